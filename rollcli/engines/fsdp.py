"""Training by torch FSDP2 (`fully_shard`) for any `transformers` language model or critic, on one process or many.

Master weights, gradient sums and optimizer state are float32; on a GPU the forward pass is bfloat16. Log-probabilities
are float32 always.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from rollcli.config.schema import PolicyConfig
from rollcli.engines import lora, naming, vision
from rollcli.engines.context_parallel import ContextParallel
from rollcli.engines.facts import check_options
from rollcli.engines.parallel_sizes import check_parallel_sizes
from rollcli.engines.sharded_weights import ShardedWeights
from rollcli.engines.tensor_parallel import Layout, apply_plans, global_norm, lay_out, local, sum_partial_gradients
from rollcli.engines.training import adamw
from rollcli.errors import EngineError


class FsdpEngine(ShardedWeights):
    """One rank of the training engine. All ranks call the same methods in the same order.

    Args:
        model: the whole model, float32, on this rank's device; every rank holds the same weights.
        config: the recipe's `policy` block.
        frozen: no optimizer: a reference model.
        dtype: precision of the forward pass: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU.
        seed: decides the start of adapters, where the recipe asks for such.
        shard_size: processes that weights, gradients and moments are sharded over, and replicated over the rest
            (HSDP); null is all of them.
        offload: keep the shards, and take the optimizer step, in main memory. On a CPU everything is there anyway.
        compile: compile every transformer block by `torch.compile`.

    Raises:
        EngineError: an option is of the wrong type, or sizes do not divide the processes or the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: PolicyConfig,
        frozen: bool = False,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        seed: int = 0,
        shard_size: int | None = None,
        offload: bool = False,
        compile: bool = False,
    ) -> None:
        check_options("fsdp", {"shard_size": shard_size, "offload": offload, "compile": compile}, "policy")
        if shard_size is not None and shard_size < 1:
            raise EngineError(f"`policy.engine_args.shard_size`: must be above 0 or null, is {shard_size}")
        sizes = model.config.get_text_config().to_dict()
        check_parallel_sizes(sizes, config.parallel, "fsdp", context_heads=True)
        self.vision = vision.of(model)
        if self.vision is not None and (config.parallel.tensor > 1 or config.parallel.context > 1):
            raise EngineError(
                "`parallel`: a vision-language model is not split here, only sharded",
                hint="set `parallel.tensor: 1` and `parallel.context: 1`, and raise `workers`",
            )
        super().__init__(config, model.device, frozen)
        self.layout = lay_out(self.device, self.ranks, config.parallel, shard_size)
        self.in_main_memory = offload
        self.naming = naming.of(model)
        if config.lora.rank:
            if config.parallel.tensor > 1:
                raise EngineError(
                    f"`parallel.tensor` is {config.parallel.tensor}: matrices that are split have no adapters here",
                    hint="set `parallel.tensor: 1`, FSDP shards every weight over the workers; or `lora.rank: 0`",
                )
            lora.wrap(model, config.lora, seed)
        self.adapted = lora.layers(model)
        self.prepare(model)
        self.context = None if self.layout.context is None else ContextParallel(model, self.layout.context)
        mixtures = apply_plans(model, self.layout)
        if compile:
            for block in _blocks(model):
                # Not the block itself: FSDP's hooks stay outside.
                block.forward = torch.compile(block.forward)
        self.model = _shard(model, mixtures, self.layout, self.precision(dtype), offload)
        self.hub_model = self.model
        self.optimizer = None if frozen else adamw(self.model.parameters(), config.optimizer)

    def outputs_at(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: np.ndarray, columns: np.ndarray, options: dict[str, Any]
    ) -> torch.Tensor:
        """Returns the outputs at the places asked for, of which a context peer computes its part."""
        if self.context is None:
            return super().outputs_at(ids, positions, rows, columns, options)
        part = self.context.split(ids, positions, rows, columns)
        outputs = super().outputs_at(part.ids, part.positions, part.rows, part.columns, {"context": part.context})
        return self.context.gather(part, outputs)

    def end_pass(self) -> None:
        """Without a backward pass FSDP leaves the outermost parameters gathered, and in the forward's precision."""
        self.model.reshard()

    def clip(self) -> float:
        """Scales the gradient down to the largest norm allowed; returns its norm before that."""
        if self.layout.tensor.size() > 1:
            sum_partial_gradients(self.model, self.layout.tensor.get_group(), self.device)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(global_norm(gradients, self.device, self.ranks))
        scale = min(1.0, self.config.optimizer.max_grad_norm / (norm + 1e-6))
        for gradient in gradients:
            local(gradient).mul_(scale)
        return norm

    def optimize(self, learning_rate: float) -> None:
        """Takes a step of AdamW."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drops the gradient."""
        self.optimizer.zero_grad()

    def move(self, device: torch.device) -> None:
        """Moves the shards and AdamW's moments; with `offload` they are in main memory all the time."""
        if self.in_main_memory:
            return
        self.model.to(device)
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            state |= {key: moment.to(device) for key, moment in state.items() if key != "step"}


def _blocks(model: PreTrainedModel) -> list[torch.nn.Module]:
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def _shard(
    model: PreTrainedModel, mixtures: list[torch.nn.Module], layout: Layout, dtype: torch.dtype, offload: bool
) -> PreTrainedModel:
    """Shards every transformer block by itself, then the rest, so that one block at a time is whole in memory."""
    place = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    options = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": place,
    }
    for module in mixtures:
        fully_shard(module, mesh=layout.experts, **options)
        # An expert sees its peers' tokens too: its gradient sums over more processes than this mesh averages over.
        module.set_gradient_divide_factor(float(layout.weights.size()))
        # gloo cannot divide while it sums; where there is nothing to sum, torch 2.13 would divide twice.
        if layout.experts.size() > 1 and dist.get_backend(layout.experts.get_group()) != "nccl":
            module.set_force_sum_reduction_for_comms(True)
    for module in [*_blocks(model), model]:
        fully_shard(module, mesh=layout.weights, **options)
    return model
