"""Training by DeepSpeed's ZeRO (arXiv 1910.02054) for any `transformers` language model or critic.

`engine_args` are DeepSpeed's own configuration: `{zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}`.
Where they name no stage it is 3, which shards what `fsdp` shards. What the recipe itself decides (batch sizes,
optimizer, clipping, precision) is refused there.

Master weights, gradient sums and optimizer state are float32. In bfloat16, stages 2 and 3 keep a bfloat16 copy of the
weights (DeepSpeed's `bf16`) and reduce gradients in float32; stages 0 and 1 have no such mode that also sums
micro-batches in float32, and cast where the model is computed (its `torch_autocast`).

On a CPU the collectives are gloo's and the optimizer is torch's, also where it is offloaded: DeepSpeed's own of both
are C++ that is compiled at the first use, for a minute and more. `offload_states`, pinned memory and bfloat16's speed
need a GPU; they have not run here.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rollcli.config.schema import PolicyConfig
from rollcli.engines import naming
from rollcli.engines.deepspeed_options import check_options
from rollcli.engines.hub_model import HubModelEngine
from rollcli.engines.training import MOMENTS, adamw, present
from rollcli.engines.vision import check_none

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it warns where it finds out by itself

import deepspeed
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

warnings.filterwarnings("ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning)  # by it, at every step
# Before the first collective DeepSpeed would find out, by compiling, what it can compile here, and then compile
# collectives of its own for a minute. Gloo serves as well.
deepspeed.ops.__compatible_ops__ = {}

BUCKET = 2**28
"""Bytes gathered at once."""
REDUCE_BUCKET = 500_000_000
"""Elements of gradients that DeepSpeed sums over ranks at once, unless told otherwise."""


class DeepSpeedEngine(HubModelEngine):
    """One rank of the training engine. All ranks call the same methods in the same order.

    Args:
        model: the whole model, float32, on this rank's device; every rank holds the same weights.
        config: the recipe's block of this role.
        frozen: no optimizer: a reference model. ZeRO shards it at stage 3 and leaves it alone below.
        dtype: precision of the forward pass: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU.
        seed: nothing here is random.
        engine_args: DeepSpeed's configuration.

    Attributes:
        stage: the stage of ZeRO, 0 to 3.
        half: whether the forward pass is in bfloat16.
        model: what computes the forward pass: DeepSpeed's engine, or the model itself where it is left alone.
        tensors: the model's parameters and persistent buffers by name in memory; ZeRO works on the same objects.
        trained: names of the parameters.
        optimizer: torch's AdamW, whose tensors ZeRO replaces by its parts of them; None where frozen.
        zero: what ZeRO puts around it; None at stage 0, and where frozen.

    Raises:
        EngineError: a key is unknown, decided by the recipe or not supported; or a parallel size is not 1.
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
        check_none(model.config, "deepspeed")
        zero = check_options(config, engine_args)
        super().__init__(config, model.device, frozen)
        self.stage = int(zero.stage)
        self.half = self.precision(dtype) is torch.bfloat16
        self.naming = naming.of(model)
        self.tensors = naming.tensors_of(model)
        self.trained = {name for name, tensor in self.tensors.items() if isinstance(tensor, torch.nn.Parameter)}
        self.hub_model = model
        self.prepare(model)
        self.optimizer = None if frozen else adamw(model.parameters(), config.optimizer)
        if frozen and self.stage < 3:
            self.model = model
            for parameter in model.parameters() if self.half else ():
                parameter.data = parameter.data.bfloat16()  # not the buffers, which turn positions into angles
        else:
            size = sum(parameter.numel() for parameter in model.parameters())
            settings = _settings(config, engine_args, self.stage, self.half, size)
            os.environ["LOCAL_RANK"] = str(self.device.index or 0)  # it looks for its device there
            self.model, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=settings)
        self.zero = None if frozen or self.stage == 0 else self.model.optimizer
        self._gradient = False  # whether a backward pass has left one

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Adds the loss's gradient, averaged over ranks: at stages 2 and 3 after each pass, else after the last."""
        self._gradient = True
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss)

    def clip(self) -> float:
        """Returns the gradient's norm; DeepSpeed scales it down in its step, but at stage 0 here."""
        if self.zero is None:
            largest = self.config.optimizer.max_grad_norm
            return float(torch.nn.utils.clip_grad_norm_(self.hub_model.parameters(), largest))
        if self.stage == 3:
            return float(combine_grad_norm_groups(self.zero._get_norm_groups()))
        return float(self.zero.scaled_global_norm())

    def optimize(self, learning_rate: float) -> None:
        """Takes a step of AdamW."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.model.step()
        self._gradient = False

    def zero_grad(self) -> None:
        """Drops the gradient; after a step DeepSpeed has."""
        if not self._gradient:
            return
        self._gradient = False
        if self.zero is None:
            self.model.zero_grad()
            return
        # Gradients lie in buffers that differ by stage and offload. DeepSpeed empties them itself, and takes no step,
        # where the norm is infinite.
        name = "_get_norm_groups" if self.stage == 3 else "scaled_global_norm"
        infinite = torch.tensor(math.inf)
        setattr(self.zero, name, lambda: [infinite] if self.stage == 3 else infinite)
        try:
            self.model.step()
        finally:
            delattr(self.zero, name)

    def named_weights(self) -> dict[str, torch.Tensor] | None:
        """Returns every weight, whole, float32, by its hub name, in rank 0's main memory; None elsewhere."""
        whole: dict[str, torch.Tensor] = {}
        for bucket in self.weight_buckets(BUCKET):
            whole |= bucket or {}
        return whole if self.rank == 0 else None

    def weight_buckets(self, size: int, adapters_only: bool = False) -> Iterator[dict[str, torch.Tensor] | None]:
        """Yields all weights by hub name in buckets of about `size` bytes on rank 0, as many times None elsewhere.

        What ZeRO holds in parts is put together by one collective for each bucket.
        """
        for names in self._buckets(size):
            whole = self._gather(names, None)
            yield None if whole is None else self.naming.to_hub(whole)

    def optimizer_state(self) -> dict[str, torch.Tensor] | None:
        """Returns AdamW's steps and moments by hub name, on rank 0."""
        steps = [state["step"] for state in self.optimizer.state.values()]
        found: dict[str, torch.Tensor] = {}
        for moment in MOMENTS if steps else ():
            for names in self._buckets(BUCKET):
                whole = self._gather([name for name in names if name in self.trained], moment)
                for name, tensor in self.naming.to_hub(whole or {}).items():
                    # A step is taken for all weights or none.
                    found |= {f"{name}.{moment}": tensor, f"{name}.step": steps[0].cpu().clone()}
        return found if self.rank == 0 else None

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Takes weights by their hub names."""
        given = {name: present(weights, name, folder, shape) for name, shape in self.naming.shapes.items()}
        for name, whole in self.naming.from_hub(given).items():
            tensor = self.tensors[name]
            if self.stage < 3 or name not in self.trained:
                tensor.copy_(whole)
            else:
                tensor.ds_tensor.copy_(_part(whole, tensor.ds_tensor.numel(), self.rank))
                if tensor.ds_status is ZeroParamStatus.AVAILABLE:  # one so small that it is never released
                    tensor.copy_(whole)
            if name in self.trained:
                self._set(tensor, None, whole)

    @torch.no_grad()
    def load_optimizer_state(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Takes AdamW's steps and moments by hub name."""
        self.optimizer.state.clear()
        if not state:
            return
        names = [name for name in self.naming.shapes if name not in self.naming.buffers]
        for flat in self._flat():
            step = present(state, f"{names[0]}.step", folder)
            self.optimizer.state[flat] = {"step": step.clone(), **{key: torch.zeros_like(flat) for key in MOMENTS}}
        for key in MOMENTS:
            given = {name: present(state, f"{name}.{key}", folder, self.naming.shapes[name]) for name in names}
            for name, whole in self.naming.from_hub(given).items():
                self._set(self.tensors[name], key, whole)

    def offload(self) -> None:
        """Moves weights and optimizer state from the device to main memory; what ZeRO keeps there already stays."""
        if self.device.type == "cpu":
            return
        if self.zero is not None:
            self.model.offload_states()
        else:
            self._move("cpu")

    def onload(self) -> None:
        """Moves them back."""
        if self.device.type == "cpu":
            return
        if self.zero is not None:
            self.model.reload_states()
        else:
            self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        """Moves a model that ZeRO leaves whole; a frozen one at stage 3 is in parts already, and stays."""
        if self.stage < 3:
            self.hub_model.to(device)
        for state in self.optimizer.state.values() if self.optimizer else ():
            state |= {moment: state[moment].to(device) for moment in MOMENTS}

    def _flat(self) -> list[torch.Tensor]:
        """Returns the tensors that AdamW updates: this rank's parts, each of many parameters; or the parameters."""
        if self.stage == 3:
            return list(self.zero.fp32_partitioned_groups_flat)
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]

    def _whole(self, name: str, moment: str | None) -> torch.Tensor | None:
        """Returns a float32 master or moment where every rank has all of it."""
        tensor = self.tensors[name]
        if name not in self.trained:
            return tensor
        if self.stage == 0 and moment is not None:
            return self.optimizer.state[tensor][moment]
        # At stage 2 in half precision the model has a copy in bfloat16.
        in_parts = self.stage == 3 or moment is not None or (self.stage == 2 and self.half and not self.frozen)
        return None if in_parts else tensor.float()

    def _own(self, parameter: torch.Tensor, moment: str | None) -> tuple[int, torch.Tensor]:
        """Returns this rank's part of a parameter's float32 master or moment `[n]`, and where in it that begins."""
        if self.stage < 3:
            fragment = parameter._hp_mapping
            if fragment is None:
                return 0, parameter.new_zeros(0)
            if moment is None:
                return fragment.lp_fragment_address.start, fragment.hp_fragment
            (flat,) = self.optimizer.param_groups[fragment.param_group_index]["params"]
            place = fragment.hp_fragment_address
            part = self.optimizer.state[flat][moment].narrow(0, place.start, place.numel)
            return fragment.lp_fragment_address.start, part
        if self.frozen:
            part = parameter.ds_tensor
        elif moment is None:
            part = safe_get_local_fp32_param(parameter)
        else:
            part = safe_get_local_optimizer_state(parameter, moment)
        start = min(self.rank * part.numel(), parameter.ds_numel)
        return start, part.flatten()[: parameter.ds_numel - start]

    def _set(self, parameter: torch.Tensor, moment: str | None, whole: torch.Tensor) -> None:
        """Replaces this rank's part of a parameter's float32 master or moment."""
        if self.zero is None:
            if moment is not None:
                self.optimizer.state[parameter][moment].copy_(whole)
        elif self.stage < 3:
            start, part = self._own(parameter, moment)
            part.copy_(whole.flatten()[start : start + part.numel()])
        else:
            part = _part(whole, parameter.ds_tensor.numel(), self.rank)
            if moment is None:
                safe_set_local_fp32_param(parameter, part)
            else:
                safe_set_local_optimizer_state(parameter, part, moment)

    def _buckets(self, size: int) -> Iterator[list[str]]:
        """Yields names in memory that together are about `size` float32 bytes on the hub, and convert by themselves."""
        names: list[str] = []
        held = 0
        for group in self.naming.groups:
            more = sum(4 * math.prod(self.naming.shapes[name]) for name in group.hub)
            if names and held + more > size:
                yield names
                names, held = [], 0
            names += group.memory
            held += more
        yield names

    @torch.no_grad()
    def _gather(self, names: list[str], moment: str | None) -> dict[str, torch.Tensor] | None:
        """Returns weights, or moments, whole and float32 in rank 0's main memory, None elsewhere; all ranks call."""
        found = {name: self._whole(name, moment) for name in names}
        parts = {name: self._own(self.tensors[name], moment) for name, whole in found.items() if whole is None}
        shapes = [getattr(self.tensors[name], "ds_shape", self.tensors[name].shape) for name in parts]
        together = torch.zeros(sum(shape.numel() for shape in shapes), device=self.device)
        pieces = together.split([shape.numel() for shape in shapes])
        # Every rank adds its parts to zeros.
        for piece, (start, part) in zip(pieces, parts.values(), strict=True):
            piece[start : start + part.numel()] = part
        if self.ranks > 1 and len(together):
            dist.reduce(together, dst=0)
        found |= {name: piece.view(shape) for name, piece, shape in zip(parts, pieces, shapes, strict=True)}
        return {name: tensor.detach().cpu() for name, tensor in found.items()} if self.rank == 0 else None


def _settings(
    config: PolicyConfig, options: Mapping[str, Any], stage: int, half: bool, parameters: int
) -> dict[str, Any]:
    """Returns DeepSpeed's configuration: its own keys as the recipe has them, and what the recipe decides."""
    clipping = config.optimizer.max_grad_norm
    # It would set aside 2 GB for gradients on their way, whatever the size of the model.
    zero = {"reduce_bucket_size": min(REDUCE_BUCKET, parameters), **dict(options.get("zero_optimization") or {})}
    made = {
        # Micro-batches differ from step to step; DeepSpeed is told of each whether it is the last.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clipping if math.isfinite(clipping) and stage else 0.0,  # stage 0: see `clip`
        "zero_force_ds_cpu_optimizer": False,
        **options,
        "zero_optimization": {**zero, "stage": stage},
    }
    if half and stage < 2:
        autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        made["torch_autocast"] = autocast
    elif half:
        made |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        made.setdefault("communication_data_type", "fp32")
    return made


def _part(whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Returns a rank's part `[size]` of a whole tensor as ZeRO-3 cuts it; the last is filled up with zeros."""
    part = whole.flatten()[rank * size : (rank + 1) * size]
    return torch.nn.functional.pad(part, (0, size - part.numel()))
