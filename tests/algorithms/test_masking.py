"""Masking: which tokens are left, and what each trajectory weighs."""

import numpy as np
import pytest

from rollcli.algorithms.masking import Masking
from tests.algorithms.batches import batch_of


def left(masking: Masking, *given, **columns) -> str:
    """Returns the mask as text, one letter a token: `x` trained, `.` not."""
    batch = batch_of(*given, **columns)
    mask = masking.mask(batch)
    assert mask.dtype == np.bool_
    parts = np.split(mask, batch.offsets[1:-1])
    return " ".join("".join("x" if trained else "." for trained in part) for part in parts)


def test_by_default_every_sampled_token_is_trained() -> None:
    assert left(Masking(), [".00.1", "..0"]) == ".xx.x ..x"


def test_answers_cut_off_by_their_budget() -> None:
    assert left(Masking(truncated=True), [".00", ".00"], truncated=[True, False]) == "... .xx"
    assert left(Masking(truncated=False), [".00", ".00"], truncated=[True, False]) == ".xx .xx"


def test_the_last_turn_alone() -> None:
    assert left(Masking(turns="last"), [".00.1.22", "..00", "0.1"]) == "......xx ..xx ..x"


def test_trajectories_without_turns_are_trained_whole() -> None:
    assert left(Masking(turns="last"), [".00", ".0"], turns=[-1] * 5) == ".xx .x"


def test_lengths_count_sampled_tokens_bounds_included() -> None:
    answers = ["..0", ".00", ".000", "0000"]
    assert left(Masking(min_tokens=2), answers) == "... .xx .xxx xxxx"
    assert left(Masking(max_tokens=3), answers) == "..x .xx .xxx ...."
    assert left(Masking(min_tokens=2, max_tokens=2), answers) == "... .xx .... ...."


def test_groups_by_their_mean_accuracy_bounds_included() -> None:
    answers, groups, accuracy = ["0"] * 6, [3, 1, 3, 1, 2, 2], [1, 0, 1, 0.5, 0.5, 0.5]  # means 1, 0.25, 0.5
    assert left(Masking(min_accuracy=0.5), answers, None, groups, accuracy=accuracy) == "x . x . x x"
    assert left(Masking(max_accuracy=0.5), answers, None, groups, accuracy=accuracy) == ". x . x x x"
    assert left(Masking(min_accuracy=0.3, max_accuracy=0.9), answers, None, groups, accuracy=accuracy) == ". . . . x x"
    assert left(Masking(max_accuracy=0.0), answers, None, groups, accuracy=accuracy) == ". . . . . ."


def test_what_is_masked_stays_masked() -> None:
    batch = batch_of([".00"])
    batch.tokens["loss_mask"][2] = False
    assert Masking().mask(batch).tolist() == [False, True, False]


def test_weights_are_one_by_default() -> None:
    assert Masking().weights(batch_of(["0", "00"])).tolist() == [1, 1]


def test_difficulty_weight_by_hand() -> None:
    batch = batch_of(["0"] * 4, None, [0, 0, 1, 1], accuracy=[1, 0.5, 0, 0])
    assert Masking(difficulty_weight=1).weights(batch).tolist() == [0.25, 0.25, 1, 1]
    assert Masking(difficulty_weight=2).weights(batch).tolist() == [0.0625, 0.0625, 1, 1]


def test_length_weight_by_hand() -> None:
    batch = batch_of(["0", "000", ".00"], sampled=[1, 3, 2])
    assert Masking(length_weight=1).weights(batch).tolist() == pytest.approx([2, 2 / 3, 1])
    assert Masking(length_weight=0.5).weights(batch).tolist() == pytest.approx([2**0.5, (2 / 3) ** 0.5, 1])


def test_weights_multiply_and_nothing_sampled_is_finite() -> None:
    batch = batch_of([".", "00"], accuracy=[0.5, 0.5])
    assert Masking(length_weight=1, difficulty_weight=1).weights(batch).tolist() == pytest.approx([0.75, 0.375])


def test_an_empty_step() -> None:
    masking = Masking(True, "last", 1, 2, 0.1, 0.9, 1.0, 1.0)
    assert masking.mask(batch_of([])).shape == masking.weights(batch_of([])).shape == (0,)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"min_tokens": 0}, ["min_tokens"]),
        ({"max_tokens": 0}, ["max_tokens"]),
        ({"difficulty_weight": -1}, ["difficulty_weight"]),
        ({"min_tokens": 5, "max_tokens": 4}, ["min_tokens"]),
        ({"min_tokens": 5, "max_tokens": 5}, []),
        ({"min_accuracy": 0.9, "max_accuracy": 0.1}, ["min_accuracy"]),
        ({"min_accuracy": 0.1, "max_accuracy": 0.9}, []),
    ],
)
def test_options_that_make_no_sense(options: dict, names: list[str]) -> None:
    assert [name for name, _ in Masking(**options).problems()] == names


def test_turn_numbers_of_what_was_not_sampled_do_not_count() -> None:
    batch = batch_of(["00.1"], turns=[0, 0, 7, 1])
    assert Masking(turns="last").mask(batch).tolist() == [False, False, False, True]
