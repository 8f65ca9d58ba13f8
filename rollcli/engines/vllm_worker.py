"""What runs inside vLLM's workers: our draws in place of its sampler, and new weights in place of old ones.

vLLM samples from a generator per request, whose state depends on how far the request came, and its log-probabilities
are either before temperature or after top-p. Here the sampler is replaced by `sampling.draw`, the one of the
`transformers` engine: the seed and the position in the answer are all that a draw depends on, so both engines give the
same answers, and every worker of a tensor-parallel replica draws the same token without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.metadata import SamplingMetadata

from rollcli.engines.sampling import Draws, draw, uniforms
from rollcli.engines.storage import checksum, load_tensors


class Rows(LogitsProcessor):
    """Knows the request of every row of vLLM's batch; changes no logits.

    vLLM tells logits processors, and nobody else, which request came to which row. What a request needs beside
    vLLM's own sampling parameters is in their `extra_args`: `seed`, `drawn` and `min_tokens`.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.requests: dict[int, tuple[Any, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Whether greedy answers are the same without it."""
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits as they are."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows requests that came, went or moved; the list of a request's sampled tokens is vLLM's own."""
        process_dict_updates(self.requests, batch_update, lambda params, prompt, sampled: (params, sampled))

    def draws(self, count: int) -> Draws:
        """Returns how each of the first `count` rows is drawn."""
        rows = [self.requests[row] for row in range(count)]
        extra = [params.extra_args for params, _ in rows]
        barred = [
            (row, token)
            for row, (params, sampled) in enumerate(rows)
            if len(sampled) < params.extra_args["min_tokens"]
            for token in params.stop_token_ids
        ]
        return Draws(
            uniforms(
                np.array([each["seed"] for each in extra], dtype=np.uint64),
                np.array([each["drawn"] + len(sampled) for each, (_, sampled) in zip(extra, rows)], dtype=np.int64),
            ),
            np.array([each["temperature"] for each in extra], dtype=np.float32),
            np.array([each["top_p"] for each in extra], dtype=np.float32),
            np.array([each["top_k"] for each in extra], dtype=np.int64),
            tuple(np.array(barred, dtype=np.int64).T) if barred else None,
        )


class CounterSampler(torch.nn.Module):
    """Stands in for vLLM's sampler."""

    def forward(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        """Draws one token for each row of `logits` `[R, V]`."""
        rows = next(each for each in sampling_metadata.logitsprocs.all if isinstance(each, Rows))
        tokens, logprobs = draw(logits, rows.draws(len(logits)))
        tokens = tokens.int()[:, None]
        return SamplerOutput(tokens, LogprobsTensors(tokens, logprobs[:, None], torch.ones_like(tokens[:, 0])))


class WorkerExtension:
    """Methods that vLLM adds to each of its workers."""

    def use_counter_sampler(self) -> None:
        """Replaces vLLM's sampler."""
        self.model_runner.sampler = CounterSampler()

    def receive_weights(self, weights: Mapping[str, torch.Tensor] | str) -> None:
        """Replaces every weight, in place.

        Args:
            weights: tensors by hub name, or, for a worker of another process, the file that holds them.
        """
        if isinstance(weights, str):
            weights = load_tensors(Path(weights))
        model = self.model_runner.get_model()
        on_cpu = self.device.type == "cpu"
        for module in model.modules() if on_cpu else ():
            # Only the first kernel of an expert layer packs its weights; of an update it would read unpacked ones.
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None
        self.model_runner.reload_weights(weights_iterator=iter(weights.items()))
        head = getattr(model, "lm_head", None)
        if on_cpu and hasattr(head, "cpu_linear"):
            # The packed copy of an embedding that is the head, too, is no weight that a reload knows of.
            head.quant_method.process_weights_after_loading(head)
        dtype = self.model_config.dtype
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self._received = {
            name: checksum(tensor.to(dtype)) for name, tensor in weights.items() if self._held(name, shapes) is None
        }

    def weight_checksums(self, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]) -> dict[str, int]:
        """Returns checksums of weights as this worker computes with them, else as they were received.

        Args:
            shapes: shape of each weight by its hub name.
            aliases: further hub names of tied weights, and the first one of each.
        """
        found = dict(getattr(self, "_received", {}))
        for name in shapes:
            tensor = self._held(name, shapes)
            if tensor is not None:
                found[name] = checksum(tensor)
        for alias, name in aliases.items():  # a tied weight that is not what the other one is must not go unseen
            tensor = self._held(alias, {**shapes, alias: shapes[name]})
            if tensor is not None and name in found and checksum(tensor) != found[name]:
                found[name] = checksum(tensor)
        return found

    def _held(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> torch.Tensor | None:
        """Returns a weight as this worker computes with it, or None where it holds a part or another form of it."""
        if self.parallel_config.world_size > 1:
            return None
        model = self.model_runner.get_model()
        path, _, parameter = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        start = 0
        for packed, parts in getattr(model, "packed_modules_mapping", {}).items():
            siblings = [f"{parent}.{part}.{parameter}" for part in parts]
            if last in parts and all(sibling in shapes for sibling in siblings):
                path = f"{parent}.{packed}"
                start = sum(shapes[sibling][0] for sibling in siblings[: parts.index(last)])
        modules = dict(model.named_modules())
        whole = _readable(modules[path], parameter, shapes[name]) if path in modules else None
        return None if whole is None else whole[start : start + shapes[name][0]]


def _readable(module: torch.nn.Module, parameter: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Returns a module's parameter, as far as its columns are those of `shape`.

    A linear layer on a CPU multiplies by a packed copy of its weight, which only a product with the identity shows.
    """
    tensor = getattr(module, parameter, None)
    packed = hasattr(module, "cpu_linear") and (isinstance(module, ParallelLMHead) or not tensor.numel())
    if parameter == "weight" and packed:
        identity = torch.eye(shape[1], dtype=tensor.dtype)
        return module.cpu_linear(identity, tensor, None).T.contiguous()
    return tensor if isinstance(tensor, torch.Tensor) and tensor.shape[1:] == torch.Size(shape[1:]) else None
