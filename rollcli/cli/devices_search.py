"""`roll devices search`: the best ways to put a recipe on given devices."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollcli.cli import arguments
from rollcli.cli.output import Output

if TYPE_CHECKING:
    from rollcli.devices.search import Choice, Question

SEARCH = """\
roll devices search rlvr-mix --gpus 8xH100-80GB
roll devices search dapo-math --gpus 16x8xH100-80GB --price 2.5
roll devices search async-math --gpus 8xH100-80GB --write mine.yaml"""
WIDTH = 80


def search(
    context: typer.Context,
    recipe: arguments.Recipe,
    overrides: arguments.Overrides = None,
    override: arguments.OverrideOptions = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="NxCHIP", help="Search on these, for example 8xH100-80GB")
    ] = None,
    count: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Ways shown (3)")] = 3,
    staleness: Annotated[
        str | None,
        typer.Option("--staleness", metavar="K,…", help="Values of max_staleness to try, too"),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", metavar="SPEC", help="Mean prompt + answer: 512+reasoning:1200,8192"),
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", metavar="P", help="Of a device for an hour; steps get a cost")
    ] = None,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="The best on all devices, half of them, a quarter …")
    ] = False,
    constants: Annotated[
        Path | None, typer.Option("--constants", metavar="FILE", help="Of `roll devices explain RUN --calibrate`")
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write a recipe with the first way's settings")
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the first way's step")] = None,
) -> None:
    """Show the fastest placements that fit, why, and what a step takes; exit 1 if none fits.

    Raises:
        PlanError: the devices, the model or a number cannot be planned with.
    """
    from rollcli.config.load import load_recipe
    from rollcli.config.schema import RlRecipe
    from rollcli.devices import search as module
    from rollcli.devices.constants import read_constants
    from rollcli.devices.facts import model_facts
    from rollcli.devices.hardware import parse_gpus, this_machine
    from rollcli.errors import ConfigError

    output: Output = context.obj
    loaded = load_recipe(recipe, arguments.overrides(overrides, override))
    if not isinstance(loaded.recipe, RlRecipe):
        raise ConfigError(
            f"recipe `{loaded.name}` samples nothing: a search places policy and rollout",
            hint=f"see its memory with `roll devices plan {loaded.name}`",
        )
    asked = {"price": price, "staleness": _numbers(staleness), "constants": read_constants(constants)}
    question = module.Question(
        loaded.recipe,
        parse_gpus(gpus) if gpus else this_machine(),
        model_facts(loaded.recipe.model),
        **_lengths(lengths),
        **asked,
    )
    choices = module.frontier(question) if frontier else module.search(question, count)
    output.document({"recipe": loaded.name, "choices": [choice.to_dict() for choice in choices]})
    output.value(" ".join(_overrides(choices[0].settings)) if choices else "nothing fits")
    _show(output, question, choices)
    if not choices:
        raise typer.Exit(1)
    if write is not None:
        _save(write, module.recipe_text(loaded.values, choices[0]))
        output.note(f"written to {write}; see it with `roll devices plan {write}{f' --gpus {gpus}' if gpus else ''}`")
    if svg is not None:
        from rollcli.devices.picture import timeline_svg

        _save(svg, timeline_svg(choices[0].simulation, f"{loaded.name} on {question.hardware.label}"))
        output.note(f"drawn in {svg}")


def _lengths(text: str | None) -> dict[str, Any]:
    """Returns what `--lengths` says of the search's question; nothing where it is not given."""
    from rollcli.devices.lengths import parse_lengths

    if not text:
        return {}
    prompt, plus, answers = text.rpartition("+")
    said: dict[str, Any] = {"answers": parse_lengths(answers)}
    return said | ({"prompt_tokens": parse_lengths(prompt).mean} if plus else {})


def _numbers(text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise typer.BadParameter(f"`{text}` is not a list of whole numbers, such as `0,1,4`") from None


def _show(output: Output, question: Question, choices: list[Choice]) -> None:
    from rollcli.devices.picture import timeline_lines

    width = output.width or WIDTH
    facts = question.facts
    output.data(f"hardware  {question.hardware.label}")
    output.data(f"model     {facts.name}, {facts.total:,} parameters")
    for note in dict.fromkeys(note for choice in choices for note in choice.simulation.assumptions):
        output.data(f"assumed   {note}")
    if not choices:
        output.data("result    no way fits: more devices, a smaller model or shorter answers")
        return
    for number, choice in enumerate(choices, 1):
        found = choice.simulation
        said = f"{found.step_s:,.1f} s a step, {found.tokens_per_s:,.0f} tokens/s trained"
        if found.cost is not None:
            said += f", costs {found.cost:,.2f}"
        devices = sum(found.devices.values())
        output.data("")
        output.data(output.paint(f"{number}  {said}, on {devices} devices", "bold"))
        for line in textwrap.wrap(choice.why, width - 4):
            output.data(f"   {line}")
        for line in textwrap.wrap(" ".join(_overrides(choice.settings)), width - 4, break_on_hyphens=False):
            output.data(f"   {output.paint(line, 'dim')}")
        for line in timeline_lines(found, width - 4):
            output.data(f"   {line}")


def _overrides(settings: dict[str, Any]) -> list[str]:
    """Returns settings as they are typed after a recipe's name."""
    return [f"{key}={_typed(value)}" for key, value in _flat(settings)]


def _flat(settings: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, dict):
            pairs += [(f"{key}.{name}", item) for name, item in value.items()]
        else:
            pairs.append((key, value))
    return pairs


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _save(path: Path, text: str) -> None:
    """Writes a file that was not there before.

    Raises:
        PlanError: it is there, or cannot be written.
    """
    from rollcli.errors import PlanError

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise PlanError(f"`{path}` is there already", hint="name another file, or remove it") from None
    except OSError as error:
        raise PlanError(f"`{path}` cannot be written: {error.strerror}", hint="name another place") from error
