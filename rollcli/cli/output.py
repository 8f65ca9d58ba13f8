"""The one place that prints. Data goes to stdout; progress, hints, warnings and errors go to stderr.

quiet    -q prints only the essential value (a run's directory, an id); -qq prints nothing but errors
verbose  -v explains (formulas, tracebacks); -vv lets library logs through; both turn the live view off
json     one JSON document on stdout (one a line for a stream), no color, no progress
color    `auto` follows NO_COLOR, CLICOLOR_FORCE, FORCE_COLOR and the stream itself
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, TextIO

PIPE_WIDTH, WIDEST = 80, 100
WIDEST_COLUMN = 120
"""Cells that a table's column is padded to in a pipe; what is longer stands there whole."""
STYLES = {
    "ok": "32",
    "command": "32",
    "error": "31",
    "warning": "33",
    "hint": "36",
    "path": "36",
    "literal": "36",
    "dim": "2",
    "heading": "1",
}


@dataclass(frozen=True)
class Column:
    """One column of a table. In too narrow a terminal the column with the highest `drop` goes first; 0 stays."""

    name: str
    right: bool = False
    drop: int = 0


def wants_color(stream: TextIO, choice: str | None = None) -> bool:
    """Returns whether to color what goes to `stream`: the user's choice, then the environment, then the stream."""
    if choice in ("always", "never"):
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("CLICOLOR_FORCE", "FORCE_COLOR")):
        return True
    return is_terminal(stream)


def is_terminal(stream: TextIO) -> bool:
    """Returns whether a person watches `stream` on a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def text_width() -> int:
    """Returns the width that running text is filled to: the terminal's up to 100 columns, and 80 in a pipe."""
    return min(shutil.get_terminal_size().columns, WIDEST) if sys.stdout.isatty() else PIPE_WIDTH


def help_lines(text: str, indent: int) -> list[str]:
    """Returns running text as indented lines."""
    return [" " * indent + line for line in textwrap.wrap(" ".join(text.split()), max(text_width() - indent, 20))]


def filled(text: str, stream: TextIO) -> str:
    """Returns running text with lines broken between words on a terminal, and as it is in a pipe."""
    if not stream.isatty():
        return text
    return textwrap.fill(text, shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False)


def cells(text: str) -> int:
    """Returns the number of terminal cells of a text without control characters."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, width: int) -> str:
    """Returns the text in at most `width` cells, with `…` where something is missing."""
    if cells(text) <= width:
        return text
    kept = ""
    for character in text:
        if cells(kept + character) > width - 1:
            break
        kept += character
    return kept + "…"


@dataclass
class Output:
    """What the user asked of the output, and the ways to write to it.

    The streams are looked up at each write, so that a test's or a shell's redirection holds.
    """

    quiet: int = 0
    verbose: int = 0
    as_json: bool = False
    color: str = "auto"
    progress: bool = True
    log: Path | None = None
    """Log of the run at hand: a traceback lands there, and an error message ends with its path."""

    @property
    def live(self) -> bool:
        """Whether a live view may redraw the terminal. FORCE_COLOR does not make a pipe a terminal."""
        if not self.progress or self.quiet or self.verbose or self.as_json:
            return False
        from rollcli.monitor.follow import should_be_live

        return should_be_live(sys.stderr)

    @property
    def colored(self) -> bool:
        """Whether stdout is colored."""
        return not self.as_json and wants_color(sys.stdout, self.color)

    @property
    def colored_stderr(self) -> bool:
        """Whether stderr is colored."""
        return not self.as_json and wants_color(sys.stderr, self.color)

    @property
    def width(self) -> int | None:
        """Width of the terminal; None in a pipe, where nothing is cut."""
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    def set_logging(self) -> None:
        """Lets log records through to stderr: our own under -v, those of libraries under -vv."""
        if self.verbose or os.environ.get("ROLL_DEBUG"):
            logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s")
            logging.getLogger("rollcli").setLevel(logging.DEBUG)
        if self.verbose > 1:
            logging.getLogger().setLevel(logging.INFO)

    def paint(self, text: str, style: str) -> str:
        """Returns `text` in a style of `STYLES`, for stdout."""
        return paint(text, style, self.colored)

    def data(self, text: str = "") -> None:
        """Writes a line of data."""
        if not self.quiet and not self.as_json:
            _write(sys.stdout, text)

    def value(self, text: object) -> None:
        """Writes the one value that `-q` is for."""
        if self.quiet == 1 and not self.as_json:
            _write(sys.stdout, str(text))

    def document(self, value: Any) -> None:
        """Writes the JSON document of a command, when JSON was asked for."""
        if self.as_json:
            _write(sys.stdout, json.dumps(plain(value), indent=2, ensure_ascii=False))

    def record(self, value: Any) -> None:
        """Writes one line of a stream of JSON, when JSON was asked for."""
        if self.as_json:
            _write(sys.stdout, json.dumps(plain(value), ensure_ascii=False))

    def note(self, text: str = "") -> None:
        """Writes a line of progress."""
        if not self.quiet and not self.as_json:
            _write(sys.stderr, text)

    def hint(self, text: str) -> None:
        """Writes what to do next, after a blank line."""
        self.note()
        self.note(hint_line(text, self.colored_stderr))

    def warn(self, text: str) -> None:
        """Writes a warning, which `-q` lets through."""
        if self.quiet < 2:
            _write(sys.stderr, f"{paint('warning:', 'warning', self.colored_stderr)} {text}")

    def error(self, text: str) -> None:
        """Writes part of an error, which nothing silences."""
        _write(sys.stderr, text)

    def debug(self, text: str) -> None:
        """Writes a line that only `-v` shows."""
        if self.verbose:
            _write(sys.stderr, paint(text, "dim", self.colored_stderr))

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Writes a table of one line per row: too narrow a terminal loses columns, then ends of lines."""
        for number, line in enumerate(table_lines(columns, rows, self.width) if rows else ()):
            self.data(self.paint(line, "dim") if number == 0 else line)

    def facts(self, facts: Mapping[str, str] | Sequence[tuple[str, str]]) -> None:
        """Writes labelled values, one a line, labels aligned; a value's further lines stand under its first."""
        pairs = list(facts.items()) if isinstance(facts, Mapping) else facts
        width = max((len(label) for label, _ in pairs), default=0)
        for label, text in pairs:
            first, *rest = text.splitlines() or [""]
            self.data(f"{self.paint(f'{label:<{width}}', 'dim')}  {first}".rstrip())
            for line in rest:
                self.data(f"{'':{width}}  {line}".rstrip())


def paint(text: str, style: str, colored: bool) -> str:
    """Returns `text` in a style of `STYLES` when `colored`."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if colored and text else text


def hint_line(text: str, colored: bool) -> str:
    """Returns a hint for stderr, literals colored."""
    label, _, rest = filled(f"hint: {text}", sys.stderr).partition(" ")
    literals = re.sub(r"`[^`]+`", lambda match: paint(match[0], "literal", colored), rest)
    return f"{paint(label, 'hint', colored)} {literals}"


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Returns a table as lines, header first, at most `width` cells wide (None: as wide as it is)."""
    shown = list(range(len(columns)))
    sizes = [max([cells(column.name), *(cells(row[i]) for row in rows)]) for i, column in enumerate(columns)]
    while width and sum(sizes[i] + 2 for i in shown) - 2 > width and any(columns[i].drop for i in shown):
        shown.remove(max(shown, key=lambda i: columns[i].drop))
    if width is None:
        sizes = [min(size, WIDEST_COLUMN) for size in sizes]
    lines = []
    for row in [[column.name for column in columns], *rows]:
        parts = []
        for i in shown:
            space = " " * (sizes[i] - cells(row[i]))
            parts.append(space + row[i] if columns[i].right else row[i] + space)
        line = "  ".join(parts).rstrip()
        lines.append(cut(line, width) if width else line)
    return lines


def plain(value: Any) -> Any:
    """Returns `value` as JSON can hold it: dataclasses as objects, paths as text, NaN and infinities as null."""
    from rollcli.runs.events import finite

    def convert(item: Any) -> Any:
        if is_dataclass(item) and not isinstance(item, type):
            return convert(asdict(item))
        if isinstance(item, Mapping):
            return {str(key): convert(inner) for key, inner in item.items()}
        if isinstance(item, (list, tuple, set, frozenset)):
            return [convert(inner) for inner in item]
        return item if isinstance(item, (str, int, float, bool)) or item is None else str(item)

    return finite(convert(value))


def _write(stream: TextIO, text: str) -> None:
    print(text, file=stream, flush=True)
