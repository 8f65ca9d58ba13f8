"""`roll doctor`: is everything there and does it import; do trainer and rollout engine agree, and if not, why."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from rollcli.cli import arguments, complete
from rollcli.cli.output import Column, Output

if TYPE_CHECKING:
    from rollcli.doctor.causes import Diagnosis
    from rollcli.doctor.environment import EnvironmentReport, PackageReport
    from rollcli.doctor.gap import Gap, Limit, Measurement

WIDTH = 80
BROKEN = ("not installed", "does not import")
UNKNOWN = "report it with `--json`; until then set `rollout.engine=transformers`, which is the reference"
EXAMPLES = """\
roll doctor
roll doctor grpo-math
roll doctor grpo-gsm8k model.dtype=bfloat16 --samples 32
roll doctor embedded:sums --json"""


def subject(incomplete: str) -> list[complete.Item]:
    """Completes what can be measured: recipes, files and checkpoints."""
    return [*complete.recipe(incomplete), *complete.checkpoint(incomplete)][: complete.MOST]


def doctor(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL_OR_RECIPE", help="A recipe, run, run@step, path, hub id or embedded:NAME; none: packages",
            autocompletion=subject, show_default=False,
        ),
    ] = None,
    overrides: arguments.Overrides = None,
    override: arguments.OverrideOptions = None,
    samples: Annotated[int, typer.Option("--samples", metavar="N", min=1, help="Answers to compare (16)")] = 16,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Most tokens of each (32)")
    ] = 32,
) -> None:  # fmt: skip
    """Check packages and machine, or whether engines agree.

    With a recipe or a model: samples short answers with the rollout engine, scores the same tokens with the trainer,
    and tests why log-probabilities differ if they differ more than precision explains; exit 1 if so.

    Raises:
        RollError: what is named is not there, or an engine cannot run it.
    """
    output: Output = context.obj
    if name is None:
        check_environment(output)
    else:
        check_gap(output, name, arguments.overrides(overrides, override), samples, max_tokens)


def check_environment(output: Output) -> None:
    """Shows what is installed and what the machine has; exits with 1 when a core package does not work."""
    from rollcli.doctor.environment import examine

    output.note("trying imports, each in a process of its own")
    report = examine()
    output.document({"healthy": report.healthy, **vars(report)})
    output.value("ok" if report.healthy else "broken")
    show_environment(output, report)
    if not report.healthy:
        raise typer.Exit(1)


def show_environment(output: Output, report: EnvironmentReport) -> None:
    """Writes the report: facts, packages, what is not installed with the command that brings it, what is wrong."""
    versions = report.versions
    engines = "; ".join(
        f"{kind.removesuffix('_engines')} {', '.join(names)}" for kind, names in report.engines.items()
    )  # fmt: skip
    output.facts(
        {
            "rollcli": versions["rollcli"],
            "python": f"{versions['python']}, {versions['platform']}",
            "engines": engines,
            **report.machine,
        }
    )
    output.data()
    columns = [Column("package"), Column("version"), Column("state"), Column("for", drop=1)]
    there = [each for each in report.packages if each.version is not None]
    output.table(columns, [[each.name, each.version or "", each.state, each.use] for each in there])
    absent = [each for each in report.packages if each.version is None]
    if absent:
        output.data()
        columns = [Column("not installed"), Column("bring it with"), Column("for", drop=1)]
        output.table(columns, [[each.name, each.advice or "", _use(each)] for each in absent])
    wrong = [each for each in there if each.state != "ok"]
    if wrong:
        output.data()
    for each in wrong:
        style = "error" if each.state == "does not import" else "warning"
        output.data(f"{output.paint(f'{style}:', style)} `{each.name}` {each.version} {_wrong(each)}")
    for warning in report.warnings:
        output.warn(warning)
    broken = next((each for each in report.packages if each.core and each.state in BROKEN), None)
    if broken is not None:
        output.hint(f"rollcli does not work without `{broken.name}`: `{broken.advice}`")


def _use(package: PackageReport) -> str:
    return f"{package.use} (needed)" if package.core else package.use


def _wrong(package: PackageReport) -> str:
    what = "does not import" if package.state == "does not import" else "is another version than was tried"
    return f"{what}: {package.reason}"


def check_gap(output: Output, name: str, overrides: list[str], samples: int, max_tokens: int) -> None:
    """Measures the gap between rollout engine and trainer; where precision does not explain it, finds the cause."""
    from rollcli.doctor import causes, gap

    loaded = gap.load_subject(name, overrides)
    with gap.bench_of(loaded, samples, max_tokens) as bench:
        found = gap.measure(bench, output.note)
        diagnosis = None if found.explained else causes.diagnose(found, output.note)
        output.note()
        output.document({"subject": loaded.name, **document(found, diagnosis)})
        output.value("ok" if diagnosis is None else cause_name(diagnosis))
        show_gap(output, found, diagnosis)
    if diagnosis is not None:
        raise typer.Exit(1)


def document(found: Measurement, diagnosis: Diagnosis | None) -> dict[str, object]:
    """Returns a measurement and its diagnosis as plain values."""
    bench = found.bench
    return {
        "model": bench.recipe.model.path,
        "rollout_engine": bench.rollout.engine,
        "train_engine": bench.recipe.policy.engine,
        "precision": bench.precision,
        "sampling": bench.requests[0].sampling,
        "answers": len(found.completions),
        "failed": bench.skipped,
        "gap": found.gap,
        "limit": found.limit,
        "largest": found.largest(),
        "explained": found.explained,
        "cause": None if diagnosis is None or diagnosis.cause is None else diagnosis.cause,
        "tried": [] if diagnosis is None else diagnosis.trials,
    }


def cause_name(diagnosis: Diagnosis) -> str:
    """Returns the cause in a word or two."""
    return diagnosis.cause.cause if diagnosis.cause is not None else "unknown"


def show_gap(output: Output, found: Measurement, diagnosis: Diagnosis | None) -> None:
    """Writes a measurement, the cause with its evidence, and what else was tried; the hint says what to do."""
    bench, largest = found.bench, found.largest()
    sampling = bench.requests[0].sampling
    drawn = [f"temperature {sampling.temperature:g}"]
    drawn += [f"top-p {sampling.top_p:g}"] * (sampling.top_p < 1) + [f"top-k {sampling.top_k}"] * (sampling.top_k > 0)
    facts = {
        "model": f"{bench.recipe.model.path}, {bench.precision}",
        "engines": f"rollout {bench.rollout.engine}, training {bench.recipe.policy.engine}",
        "answers": f"{len(found.completions)} with {found.gap.tokens} tokens, {', '.join(drawn)}",
        "gap": f"{_gap(found.gap)}\nkl {found.gap.kl:.2g}, effective samples {found.gap.effective_samples:.1%}",
        "largest": f"answer {largest['answer']}, token {largest['position']} `{largest['text']}`: "
        f"rollout {largest['rollout']:.4f}, trainer {largest['trainer']:.4f}",
        "verdict": _verdict(found.explained, found.limit),
    }
    cause = diagnosis.cause if diagnosis is not None else None
    if diagnosis is not None:
        part = "" if diagnosis.whole else "likely, and not all of it: "
        facts["cause"] = "unknown: nothing tried explains it" if cause is None else f"{part}{cause.cause}"
    if cause is not None:
        facts["finding"] = cause.finding
        facts["evidence"] = f"{cause.assumed}:\nmean {found.gap.mean:.2g} → {cause.gap.mean:.2g}, "
        facts["evidence"] += f"max {found.gap.max:.2g} → {cause.gap.max:.2g}"
    output.facts({label: _wrapped(text, (output.width or WIDTH) - 10) for label, text in facts.items()})
    if bench.skipped:
        output.warn(f"{len(bench.skipped)} of {len(bench.requests)} requests failed: {bench.skipped[0]}")
    if diagnosis is None:
        if bench.precision != "float32":
            output.hint("a fault smaller than the rounding hides in it; `model.dtype=float32` would show it")
        return
    output.data()
    columns = [Column("tried"), Column("mean left", right=True), Column("max left", right=True), Column("best of it")]
    rows = [[trial.cause, f"{trial.gap.mean:.2g}", f"{trial.gap.max:.2g}", trial.assumed] for trial in diagnosis.trials]
    output.table(columns, rows)
    output.hint(cause.advice if cause is not None else UNKNOWN)


def _wrapped(text: str, width: int) -> str:
    lines = (
        textwrap.wrap(line, max(width, 30), break_long_words=False, break_on_hyphens=False) or [""]
        for line in text.splitlines()
    )
    return "\n".join(part for parts in lines for part in parts)


def _gap(gap: Gap) -> str:
    return f"mean {gap.mean:.2g}, max {gap.max:.2g}"


def _verdict(explained: bool, limit: Limit) -> str:
    word = "ok, explained by" if explained else "too much for"
    return f"{word} {limit.why}\n(mean up to {limit.mean:.2g}, max up to {limit.max:.2g})"
