"""When a text ends an answer, against the text of all that was sampled, and answers in parts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rollcli.engines.base import GenerateRequest, SamplingParams
from rollcli.engines.requests import Answer, refusal, stop_text_ends

PIECES = [b"a", b"b", b"ab", b"bab", b" a", b"\xc3", b"\xa9", b"\xc3\xa9", b"\xe2\x82", b"\xac", b"\n", b"aab"]
"""Tokens of several characters, and some that are only parts of one."""


def decode(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", errors="replace")


def request(prompt: list[int], drawn: int = 0, **sampling: object) -> GenerateRequest:
    return GenerateRequest("a", np.array(prompt, dtype=np.int32), 0, SamplingParams(99, **sampling), drawn=drawn)


@pytest.mark.parametrize("seed", range(40))
def test_the_first_stop_text_is_found_where_the_whole_text_shows_it(seed: int) -> None:
    generator = random.Random(seed)
    stop = generator.choice(["ab", "bb", "aé", "é", "€a", "\n\n", "abba", " a a", "babab"])
    sampled = generator.choices(range(len(PIECES)), k=60)
    drawn = generator.choice([0, 3, 9])
    prompt = [0, 1, 2, *sampled[:drawn]]
    texts = [decode(sampled[:count]).count(stop) for count in range(len(sampled) + 1)]
    found = [
        count
        for count in range(drawn + 1, len(sampled) + 1)
        if stop_text_ends(request(prompt, drawn, stop=(stop, "never")), np.array(sampled[drawn:count]), decode)
    ]
    # Overlapping occurrences aside, which `count` leaves out: it can only see fewer.
    assert {count for count in range(drawn + 1, len(texts)) if texts[count] > texts[count - 1]} <= set(found)
    assert all(stop in decode(sampled[:count]) for count in found)


def test_a_text_of_the_prompt_and_one_within_the_minimum_end_nothing() -> None:
    assert not stop_text_ends(request([0], stop=("ab",)), np.array([1]), decode)  # a | b
    assert stop_text_ends(request([1, 0], drawn=1, stop=("ab",)), np.array([1]), decode)
    assert not stop_text_ends(request([0], stop=("ab",), min_tokens=2), np.array([0, 1]), decode)
    assert stop_text_ends(request([0], stop=("ab",), min_tokens=1), np.array([0, 1]), decode)
    assert not stop_text_ends(request([0]), np.array([0, 1]), decode)


def test_refusals_name_the_value() -> None:
    assert "vocabulary of 12" in refusal(request([12]), 10, 12, True)
    assert "tokenizer" in refusal(request([1], stop=("a",)), 10, 12, False)
    assert refusal(request([1], stop=("a",)), 10, 12, True) is None
    everything = {"stop_token_ids": tuple(range(12))}
    assert "every token" in refusal(request([1], min_tokens=1, **everything), 10, 12, True)
    assert refusal(request([1], **everything), 10, 12, True) is None
    assert "negative: -1" in refusal(request([1], stop_token_ids=(3, -1)), 10, 12, True)


def test_an_answer_knows_what_remains() -> None:
    answer = Answer(request([1, 2], drawn=1, min_tokens=5))
    answer.append([3, 4], [-1.0, -2.0], version=0)
    answer.append([5], [-3.0], version=7)
    rest = answer.remaining()
    assert rest.prompt.tolist() == [1, 2, 3, 4, 5] and rest.drawn == 4
    assert (rest.sampling.max_tokens, rest.sampling.min_tokens) == (96, 2)
    whole = answer.completion("stop")
    assert (whole.tokens.tolist(), whole.versions.tolist()) == ([3, 4, 5], [0, 0, 7])
    assert whole.logprobs.tolist() == [-1.0, -2.0, -3.0]
