"""How the `fsdp` engine lays its processes out, and shards a loaded model over them before FSDP does.

Dense weights and experts lie on two meshes of the same processes, consecutive ranks innermost:

    weights   (replicate, shard, tensor)   tensor parallelism inside, FSDP outside, copies of both outermost
    experts   (shard, expert)              experts are split by number inside, by FSDP outside

The plans (which layer is split by columns, which by rows) and the code around each layer are transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    apply_expert_parallelism,
    apply_tensor_parallelism,
    replace_layer_number_by_wildcard,
)

from rollcli.config.schema import ParallelConfig
from rollcli.errors import EngineError

DISPATCH = "ep_dispatch_experts"
"""Plan of a mixture whose tokens travel to the process that holds their expert."""
SUMMED = "replicated_with_grad_allreduce"
"""Plan of weights that every peer holds whole and applies to its own heads only, so that the gradients add up."""


@dataclass(frozen=True)
class Layout:
    """Meshes of all processes.

    Attributes:
        tensor: the peers that share every matrix product.
        weights: what FSDP shards dense weights over; of two dimensions where they are replicated too.
        context: the peers that share every sequence; None where sequences are whole.
        expert: the peers that share a mixture's experts, and `experts` what FSDP shards those over; None without.
    """

    tensor: DeviceMesh
    weights: DeviceMesh
    context: dist.ProcessGroup | None = None
    expert: DeviceMesh | None = None
    experts: DeviceMesh | None = None


def lay_out(device: torch.device, ranks: int, parallel: ParallelConfig, shard_size: int | None) -> Layout:
    """Returns the meshes of `ranks` processes; weights are sharded over `shard_size` of them, all that there are if
    None, and replicated over the rest.

    Raises:
        EngineError: the sizes do not divide.
    """
    if parallel.pipeline > 1:
        raise EngineError(
            f"the engine `fsdp` has no pipeline, `parallel.pipeline` is {parallel.pipeline}",
            hint="use `parallel.tensor`, or the engine `megatron`",
        )
    data = ranks // parallel.tensor
    shard = data if shard_size is None else shard_size
    if data % shard:
        raise EngineError(
            f"`engine_args.shard_size` {shard} does not divide the {data} processes that share the weights "
            f"({ranks} processes / tensor {parallel.tensor})"
        )
    if parallel.expert > 1 and (ranks % parallel.expert or parallel.expert % parallel.tensor):
        raise EngineError(
            f"`parallel.expert` {parallel.expert} must divide the {ranks} processes and be a multiple of "
            f"`parallel.tensor` {parallel.tensor}"
        )
    root = init_device_mesh(
        device.type, (data // shard, shard, parallel.tensor), mesh_dim_names=("replicate", "shard", "tensor")
    )
    weights = root["shard"] if shard == data else root["replicate", "shard"]
    context = None
    if parallel.context > 1:
        places = (data // parallel.context, parallel.context, parallel.tensor)
        context = init_device_mesh(device.type, places, mesh_dim_names=("data", "context", "tensor"))["context"]
        context = context.get_group()
    if parallel.expert == 1:
        return Layout(root["tensor"], weights, context)
    other = init_device_mesh(
        device.type, (ranks // parallel.expert, parallel.expert), mesh_dim_names=("shard", "expert")
    )
    return Layout(root["tensor"], weights, context, other["expert"], other["shard"])


def apply_plans(model: PreTrainedModel, layout: Layout) -> list[torch.nn.Module]:
    """Splits the layers that the model's own plans name, in place; returns the mixtures split by experts.

    An output head, and embeddings tied to it, stay whole where the vocabulary cannot be split evenly.

    Raises:
        EngineError: transformers has no such plan for this model.
    """
    tensor_plan, expert_plan = dict(model.tp_plan), {}
    kind = model.config.model_type
    if layout.expert is not None:
        expert_plan = dict(model.ep_plan)
        if DISPATCH not in expert_plan.values():
            raise EngineError(
                f"`parallel.expert` is {layout.expert.size()}, but transformers has no plan to split experts of a "
                f"`{kind}` model",
                hint="set `parallel.expert: 1`: FSDP shards experts like every other weight",
            )
        tensor_plan = {n: s for n, s in tensor_plan.items() if not any(n.startswith(e) for e in expert_plan)}
    if layout.tensor.size() > 1:
        _apply_tensor_plan(model, layout.tensor, tensor_plan)
    if not expert_plan:
        return []
    mixtures = [module for _, module in _named(model, expert_plan, DISPATCH)]
    for module in mixtures:
        if module.num_experts % layout.expert.size():
            raise EngineError(
                f"`parallel.expert` {layout.expert.size()} does not divide the model's {module.num_experts} experts"
            )
    apply_expert_parallelism(model, layout.expert, layout.tensor, expert_plan)
    return mixtures


def sum_partial_gradients(model: PreTrainedModel, peers: dist.ProcessGroup, device: torch.device) -> None:
    """Adds up, over tensor-parallel peers, the gradients of weights that each applied to its own heads only."""
    for _, module in _named(model, model.tp_plan, SUMMED):
        for parameter in module.parameters(recurse=False):
            if parameter.grad is not None:
                mine = local(parameter.grad)
                summed = mine.to(device)  # collectives work there, shards may be in main memory
                dist.all_reduce(summed, group=peers)
                mine.copy_(summed)


def _apply_tensor_plan(model: PreTrainedModel, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    kind = model.config.model_type
    if not plan:
        raise EngineError(
            f"`parallel.tensor` is {mesh.size()}, but transformers has no plan to split a `{kind}` model",
            hint="set `parallel.tensor: 1`: FSDP shards every weight over `policy.workers`",
        )
    vocabulary = {"lm_head"} | {n for n, style in plan.items() if n.rsplit(".", 1)[-1] == "embed_tokens"}
    if model.get_input_embeddings().weight.shape[0] % mesh.size():
        plan = {name: style for name, style in plan.items() if name not in vocabulary}
    tied = model.get_output_embeddings() is not None and (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    # Gradients that add up do so once an update, in the engine: transformers' hook would add up sums again.
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if style != SUMMED})
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def _named(model: PreTrainedModel, plan: dict[str, str], style: str) -> list[tuple[str, torch.nn.Module]]:
    wanted = {name for name, its in plan.items() if its == style}
    return [(name, m) for name, m in model.named_modules() if replace_layer_number_by_wildcard(name) in wanted]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_norm(gradients: Iterable[torch.Tensor], device: torch.device, ranks: int) -> torch.Tensor:
    """Returns the norm of all gradients over all processes, each element counted once however often it is held."""
    by_copies: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        shards = 1
        if isinstance(gradient, DTensor):
            for place, size in zip(gradient.placements, gradient.device_mesh.shape, strict=True):
                shards *= 1 if place.is_replicate() else size
        by_copies.setdefault(ranks // shards, []).append(local(gradient))
    squares = torch.zeros((), device=device)
    for copies, parts in by_copies.items():
        squares += torch.nn.utils.get_total_norm(parts).to(device).square() / copies
    if ranks > 1:
        dist.all_reduce(squares)
    return squares.sqrt()
