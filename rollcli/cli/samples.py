"""`roll samples`: reads what the model answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollcli.cli import arguments
from rollcli.cli.output import Output
from rollcli.errors import NotFound

if TYPE_CHECKING:
    from rollcli.runs.directory import RunDirectory

EXAMPLES = """\
roll samples grpo-math-7f3a --best -n 1
roll samples grpo-math-7f3a --step 40 --worst
roll samples grpo-math-7f3a --contains "wait" --json"""

COLUMNS = (
    "step", "task", "index", "sample", "agent", "prompt", "response", "chat", "turn_rewards", "reward", "accuracy",
    "rewards", "advantage",
    "response_tokens", "stop_reason", "error", "error_kind", "greedy",
)  # fmt: skip
"""What is read; token ids and logprobs stay in the file."""


def samples(
    context: typer.Context,
    run: arguments.Run,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Step to read; the newest")] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="NAME", help="Only this task")] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first")] = False,
    contains: Annotated[
        str | None, typer.Option("--contains", metavar="TEXT", help="Only answers or prompts that contain it")
    ] = None,
    count: Annotated[int, typer.Option("-n", "--count", metavar="N", min=1, help="How many to show (3)")] = 3,
) -> None:
    """Read prompts and answers of a run.

    Raises:
        NotFound: the run, samples of that step, or the task are not there.
    """
    from rollcli.runs.listing import find_run

    output: Output = context.obj
    if best and worst:
        raise typer.BadParameter("give one of `--best` and `--worst`")
    directory = find_run(run)
    found, path = read(directory, step)
    if task is not None:
        check_task(directory, task, found)
    chosen = choose(found, task, contains, best, worst)
    output.document({"run": directory.id, "file": path, "matching": len(chosen), "samples": chosen[:count]})
    output.value(path)
    for number, sample in enumerate(chosen[:count]):
        if number:
            output.data()
        show(output, sample)
    if not chosen:
        output.note(f"0 of {len(found)} samples match in {path}")
        return
    output.note()
    output.note(f"{min(count, len(chosen))} of {len(chosen)} samples in {path}")


def check_task(directory: RunDirectory, task: str, found: list[dict[str, Any]]) -> None:
    """Refuses a task that neither the samples nor the run's recipe have.

    Raises:
        NotFound: with the tasks that there are.
    """
    from rollcli.config.load import read_values

    written = read_values(directory.config).get("tasks") or [] if directory.config.is_file() else []
    known = [*(each.get("name") for each in written), *(row.get("task") for row in found)]
    names = [name for name in dict.fromkeys(known) if name]
    if task not in names:
        raise NotFound(f"run `{directory.id}` has no task `{task}`", hint=f"it has {', '.join(names) or 'none'}")


def read(directory: RunDirectory, step: int | None) -> tuple[list[dict[str, Any]], Path]:
    """Returns the samples of a step (the newest if None) and the file they stand in.

    Raises:
        NotFound: there are none.
    """
    from pyarrow.parquet import ParquetFile

    from rollcli.runs.directory import step_name

    files = sorted(directory.rollouts.glob("step_*.parquet"))
    if not files:
        raise NotFound(
            f"run `{directory.id}` has no samples yet", hint=f"see how it goes: `roll runs show {directory.id}`"
        )
    path = files[-1] if step is None else directory.rollouts / f"{step_name(step)}.parquet"
    if path not in files:
        steps = [int(file.stem.removeprefix("step_")) for file in files]
        raise NotFound(
            f"run `{directory.id}` has no samples of step {step}", hint=f"there are steps {steps[0]} to {steps[-1]}"
        )
    file = ParquetFile(path)
    rows = file.read(columns=[name for name in COLUMNS if name in file.schema_arrow.names]).to_pylist()
    for row in rows:
        for name in ("rewards", "chat"):
            if isinstance(row.get(name), str):
                row[name] = json.loads(row[name])
    return rows, path


def choose(
    found: list[dict[str, Any]], task: str | None, contains: str | None, best: bool, worst: bool
) -> list[dict[str, Any]]:
    """Returns the samples that were asked for, in the order that was asked for; samples without a reward come last."""
    chosen = [row for row in found if task is None or row.get("task") == task]
    if contains is not None:
        chosen = [row for row in chosen if contains in f"{row.get('prompt')}\n{row.get('response')}"]
    if best or worst:
        sign = -1.0 if best else 1.0
        chosen.sort(key=lambda row: (row.get("reward") is None, sign * (row.get("reward") or 0.0)))
    return chosen


def show(output: Output, sample: dict[str, Any]) -> None:
    """Writes one sample."""
    head = [
        f"{sample.get('task')} #{sample.get('index')}.{sample.get('sample', 0)}",
        *([str(sample["agent"])] if sample.get("agent") else []),
        f"step {sample.get('step')}",
        f"reward {number(sample.get('reward'))}",
        f"advantage {number(sample.get('advantage'), signed=True)}",
        f"{sample.get('response_tokens')} tokens",
        f"stop {sample.get('stop_reason')}",
        *(["greedy baseline, not trained on"] if sample.get("greedy") else []),
    ]
    output.data(output.paint("  ".join(head), "heading"))
    facts = {}
    components = sample.get("rewards") or {}
    if len(components) > 1 or set(components) - {"total"}:
        facts["rewards"] = "  ".join(f"{name} {number(value)}" for name, value in components.items())
    if sample.get("error"):
        facts["error"] = f"{sample.get('error_kind')}: {sample['error']}"
    talk = turns(sample)
    if not talk:
        facts |= {"prompt": str(sample.get("prompt")), "response": str(sample.get("response"))}
    output.facts([*facts.items(), *talk])


def turns(sample: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns who said what, where an assistant speaks more than once in a sample; else nothing.

    What the model sampled bears its turn's number, and its reward unless that is 0; an assistant's words without a
    number were given to it.
    """
    chat, rewards = sample.get("chat") or [], sample.get("turn_rewards") or []
    if sum(message.get("role") == "assistant" for message in chat) < 2:
        return []
    who = str(sample.get("agent") or "model")
    pairs = []
    for message in chat:
        turn = message.get("turn")
        label = str(message.get("role"))
        if turn is not None:
            reward = rewards[turn] if turn < len(rewards) else 0.0
            label = f"{who} {turn + 1}" + (f" {reward:+.3g}" if reward else "")
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        pairs.append((label, "\n".join(part for part in (str(message.get("content") or ""), calls) if part)))
    return pairs


def number(value: Any, signed: bool = False) -> str:
    """Returns a number with at most three decimals, or `-`; text and lists as they are."""
    if value is None:
        return "-"
    if not isinstance(value, (int, float)):
        return str(value)
    return f"{value:+.3f}" if signed else f"{value:.3f}".rstrip("0").rstrip(".")
