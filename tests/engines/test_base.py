"""An answer in parts: what is asked for after an interruption, and how the parts are one again."""

import numpy as np

from rollcli.engines.base import Completion, GenerateRequest, SamplingParams


def part(tokens: list[int], version: int, stop_reason: str, error: str | None = None) -> Completion:
    count = len(tokens)
    logprobs = -0.5 * np.array(tokens, np.float32)
    return Completion("a", np.array(tokens, np.int32), logprobs, np.full(count, version, np.int32), stop_reason, error)


REQUEST = GenerateRequest("a", np.array([7, 8], np.int32), 3, SamplingParams(10, 0.5, 0.9, 4, (2,)), stream=True)


def test_the_rest_of_a_budget_of_10_after_4_tokens_is_6_from_the_fifth_draw():
    rest = REQUEST.after(part([1, 3, 5, 6], 0, "abort"))
    assert rest.prompt.tolist() == [7, 8, 1, 3, 5, 6] and rest.prompt.dtype == np.int32
    assert rest.sampling == SamplingParams(6, 0.5, 0.9, 4, (2,)) and rest.drawn == 4
    assert (rest.id, rest.seed, rest.stream) == ("a", 3, True)
    # The request itself is as it was, and parts add up.
    assert REQUEST.drawn == 0 and REQUEST.prompt.tolist() == [7, 8] and REQUEST.sampling.max_tokens == 10
    last = rest.after(part([9], 1, "abort"))
    assert (last.drawn, last.sampling.max_tokens, last.prompt.tolist()) == (5, 5, [7, 8, 1, 3, 5, 6, 9])


def test_nothing_was_sampled_yet():
    rest = REQUEST.after(part([], 0, "abort"))
    assert (rest.drawn, rest.sampling, rest.prompt.tolist()) == (0, REQUEST.sampling, [7, 8])


def test_parts_are_one_answer_that_ends_as_the_last_did():
    whole = part([1, 3], 0, "abort").then(part([], 1, "abort")).then(part([5], 2, "error", "NaN"))
    assert (whole.tokens.tolist(), whole.versions.tolist()) == ([1, 3, 5], [0, 0, 2])
    assert whole.logprobs.tolist() == [-0.5, -1.5, -2.5] and (whole.stop_reason, whole.error) == ("error", "NaN")
    assert (whole.tokens.dtype, whole.logprobs.dtype, whole.versions.dtype) == (np.int32, np.float32, np.int32)
