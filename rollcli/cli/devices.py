"""`roll devices`: where everything goes and whether it fits, before any device is touched."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcli.cli import arguments
from rollcli.cli.devices_explain import EXPLAIN, explain
from rollcli.cli.devices_search import SEARCH, search
from rollcli.cli.help import RollCommand, RollGroup
from rollcli.cli.output import Column, Output, table_lines

if TYPE_CHECKING:
    from rollcli.devices.hardware import Hardware
    from rollcli.devices.layout import DevicePlan, Plan, RolePlan

PLAN = """\
roll devices plan grpo-math
roll devices plan grpo-gsm8k --gpus 8xH100-80GB policy.workers=8
roll devices plan grpo-gsm8k --gpus 8xH100-80GB+16xL40S
roll devices plan grpo-gsm8k --gpus 2xL40S -v"""

WIDTH, BAR = 80, 20
COLUMNS = {
    "weights": ("weights", "masters"),
    "optim": ("optimizer",),
    "grads": ("gradients",),
    "activ": ("activations", "backward"),
    "logits": ("logits",),
    "kv": ("kv", "reserved"),
}
_ORDER = ("policy", "reference", "critic", "rollout", "environment", "reward", "services")
_SHOWN = {"services": "driver, Ray", "offloaded": "offloaded, checkpoint"}

app = typer.Typer(
    cls=RollGroup, help="Plan where everything goes and whether it fits.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("plan", cls=RollCommand, epilog=PLAN)
def plan(
    context: typer.Context,
    recipe: arguments.Recipe,
    overrides: arguments.Overrides = None,
    override: arguments.OverrideOptions = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="NxCHIP", help="Plan for these: 8xH100-80GB, 4x8xH100 in nodes, pools with +"),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="Machines that each have what --gpus says")] = 1,
    cpu: Annotated[bool, typer.Option("--cpu", help="Plan for this machine without accelerators")] = False,
    hardware: Annotated[
        Path | None, typer.Option("--hardware", metavar="FILE", help="Plan for what a YAML file says: pools, or cpu")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="HOST:PORT", help="Plan for a Ray cluster that is up; auto: the one here"),
    ] = None,
    chips: Annotated[
        Path | None, typer.Option("--chips", metavar="FILE", help="Chips of yours, in the format of chips.yaml")
    ] = None,
) -> None:
    """Show roles, devices, memory by part, and what to change if it does not fit; exit 1 if it does not.

    Raises:
        PlanError: the devices, the model or the placement cannot be planned with.
    """
    from rollcli.config.load import load_recipe
    from rollcli.config.locate import located
    from rollcli.data.hub import fetch_config
    from rollcli.devices.facts import model_facts
    from rollcli.devices.plan import plan as make_plan
    from rollcli.errors import PlanError

    given = {"--gpus": gpus, "--cpu": cpu or None, "--hardware": hardware, "--address": address}
    named = [f"`{option}`" for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise typer.BadParameter(f"{' and '.join(named)} exclude each other")
    if nodes != 1 and gpus is None:
        raise typer.BadParameter("`--nodes` says how many machines have what `--gpus` says: give that too")
    output: Output = context.obj
    loaded = load_recipe(recipe, arguments.overrides(overrides, override))
    try:
        where = _hardware(gpus, nodes, cpu, hardware, address, chips)
        found = make_plan(loaded.recipe, where, model_facts(loaded.recipe.model, fetch_config))
    except PlanError as error:
        raise located(error, loaded.places) from error
    output.document({"recipe": loaded.name, **found.to_dict()})
    output.value("fits" if found.fits else "does not fit")
    show_plan(found, output)
    if not found.fits:
        raise typer.Exit(1)


app.command("search", cls=RollCommand, epilog=SEARCH)(search)
app.command("explain", cls=RollCommand, epilog=EXPLAIN)(explain)


def _hardware(
    gpus: str | None, nodes: int, without: bool, file: Path | None, address: str | None, chips: Path | None
) -> Hardware:
    """Returns the hardware that the options name; without any, this machine's."""
    from rollcli.devices import hardware
    from rollcli.devices.chips import catalogue, read_chips
    from rollcli.devices.inventory import from_ray_nodes, read_hardware

    known = catalogue() if chips is None else read_chips(chips)
    if gpus is not None:
        return hardware.parse_gpus(gpus, known, nodes)
    if file is not None:
        return read_hardware(file, known)
    if address is not None:
        from rollcli.cluster.session import cluster_nodes

        return from_ray_nodes(cluster_nodes(address), known)
    return hardware.cpu() if without else hardware.this_machine(known)


def show_plan(plan: Plan, output: Output) -> None:
    """Writes a plan: devices and memory by part, arithmetic, advice; with -v every formula with its numbers."""
    for line in plan_lines(plan, verbose=output.verbose > 0, width=output.width or WIDTH):
        label, _, rest = line.partition("  ")
        output.data(f"{output.paint(label, 'dim')}  {rest}" if label.strip() and rest else line)


def plan_lines(plan: Plan, verbose: bool = False, width: int = WIDTH) -> list[str]:
    """Returns a plan as lines of text."""
    facts, hardware = plan.facts, plan.hardware
    size = f"{facts.total:,} parameters" + (f", {facts.active:,} active" if facts.active != facts.total else "")
    about = " (approximate)" if facts.approximate else ""
    lines = [
        *_labelled("hardware", hardware.label, width),
        *_labelled("plan", _shape(plan), width),
        *_labelled("", f"{plan.layout}: {plan.reason}", width),
        *_labelled("model", f"{facts.name}, {facts.model_type}, {size}{about}", width),
        *(_labelled("", f"shapes from {facts.origin}", width) if facts.origin else ()),
        "",
        *_table(plan, width),
        "",
        *_block("batch", plan.batch, width),
        *_block("sequence", plan.sequence, width),
    ]
    if plan.host:
        held = " + ".join(f"{_SHOWN.get(role, role)} {_gib(gib)}" for role, gib in plan.host.items())
        lines += _labelled("host", f"{held} GiB beside the workers' own processes", width)
    for note in plan.notes:
        lines += _labelled("note", note, width)
    if not plan.fits:
        lines += ["", *_advice(plan, width)]
    if verbose:
        lines += ["", *_formulas(plan, width)]
    return lines


def _shape(plan: Plan) -> str:
    """Says in short which engines run how often."""
    named = [plan.roles[role] for role in _ordered(plan.roles) if plan.roles[role].engine]
    return " + ".join(f"{role.workers} {role.role} ({role.engine})" for role in named)


def _ordered(roles: Iterable[str]) -> list[str]:
    """Returns roles as tables list them; reward models, which the recipe names, come after the rollout."""
    models = _ORDER.index("rollout") + 0.5
    return sorted(roles, key=lambda role: _ORDER.index(role) if role in _ORDER else models)


def _table(plan: Plan, width: int) -> list[str]:
    """Returns the table of memory: a row per role, and a bar for the devices that hold them."""
    unit = "cpu" if plan.hardware.kind == "cpu" else "gpu"
    columns = [Column(unit), Column("GiB of"), *(Column(name, right=True) for name in COLUMNS)]
    columns += [Column("other", right=True), Column("used", right=True)]
    rows: list[list[str]] = []
    after: dict[int, DevicePlan] = {}
    for device in plan.devices:
        held = _ordered(device.roles)
        for number, role in enumerate(held):
            rows.append([device.label if number == 0 and unit == "gpu" else "", *_cells(plan.roles[role], device)])
        if not held:
            rows.append([device.label, "unused", *["–"] * (len(columns) - 2)])
        after[len(rows)] = device
    indent = 4 + max(len(row[0]) for row in [[unit], *rows])
    lines = []
    for number, line in enumerate(table_lines(columns, rows, width - 2)):
        lines.append(f"  {line}")
        if number in after and after[number].roles:
            lines.append(" " * indent + _bar(after[number], min(max(width - 56, 4), BAR)))
    return lines


def _cells(role: RolePlan, device: DevicePlan) -> list[str]:
    count = device.roles[role.role]
    named = [role.part_gib(*names) * count for names in COLUMNS.values()]
    used = role.total_gib if count > 1 else role.used_gib
    name = _SHOWN.get(role.role, role.role) + (f" ×{count}" if count > 1 else "")
    return [name, *(_gib(gib) for gib in (*named, used - sum(named), used))]


def _bar(device: DevicePlan, size: int) -> str:
    share = min(device.used_gib / device.memory_gib, 1.0)
    filled = round(share * size)
    left = f"{_gib(abs(device.free_gib))} {'free' if device.free_gib >= 0 else 'too much'}"
    drawn = "▇" * filled + "▁" * (size - filled)
    return f"{drawn}  {_gib(device.used_gib)} of {device.memory_gib:.1f} GiB, {left}  {device.status}"


def _advice(plan: Plan, width: int) -> list[str]:
    """Says by how much it does not fit and which settings help."""
    worst = min(plan.devices, key=lambda device: device.free_gib)
    where = "this machine" if plan.hardware.kind == "cpu" else f"gpu {worst.label}"
    lines = _labelled("too big", f"{_gib(plan.short_gib)} GiB more than {where} has", width)
    if not plan.changes:
        return [*lines, *_labelled("change", "no setting frees enough: more devices or a smaller model", width)]
    if plan.together:
        enough = plan.changes[-1].fits
        lead = "all of these" if enough else "all of these, and still more devices or a smaller model"
        lines += _labelled("change", f"{lead}; no single one is enough", width)
    size = max(len(change.override) for change in plan.changes)
    for number, change in enumerate(plan.changes):
        text = f"{change.override:<{size}}  frees {_gib(change.frees_gib)}, now {_written(change.old)}"
        lines += _labelled("" if number or plan.together else "change", text, width)
    return lines


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _formulas(plan: Plan, width: int) -> list[str]:
    """Returns every part of one worker of each role, with its formula."""
    lines = []
    for role in (plan.roles[name] for name in _ordered(plan.roles)):
        peak = f", most at `{role.peak}`" if role.peak else ""
        each = "" if role.role == "services" else " a worker"
        lines.append(f"{_SHOWN.get(role.role, role.role)}: {_gib(role.used_gib)} GiB{each}{peak}")
        for part in role.parts:
            stage = "" if role.at_peak(part) or not part.stages else f" [not then: {', '.join(part.stages)}]"
            stage = f" [main memory]{stage}" if part.host else stage
            first = f"  {part.name:<12} {_gib(part.gib):>6}  "
            lines += textwrap.wrap(first + part.formula + stage, width, subsequent_indent=" " * len(first))
    return lines


def _labelled(label: str, text: str, width: int) -> list[str]:
    filled = textwrap.wrap(text, max(width - 10, 30), break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{label if number == 0 else '':<8}  {line}" for number, line in enumerate(filled)]


def _block(label: str, texts: list[str], width: int) -> list[str]:
    return [line for number, text in enumerate(texts) for line in _labelled("" if number else label, text, width)]


def _gib(value: float) -> str:
    """Returns a size in GiB with the digits that matter."""
    if value == 0 or abs(value) < 1e-9:
        return "–"
    if abs(value) < 0.005:
        return "<0.01"
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:,.1f}"
