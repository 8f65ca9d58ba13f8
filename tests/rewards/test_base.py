"""Rewards are called with what they name, and give back one finite number or an error that says why not."""

from functools import partial

import numpy as np
import pytest
import torch

from rollcli.errors import PluginError, RewardError
from rollcli.rewards import RewardResult
from rollcli.rewards.base import STANDARD_FIELDS, call_reward, check_signature, reward_name, to_result

FIELDS = {"prompt": "1+1?", "response": "2", "messages": [], "answer": "2"}


def length(response: str) -> float:
    return len(response)


class Longer:
    def __init__(self, than: int) -> None:
        self.than = than

    def __call__(self, response: str) -> bool:
        return len(response) > self.than


class Unhashable(Longer):
    __hash__ = None


def test_only_what_is_named_is_passed():
    assert call_reward(lambda answer, response: answer == response, FIELDS) == RewardResult(1.0)


def test_default_is_kept_when_no_field_answers_and_replaced_when_one_does():
    assert call_reward(lambda response, scale=3: scale, FIELDS).score == 3
    assert call_reward(lambda response, scale=3: scale, {**FIELDS, "scale": 5}).score == 5


def test_all_fields_reach_a_function_that_takes_any():
    assert call_reward(lambda response, **rest: len(rest), FIELDS).score == 3


def test_keyword_only_arguments():
    def keyword_only(*, answer: str) -> float:
        return float(answer)

    assert call_reward(keyword_only, FIELDS).score == 2.0


def test_missing_argument_names_function_argument_and_the_word_meant():
    with pytest.raises(RewardError) as caught:
        call_reward(_asks_for_responce, FIELDS)
    message = str(caught.value)
    assert "`_asks_for_responce`" in message
    assert "`responce`" in message and "did you mean `response`?" in message
    assert "answer, messages, prompt, response" in message


def _asks_for_responce(responce: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "name"),
    [(length, "length"), (partial(length), "length"), (partial(partial(length)), "length"), (Longer(3), "Longer")],
)
def test_callables_without_a_name_work_and_are_named(function, name):
    assert reward_name(function) == name
    assert call_reward(function, {"response": "four"}).score in (4.0, 1.0)


def test_unhashable_callable():
    assert call_reward(Unhashable(3), {"response": "four"}).score == 1.0


def test_what_a_partial_binds_is_not_replaced_by_a_field():
    def equal(response: str, answer: str) -> bool:
        return response == answer

    assert call_reward(partial(equal, answer="7"), {**FIELDS, "response": "7"}).score == 1.0
    assert call_reward(partial(lambda answer, **rest: len(rest), answer="7"), FIELDS).score == 3.0


def test_async_is_refused():
    async def score(response: str) -> float:
        return 1.0

    class Judge:
        async def __call__(self, response: str) -> float:
            return 1.0

    for function in (score, partial(score), Judge()):
        with pytest.raises(RewardError, match="async"):
            call_reward(function, FIELDS)
    with pytest.raises(RewardError, match="async"):
        call_reward(lambda response: score(response), FIELDS)


def test_positional_only_and_non_functions_are_refused():
    def positional(response, /):
        return 1.0

    with pytest.raises(RewardError, match="by position only"):
        call_reward(positional, FIELDS)
    with pytest.raises(RewardError, match="not a function"):
        call_reward("math", FIELDS)


def test_what_the_function_raises_passes_untouched():
    with pytest.raises(ZeroDivisionError):
        call_reward(lambda: 1 / 0, FIELDS)


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(-3), -3.0),
        (np.bool_(True), 1.0),
        (np.array(2.5), 2.5),
        (torch.tensor(0.75), 0.75),
        (torch.tensor(True), 1.0),
    ],
)
def test_numbers_of_any_make_become_floats(value, score):
    result = to_result(value, "r")
    assert result == RewardResult(score) and type(result.score) is float


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (None, "None"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (np.float64("-inf"), "-inf"),
        (10**400, "inf"),
        ("1.0", "str '1.0'"),
        (b"1", "bytes"),
        (1 + 2j, "complex"),
        ([1.0, 0.0], "list of 2"),
        ([], "list of 0"),
        ({"score": 1}, "dict of 1"),
        (np.ones(3), r"ndarray of shape \(3,\)"),
        (np.ones(0), r"ndarray of shape \(0,\)"),
        (torch.ones(2, 2), r"Tensor of shape \(2, 2\)"),
        (object(), "object"),
    ],
)
def test_anything_but_one_finite_number_is_named(value, got):
    with pytest.raises(RewardError, match=f"reward `mine`: expected .* number, got .*{got}"):
        to_result(value, "mine")


def test_a_long_value_is_shortened():
    with pytest.raises(RewardError) as caught:
        to_result("x" * 100_000, "mine")
    assert len(str(caught.value)) < 200


def test_result_details_are_checked_too():
    full = to_result(RewardResult(np.float32(0.5), {"length": np.int32(7)}, True), "r")
    assert full == RewardResult(0.5, {"length": 7.0}, 1.0)
    for bad in (
        RewardResult(None),
        RewardResult(float("nan")),
        RewardResult(1.0, {"length": float("nan")}),
        RewardResult(1.0, {"length": "7"}),
        RewardResult(1.0, None),
        RewardResult(1.0, {}, 2.0),
        RewardResult(1.0, {}, float("nan")),
    ):
        with pytest.raises(RewardError, match="reward `mine`"):
            to_result(bad, "mine")


def test_signature_is_checked_before_a_run():
    check_signature(length, STANDARD_FIELDS)
    check_signature(lambda response, scale=1, **rest: 0, STANDARD_FIELDS)
    with pytest.raises(PluginError, match=r"`anwser`.*did you mean `answer`"):
        check_signature(lambda anwser: 0, [*STANDARD_FIELDS, "answer"])
    with pytest.raises(PluginError, match="by position only"):
        check_signature(lambda response, /: 0, STANDARD_FIELDS)
