"""Reads one large JSON array or object member by member, so that a file of gigabytes never stands in memory whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rollcli.errors import DatasetNotFound

CHUNK = 1 << 20
LONGEST = 64 * CHUNK
"""Characters read at once, and the most that one member may have: what is longer is a file that is broken."""
_DECODER = json.JSONDecoder()


def array_members(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields `file:line:column` and value of each member of an array.

    Raises:
        DatasetNotFound: the file cannot be read, or is no JSON array; with file, line and column.
    """
    for where, _, value in _members(path, "[]"):
        yield where, value


def object_members(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Yields `file:line:column`, key and value of each member of an object.

    Raises:
        DatasetNotFound: the file cannot be read, or is no JSON object; with file, line and column.
    """
    yield from _members(path, "{}")


def _members(path: Path, brackets: str) -> Iterator[tuple[str, str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            stream = _Stream(path, file)
            stream.take(brackets[0])
            while stream.peek() != brackets[1]:
                where, key = stream.where(), ""
                if brackets == "{}":
                    key = stream.value()
                    stream.take(":")
                yield where, key, stream.value()
                if stream.peek() != brackets[1]:
                    stream.take(",")
    except OSError as error:
        raise DatasetNotFound(f"`{path}` cannot be read: {error}", hint="check the path") from error
    except UnicodeDecodeError as error:
        raise DatasetNotFound(f"`{path}` is not UTF-8 text: {error}", hint="take an unpacked JSON file") from error


class _Stream:
    """A window on the text of a file; `line` and `column` are those of `counted`, a place in it."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path, self.file = path, file
        self.buffer, self.at = "", 0
        self.line, self.column, self.counted = 1, 1, 0
        self.ended = False

    def fill(self) -> None:
        """Forgets what was read and reads on."""
        self._count()
        read = self.file.read(CHUNK)
        self.ended = not read
        self.buffer, self.at, self.counted = self.buffer[self.at :] + read, 0, 0

    def peek(self) -> str:
        """Returns the next character that is no space; '' at the end."""
        while True:
            while self.at < len(self.buffer) and self.buffer[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self.buffer) or self.ended:
                return self.buffer[self.at : self.at + 1]
            self.fill()

    def take(self, character: str) -> None:
        """Steps over a character."""
        found = self.peek()
        if found != character:
            raise self.broken(f"`{character}` should stand here, not {f'`{found}`' if found else 'the end'}", self.at)
        self.at += 1

    def value(self) -> Any:
        """Returns the next value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.buffer, self.at)
                if end < len(self.buffer) or self.ended:  # a number may go on in the next chunk
                    self.at = end
                    return value
            except json.JSONDecodeError as error:
                if self.ended or len(self.buffer) - self.at > LONGEST:
                    raise self.broken(error.msg, error.pos) from error
            self.fill()

    def where(self) -> str:
        """Returns the place of the next value."""
        self.peek()
        self._count()
        return f"{self.path}:{self.line}:{self.column}"

    def broken(self, why: str, at: int) -> DatasetNotFound:
        """Returns the error of a place."""
        line, column = self._place(at)
        return DatasetNotFound(f"{self.path}:{line}:{column}: not the JSON of WebShop: {why}", hint="mend the file")

    def _count(self) -> None:
        """Counts lines up to here, so that none is counted twice."""
        self.line, self.column = self._place(self.at)
        self.counted = self.at

    def _place(self, at: int) -> tuple[int, int]:
        newlines = self.buffer.count("\n", self.counted, at)
        last = self.buffer.rfind("\n", self.counted, at)
        return self.line + newlines, at - last if newlines else self.column + at - self.counted
