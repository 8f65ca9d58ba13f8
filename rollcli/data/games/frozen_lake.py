"""FrozenLake as gymnasium defines it: maps, transitions and the best policy. `S` start, `F` ice, `H` hole, `G` goal."""

from __future__ import annotations

from collections import deque
from functools import lru_cache

import numpy as np

from rollcli.data.games.moves import MOVES
from rollcli.errors import DatasetNotFound

_DISCOUNT = 0.99
"""Below 1, so that of two sure ways the shorter is better."""


def generate(size: int, frozen_share: float, seed: int) -> tuple[str, ...]:
    """Returns the rows of a map with a way from start to goal: gymnasium's `generate_random_map`, draw for draw."""
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    while True:
        board = random.choice(["F", "H"], (size, size), p=[frozen_share, 1 - frozen_share])
        board[0][0], board[-1][-1] = "S", "G"
        rows = tuple("".join(row) for row in board)
        if is_solvable(rows):
            return rows


def parse(text: str, where: str = "map") -> tuple[str, ...]:
    """Returns the rows of a map written as text.

    Raises:
        DatasetNotFound: it is no rectangle of `S`, `F`, `H`, `G`, has not one start, or no way to a goal (with line).
    """
    rows = tuple(text.split())
    for number, row in enumerate(rows, 1):
        if wrong := set(row) - set("SFHG"):
            raise DatasetNotFound(f"{where}:{number}: `{min(wrong)}` is none of S, F, H, G", hint="mend it")
        if len(row) != len(rows[0]):
            raise DatasetNotFound(f"{where}:{number}: {len(row)} fields, not {len(rows[0])}", hint="mend the map")
    joined = "".join(rows)
    if joined.count("S") != 1 or not is_solvable(rows):
        raise DatasetNotFound(f"{where}: a map needs one start and a way from it to a goal", hint="mend the map")
    return rows


def neighbor(rows: tuple[str, ...], state: int, action: int) -> int:
    """Returns the field one step from `state` (row × width + column); at the edge one stays."""
    row, column = divmod(state, len(rows[0]))
    if action == 0:
        column = max(column - 1, 0)
    elif action == 1:
        row = min(row + 1, len(rows) - 1)
    elif action == 2:
        column = min(column + 1, len(rows[0]) - 1)
    else:
        row = max(row - 1, 0)
    return row * len(rows[0]) + column


def is_solvable(rows: tuple[str, ...]) -> bool:
    """Returns whether a way over ice leads from the start to a goal."""
    fields = "".join(rows)
    start = fields.find("S")
    seen, waiting = {start}, deque([start])
    while waiting:
        state = waiting.popleft()
        if fields[state] == "G":
            return True
        for action in range(4):
            after = neighbor(rows, state, action)
            if after not in seen and fields[after] != "H":
                seen.add(after)
                waiting.append(after)
    return False


@lru_cache(maxsize=4096)
def policy(rows: tuple[str, ...], is_slippery: bool) -> str:
    """Returns the best move from each field as a letter, by value iteration with a reward of 1 at a goal."""
    fields = "".join(rows)
    after = np.array([[neighbor(rows, state, action) for action in range(4)] for state in range(len(fields))])
    outcomes = [after[:, (np.arange(4) + turn) % 4] for turn in ((-1, 0, 1) if is_slippery else (0,))]
    is_over = np.array([field in "GH" for field in fields])
    goal = np.array([float(field == "G") for field in fields])
    values = np.zeros(len(fields))
    for _ in range(2000):
        returns = sum(goal[to] + _DISCOUNT * np.where(is_over[to], 0, values[to]) for to in outcomes) / len(outcomes)
        best = np.where(is_over, 0, returns.max(axis=1))
        if np.abs(best - values).max() < 1e-10:
            break
        values = best
    return "".join(list(MOVES)[action] for action in returns.argmax(axis=1))


def render(rows: tuple[str, ...], state: int, words: str = "FHGP") -> str:
    """Returns the map with the player on it; `words` are the characters of ice, hole, goal and player."""
    ice, hole, goal, player = words
    fields = [{"F": ice, "S": ice, "H": hole, "G": goal}[field] for field in "".join(rows)]
    fields[state] = player
    width = len(rows[0])
    return "\n".join("".join(fields[at : at + width]) for at in range(0, len(fields), width))
