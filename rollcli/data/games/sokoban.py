"""Sokoban: levels as text, moves, a generator by reverse play, and Boxoban's files.

`#` wall, `@` player, `$` box, `.` target, `*` box on a target, `+` player on a target, space floor.
"""

from __future__ import annotations

import random as randomness
from dataclasses import dataclass, replace
from pathlib import Path

from rollcli.errors import DatasetNotFound

STEPS = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
STANDARD = "# .$*@+"
"""Characters of wall, floor, target, box, box on a target, player, player on a target."""

Cell = tuple[int, int]
"""Row and column."""


@dataclass(frozen=True)
class Level:
    """A position: where walls and targets are, and where boxes and player stand now."""

    height: int
    width: int
    walls: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def is_solved(self) -> bool:
        """Whether every box stands on a target."""
        return self.boxes <= self.targets

    def is_free(self, cell: Cell) -> bool:
        """Whether neither wall nor box stands there."""
        inside = 0 <= cell[0] < self.height and 0 <= cell[1] < self.width
        return inside and cell not in self.walls and cell not in self.boxes

    def moved(self, letter: str) -> Level:
        """Returns the position after a move, the same one where the way is blocked."""
        ahead = shifted(self.player, letter)
        if ahead in self.boxes:
            beyond = shifted(ahead, letter)
            return replace(self, boxes=self.boxes - {ahead} | {beyond}, player=ahead) if self.is_free(beyond) else self
        return replace(self, player=ahead) if self.is_free(ahead) else self

    def render(self, words: str = STANDARD) -> str:
        """Returns the position as text in the given characters, ordered as in `STANDARD`."""
        names = dict(zip(STANDARD, words, strict=True))
        rows = []
        for row in range(self.height):
            rows.append("".join(names[self._character((row, column))] for column in range(self.width)))
        return "\n".join(rows)

    def _character(self, cell: Cell) -> str:
        on_target = cell in self.targets
        if cell in self.walls:
            return "#"
        if cell == self.player:
            return "+" if on_target else "@"
        if cell in self.boxes:
            return "*" if on_target else "$"
        return "." if on_target else " "


def shifted(cell: Cell, letter: str, by: int = 1) -> Cell:
    """Returns the cell `by` steps away."""
    row, column = STEPS[letter]
    return cell[0] + by * row, cell[1] + by * column


def parse(text: str, where: str = "level", first_line: int = 1) -> Level:
    """Returns the level that a text draws.

    Raises:
        DatasetNotFound: a character is none of the game's, or the level has not one player and a target for each of at
            least one box; with the line.
    """
    rows = text.strip("\n").split("\n")
    found: dict[str, set[Cell]] = {character: set() for character in STANDARD}
    for row, line in enumerate(rows):
        for column, character in enumerate(line):
            if character not in found:
                raise DatasetNotFound(
                    f"{where}:{first_line + row}: `{character}` is none of `{STANDARD}`", hint="mend the level"
                )
            found[character].add((row, column))
    players, boxes, targets = found["@"] | found["+"], found["$"] | found["*"], found["."] | found["*"] | found["+"]
    if len(players) != 1 or not boxes or len(boxes) > len(targets):
        raise DatasetNotFound(
            f"{where}:{first_line}: {len(players)} players, {len(boxes)} boxes, {len(targets)} targets",
            hint="a level has one player, at least one box, and as many targets as boxes",
        )
    width = max(map(len, rows))
    return Level(len(rows), width, frozenset(found["#"]), frozenset(targets), frozenset(boxes), next(iter(players)))


def read_boxoban(path: str) -> list[Level]:
    """Returns the levels of a Boxoban file: each begins with a line `; number`.

    Raises:
        DatasetNotFound: the file is not there, or a level is broken; with file and line.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetNotFound(f"level file `{path}` cannot be read: {error}", hint="check `path`") from error
    starts = [number for number, line in enumerate(lines) if line.startswith(";")]
    if not starts:
        raise DatasetNotFound(f"{path}:1: no line begins a level with `;`", hint="give a file of Boxoban levels")
    ends = [*starts[1:], len(lines)]
    return [parse("\n".join(lines[at + 1 : end]), path, at + 2) for at, end in zip(starts, ends, strict=True)]


def generate(height: int, width: int, boxes: int, wall_share: float, pulls: int, random: randomness.Random) -> Level:
    """Returns a level made by playing backwards from a solved one, so that playing forwards solves it.

    The player walks freely and pulls boxes off their targets, at most `pulls` times; the level is the position with no
    box on a target that was reached last. Played back, each pull is a push.

    Raises:
        DatasetNotFound: no such position was found in a thousand rooms.
    """
    inner = [(row, column) for row in range(1, height - 1) for column in range(1, width - 1)]
    border = {(row, column) for row in range(height) for column in range(width)} - set(inner)
    for _ in range(1000):
        walls = frozenset(border | {cell for cell in inner if random.random() < wall_share})
        floor = [cell for cell in inner if cell not in walls]
        if len(floor) <= boxes:
            continue
        player, *targets = random.sample(floor, boxes + 1)
        level = Level(height, width, walls, frozenset(targets), frozenset(targets), player)
        best = None
        for _ in range(pulls):
            reached = reachable(level)
            ways = sorted((box, way) for box in level.boxes for way in STEPS if _can_pull(level, box, way, reached))
            if not ways:
                break
            box, way = random.choice(ways)
            beside = shifted(box, way)
            level = replace(level, boxes=level.boxes - {box} | {beside}, player=shifted(beside, way))
            if not level.boxes & level.targets:
                best = level
        if best is not None:
            return replace(best, player=random.choice(sorted(reachable(best))))
    raise DatasetNotFound(
        f"no level of {height} × {width} with {boxes} boxes was found",
        hint="make it larger, or take fewer boxes or walls",
    )


def reachable(level: Level) -> dict[Cell, str]:
    """Returns the cells the player can walk to, each with a shortest walk there."""
    walks, waiting = {level.player: ""}, [level.player]
    for cell in waiting:
        for letter in STEPS:
            beside = shifted(cell, letter)
            if beside not in walks and level.is_free(beside):
                walks[beside] = walks[cell] + letter
                waiting.append(beside)
    return walks


def _can_pull(level: Level, box: Cell, way: str, reached: dict[Cell, str]) -> bool:
    return shifted(box, way) in reached and level.is_free(shifted(box, way, 2))
