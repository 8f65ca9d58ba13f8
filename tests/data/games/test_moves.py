"""Moves are found in the forms models write."""

import pytest

from rollcli.data.games.moves import parse_moves


@pytest.mark.parametrize(
    ("response", "moves"),
    [
        ("R", "R"), ("u", "U"), ("Left.", "L"), ("**down**", "D"), ("→", "R"),
        ("<think>up? no</think>right", "R"), ("I could go left or down. Up is best: up", "U"),
        ("<answer>Left</answer> not right", "L"), (r"\boxed{down}", "D"), ("Action: right\n", "R"),
        ("<action>up</action> not right", "U"),
        ("", ""), ("upward", ""), ("no idea", ""), ("<answer>jump</answer>", ""),
    ],
)  # fmt: skip
def test_one_move(response: str, moves: str) -> None:
    assert parse_moves(response) == moves


@pytest.mark.parametrize(
    "response", ["RRD", "r, r, d", "right, right, down", "<answer>Right || Right || Down</answer>"]
)
def test_several_moves_up_to_the_most(response: str) -> None:
    assert (parse_moves(response, 3), parse_moves(response, 2)) == ("RRD", "RR")
