"""Sokoban's problems: apart by split, demonstrated by turns, checked before anything starts."""

from rollcli.data.games import sokoban
from rollcli.data.games.sokoban_solver import solve
from rollcli.data.sources.sokoban import SokobanSource


def test_levels_are_repeatable_and_apart_by_split() -> None:
    source = SokobanSource()
    train, test = source.open("train", 1), source.open("test", 1)
    levels = [train[index].payload["level"] for index in range(30)]
    assert levels == [source.open("train", 1)[index].payload["level"] for index in range(30)]
    assert not set(levels) & {test[index].payload["level"] for index in range(10)}


def test_a_demonstrated_turn_is_the_solvers_on_the_grid_before_it() -> None:
    items = SokobanSource(demonstrate=True, expert_share=1.0, prompt="{state}").open("train", 1)
    for index in range(10):
        problem = items[index]
        level = sokoban.parse(problem.messages[-1]["content"])
        assert len(solve(level.moved(problem.payload["response"]))) == len(solve(level)) - 1


def test_options_without_sense_are_named() -> None:
    source = SokobanSource(height=4, width=4, boxes=2, wall_share=0.9, words="##")
    assert {key for key, _ in source.problems()} == {"boxes", "wall_share", "words"}
