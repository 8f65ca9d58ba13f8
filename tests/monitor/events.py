"""Hand-made events of a run, for the tests of this folder."""

STEP_METRICS = {
    "reward": 0.551,
    "accuracy": 0.5,
    "accuracy/gsm8k": 0.61,
    "accuracy/sokoban": 0.32,
    "length": 384.0,
    "length_max": 3912.0,
    "truncated": 0.031,
    "entropy": 0.83,
    "kl_old": 0.0001,
    "kl_reference": 0.0051,
    "staleness_max": 2.0,
    "staleness/0": 0.61,
    "staleness/1": 0.32,
    "staleness/2": 0.07,
    "dropped": 0.0,
    "failed": 0.0,
    "time/step_s": 54.8,
    "time/sync_s": 1.6,
    "time/rollout_s": 22.5,
    "time/logprobs_s": 4.9,
    "time/advantages_s": 0.5,
    "time/update_s": 21.4,
    "speed/rollout_tokens_per_s": 11400.0,
    "speed/train_tokens_per_s": 8900.0,
    "memory/policy_gib": 71.2,
    "memory/rollout_gib": 62.0,
    "memory/total_gib": 133.2,
}


def event(type, time=0.0, **fields):
    return {"time": time, "type": type, **fields}


def started(time=1000.0, attempt=1, **fields):
    return event(
        "run_started",
        time,
        **{
            "run": "grpo-math-7f3a",
            "recipe": "grpo-math",
            "pipeline": "rl",
            "algorithm": "grpo",
            "steps": 500,
            "attempt": attempt,
            "overrides": ["seed=1", "algorithm.clip=0.3"],
            "devices": "8 GPUs (4 train + 4 rollout)",
            **fields,
        },
    )


def step(number, time=0.0, **metrics):
    return event("step", time, step=number, metrics=STEP_METRICS | metrics)


def sample(number, reward, time=0.0, **fields):
    return event(
        "sample",
        time,
        **{
            "step": number,
            "task": "gsm8k",
            "prompt": "Natalia sold clips to 48 friends.\nHow many altogether?",
            "response": "so 48 + 24 = 72.\nThe answer is \\boxed{72}.",
            "reward": reward,
            "advantage": 0.62,
            "tokens": 212,
            "stop_reason": "stop",
            **fields,
        },
    )


def run(steps=142):
    """A run in the rollout of the step after `steps`; each step takes 55 s."""
    events, time = [started()], 1020.0
    for number in range(1, steps + 1):
        time += 55
        events.append(step(number, time, reward=0.12 + 0.431 * number / steps, kl_reference=0.0051 * number / steps))
        events += [sample(number, reward, time) for reward in (0.5, 1.0, 0.0)]
        if number % 20 == 0:
            tasks = {"math500": {"accuracy": 0.612, "accuracy_low": 0.57, "accuracy_high": 0.65, "length": 402.0}}
            events.append(event("evaluation", time, step=number, tasks=tasks, accuracy=0.612))
            events.append(event("checkpoint", time, step=number, path=f"c/step_{number:06d}", seconds=3.2))
    events.append(event("stage_started", time, step=steps + 1, stage="rollout"))
    states = {"generating": 120, "acting": 3, "scoring": 2, "failed": 0}
    progress = {"done": 371, "total": 512, "states": states, "longest": 3912}
    return [*events, event("progress", time + 10, step=steps + 1, stage="rollout", **progress)]
