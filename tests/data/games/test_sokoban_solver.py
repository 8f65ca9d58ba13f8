"""The solver's solutions are shortest, and it sees what cannot be solved."""

import random
from collections import deque

from rollcli.data.games.sokoban import STEPS, generate, parse
from rollcli.data.games.sokoban_solver import solve


def shortest(level) -> int:
    """Returns the number of moves by breadth-first search over moves."""
    seen, waiting = {level}, deque([(level, 0)])
    while waiting:
        now, moves = waiting.popleft()
        if now.is_solved:
            return moves
        for letter in STEPS:
            if (after := now.moved(letter)) not in seen:
                seen.add(after)
                waiting.append((after, moves + 1))


def test_no_solution_is_shorter() -> None:
    for seed in range(15):
        level = generate(5, 6, 1, 0.1, 8, random.Random(seed))
        assert len(solve(level)) == shortest(level)


def test_a_box_in_a_corner_is_lost() -> None:
    assert solve(parse("######\n#$  .#\n#  @ #\n######")) is None
