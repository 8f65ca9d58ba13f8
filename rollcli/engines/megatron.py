"""Training by Megatron-Core: tensor, sequence and expert parallelism on Megatron's own layers.

    hub model ── place_of, Layout.part ──▶ this rank's weights ── Gpt (megatron_model.py) ──▶ whole logits on every rank
    gradients ── sum over ranks that saw other tokens or heads, mean over copies ──▶ clip ──▶ AdamW on float32 masters

Ranks of one copy compute the same loss from the same logits. Tensor parallelism (`parallel.tensor`) cuts matrices;
`sequence_parallel: true` in `engine_args` also shares the norms' tokens, and mixtures always do. With expert
parallelism (`parallel.expert`) each rank holds whole experts, and tokens travel.

AdamW's moments are shared among the copies, whole weights at a time (ZeRO stage 1): the owner updates a weight and
broadcasts it. That is ours: Megatron's distributed optimizer keeps flat buffers, out of which the moments of one weight
are not to be had, and a checkpoint here is every engine's.

Pipeline and context parallelism and adapters are refused. On a CPU (gloo) everything runs with the shims of
`megatron_shims.py`; a GPU has not been tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from transformers import PreTrainedModel

from rollcli.config.schema import ParallelConfig, PolicyConfig
from rollcli.engines import megatron_shims, naming
from rollcli.engines.facts import check_abilities, check_options
from rollcli.engines.megatron_model import Gpt, check_architecture, transformer_config
from rollcli.engines.megatron_weights import Layout, Place, place_of
from rollcli.engines.parallel_sizes import check_parallel_sizes
from rollcli.engines.training import MOMENTS, TrainingEngine, adamw, present


class MegatronEngine(TrainingEngine):
    """One rank of the training engine. All ranks call the same methods in the same order.

    Engines in one process share Megatron's process groups, so they have the same parallel sizes as the last one made.

    Args:
        model: the whole model, float32; every rank holds the same weights. It gives its weights up.
        config: the recipe's `policy` block.
        frozen: no optimizer: a reference model.
        dtype: precision of the forward pass: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU.
        seed: nothing here is random.
        engine_args: fields of Megatron's `TransformerConfig`.

    Attributes:
        model: this rank's part, in the forward pass's precision.
        masters: float32 weights by Megatron's names; in float32 the model's own.
        places: where each comes from in the `transformers` model.
        naming: how that model's tensors are called on the hub.
        owners: which copy, by its index, keeps the moments of each weight and updates it (ZeRO stage 1).

    Raises:
        EngineError: an architecture, an option or a parallel size that is not supported.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: PolicyConfig,
        frozen: bool = False,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        seed: int = 0,
        **engine_args: Any,
    ) -> None:
        check_options("megatron", engine_args, "policy")
        check_architecture(model)
        check_abilities("megatron", config, {}, "policy")
        check_parallel_sizes(model.config.to_dict(), config.parallel, "megatron")
        super().__init__(config, model.device, frozen)
        precision = self.precision(dtype)
        half = precision is torch.bfloat16
        _join_groups(config.parallel)
        settings = transformer_config(model, config, precision, engine_args)
        tensor = config.parallel.tensor
        heads, groups = settings.num_attention_heads, settings.num_query_groups
        self.experts_here = (settings.num_moe_experts or 0) // config.parallel.expert
        self.layout = Layout(
            groups, heads // groups, settings.kv_channels, model.config.vocab_size, tensor,
            self.experts_here * parallel_state.get_expert_model_parallel_rank(),
        )  # fmt: skip
        self.model = Gpt(model, settings, self.layout.padded_vocabulary).to(self.device).train()
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.expert_tensor_group = parallel_state.get_expert_tensor_parallel_group()
        self.expert_group = parallel_state.get_expert_model_parallel_group()
        self.expert_data_group = parallel_state.get_expert_data_parallel_group()
        self.shared_data_group = parallel_state.get_data_parallel_group()
        self.parameters = {name.removeprefix("gpt."): weight for name, weight in self.model.named_parameters()}
        self.places = {name: place_of(name, self.layout.first_expert) for name in self.parameters}
        self.naming = naming.of(model)
        self.shapes = {name: weight.shape for name, weight in model.named_parameters()}
        self.masters = {
            name: weight.detach().float().requires_grad_(not frozen) if half else weight
            for name, weight in self.parameters.items()
        }
        self._take(dict(model.named_parameters()))
        self.hub_model = model.to("meta")
        self.owners = self._share_out()
        self.optimizer = None if frozen else self._optimizer()

    def predict(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: np.ndarray, columns: np.ndarray
    ) -> torch.Tensor:
        """Returns the outputs at the places asked for, the same on every rank of a copy."""
        width, height = self._padded(ids.shape)
        extra = (0, width - ids.shape[1], 0, height - ids.shape[0])
        # Each token that fills up is a sequence of its own: its position is 0.
        ids, positions = F.pad(ids, extra), F.pad(positions, extra)
        # Collectives over no place at all are not defined everywhere; the first place carries the gradient of zero.
        where = (rows, columns) if len(rows) else (np.zeros(1, np.int64), np.zeros(1, np.int64))
        with self.model_time:
            outputs = self.model(ids, positions, *map(self._tensor, where))
        return outputs[: len(rows)]

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Adds the loss's gradient to the masters', in float32; the last pass sums them over ranks."""
        loss.backward()
        for name, weight in self.parameters.items():
            master = self.masters[name]
            if master is not weight and weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None
        if last:
            self._reduce_gradients()

    def clip(self) -> float:
        """Scales the gradient down to the largest norm allowed; returns its norm before that.

        A weight that every rank of a group holds counts once: on the first.
        """
        squares = {"shared": torch.zeros((), device=self.device), "expert": torch.zeros((), device=self.device)}
        for name, place in self.places.items():
            if place.cut != "whole" or self.tensor_group.rank() == 0:
                kind = "shared" if place.expert is None else "expert"
                squares[kind] += self.masters[name].grad.square().sum()
        _sum(squares["shared"], self.tensor_group)
        _sum(squares["expert"], self.expert_tensor_group)
        _sum(squares["expert"], self.expert_group)
        norm = (squares["shared"] + squares["expert"]).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.masters.values(), self.config.optimizer.max_grad_norm, norm)
        return float(norm)

    def optimize(self, learning_rate: float) -> None:
        """Takes a step of AdamW on the masters, and hands them to the model."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        for name, master in self.masters.items():
            self._from_owner(name, master.data)
        self._publish()

    def zero_grad(self) -> None:
        """Drops the gradient."""
        for master in self.masters.values():
            master.grad = None

    def named_weights(self) -> dict[str, torch.Tensor] | None:
        """Returns every weight, whole, float32, by its hub name, in rank 0's main memory; None elsewhere."""
        whole = self._gather(self.masters.__getitem__)
        return None if whole is None else self.naming.to_hub(whole)

    def optimizer_state(self) -> dict[str, torch.Tensor] | None:
        """Returns AdamW's steps and moments by hub name, on rank 0."""
        # The first copy owns the largest weight, so that rank 0 knows whether a step was taken; others may own nothing.
        taken = torch.tensor(len(self.optimizer.state), device=self.device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        if not taken:
            return {} if self.rank == 0 else None
        found: dict[str, torch.Tensor] = {}
        for moment in MOMENTS:
            whole = self._gather(lambda name, moment=moment: self._moment(name, moment))
            found |= {f"{name}.{moment}": tensor for name, tensor in self.naming.to_hub(whole or {}).items()}
        if self.rank:
            return None
        step = next(iter(self.optimizer.state.values()))["step"]  # every step is one of every weight
        return found | {f"{name}.step": step.detach().cpu().clone() for name in self.naming.shapes}

    def load_weights(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Takes weights by their hub names."""
        self._take(self._in_memory(weights, folder))

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Takes AdamW's steps and moments by hub name."""
        self.optimizer.state.clear()
        if not state:
            return
        step = present(state, f"{next(iter(self.naming.shapes))}.step", folder)
        moments = {moment: self._in_memory(state, folder, f".{moment}") for moment in MOMENTS}
        for name in self._owned():
            own = {moment: self._part(whole, self.places[name]) for moment, whole in moments.items()}
            self.optimizer.state[self.masters[name]] = {"step": step.clone(), **own}

    def move(self, device: torch.device) -> None:
        """Moves weights, masters and AdamW's moments."""
        for weight in {**self.parameters, "frequencies": self.model.frequencies}.values():
            weight.data = weight.data.to(device)
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.data = master.data.to(device)
        for state in self.optimizer.state.values() if self.optimizer else ():
            state.update({key: value.to(device) for key, value in state.items() if key != "step"})

    def _share_out(self) -> dict[str, int]:
        """Gives each weight to one of the copies that hold it, the largest first, to the one that has least."""
        held: dict[bool, list[int]] = {}
        owners: dict[str, int] = {}
        for name in sorted(self.masters, key=lambda name: -self.masters[name].numel()):
            loads = held.setdefault(self.places[name].expert is None, [0] * self._copies(name).size())
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += self.masters[name].numel()
        return owners

    def _copies(self, name: str) -> dist.ProcessGroup:
        """Returns the ranks that hold the same part of a weight."""
        return self.shared_data_group if self.places[name].expert is None else self.expert_data_group

    def _owned(self) -> list[str]:
        return [name for name, owner in self.owners.items() if owner == self._copies(name).rank()]

    def _from_owner(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrites a tensor that lies beside a weight by its owner's."""
        if self._copies(name).size() > 1:
            dist.broadcast(tensor, group=self._copies(name), group_src=self.owners[name])
        return tensor

    def _moment(self, name: str, moment: str) -> torch.Tensor:
        master = self.masters[name]
        own = self.optimizer.state.get(master, {}).get(moment)
        return self._from_owner(name, torch.empty_like(master, requires_grad=False) if own is None else own)

    def _optimizer(self) -> torch.optim.AdamW:
        """Returns AdamW over what this rank owns; vectors (norms, biases) are not decayed."""
        return adamw((self.masters[name] for name in self._owned()), self.config.optimizer)

    def _padded(self, shape: torch.Size) -> tuple[int, int]:
        """Returns width and height of the rows with what collectives need.

        Tokens shared along the sequence must divide; and where experts are on ranks with other rows, whose tokens are
        gathered in equal parts, all are as large as the largest.
        """
        height, width = shape
        if self.model.config.sequence_parallel:
            width += -width % self.config.parallel.tensor
        if self.config.parallel.expert > 1 and self.model.config.moe_token_dispatcher_type == "allgather":
            largest = torch.tensor([width, height], device=self.device)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.expert_group)
            width, height = largest.tolist()
        return width, height

    def _reduce_gradients(self) -> None:
        """Makes gradients those of the whole minibatch: sums of what ranks saw, divided by the copies' number."""
        on_tokens = self.model.config.sequence_parallel
        for name, place in self.places.items():
            master = self.masters[name]
            if master.grad is None:  # an expert that no token came to
                master.grad = torch.zeros_like(master)
            if place.on_heads or (place.on_tokens and on_tokens):
                _sum(master.grad, self.tensor_group)
            _sum(master.grad, self._copies(name))
            master.grad /= self.data_ranks

    def _publish(self) -> None:
        """Gives the model its masters' values."""
        with torch.no_grad():
            for name, weight in self.parameters.items():
                if weight is not self.masters[name]:
                    weight.copy_(self.masters[name])

    def _take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Takes weights by their names in the `transformers` model's memory."""
        with torch.no_grad():
            for name, place in self.places.items():
                self.masters[name].copy_(self._part(weights, place))
        self._publish()

    def _in_memory(
        self, tensors: Mapping[str, torch.Tensor], folder: Path, suffix: str = ""
    ) -> dict[str, torch.Tensor]:
        """Returns tensors of a checkpoint, whose hub names `suffix` follows, as a `transformers` model holds them.

        Raises:
            CheckpointError: one is missing, or of another shape than the model's.
        """
        shapes = self.naming.shapes
        return self.naming.from_hub({name: present(tensors, name + suffix, folder, shapes[name]) for name in shapes})

    def _part(self, tensors: Mapping[str, torch.Tensor], place: Place) -> torch.Tensor:
        """Returns this rank's part, float32 and a copy, of the tensors that a weight is made of."""
        whole = [tensors[name] if place.expert is None else tensors[name][place.expert] for name in place.memory]
        group = self._cut_group(place)
        part = self.layout.part(place, whole, group.rank(), group.size())
        return part.detach().to(self.device, torch.float32, copy=True)

    def _cut_group(self, place: Place) -> dist.ProcessGroup:
        return self.tensor_group if place.expert is None else self.expert_tensor_group

    def _gather(self, value: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Returns tensors that are cut as the weights are, whole, in rank 0's main memory; None elsewhere.

        Names and shapes are those of the `transformers` model in memory. One weight at a time is whole on the device.
        All ranks call.
        """
        whole: dict[str, torch.Tensor] = {}
        for name, place in self.places.items():
            parts = [value(name).detach()]
            if place.cut != "whole":
                parts = _gathered(parts[0], self._cut_group(place))
            tensors = self.layout.whole(place, parts)
            if place.expert is None:
                if self.rank == 0:
                    whole.update({name: tensor.cpu().clone() for name, tensor in zip(place.memory, tensors)})
                continue
            here = place.expert - self.layout.first_expert
            for rank, tensor in enumerate(_gathered(tensors[0], self.expert_group)):
                if self.rank == 0:
                    stack = whole.setdefault(place.memory[0], torch.empty(self.shapes[place.memory[0]]))
                    stack[rank * self.experts_here + here] = tensor.cpu()
        return {name: whole[name] for name in self.shapes} if self.rank == 0 else None


_joined: list[tuple[object, tuple[int, int]]] = []
"""The world and the sizes that Megatron's process groups, which are global, were made for."""


def _join_groups(parallel: ParallelConfig) -> None:
    """Makes Megatron's process groups, as the base class makes its own: ranks of one copy are consecutive."""
    made_for = (dist.group.WORLD, (parallel.tensor, parallel.expert))
    if _joined != [made_for]:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=1 if parallel.expert > 1 else parallel.tensor,
            order="tp-cp-ep-pp-dp",
            create_gloo_process_groups=False,
        )
        _joined[:] = [made_for]
    megatron_shims.prepare()


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> Iterable[torch.Tensor]:
    """Returns the tensor of every rank of a group."""
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
