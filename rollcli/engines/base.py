"""The two protocols every engine stands behind: one trains, one generates.

An engine lives inside one worker process and knows nothing of Ray, recipes or rewards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from rollcli.data.batch import Batch
    from rollcli.engines.objectives import Objective


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        max_tokens: most tokens to sample; the stop token counts.
        temperature: divides the logits; 0 means greedy (evaluation only).
        top_p: smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: number of most probable tokens kept; 0 keeps all.
        stop_token_ids: sampling one of these ends the request; the token itself is part of the answer.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerateRequest:
    """One answer to sample. Requests with equal prompts that arrive together share one prefill.

    `seed` and the position in the answer determine every random draw, so the answer does not depend on which other
    requests are in flight, on the replica, or on when the request came. `drawn` is the position of the first draw,
    above 0 where the end of `prompt` is the beginning of the answer, sampled before an interruption.
    """

    id: str
    prompt: np.ndarray  # int32 [P]
    seed: int
    sampling: SamplingParams
    stream: bool = False
    drawn: int = 0

    def after(self, part: Completion) -> GenerateRequest:
        """Returns the request for the rest of an answer of which `part` was sampled."""
        return replace(
            self,
            prompt=np.concatenate([self.prompt, part.tokens]).astype(np.int32),
            sampling=replace(self.sampling, max_tokens=self.sampling.max_tokens - len(part.tokens)),
            drawn=self.drawn + len(part.tokens),
        )


@dataclass
class Completion:
    """Tokens sampled for one request.

    `stop_reason` is `stop`, `length`, `abort`, `error`, or None for a streamed part that is not the end. `logprobs`
    are of the distribution the token was drawn from: after temperature, before top-p and top-k.
    """

    id: str
    tokens: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N]
    versions: np.ndarray  # int32 [N]
    stop_reason: str | None
    error: str | None = None

    def then(self, rest: Completion) -> Completion:
        """Returns the whole answer of which this was the first part."""
        columns = ("tokens", "logprobs", "versions")
        joined = {name: np.concatenate([getattr(self, name), getattr(rest, name)]) for name in columns}
        return replace(rest, **joined)


class InferEngine(Protocol):
    """Generates. `add`, `abort` and `load_weights` may be called between any two `step`s."""

    version: int

    def add(self, requests: Sequence[GenerateRequest]) -> None:
        """Queues requests; one that cannot fit the context comes back from `step` with `stop_reason="error"`."""

    def abort(self, ids: Iterable[str]) -> None:
        """Ends requests; their tokens so far come back from the next `step` with `stop_reason="abort"`."""

    def step(self) -> list[Completion]:
        """Samples one token for every running request; returns what finished, and parts of streamed requests."""

    @property
    def pending(self) -> int:
        """Requests queued or running."""

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replaces every weight in place and drops cached prefixes; requests in flight keep what they computed.

        Raises:
            WeightSyncError: a name is unknown or missing, or a shape differs; the old weights stay.
        """


class TrainEngine(Protocol):
    """Trains one model, alone or as one rank of several that call the same methods in the same order."""

    def forward(self, batch: Batch, objective: Objective) -> np.ndarray:
        """Returns the objective's column at each trained token, float32 `[T]` or `[T, V]`; 0 off the loss mask."""

    def update(self, batch: Batch, objective: Objective, learning_rate: float) -> tuple[dict[str, float], np.ndarray]:
        """Takes one optimizer step on this rank's share of a minibatch; returns metrics and the pass's column `[T]`."""

    def named_weights(self) -> dict[str, torch.Tensor] | None:
        """Returns every weight, whole and in the hub's naming, on rank 0; None on the other ranks (all must call)."""

    def save(self, folder: Path) -> None:
        """Writes weights (hub layout, under `model/`), optimizer and random state into `folder`."""

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, whatever the number of ranks that wrote it."""
