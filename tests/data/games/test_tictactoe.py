"""Rules by hand; best play against every reply."""

from __future__ import annotations

from random import Random

import pytest

from rollcli.data.games.tictactoe import TicTacToe, winner


def after(*moves: str) -> TicTacToe:
    game = TicTacToe(Random(0))
    for move in moves:
        game.play(move)
    return game


def test_turns_alternate_and_a_free_field_shows_its_number():
    game = after("5", "1")
    assert game.view(0) == game.view(1) == "O23\n4X6\n789" and game.player == 0
    assert game.moves() == list("2346789") and not game.is_over


@pytest.mark.parametrize(
    ("moves", "scores"),
    [("14253", (1.0, -1.0)), ("172594", (0.0, 0.0)), ("159287364", (0.0, 0.0)), ("51734629", (-1.0, 1.0))],
)
def test_scores(moves, scores):
    game = after(*moves)
    assert (game.score(0), game.score(1)) == scores


def test_three_in_a_row_column_and_diagonal():
    for line in ("123", "456", "789", "147", "258", "369", "159", "357"):
        board = "".join("O" if field in line else field for field in "123456789")
        assert winner(board) == 1
    assert winner("X2X4O6O8X") is None and after("1", "4", "2", "5", "3").is_over


@pytest.mark.parametrize("seat", [0, 1])
def test_best_play_never_loses_whatever_the_other_does(seat):
    results = set()

    def walk(moves: tuple[str, ...]) -> None:
        game = after(*moves)
        if game.is_over:
            results.add(game.score(seat))
            return
        replies = [game.best(Random(len(moves)))] if game.player == seat else game.moves()
        for move in replies:
            walk((*moves, move))

    walk(())
    assert results == {0.0, 1.0}


def test_best_play_wins_at_once_where_it_can():
    assert after("1", "4", "2", "5").best(Random(0)) == "3"
