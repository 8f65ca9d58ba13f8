"""What every training engine does the same way: one pass over a batch, its metrics, checkpoints.

A pass is: micro-batches of rows (data/packing.py) → the model's outputs where a trained token is predicted → the
objective's loss of each (engines/objectives.py), times its weight → backward. The weights are shares of the whole
minibatch's loss, computed before it was split, so gradients simply add up: over micro-batches here, over data-parallel
ranks in the engine (which averages, hence the factor of their number).

An engine brings a model in its own form, its `naming` and `hub_model`, and fills in what `TrainingEngine` leaves open:
`predict`, `backward`, `clip`, `optimize`, `zero_grad`, `move`, and weights and optimizer state in the hub's naming,
both ways. What it does in the model it does under `model_time`. Nothing here is random: every dropout is off, since a
policy ratio must be 1 on an on-policy token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rollcli.algorithms.base import METRIC_MAX
from rollcli.config.schema import OptimizerConfig, PolicyConfig
from rollcli.data.batch import Batch
from rollcli.data.packing import MicroBatch, micro_batches
from rollcli.engines.naming import Naming
from rollcli.engines.objectives import Objective, TokenColumns
from rollcli.engines.stopwatch import Stopwatch
from rollcli.engines.storage import load_tensors, save_model, save_tensors
from rollcli.engines.vision import Vision, tensors
from rollcli.errors import CheckpointError, EngineError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps beside each weight, element by element."""
NO_ROWS = MicroBatch(*np.zeros((2, 1, 1), np.int64), *np.zeros((2, 0), np.int64), packed=False)
"""Stands for a micro-batch on a rank that has none left."""


class TrainingEngine:
    """One rank of a training engine. All ranks call the same methods in the same order.

    Ranks that share one copy of the model (its peers) are consecutive, get the same batches, and return the same.

    Args:
        config: the recipe's block of this role.
        device: where this rank computes.
        frozen: no optimizer: a reference model.

    Attributes:
        rank, ranks: this process and their number.
        data_rank, data_ranks: which part of every batch this rank gets, of how many.
        peers: the ranks that share this copy of the model, a process group; None where there is but this one.
        data_group: the ranks in the same place of every copy; None where there is but one copy.
    """

    naming: Naming
    """What the model's tensors are called on the hub."""
    hub_model: PreTrainedModel
    """Carries configuration and generation settings for `save`; its weights need not be the trained ones."""
    vision: Vision | None = None
    """What is known of a model that sees images; set by an engine that trains such models."""

    def __init__(self, config: PolicyConfig, device: torch.device, frozen: bool) -> None:
        self.config = config
        self.device = device
        self.frozen = frozen
        self.model_time = Stopwatch()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        copy = config.parallel.processes
        self.data_rank, self.data_ranks = self.rank // copy, self.ranks // copy
        everyone = np.arange(self.ranks).reshape(self.data_ranks, copy)
        self.peers = _own_group(everyone) if copy > 1 else None
        self.data_group = _own_group(everyone.T) if self.data_ranks > 1 else None

    # What an engine fills in.

    def predict(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: np.ndarray, columns: np.ndarray, **images: torch.Tensor
    ) -> torch.Tensor:
        """Returns the model's float32 outputs `[N, K]` at N places of ids `[R, W]`; each predicts the token after it.

        Each sequence of a row counts its positions from 0 and attends only to itself. N may be 0, and the outputs then
        still carry a gradient (of zero), so that ranks without work take part in the collectives. An engine with
        `vision` gets positions `[4, R, W]` and images (`Vision.lay_out`).
        """
        raise NotImplementedError

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Adds the loss's gradient, averaged over data-parallel ranks; `last` is the minibatch's last pass."""
        loss.backward()

    def clip(self) -> float:
        """Scales the gradient down to the largest norm allowed, now or in `optimize`; returns its norm before that."""
        raise NotImplementedError

    def optimize(self, learning_rate: float) -> None:
        """Takes the optimizer step."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Drops the gradient, whether it was used or not."""
        raise NotImplementedError

    def more_files(self) -> Callable[[Path], None] | None:
        """Gathers what else belongs into a checkpoint; returns what writes it into a folder, called on rank 0 alone.

        All ranks call, before anything is written: none may gather when rank 0 may have failed.
        """
        return None

    def end_pass(self) -> None:
        """Called after a forward pass over a batch that no backward pass follows."""

    def without_adapter(self) -> AbstractContextManager[None]:
        """Switches adapters off: within, `forward` is the base model's, so a policy with them is its own reference.

        Raises:
            EngineError: there are no adapters.
        """
        raise EngineError("the policy has no adapters, so it is not its own reference", hint="set `policy.lora.rank`")

    def named_weights(self) -> dict[str, torch.Tensor] | None:
        """Returns every weight, whole, float32, by its hub name, in rank 0's main memory; None elsewhere."""
        raise NotImplementedError

    def weight_buckets(self, size: int, adapters_only: bool = False) -> Iterator[dict[str, Any] | None]:
        """Yields all weights by hub name in buckets of about `size` bytes on rank 0, None once a gathering elsewhere.

        Args:
            size: float32 bytes of a bucket; a larger tensor has one to itself.
            adapters_only: of a policy with adapters only these, as `LowRank`; without adapters it changes nothing.
        """
        # Ranks other than 0 have done their part in the first gathering.
        weights = self.named_weights()
        yield from [None] if weights is None else buckets(weights, size)

    def optimizer_state(self) -> dict[str, torch.Tensor] | None:
        """Returns `{hub name}.step`, `.exp_avg` and `.exp_avg_sq`, whole, on rank 0; None elsewhere. All ranks call."""
        raise NotImplementedError

    def load_weights(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Takes weights by their hub names.

        Raises:
            CheckpointError: one is missing.
        """
        raise NotImplementedError

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Takes what `optimizer_state` returned; an empty state is that of an optimizer which took no step yet."""
        raise NotImplementedError

    def move(self, device: torch.device) -> None:
        """Moves weights and optimizer state to `device`."""
        raise NotImplementedError

    # What all have in common.

    @property
    def buffers(self) -> frozenset[str]:
        """Hub names of the weights that nothing trains and no forward pass casts."""
        return frozenset(self.naming.buffers)

    def offload(self) -> None:
        """Moves weights and optimizer state to main memory; on a CPU they are there."""
        if self.device.type != "cpu":
            self.move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Moves them back."""
        if self.device.type != "cpu":
            self.move(self.device)

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
        self.end_pass()
        return column

    def update(self, batch: Batch, objective: Objective, learning_rate: float) -> tuple[dict[str, float], np.ndarray]:
        """Takes one optimizer step; returns metrics over all ranks, and the column that the pass made `[T]`.

        `batch` is this rank's share of a minibatch, with the columns that the objective's loss uses, and
        `loss_weights`. A minibatch without a trained token, and one whose gradient is not finite, leave weights and
        optimizer as they are.
        """
        assert not self.frozen, "a frozen engine does not train"
        column = np.zeros(int(batch.offsets[-1]), dtype=np.float32)
        sums: dict[str, float] = {"tokens": float(batch.tokens["loss_mask"].sum()), "loss": 0.0}
        micros = list(self._micro_batches(batch))
        for number, micro in enumerate(micros):
            self._backward(batch, micro, objective, sums, column, last=number + 1 == len(micros))
        metrics = self._reduce(sums)
        norm = self.clip() if micros else math.nan
        metrics["grad_norm"] = norm
        metrics["learning_rate"] = learning_rate
        metrics["skipped_updates"] = float(not math.isfinite(norm) or metrics["tokens"] == 0)
        if not metrics["skipped_updates"]:
            with self.model_time:
                self.optimize(learning_rate)
        self.zero_grad()
        return metrics, column

    def save(self, folder: Path) -> None:
        """Writes `model/` in the hub's layout and `optimizer.safetensors`; rank 0 writes, all must call.

        Raises:
            OSError: on rank 0 alone, the folder cannot be written; or, for the same, an error of safetensors' own.
        """
        weights = self.named_weights()
        state = None if self.frozen else self.optimizer_state()
        write_more = self.more_files()
        try:
            if weights is not None:
                save_model(self.hub_model, weights, folder / "model")
                if state is not None:
                    save_tensors(state, folder / "optimizer.safetensors")
                if write_more is not None:
                    write_more(folder)
        finally:
            # A full disk fails rank 0 alone; the others must not be left waiting for it.
            dist.barrier()

    def load(self, folder: Path) -> None:
        """Restores weights and optimizer, whatever the engine and the number of ranks that wrote them.

        Raises:
            CheckpointError: a file or a tensor is missing, damaged, or of another model.
        """
        self.load_weights(load_tensors(folder / "model"), folder)
        if not self.frozen:
            self.load_optimizer_state(load_tensors(folder / "optimizer.safetensors"), folder)

    def precision(self, dtype: str) -> torch.dtype:
        """Returns the precision of the forward pass: `auto` is bfloat16 on a GPU and float32 on a CPU."""
        half = dtype == "bfloat16" or (dtype == "auto" and self.device.type == "cuda")
        return torch.bfloat16 if half else torch.float32

    def _micro_batches(self, batch: Batch) -> Iterator[MicroBatch | None]:
        """Yields this rank's micro-batches, then None until the rank with the most is done.

        Collectives make every rank run the same number of passes.
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
        micro = NO_ROWS if micro is None else micro
        trained = batch.tokens["loss_mask"][micro.source]
        picked, place = micro.source[trained], micro.place[trained] - 1
        assert (micro.positions.flat[micro.place[trained]] > 0).all(), "nothing predicts a sequence's first token"
        rows, columns = np.divmod(place, micro.ids.shape[1])
        ids, positions, images = micro.ids, micro.positions, {}
        if self.vision is not None:
            ids, positions, images = self.vision.lay_out(batch, micro)
        outputs = self.predict(
            self._tensor(ids), self._tensor(positions), rows, columns, **tensors(images, self.device)
        )
        return picked, self._columns(batch, picked), outputs

    def _backward(
        self, batch: Batch, micro: MicroBatch | None, objective: Objective, sums: dict[str, float],
        column: np.ndarray, last: bool,
    ) -> None:  # fmt: skip
        """Adds one micro-batch's gradient, and its metrics to `sums`; writes its part of `column`."""
        picked, tokens, outputs = self._outputs(batch, micro)
        if not len(picked):
            # A rank without a trained token takes part in the collectives all the same, by way of a zero.
            with self.model_time:
                self.backward(outputs.sum() * 0.0, last)
            return
        losses, metrics, made = objective.loss(tokens, outputs)
        loss = (losses * tokens.column("loss_weights")).sum()
        with self.model_time:
            self.backward(loss * self.data_ranks, last)
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
        """Returns sums and maxima over data-parallel ranks, token sums divided by the number of trained tokens."""
        gathered: list[dict[str, float]] = [sums]
        if self.data_group is not None:
            gathered = [{} for _ in range(self.data_ranks)]
            dist.all_gather_object(gathered, sums, group=self.data_group)
        names = dict.fromkeys(name for part in gathered for name in part)
        total: dict[str, float] = {}
        for name in names:
            values = [part[name] for part in gathered if name in part]
            total[name] = max(values) if name.endswith(METRIC_MAX) else sum(values)
        count = max(total["tokens"], 1.0)
        plain = ("tokens", "loss")
        return {n: v if n in plain or n.endswith(METRIC_MAX) else v / count for n, v in total.items()}


def adamw(parameters: Iterable[torch.Tensor], config: OptimizerConfig) -> torch.optim.AdamW:
    """Returns AdamW over those of `parameters` that are trained; vectors (norms, biases) are not decayed."""
    groups: dict[tuple[object, bool], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            # What lies on different meshes cannot be updated in one call.
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((mesh, parameter.ndim > 1), []).append(parameter)
    parts = [
        {"params": members, "weight_decay": config.weight_decay if matrices else 0.0}
        for (_, matrices), members in groups.items()
    ]
    return torch.optim.AdamW(parts, lr=config.learning_rate, betas=tuple(config.betas), eps=config.eps)


def buckets(tensors: Mapping[str, torch.Tensor], size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Splits tensors into buckets of about `size` bytes."""
    bucket: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in tensors.items():
        if bucket and held + tensor.nbytes > size:
            yield bucket
            bucket, held = {}, 0
        bucket[name] = tensor
        held += tensor.nbytes
    yield bucket


def present(
    tensors: Mapping[str, torch.Tensor], name: str, folder: Path, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """Returns a tensor of a checkpoint.

    Raises:
        CheckpointError: it has none of that name, or one of another shape than `shape`.
    """
    if name not in tensors:
        raise CheckpointError(
            f"checkpoint `{folder}` has no tensor `{name}`", hint="resume from another step with `--step`"
        )
    if shape is not None and tuple(tensors[name].shape) != tuple(shape):
        raise CheckpointError(
            f"`{name}` of `{folder}` is of shape {tuple(tensors[name].shape)}, where the model has {tuple(shape)}",
            hint="the checkpoint is another model's: give the one it was trained from",
        )
    return tensors[name]


def _own_group(groups: np.ndarray) -> dist.ProcessGroup:
    """Makes a process group of each row of ranks (all ranks make all of them) and returns this rank's."""
    rank = dist.get_rank()
    made = [(dist.new_group(row.tolist()), rank in row) for row in groups]
    return next(group for group, own in made if own)
