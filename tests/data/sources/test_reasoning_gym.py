"""Procedural problems: pure, endless, train and test disjoint by content."""

import random

import pytest

from rollcli.data.sources.reasoning_gym import ReasoningGymSource
from rollcli.errors import DatasetNotFound


def text(problem) -> str:
    return problem.messages[0]["content"]


def test_items_are_pure_and_endless() -> None:
    first, second = (ReasoningGymSource("basic_arithmetic").open("train", 2**62 + 11) for _ in range(2))
    forward = [first[index] for index in (0, 1, 2, 10**6, 10**9)]
    backward = [second[index] for index in (10**9, 10**6, 2, 1, 0)][::-1]
    assert forward == backward and first.size is None
    assert len({text(problem) for problem in forward}) == 5
    assert forward[0].payload["question"] == text(forward[0]) and isinstance(forward[0].payload["answer"], str)
    assert text(ReasoningGymSource("basic_arithmetic").open("train", 1)[0]) != text(forward[0])


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_splits_share_no_problem_whatever_the_seed(share: float) -> None:
    # Single digits: few enough problems that both splits meet the same ones again and again.
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    source = ReasoningGymSource("basic_arithmetic", options=options, held_out_share=share)
    train = {text(source.open("train", seed)[index]) for seed in (0, 1) for index in range(150)}
    test = {text(source.open("test", seed)[index]) for seed in (0, 2) for index in range(150)}
    assert train and test and not train & test


def test_prompt_may_name_metadata_and_is_what_is_held_out() -> None:
    options = {"min_terms": 2, "max_terms": 2, "operators": ["+"], "allow_parentheses": False, "allow_negation": False}
    items = ReasoningGymSource("basic_arithmetic", options=options, prompt="Add: {expression}").open("train", 0)
    left, right = text(items[0]).removeprefix("Add: ").split("+")
    assert int(left) + int(right) == int(items[0].payload["answer"])


@pytest.mark.parametrize("dataset", ["gsm_symbolic", "list_functions", "pool_matrix", "word_ladder", "codeio"])
def test_data_sets_that_bound_their_items_or_seeds(dataset: str) -> None:
    """The package prepares all items of some at once, and gives NumPy, which takes 32 bits, the seed of others."""
    train, test = (ReasoningGymSource(dataset).open(split, 2**62 + 11) for split in ("train", "test"))
    random.seed(train[2].payload["answer"])  # some draw from the global generator too
    assert text(train[3]) == text(ReasoningGymSource(dataset).open("train", 2**62 + 11)[3])
    assert len({text(train[3]), text(train[4]), text(test[3]), text(train[2_000_003])}) == 4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ReasoningGymSource("basic_aritmetic"), "no data set `basic_aritmetic`.*did you mean `basic_arithmetic`"),
        (ReasoningGymSource("basic_arithmetic", options={"digits": 3}), "does not take these options"),
        (ReasoningGymSource("basic_arithmetic", options={"min_terms": -2}), "does not take these options"),
        (ReasoningGymSource("basic_arithmetic", prompt="{expresion}"), "did you mean `expression`"),
    ],
)
def test_what_is_wrong_is_said(source: ReasoningGymSource, message: str) -> None:
    with pytest.raises(DatasetNotFound, match=message) as caught:
        source.open("train", 0)
    assert caught.value.hint


def test_too_few_problems_for_a_split_end_with_a_message() -> None:
    source = ReasoningGymSource("basic_arithmetic", prompt="always the same")
    present = {}
    for split in ("train", "test"):
        items = source.open(split, 0)
        try:
            present[split] = text(items[0])
        except DatasetNotFound as error:
            assert f"no {split} problem near index 0" in str(error)
    assert len(present) == 1


@pytest.mark.parametrize("share", [0.0, 1.0, -1, 2])
def test_share_must_leave_both_splits(share: float) -> None:
    assert [name for name, _ in ReasoningGymSource("x", held_out_share=share).problems()] == ["held_out_share"]
    assert not list(ReasoningGymSource("x").problems())


def test_fingerprint_follows_the_options() -> None:
    prints = [
        ReasoningGymSource("basic_arithmetic", **options).open("train", 0).fingerprint
        for options in ({}, {}, {"options": {"max_digits": 5}}, {"prompt": "Q: {question}"}, {"held_out_share": 0.2})
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 4
