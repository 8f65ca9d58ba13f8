"""Where a step's time goes on this machine, for the embedded model and for another small one. Run by hand.

    python tests/benchmarks/step.py [MODEL_FOLDER]

For each model it trains a few steps through the real command line and prints: seconds from Enter to the first step,
tokens per CPU-second sampled and trained, the share of the step outside model compute, and the resident memory of all
processes together. A CPU-second is a second inside the model on one thread, so a policy with two threads spends two.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

STEPS = 8
ROLL = Path(sys.executable).with_name("roll")


def main() -> None:
    """Measures the embedded recipe, then the model given."""
    measure("embedded default", [])
    if len(sys.argv) > 1:
        model = [f"model.path={sys.argv[1]}", "model.chat_template=plain", "algorithm.kl_coefficient=0"]
        measure(Path(sys.argv[1]).parent.name, model)


def measure(label: str, overrides: list[str]) -> None:
    """Runs `STEPS` steps and prints what they took; the first, which warms up, does not count."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "ROLL_RUNS": folder}
        command = [str(ROLL), "train", "grpo-math", "--name", "run", f"steps={STEPS}", *overrides]
        entered = time.time()
        process = subprocess.Popen(
            [*command, "evaluation.at_start=false", "evaluation.problems_per_task=8"], env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        peak = [0.0]
        watcher = threading.Thread(target=watch_memory, args=(process, peak))
        watcher.start()
        process.wait()
        watcher.join()
        run = Path(folder) / "run"
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first_started = next(e["time"] for e in events if e["type"] == "stage_started" and e["step"] == 1)
    first_done = next(e["time"] for e in events if e["type"] == "step")
    report(label, first_started - entered, first_done - entered, metrics[1:], peak[0])


def report(label: str, to_start: float, to_first: float, metrics: list[dict[str, float]], peak_gib: float) -> None:
    """Prints the figures of one model."""
    total = {name: sum(step.get(name, 0.0) for step in metrics) for name in metrics[0]}
    compute = total["time/rollout_model_s"] + total["time/policy_model_s"]
    threads = os.cpu_count() or 1
    print(f"{label}, {len(metrics)} steps of {total['time/step_s'] / len(metrics):.2f} s")
    print(f"  from Enter to the first step's start {to_start:.1f} s, to its end {to_first:.1f} s")
    sampled = total["sampled_tokens"] / total["time/rollout_model_s"]
    trained = total["trained_tokens"] / total["time/policy_model_s"] / threads
    print(f"  sampled {sampled:,.0f} and trained {trained:,.0f} tokens per CPU-second of the model")
    print(f"  outside model compute {1 - compute / total['time/step_s']:.0%} of the step")
    for stage in ("sync", "rollout", "logprobs", "advantages", "update"):
        print(f"    {stage:<10} {total[f'time/{stage}_s'] / total['time/step_s']:.0%}")
    print(f"  resident memory of all processes together, at most {peak_gib:.2f} GiB")


def watch_memory(process: subprocess.Popen, peak: list[float]) -> None:
    """Follows the proportional resident memory (shared pages counted once) of everything the run started."""
    while process.poll() is None:
        peak[0] = max(peak[0], sum(proportional_gib(pid) for pid in family(process.pid)))
        time.sleep(0.5)


def family(pid: int) -> set[int]:
    """Returns a process and all that descend from it, or belong to its session."""
    parents: dict[int, tuple[int, int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = (int(fields[1]), int(fields[3]))
        except (OSError, IndexError):
            continue
    members = {pid}
    while True:
        more = {child for child, (parent, group) in parents.items() if parent in members or group == pid} - members
        if not more:
            return members
        members |= more


def proportional_gib(pid: int) -> float:
    """Returns the proportional set size of one process."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) / 2**20
    except (OSError, StopIteration):
        return 0.0


if __name__ == "__main__":
    main()
