"""Levels are read and moved by the rules, and every generated one can be solved."""

import os
import random
from pathlib import Path

import pytest

from rollcli.data.games import sokoban
from rollcli.data.games.sokoban_solver import solve
from rollcli.errors import DatasetNotFound

DATA = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[3].parent / "shared" / "data") / "boxoban"


def test_pushing_and_blocked_moves() -> None:
    level = sokoban.parse("######\n#@$ .#\n######")
    assert level.moved("L") == level.moved("U") == level
    twice = level.moved("R").moved("R")
    assert twice.is_solved and twice.render() == "######\n#  @*#\n######"
    assert twice.moved("R") == twice
    assert sokoban.parse(twice.render("WFTBDPQ").translate(str.maketrans("WFTBDPQ", sokoban.STANDARD))) == twice


def test_generated_levels_are_all_solved_by_the_solver() -> None:
    for seed in range(1000):
        boxes = 1 + seed % 2
        level = sokoban.generate(6, 6, boxes, 0.1, 8, random.Random(seed))
        assert len(level.boxes) == boxes and not level.boxes & level.targets
        moves = solve(level)
        assert moves
        for letter in moves:
            level = level.moved(letter)
        assert level.is_solved


def test_sizes_that_hold_no_level_are_refused() -> None:
    with pytest.raises(DatasetNotFound, match="3 × 4 with 2 boxes"):
        sokoban.generate(3, 4, 2, 0.0, 5, random.Random(0))


@pytest.mark.parametrize(
    ("text", "place"), [("; 0\n####\n#@x#\n", "3"), ("; 0\n#@$.#\n\n; 1\n#@ .#\n", "5"), ("####", "1")]
)
def test_a_broken_file_is_located(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "levels.txt").write_text(text)
    with pytest.raises(DatasetNotFound, match=rf"levels\.txt:{place}: "):
        sokoban.read_boxoban(str(tmp_path / "levels.txt"))


@pytest.mark.skipif(not DATA.is_dir(), reason="no data")
def test_boxoban_levels_are_read_as_they_stand() -> None:
    levels = sokoban.read_boxoban(str(DATA / "unfiltered_train_000.txt"))
    assert len(levels) == 1000 and {len(level.boxes) for level in levels} == {4}
    assert levels[0].render().startswith("##########\n#@ #######\n#.$#######")
