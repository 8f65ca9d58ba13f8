"""The two protocols every engine stands behind: one trains, one generates.

An engine lives inside one worker process and knows nothing of Ray, recipes or rewards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from rollcli.config.schema import ModelConfig, ParallelConfig
    from rollcli.data.batch import Batch
    from rollcli.data.images import Images
    from rollcli.engines.objectives import Objective
    from rollcli.engines.stopwatch import Stopwatch


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        max_tokens: most tokens to sample; the stop token counts.
        min_tokens: tokens before which nothing ends the answer: among the first so many no stop token is sampled, and
            a stop text that ends with one of them does not count.
        stop: texts that end the request; the tokens that make one up, up to its last character, are part of the answer.
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
    min_tokens: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # A recipe has a list.
        object.__setattr__(self, "stop", tuple(self.stop))


@dataclass(frozen=True)
class GenerateRequest:
    """One answer to sample. Requests with equal prompts that arrive together share one prefill.

    `seed` and the position in the answer determine every random draw, so the answer does not depend on which other
    requests are in flight, on the replica, or on when the request came. `drawn` is the position of the first draw,
    above 0 where the end of `prompt` is the beginning of the answer, sampled before an interruption. `images` are what
    the prompt's placeholder tokens stand for; whoever asks names such tokens in `sampling.stop_token_ids`, too.
    """

    id: str
    prompt: np.ndarray  # int32 [P]
    seed: int
    sampling: SamplingParams
    stream: bool = False
    drawn: int = 0
    images: Images | None = None

    def after(self, part: Completion) -> GenerateRequest:
        """Returns the request for the rest of an answer of which `part` was sampled."""
        return replace(
            self,
            prompt=np.concatenate([self.prompt, part.tokens]).astype(np.int32),
            sampling=replace(
                self.sampling,
                max_tokens=self.sampling.max_tokens - len(part.tokens),
                min_tokens=max(self.sampling.min_tokens - len(part.tokens), 0),
            ),
            drawn=self.drawn + len(part.tokens),
        )


@dataclass
class Completion:
    """Tokens sampled for one request.

    `stop_reason` is `stop`, `length`, `abort`, `error`, or None for a streamed part that is not the end. `logprobs`
    are of the whole distribution after temperature, before min_tokens, top-p and top-k keep tokens out of it; of a
    greedy request, of temperature 1.
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
    """Generates. Everything may be called between any two `step`s, with requests in flight.

    Attributes:
        version: policy version of the weights.
        max_context: most tokens, prompt and answer together.
    """

    version: int
    max_context: int

    @classmethod
    def load(
        cls, config: ModelConfig, *, device: torch.device, seed: int, max_rows: int, parallel: ParallelConfig,
        **options: Any,
    ) -> InferEngine:  # fmt: skip
        """Returns an engine for the recipe's model.

        Args:
            config: the recipe's `model` block.
            device: where this process computes.
            seed: seeds random weights, where the recipe asks for such.
            max_rows: most requests that run at once; others wait.
            parallel: the devices of this replica.
            options: the recipe's `engine_args`, passed to the engine as they are.

        Raises:
            EngineError: the engine does not know the model, or an option is not one of its own.
        """

    def add(self, requests: Sequence[GenerateRequest]) -> None:
        """Queues requests; one that cannot fit the context comes back from `step` with `stop_reason="error"`."""

    def abort(self, ids: Iterable[str]) -> None:
        """Ends requests; their tokens so far come back from the next `step` with `stop_reason="abort"`."""

    def step(self) -> list[Completion]:
        """Samples one token for every running request; returns what finished, and parts of streamed requests.

        An engine may give a request its first token in a later step, where its prompt takes several.
        """

    @property
    def pending(self) -> int:
        """Requests queued or running, and completions that the next `step` returns."""

    def stats(self) -> dict[str, float]:
        """Counters since the start: `prefill_tokens`, `sampled_tokens`, `steps`, `model_s` (in the model), `busy_s`."""

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every weight by its hub name; of tied ones only the first."""

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replaces every weight in place and drops cached prefixes; requests in flight keep what they computed.

        Names are the hub's. Of tied weights one is enough; if several come, they must be equal.

        Raises:
            WeightSyncError: a name is unknown or missing, or a shape differs; the old weights stay.
        """

    def checksums(self) -> dict[str, int]:
        """Returns `storage.checksum` of every weight as the engine computes with it, by hub name, tied ones once."""

    def offload(self) -> None:
        """Frees the device for training: weights and KV cache go; requests in flight are computed anew afterwards.

        Without a device of its own the engine keeps everything.
        """

    def onload(self) -> None:
        """Takes the device back; weights are undefined until `load_weights`."""


class TrainEngine(Protocol):
    """Trains one model, alone or as one rank of several that call the same methods in the same order.

    An engine is made of a `transformers` model: `engine(model, config, frozen=False, dtype="auto", seed=0,
    **engine_args)`, with the whole float32 model on this rank's device, the recipe's block of the role, whether there
    is no optimizer, the precision of the forward pass, and what random starts (of adapters) follow from. The base
    class `training.TrainingEngine` has all of it but the model; an engine may do without.

    Attributes:
        model_time: seconds spent in the model: forward, backward, optimizer.
        buffers: hub names of the weights that nothing trains and no forward pass casts; a sync leaves them as they are.
    """

    model_time: Stopwatch
    buffers: frozenset[str]

    def forward(self, batch: Batch, objective: Objective) -> np.ndarray:
        """Returns the objective's column at each trained token, float32 `[T]` or `[T, V]`; 0 off the loss mask."""

    def update(self, batch: Batch, objective: Objective, learning_rate: float) -> tuple[dict[str, float], np.ndarray]:
        """Takes one optimizer step on this rank's share of a minibatch; returns metrics and the pass's column `[T]`."""

    def without_adapter(self) -> AbstractContextManager[None]:
        """Switches adapters off: within, `forward` is the base model's, so a policy with them is its own reference.

        Raises:
            EngineError: there are no adapters.
        """

    def named_weights(self) -> dict[str, torch.Tensor] | None:
        """Returns every weight, whole and in the hub's naming, on rank 0; None on the other ranks (all must call)."""

    def weight_buckets(self, size: int, adapters_only: bool = False) -> Iterator[dict[str, Any] | None]:
        """Yields the weights in buckets of about `size` bytes on rank 0, None as often as needed elsewhere.

        Of a policy with adapters, on request, only those, as `lora.LowRank` by the name of the weight they change.
        """

    def save(self, folder: Path) -> None:
        """Writes weights (hub layout, under `model/`) and optimizer state into `folder`."""

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, whatever the engine and the number of ranks that wrote it.

        Raises:
            CheckpointError: a file or a tensor is missing, damaged, or of another model.
        """

    def offload(self) -> None:
        """Moves weights and optimizer state from the device to main memory; without a device of its own, nothing."""

    def onload(self) -> None:
        """Moves them back."""
