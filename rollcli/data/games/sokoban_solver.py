"""A* over pushes: the shortest solution of a Sokoban level in moves."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import count

from rollcli.data.games.sokoban import STEPS, Cell, Level, reachable, shifted


def solve(level: Level, most_states: int = 200_000, weight: float = 1.0) -> str | None:
    """Returns the moves of a solution; None when there is none among `most_states` positions.

    With `weight` 1 no solution is shorter. The bound on what is left is each box's distance to its nearest target, in
    pushes on an empty floor, which never exceeds the moves needed; a larger weight finds longer solutions sooner.
    """
    distances = _push_distances(level)
    ticket = count()
    start = _estimate(level, distances)
    waiting = [(0.0, next(ticket), level, "")] if start is not None else []
    done: set[tuple[frozenset[Cell], Cell]] = set()
    while waiting and len(done) < most_states:
        _, _, now, moves = heapq.heappop(waiting)
        if now.is_solved:
            return moves
        if (now.boxes, now.player) in done:
            continue
        done.add((now.boxes, now.player))
        walks = reachable(now)
        for box in now.boxes:
            for letter in STEPS:
                behind = shifted(box, letter, -1)
                if behind not in walks or not now.is_free(shifted(box, letter)):
                    continue
                after = replace(now, boxes=now.boxes - {box} | {shifted(box, letter)}, player=box)
                left = _estimate(after, distances)
                if left is not None and (after.boxes, after.player) not in done:
                    way = moves + walks[behind] + letter
                    heapq.heappush(waiting, (len(way) + weight * left, next(ticket), after, way))
    return None


def _push_distances(level: Level) -> dict[Cell, int]:
    """Returns the fewest pushes from each cell to a target, boxes left out; a box elsewhere is lost."""
    distances, waiting = dict.fromkeys(level.targets, 0), sorted(level.targets)
    empty = replace(level, boxes=frozenset())
    for cell in waiting:
        for letter in STEPS:
            before, player = shifted(cell, letter, -1), shifted(cell, letter, -2)
            if before not in distances and empty.is_free(before) and empty.is_free(player):
                distances[before] = distances[cell] + 1
                waiting.append(before)
    return distances


def _estimate(level: Level, distances: dict[Cell, int]) -> int | None:
    """Returns a lower bound of the pushes left; None when a box can reach no target."""
    if not level.boxes <= distances.keys():
        return None
    return sum(distances[box] for box in level.boxes)
