"""Training by torch FSDP2 (`fully_shard`) for any `transformers` language model or critic, on one process or many.

Master weights, gradient sums and optimizer state are float32; on a GPU the forward pass is bfloat16. Log-probabilities
are float32 always.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from rollcli.config.schema import PolicyConfig
from rollcli.engines.training import TrainingEngine, present


class FsdpEngine(TrainingEngine):
    """One rank of the training engine. All ranks call the same methods in the same order.

    Args:
        model: the whole model, float32, on this rank's device; every rank holds the same weights.
        config: the recipe's `policy` block.
        frozen: no optimizer: a reference model.
        dtype: precision of the forward pass: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: PolicyConfig,
        frozen: bool = False,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    ) -> None:
        super().__init__(config, model.device, frozen)
        model.train()
        if config.recompute_activations:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        # A language model computes logits only where asked; a critic has one value everywhere.
        self.selects = "logits_to_keep" in inspect.signature(model.forward).parameters
        # Flash attention tells packed sequences apart in a single row only; the other kinds work less on short rows.
        self.one_row = "flash" in (model.config._attn_implementation or "")
        half = dtype == "bfloat16" or (dtype == "auto" and self.device.type == "cuda")
        self.model = _shard(model, self.device, self.ranks, torch.bfloat16 if half else torch.float32)
        self.hub_model = self.model
        self.optimizer = None if frozen else _optimizer(self.model, config)

    def predict(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: np.ndarray, columns: np.ndarray
    ) -> torch.Tensor:
        """Returns the outputs at the places asked for; a language model computes its logits only in their columns."""
        if self.one_row:
            rows, columns = np.zeros_like(rows), rows * ids.shape[1] + columns
            ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
        options = {}
        if self.selects:
            kept = np.unique(columns) if len(columns) else np.array([0])
            columns = np.searchsorted(kept, columns)
            options["logits_to_keep"] = self._tensor(kept)
        with self.model_time:
            output = self.model(input_ids=ids, position_ids=positions, use_cache=False, **options)
        return output.logits[self._tensor(rows), self._tensor(columns)].float()

    def end_pass(self) -> None:
        """Without a backward pass FSDP leaves the outermost parameters gathered, and in the forward's precision."""
        self.model.reshard()

    def clip(self) -> float:
        """Scales the gradient down to the largest norm allowed; returns its norm before that."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def optimize(self, learning_rate: float) -> None:
        """Takes a step of AdamW."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drops the gradient."""
        self.optimizer.zero_grad()

    def named_weights(self) -> dict[str, torch.Tensor] | None:
        """Returns every weight, whole, float32, by its hub name, in rank 0's main memory; None elsewhere."""
        return self._gather(self.model.named_parameters())

    def optimizer_state(self) -> dict[str, torch.Tensor] | None:
        """Returns AdamW's steps and moments by hub name, on rank 0."""
        return self._gather(self._optimizer_state())

    def load_weights(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Takes weights by their hub names."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(_like(present(weights, name, folder), parameter))

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Takes AdamW's steps and moments by hub name."""
        self.optimizer.state.clear()
        for name, parameter in self.model.named_parameters() if state else ():
            self.optimizer.state[parameter] = {
                "step": present(state, f"{name}.step", folder),
                "exp_avg": _like(present(state, f"{name}.exp_avg", folder), parameter),
                "exp_avg_sq": _like(present(state, f"{name}.exp_avg_sq", folder), parameter),
            }

    def _optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"{name}.{key}", value

    def _gather(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor] | None:
        """Returns tensors whole, in rank 0's main memory; one at a time is whole on the device. All ranks call."""
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                whole[name] = full.detach().cpu()
        return whole if self.rank == 0 else None


def _shard(model: PreTrainedModel, device: torch.device, ranks: int, dtype: torch.dtype) -> PreTrainedModel:
    """Shards every transformer block by itself, then the rest, so that one block at a time is whole in memory."""
    mesh = init_device_mesh(device.type, (ranks,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    blocks = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    return fully_shard(model, mesh=mesh, mp_policy=precision)


def _optimizer(model: PreTrainedModel, config: PolicyConfig) -> torch.optim.AdamW:
    """Returns AdamW; vectors (norms, biases) are not decayed."""
    settings = config.optimizer
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=tuple(settings.betas), eps=settings.eps)


def _like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a whole tensor sharded like `parameter`."""
    whole = whole.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole
