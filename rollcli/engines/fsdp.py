"""Training by torch FSDP2 (`fully_shard`) for any `transformers` language model or critic, on one process or many.

One pass over a batch is: micro-batches of rows (data/packing.py) → forward, with logits only where a trained token is
predicted → the objective's loss of each (engines/objectives.py), times its weight → backward. The weights are shares of
the whole minibatch's loss, computed before it was split, so gradients simply add up: over micro-batches here, over
ranks in FSDP (which averages, hence the factor of the number of ranks).

Master weights, gradient sums and optimizer state are float32; on a GPU the forward pass is bfloat16. Log-probabilities
are float32 always. Nothing here is random: every dropout is off, since a policy ratio must be 1 on an on-policy token.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from rollcli.algorithms.base import METRIC_MAX
from rollcli.config.schema import PolicyConfig
from rollcli.data.batch import Batch
from rollcli.data.packing import MicroBatch, micro_batches
from rollcli.engines.objectives import Objective, TokenColumns
from rollcli.engines.stopwatch import Stopwatch
from rollcli.engines.storage import load_tensors, save_model, save_tensors
from rollcli.errors import CheckpointError


class FsdpEngine:
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
        self.config = config
        self.model_time = Stopwatch()
        self.device = model.device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        model.train()
        if config.recompute_activations:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        # A language model computes logits only where asked; a critic has one value everywhere.
        self.selects = "logits_to_keep" in inspect.signature(model.forward).parameters
        # Flash attention tells packed sequences apart in a single row only; the other kinds work less on short rows.
        self.one_row = "flash" in (model.config._attn_implementation or "")
        half = dtype == "bfloat16" or (dtype == "auto" and self.device.type == "cuda")
        self.model = _shard(model, self.device, self.ranks, torch.bfloat16 if half else torch.float32)
        self.optimizer = None if frozen else _optimizer(self.model, config)

    def forward(self, batch: Batch, objective: Objective) -> np.ndarray:
        """Returns the objective's column under the current weights, float32 `[T]` or `[T, V]`; 0 off the mask."""
        length = int(batch.offsets[-1])
        column = np.zeros(length, dtype=np.float32)
        with torch.no_grad():
            for micro in self._micro_batches(batch):
                picked, tokens, outputs = self._outputs(batch, micro)
                made = objective.column(tokens, outputs).cpu().numpy()
                if column.ndim < made.ndim:
                    column = np.zeros((length, made.shape[1]), dtype=np.float32)
                column[picked] = made
        # Without a backward pass FSDP leaves the outermost parameters gathered, and in the forward pass's precision.
        self.model.reshard()
        return column

    def update(self, batch: Batch, objective: Objective, learning_rate: float) -> tuple[dict[str, float], np.ndarray]:
        """Takes one optimizer step; returns metrics over all ranks, and the column that the pass made `[T]`.

        `batch` is this rank's share of a minibatch, with the columns that the objective's loss uses, and
        `loss_weights`. A minibatch without a trained token, and one whose gradient is not finite, leave weights and
        optimizer as they are.
        """
        assert self.optimizer is not None, "a frozen engine does not train"
        column = np.zeros(int(batch.offsets[-1]), dtype=np.float32)
        sums: dict[str, float] = {"tokens": float(batch.tokens["loss_mask"].sum()), "loss": 0.0}
        for micro in self._micro_batches(batch):
            self._backward(batch, micro, objective, sums, column)
        metrics = self._reduce(sums)
        norm = self._clip()
        metrics["grad_norm"] = norm
        metrics["learning_rate"] = learning_rate
        metrics["skipped_updates"] = float(not math.isfinite(norm) or metrics["tokens"] == 0)
        if not metrics["skipped_updates"]:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            with self.model_time:
                self.optimizer.step()
        self.optimizer.zero_grad()
        return metrics, column

    def named_weights(self) -> dict[str, torch.Tensor] | None:
        """Returns every weight, whole, float32, by its hub name, in rank 0's main memory; None elsewhere."""
        weights = self._gather(self.model.named_parameters())
        return weights if self.rank == 0 else None

    def save(self, folder: Path) -> None:
        """Writes `model/` in the hub's layout and `optimizer.safetensors`; rank 0 writes, all must call."""
        weights = self.named_weights()
        state = self._gather(self._optimizer_state()) if self.optimizer is not None else {}
        try:
            if weights is not None:
                save_model(self.model, weights, folder / "model")
                if self.optimizer is not None:
                    save_tensors(state, folder / "optimizer.safetensors")
        finally:
            # A full disk fails rank 0 alone; the others must not be left waiting for it.
            dist.barrier()

    def load(self, folder: Path) -> None:
        """Restores weights and optimizer, whatever the number of ranks that wrote them.

        Raises:
            CheckpointError: a tensor is missing.
        """
        weights = load_tensors(folder / "model")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(_like(_present(weights, name, folder), parameter))
        if self.optimizer is None:
            return
        state = load_tensors(folder / "optimizer.safetensors")
        self.optimizer.state.clear()
        for name, parameter in self.model.named_parameters() if state else ():
            self.optimizer.state[parameter] = {
                "step": _present(state, f"{name}.step", folder),
                "exp_avg": _like(_present(state, f"{name}.exp_avg", folder), parameter),
                "exp_avg_sq": _like(_present(state, f"{name}.exp_avg_sq", folder), parameter),
            }

    def _micro_batches(self, batch: Batch) -> Iterator[MicroBatch | None]:
        """Yields this rank's micro-batches, then None until the rank with the most is done.

        FSDP's collectives make every rank run the same number of passes.
        """
        mine = micro_batches(batch, self.config.micro_batch_tokens, self.config.packing)
        count = torch.tensor(len(mine), device=self.device)
        if self.ranks > 1:
            dist.all_reduce(count, op=dist.ReduceOp.MAX)
        yield from mine
        yield from [None] * (int(count) - len(mine))

    def _outputs(self, batch: Batch, micro: MicroBatch | None) -> tuple[np.ndarray, TokenColumns, torch.Tensor]:
        """Runs one micro-batch.

        Returns the batch positions of its N trained tokens, access to their columns, and the float32 outputs `[N, K]`
        that predict them.
        """
        if micro is None:
            ids = torch.zeros((1, 1), dtype=torch.long, device=self.device)
            outputs = self.model(input_ids=ids, use_cache=False).logits[0, :0].float()
            return np.zeros(0, dtype=np.int64), self._columns(batch, np.zeros(0, dtype=np.int64)), outputs
        trained = batch.tokens["loss_mask"][micro.source]
        picked, place = micro.source[trained], micro.place[trained] - 1
        assert (micro.positions.flat[micro.place[trained]] > 0).all(), "nothing predicts a sequence's first token"
        # Row after row is how places count, so one long row needs no other places.
        shape = (1, micro.ids.size) if self.one_row else micro.ids.shape
        rows, columns = np.divmod(place, shape[1])
        options = {}
        if self.selects:
            kept = np.unique(columns) if len(columns) else np.array([0])
            columns = np.searchsorted(kept, columns)
            options["logits_to_keep"] = self._tensor(kept)
        with self.model_time:
            output = self.model(
                input_ids=self._tensor(micro.ids.reshape(shape)),
                position_ids=self._tensor(micro.positions.reshape(shape)),
                use_cache=False,
                **options,
            )
        return picked, self._columns(batch, picked), output.logits[self._tensor(rows), self._tensor(columns)].float()

    def _backward(
        self, batch: Batch, micro: MicroBatch | None, objective: Objective, sums: dict[str, float], column: np.ndarray
    ) -> None:
        """Adds one micro-batch's gradient, and its metrics to `sums`; writes its part of `column`."""
        picked, tokens, outputs = self._outputs(batch, micro)
        if not len(picked):
            # A rank without a trained token takes part in the collectives all the same, by way of a zero.
            with self.model_time:
                (outputs.sum() * 0.0).backward()
            return
        losses, metrics, made = objective.loss(tokens, outputs)
        loss = (losses * tokens.column("loss_weights")).sum()
        with self.model_time:
            (loss * self.ranks).backward()
        column[picked] = made.cpu().numpy()
        sums["loss"] += float(loss.detach())
        for name, values in metrics.items():
            if name.endswith(METRIC_MAX):
                sums[name] = max(sums.get(name, -math.inf), float(values.max()))
            else:
                sums[name] = sums.get(name, 0.0) + float(values.sum())

    def _columns(self, batch: Batch, picked: np.ndarray) -> TokenColumns:
        def column(name: str) -> torch.Tensor | None:
            return self._tensor(batch.tokens[name][picked]) if name in batch.tokens else None

        ids = self._tensor(batch.tokens["ids"][picked].astype(np.int64))
        return TokenColumns(column, self._tensor(batch.rows[picked]), ids)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def _reduce(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns sums and maxima over all ranks, token sums divided by the number of trained tokens."""
        gathered: list[dict[str, float]] = [sums]
        if self.ranks > 1:
            gathered = [{} for _ in range(self.ranks)]
            dist.all_gather_object(gathered, sums)
        names = dict.fromkeys(name for part in gathered for name in part)
        total: dict[str, float] = {}
        for name in names:
            values = [part[name] for part in gathered if name in part]
            total[name] = max(values) if name.endswith(METRIC_MAX) else sum(values)
        count = max(total["tokens"], 1.0)
        plain = ("tokens", "loss")
        return {n: v if n in plain or n.endswith(METRIC_MAX) else v / count for n, v in total.items()}

    def _clip(self) -> float:
        """Scales the gradient down to the largest norm allowed; returns its norm before that."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"{name}.{key}", value

    def _gather(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Returns tensors whole, in rank 0's main memory; one at a time is whole on the device. All ranks call."""
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                whole[name] = full.detach().cpu()
        return whole


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


def _present(tensors: Mapping[str, torch.Tensor], name: str, folder: Path) -> torch.Tensor:
    if name not in tensors:
        raise CheckpointError(
            f"checkpoint `{folder}` has no tensor `{name}`", hint="resume from another step with `--step`"
        )
    return tensors[name]


def _like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a whole tensor sharded like `parameter`."""
    whole = whole.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole
