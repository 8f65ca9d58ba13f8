"""What rollout engines share: which requests they refuse, when a text ends an answer, and an answer under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from rollcli.engines.base import Completion, GenerateRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollcli.config.schema import ModelConfig
    from rollcli.engines.vision import Vision

Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens, special ones included."""
MARGIN = 8
"""Tokens decoded before the earliest one that a stop text can begin in: what a token reads may depend on the last few,
such as the bytes that make up one character or the space that a tokenizer leaves out in front of a text."""


def decoder(config: ModelConfig) -> Decode:
    """Returns a function that decodes with the recipe's tokenizer, which is loaded when it is first called."""

    @cache
    def tokenizer() -> PreTrainedTokenizerBase:
        from rollcli.engines.models import load_policy_tokenizer

        return load_policy_tokenizer(config)

    return lambda tokens: tokenizer().decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def refusal(
    request: GenerateRequest, max_context: int, vocabulary: int, decodes: bool, vision: Vision | None = None
) -> str | None:
    """Says why a request cannot be served, or returns None.

    Args:
        request: what is asked.
        max_context: most tokens of prompt and answer together.
        vocabulary: number of token ids.
        decodes: whether the engine knows the text of tokens.
        vision: what is known of a model that sees images.
    """
    length, sampling = len(request.prompt), request.sampling
    if length == 0:
        return "the prompt is empty"
    if length >= max_context:
        return f"prompt of {length} tokens does not fit the context of {max_context}"
    if request.prompt.min() < 0 or request.prompt.max() >= vocabulary:
        return f"the prompt has a token id outside the model's vocabulary of {vocabulary}"
    if vision is not None and (problem := vision.problem(request.prompt, request.images)):
        return problem
    if vision is None and request.images is not None:
        return "the request has images, and the model sees none"
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}: nothing to sample"
    if not 0 <= sampling.temperature < np.inf or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        return f"sampling out of range: {sampling}"
    if min(sampling.stop_token_ids, default=0) < 0:
        return f"a stop token is negative: {min(sampling.stop_token_ids)}"
    if sampling.min_tokens > 0 and len(set(sampling.stop_token_ids)) >= vocabulary:
        return f"min_tokens is {sampling.min_tokens}, and every token of the vocabulary is a stop token"
    if "" in sampling.stop:
        return "a stop text is empty"
    if sampling.stop and not decodes:
        return f"stop texts {list(sampling.stop)} need a tokenizer, and the engine was given none"
    return None


def stop_text_ends(request: GenerateRequest, sampled: np.ndarray, decode: Decode) -> bool:
    """Whether the last token of `sampled` completes one of the request's stop texts, all of it within the answer.

    The answer may have begun in the prompt (`GenerateRequest.drawn`).
    """
    sampling = request.sampling
    if not sampling.stop or len(sampled) <= sampling.min_tokens:
        return False
    reach = max(len(text.encode()) for text in sampling.stop)  # a token is a byte or more
    begin = len(request.prompt) - request.drawn
    length = reach + MARGIN
    tail = np.concatenate([request.prompt[-length:], sampled[-length:]])[-length:].tolist()
    lead = max(begin - (len(request.prompt) + len(sampled) - len(tail)), 0)  # tokens of the tail before the answer
    before, now = decode(tail[:-1]), decode(tail)
    first = len(decode(tail[:lead])) if lead else 0
    # Not all of `before` need be there still: the rest of a character may have come.
    known = next((place for place, (old, new) in enumerate(zip(before, now)) if old != new), min(len(before), len(now)))
    return any(now.find(text, max(first, known - len(text) + 1)) >= 0 for text in sampling.stop)


def without_tokens(request: GenerateRequest, stop_reason: str, error: str | None = None) -> Completion:
    """Returns the end of a request that has no tokens."""
    empty = np.zeros(0, dtype=np.int32)
    return Completion(request.id, empty, np.zeros(0, dtype=np.float32), empty, stop_reason, error)


class Answer:
    """What was sampled for a request so far.

    Args:
        request: what was asked.

    Attributes:
        tokens: all that were sampled.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._delivered = 0

    def append(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Adds tokens that weights of one version sampled."""
        self.tokens += tokens
        self._logprobs += logprobs
        self._versions += [version] * len(tokens)

    def completion(self, stop_reason: str | None, error: str | None = None) -> Completion:
        """Returns the answer; of a streamed request, what no earlier part carried."""
        part = slice(self._delivered, len(self.tokens))
        if self.request.stream:
            self._delivered = len(self.tokens)
        return Completion(
            self.request.id,
            np.array(self.tokens[part], dtype=np.int32),
            np.array(self._logprobs[part], dtype=np.float32),
            np.array(self._versions[part], dtype=np.int32),
            stop_reason,
            error,
        )

    def remaining(self) -> GenerateRequest:
        """Returns the request for what is still to be sampled."""
        whole = Completion(self.request.id, *(np.array(each, dtype=np.int32) for each in (self.tokens, [], [])), None)
        return self.request.after(whole)
