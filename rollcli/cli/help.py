"""Commands and groups of `roll`: options that every command takes, and help as plain text.

Help is written here rather than by Rich: it has no boxes, costs no import, and is the same in a pipe. Its width follows
the terminal up to 100 columns and is 80 in a pipe.
"""

from __future__ import annotations

import os
import sys
import textwrap
from functools import cache
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from rollcli.cli.output import Output, paint, text_width

EVERYWHERE = ("quiet", "verbose", "as_json", "color", "no_progress")


@cache
def _options_of_every_command() -> list[Any]:
    """Returns the parameters added to each command; Typer builds them from a signature that nobody calls."""

    def signature(
        quiet: Annotated[
            int,
            typer.Option(
                "-q", "--quiet", count=True, rich_help_panel="Output", help="Only the essential value; -qq nothing"
            ),
        ] = 0,
        verbose: Annotated[
            int,
            typer.Option("-v", "--verbose", count=True, rich_help_panel="Output", help="Explain; -vv library logs too"),
        ] = 0,
        as_json: Annotated[
            bool, typer.Option("--json", rich_help_panel="Output", help="One JSON document on stdout")
        ] = False,
        color: Annotated[
            Literal["auto", "always", "never"] | None, typer.Option("--color", metavar="WHEN", hidden=True)
        ] = None,
        no_progress: Annotated[bool, typer.Option("--no-progress", hidden=True)] = False,
    ) -> None: ...

    app = typer.Typer(add_completion=False)
    app.command()(signature)
    return list(typer.main.get_command(app).params)


def _collect(context: typer.Context) -> None:
    """Takes the options of every command out of the parameters and adds them to those given further left."""
    given = {name: context.params.pop(name) for name in EVERYWHERE if name in context.params}
    output = context.find_root().obj
    if not isinstance(output, Output):
        output = context.find_root().obj = Output()
    output.quiet += given.get("quiet", 0)
    output.verbose += given.get("verbose", 0)
    output.as_json |= given.get("as_json", False)
    output.color = given.get("color") or output.color
    output.progress &= not given.get("no_progress", False)
    output.set_logging()
    context.obj = output


class RollCommand(TyperCommand):
    """A command: takes the options of every command and finds an `Output` for them in `context.obj`."""

    def __init__(self, *args: Any, params: list[Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, params=[*(params or []), *_options_of_every_command()], **kwargs)

    def invoke(self, ctx: typer.Context) -> Any:
        """Runs the command."""
        _collect(ctx)
        return super().invoke(ctx)

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        """Writes the help."""
        formatter.write(command_help(self, ctx))


class RollGroup(TyperGroup):
    """A group of commands."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        """Writes the help."""
        formatter.write(command_help(self, ctx))


class RootGroup(RollGroup):
    """`roll` itself: every way in goes through `main`, which is where errors become messages and exit codes."""

    def __init__(self, *, params: list[Any] | None = None, **kwargs: Any) -> None:
        super().__init__(params=[*_options_of_every_command(), *(params or [])], **kwargs)

    def main(self, args: Any = None, prog_name: str | None = None, standalone_mode: bool = True, **extra: Any) -> Any:
        """Runs the command line and exits with its code, whoever calls: the console script, a shell, or a test."""
        from rollcli.cli import border
        from rollcli.cli.complete import join_words

        words = list(sys.argv[1:] if args is None else args)
        output = border.output_before_parsing(words)
        if "_ROLL_COMPLETE" in os.environ:
            join_words()
        extra = {"obj": Output(), "color": output.colored, **extra}

        def call() -> Any:
            return super(RootGroup, self).main(args=words, prog_name="roll", standalone_mode=False, **extra)

        code = border.run(call, extra["obj"], output)
        sys.exit(code)

    def invoke(self, ctx: typer.Context) -> Any:
        """Runs the named command."""
        _collect(ctx)
        return super().invoke(ctx)

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        """Writes the help: commands by panel, and the options of every command in short."""
        formatter.write(root_help(self, ctx))


def command_help(command: Any, ctx: typer.Context) -> str:
    """Returns a command's help: usage, what it does, arguments and options by section, examples."""
    colored = bool(ctx.color)
    parts = [_usage(command, ctx, colored), _prose(command.help)]
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        if getattr(param, "hidden", False):
            continue
        default = "Arguments" if isinstance(param, TyperArgument) else "Options"
        section = "Output" if param.name == "help" else getattr(param, "rich_help_panel", None) or default
        sections.setdefault(section, []).append((_name(param), (param.help or "").rstrip(".")))
    if isinstance(command, TyperGroup):
        sections = {"Commands": [(name, _short(each)) for name, each in command.commands.items()], **sections}
    indent = max(len(name) for rows in sections.values() for name, _ in rows) + 4
    parts += [_section(title, rows, indent, colored) for title, rows in sections.items()]
    if command.epilog:
        parts.append(f"{_heading('Examples', colored)}\n{_examples(command.epilog, colored)}")
    return "\n\n".join(part for part in parts if part) + "\n"


def root_help(command: RootGroup, ctx: typer.Context) -> str:
    """Returns the top screen, which fits 24 lines."""
    colored = bool(ctx.color)
    panels: dict[str, list[tuple[str, str]]] = {}
    for name, each in command.commands.items():
        if not each.hidden:
            panels.setdefault(each.rich_help_panel or "Commands", []).append((name, _short(each)))
    indent = max(len(name) for name in command.commands) + 4
    parts = [f"{_heading('Usage:', colored)} roll COMMAND [ARGUMENTS] [OPTIONS]", *_prose(command.help).splitlines()]
    parts += [_section(title, rows, indent, colored) for title, rows in panels.items()]
    parts.append(f"{_heading('Every command takes', colored)}\n{command.epilog}")
    return "\n\n".join(parts) + "\n"


def examples(command: Any) -> list[str]:
    """Returns the command lines of a command's examples."""
    return [line.partition("  #")[0].strip() for line in (command.epilog or "").splitlines() if line.startswith("roll")]


def _usage(command: Any, ctx: typer.Context, colored: bool) -> str:
    pieces = ["COMMAND"] if isinstance(command, TyperGroup) else []
    for param in command.get_params(ctx):
        if isinstance(param, TyperArgument):
            name = param.metavar or param.name.upper()
            pieces.append(name if param.required or name.startswith("[") else f"[{name}]")
    return f"{_heading('Usage:', colored)} {' '.join([ctx.command_path, *pieces, '[OPTIONS]'])}"


def _prose(text: str | None) -> str:
    """Returns a docstring's paragraphs filled to the width; what follows `Raises:` is for readers of the code."""
    paragraphs = textwrap.dedent(f"    {text or ''}").partition("Raises:")[0].strip().split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(paragraph.split()), text_width()) for paragraph in paragraphs)


def _short(command: Any) -> str:
    """Returns the first paragraph of a command's help as one line of a list."""
    return (command.short_help or " ".join((command.help or "").split("\n\n")[0].split())).rstrip(".")


def _name(param: Any) -> str:
    if isinstance(param, TyperArgument):
        return param.metavar or param.name.upper()
    names = ", ".join(sorted(param.opts, key=len))
    takes_value = not (param.is_flag or param.count or param.name == "help")
    return f"{names} {param.metavar or param.name.upper()}" if takes_value else names


def _section(title: str, rows: list[tuple[str, str]], indent: int, colored: bool) -> str:
    lines = [_heading(title, colored)]
    for name, text in rows:
        filled = textwrap.wrap(text, max(text_width() - indent, 20)) or [""]
        lines.append(f"  {paint(name, 'command', colored)}{'':{max(indent - 2 - len(name), 1)}}{filled[0]}".rstrip())
        lines += [" " * indent + line for line in filled[1:]]
    return "\n".join(lines)


def _examples(text: str, colored: bool) -> str:
    lines = []
    for line in text.strip().splitlines():
        command, mark, comment = line.partition("  #")
        lines.append(f"  {paint(command, 'command', colored)}{paint(mark + comment, 'dim', colored)}")
    return "\n".join(lines)


def _heading(text: str, colored: bool) -> str:
    return paint(text, "heading", colored)
