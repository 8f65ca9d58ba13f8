"""The weights and moments of a `transformers` model that is sharded as DTensors, whole and in the hub's naming.

Of a model with adapters (engines/lora.py) the weights are those of the merged model, and the moments the adapters'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from rollcli.engines import lora
from rollcli.engines.hub_model import HubModelEngine
from rollcli.engines.training import MOMENTS, present
from rollcli.errors import CheckpointError


class ShardedWeights(HubModelEngine):
    """What an engine that holds a model as `transformers` made it need not write again; an engine sets what follows.

    Attributes:
        model: with DTensors for parameters, or plain tensors.
        adapted: its layers with adapters.
        optimizer: AdamW; None where frozen.
    """

    model: PreTrainedModel
    adapted: list[lora.Layer]
    optimizer: torch.optim.AdamW | None

    def named_weights(self) -> dict[str, torch.Tensor] | None:
        """Returns every weight, whole, float32, adapters merged, by its hub name, in rank 0's main memory."""
        changes = self.adapter_weights() or {}
        whole: dict[str, torch.Tensor] = {}
        for part in self._base_weights():
            whole |= {n: lora.merge(weight, changes[n]) if n in changes else weight for n, weight in part.items()}
        return whole if self.rank == 0 else None

    def adapter_weights(self) -> dict[str, lora.LowRank] | None:
        """Returns the change that each adapter makes, by the hub name of the weight changed, on rank 0."""
        tensors = dict(self.model.named_parameters()) if self.adapted else {}
        changes: dict[str, lora.LowRank] = {}
        for layer in self.adapted:
            a, b = self._whole(tensors[layer.a]), self._whole(tensors[layer.b])
            if self.rank == 0:
                changes[self.naming.hub_name(layer.weight)] = layer.low_rank(a.cpu(), b.cpu())
        return changes if self.rank == 0 else None

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """Returns adapters, and a critic's head beside them, whole, by peft's names; on every rank."""
        return {name: self._whole(tensor) for name, tensor in lora.trained_tensors(self.model).items()}

    def weight_buckets(self, size: int, adapters_only: bool = False) -> Iterator[dict[str, Any] | None]:
        """Yields all weights by hub name in buckets of about `size` bytes on rank 0, as many times None elsewhere.

        A policy with adapters yields its base weights, and last the adapters, by the names of the weights they change.

        Args:
            size: float32 bytes of a bucket; a larger tensor has one to itself.
            adapters_only: yield the adapters alone.
        """
        bucket: dict[str, Any] = {}
        held = 0
        for group, part in zip(self.naming.groups, () if self.adapted and adapters_only else self._base_weights()):
            more = sum(4 * math.prod(self.naming.shapes[name]) for name in group.hub)
            if held and held + more > size:
                yield bucket if self.rank == 0 else None
                bucket, held = {}, 0
            bucket |= part
            held += more
        if held:
            yield bucket if self.rank == 0 else None
        if self.adapted:
            yield self.adapter_weights()

    def without_adapter(self) -> AbstractContextManager[None]:
        """Switches the adapters off; see `TrainingEngine`."""
        return lora.without_adapters(self.model) if self.adapted else super().without_adapter()

    def optimizer_state(self) -> dict[str, torch.Tensor] | None:
        """Returns AdamW's steps and moments by hub name, those of adapters by peft's, on rank 0."""
        found: dict[str, torch.Tensor] = {}
        for memory, hub, parameters in self._trained():
            states = [self.optimizer.state.get(parameter, {}) for parameter in parameters]
            if not all(states):
                continue
            for key in MOMENTS:
                whole = {name: self._whole(state[key]) for name, state in zip(memory, states)}
                moments = self._to_hub(whole)
                if self.rank == 0:
                    found |= {f"{name}.{key}": moment.cpu() for name, moment in moments.items()}
            found |= {f"{name}.step": states[0]["step"].detach().cpu().clone() for name in hub}
        return found if self.rank == 0 else None

    def load_weights(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Takes weights by their hub names; a policy with adapters takes these, its base weights being what they are.

        Raises:
            CheckpointError: one is missing; there are no adapters; or they are those of another base.
        """
        tensors = lora.base_tensors(self.model)
        changed = {layer.weight for layer in self.adapted}
        for group in self.naming.groups:
            shapes = {name: self.naming.shapes[name] for name in group.hub}
            given = self.naming.from_hub({name: present(weights, name, folder, shapes[name]) for name in shapes})
            for name, value in given.items():
                if not self.adapted:
                    tensors[name].detach().copy_(_like(value, tensors[name]))
                elif name in changed or tensors[name].requires_grad:
                    continue  # it follows from what `adapter/` holds
                # Whole, so that all ranks find the same.
                elif not torch.equal(value.to(self.device), self._whole(tensors[name])):
                    raise CheckpointError(
                        f"`{name}` of checkpoint `{folder}` is not that of the model which the run starts from",
                        hint="adapters continue only on the model they were trained on: give the same `model.path`",
                    )
        if self.adapted:
            saved = lora.load(folder / lora.FOLDER)
            for name, parameter in lora.trained_tensors(self.model).items():
                parameter.detach().copy_(_like(present(saved, name, folder, parameter.shape), parameter))

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Takes AdamW's steps and moments by the names that `optimizer_state` gave them."""
        self.optimizer.state.clear()
        for memory, hub, parameters in self._trained() if state else ():
            step = present(state, f"{hub[0]}.step", folder)
            shapes = {n: parameters[0].shape if self.adapted else self.naming.shapes[n] for n in hub}
            moments = {
                key: self._from_hub({n: present(state, f"{n}.{key}", folder, shape) for n, shape in shapes.items()})
                for key in MOMENTS
            }
            for name, parameter in zip(memory, parameters):
                own = {key: _like(moments[key][name], parameter) for key in MOMENTS}
                self.optimizer.state[parameter] = {"step": step.clone(), **own}

    def more_files(self) -> Callable[[Path], None] | None:
        """Returns what writes a policy's adapters to `adapter/`, as peft reads them; None without adapters."""
        if not self.adapted:
            return None
        tensors = self.trained_weights()
        return lambda folder: lora.save(self.model, tensors, folder / lora.FOLDER)

    def _base_weights(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the weights without adapters, a group at a time, by hub name, in rank 0's main memory; {} elsewhere.

        One group at a time is whole on the device. All ranks call.
        """
        tensors = lora.base_tensors(self.model)
        for group in self.naming.groups:
            whole = {name: self._whole(tensors[name]) for name in group.memory}
            made = self.naming.to_hub(whole) if self.rank == 0 else {}
            yield {name: tensor.cpu() for name, tensor in made.items()}

    def _trained(self) -> Iterator[tuple[Sequence[str], Sequence[str], list[torch.nn.Parameter]]]:
        """Yields what the optimizer has moments of that convert together: names in memory and in files, parameters."""
        if self.adapted:
            for name, parameter in lora.trained_tensors(self.model).items():
                yield [name], [name], [parameter]
            return
        parameters = dict(self.model.named_parameters())
        for group in self.naming.groups:
            if set(group.memory) <= set(parameters):
                yield group.memory, group.hub, [parameters[name] for name in group.memory]

    def _to_hub(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors if self.adapted else self.naming.to_hub(tensors)

    def _from_hub(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors if self.adapted else self.naming.from_hub(tensors)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a sharded tensor whole; all ranks call."""
        # Shards may be in main memory (CPU offload); collectives work on the device.
        return (tensor.to(self.device).full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a whole tensor sharded like `parameter`."""
    whole = whole.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole
