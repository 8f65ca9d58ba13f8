"""How a role's model is spread over its processes: what each part is really split by, as our engines do it.

    tensor    matrices of a layer, the head (and the embeddings where `megatron`, vLLM or SGLang do it); not norms
    pipeline  layers
    expert    routed experts, and nothing else
    context   activations, and no weight
    data      what ZeRO's stage or FSDP's shards say: the optimizer's moments, gradients, weights

The engines: `fsdp` shards weights, gradients and moments over all processes but tensor peers, experts over all
(engines/tensor_parallel.py). `deepspeed` is ZeRO (arXiv 1910.02054, section 5) at the stage that `engine_args` name,
3 unless they do. `megatron` shares moments among copies, whole weights at a time (ZeRO stage 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollcli.config.schema import ParallelConfig, PolicyConfig
from rollcli.devices.facts import ModelFacts

REDUCE_BUCKET, GATHER_BUCKET, MAX_LIVE = 500_000_000, 500_000_000, 1_000_000_000
"""DeepSpeed's defaults of `reduce_bucket_size`, `allgather_bucket_size`, `stage3_max_live_parameters`, in elements."""


@dataclass(frozen=True)
class Held:
    """Parameters of one process.

    Attributes:
        dense: all but routed experts.
        routed: of routed experts.
        words: how they were divided, for formulas.
    """

    dense: float
    routed: float
    words: str = ""

    @property
    def total(self) -> float:
        """Both."""
        return self.dense + self.routed


@dataclass(frozen=True)
class Spread:
    """One training role's layout.

    Attributes:
        engine: its name; of one that is not built in, `fsdp`'s layout is assumed.
        parallel: how one copy is spread.
        processes: of all copies.
        stage: what data parallelism shards, in ZeRO's stages; `fsdp` is 3, `megatron` 1.
        shard: processes that weights are sharded over at stage 3.
        offload_optimizer, offload_weights: kept in main memory.
        options: DeepSpeed's `zero_optimization`.
    """

    engine: str
    parallel: ParallelConfig
    processes: int
    stage: int
    shard: int
    offload_optimizer: bool
    offload_weights: bool
    options: Mapping[str, Any]

    def model(self, facts: ModelFacts) -> Held:
        """Returns what model parallelism alone leaves to one process."""
        sizes = self.parallel
        return held(facts, sizes.tensor, sizes.pipeline, sizes.expert, embeddings=self.engine == "megatron")

    def sharded(self, facts: ModelFacts, stage: int) -> Held:
        """Returns of how many parameters one process keeps what is sharded from `stage` on: 1 moments, 2 gradients,
        3 weights. Below, each copy keeps all of its own."""
        mine = self.model(facts)
        if self.stage < stage:
            return mine
        experts = max(self.processes // self._expert_peers, 1)
        if self.engine == "megatron":
            data = max(self.processes // (self.parallel.tensor * self.parallel.pipeline), 1)
        else:
            data = self.shard
            experts = experts if self.parallel.expert > 1 else data
        words = mine.words + (f" ÷ {data}" if data > 1 else "")
        if facts.routed and experts != data:
            words += f" (experts ÷ {experts})"
        return Held(mine.dense / data, mine.routed / experts, words)

    @property
    def _expert_peers(self) -> int:
        """Processes that hold different experts, or parts of the same."""
        return self.parallel.expert if self.parallel.expert > 1 else self.parallel.tensor * self.parallel.pipeline

    def largest_block(self, facts: ModelFacts) -> float:
        """Returns the parameters of the largest layer that one process has while it is whole there."""
        sizes = self.parallel
        routed = facts.routed_layer / (sizes.expert if sizes.expert > 1 else sizes.tensor)
        dense = facts.largest_block - facts.routed_layer
        whole = min(facts.unsplit_layer, dense)
        return routed + (dense - whole) / sizes.tensor + whole

    def buffers(self, facts: ModelFacts) -> tuple[float, float]:
        """Returns DeepSpeed's communication buffers: elements of gradients on their way (float32) and of weights."""
        if self.engine != "deepspeed" or self.stage == 0:
            return 0.0, 0.0
        mine = self.model(facts).total
        reduce = min(self.options.get("reduce_bucket_size", REDUCE_BUCKET), mine)
        reduce *= 2 if self.options.get("overlap_comm", self.stage == 3) else 1
        if self.stage == 3:
            return reduce, min(self.options.get("stage3_max_live_parameters", MAX_LIVE), mine)
        return reduce, min(self.options.get("allgather_bucket_size", GATHER_BUCKET), mine)


def spread_of(config: PolicyConfig) -> Spread:
    """Returns the layout that a training role's block asks for."""
    arguments, processes = config.engine_args, config.processes
    if config.engine == "deepspeed":
        options = dict(arguments.get("zero_optimization") or {})
        stage = int(options.get("stage", 3))
        away = {name: bool(options.get(f"offload_{name}")) for name in ("optimizer", "param")}
        return Spread(
            "deepspeed", config.parallel, processes, stage, processes, away["optimizer"] and stage > 0,
            away["param"] and stage == 3, options,
        )  # fmt: skip
    if config.engine == "megatron":
        return Spread("megatron", config.parallel, processes, 1, 1, False, False, {})
    data = max(processes // config.parallel.tensor, 1)
    offload = bool(arguments.get("offload", False))
    return Spread("fsdp", config.parallel, processes, 3, arguments.get("shard_size") or data, offload, offload, {})


def held(facts: ModelFacts, tensor: int = 1, pipeline: int = 1, expert: int = 1, embeddings: bool = True) -> Held:
    """Returns the parameters that model parallelism leaves to one process.

    Tensor parallelism never divides norms, the router, and biases added after a sum; keys and values are repeated where
    there are fewer heads of them than processes. Of a pipeline the first and the last process have embeddings or head
    beside their layers; the larger of the two stands for all.

    Args:
        facts: the model's.
        tensor, pipeline, expert: degrees.
        embeddings: they are split by tensor parallelism too, and not the head alone.
    """
    parts = facts.parameters
    outside = parts["embeddings"] + parts["head"]
    norm = facts.norm_tensors * facts.hidden
    layers = facts.total - facts.vision - outside - norm - facts.routed
    whole = min(facts.unsplit - facts.vision - norm, layers)
    repeated = max(tensor / facts.kv_heads - 1, 0) * 2 * facts.layers * facts.hidden * facts.kv_width / tensor
    if facts.latent is not None or facts.kv_heads >= facts.heads:
        repeated = 0
    table = parts["embeddings"] / (tensor if embeddings or facts.tied else 1)
    head = parts["head"] / (1 if facts.critic else tensor)
    ends = table + head if pipeline == 1 else max(table, head if head else table)
    dense = ((layers - whole) / tensor + repeated + whole) / pipeline + ends + norm + facts.vision
    routed = facts.routed / (expert if expert > 1 else tensor) / pipeline
    degrees = {"tensor": tensor, "pipeline": pipeline, "expert": expert if facts.routed else 1}
    return Held(dense, routed, "".join(f" ÷ {name} {degree}" for name, degree in degrees.items() if degree > 1))


def adapter_parameters(facts: ModelFacts, rank: int, targets: list[str]) -> int:
    """Returns the parameters of LoRA adapters: rank × (inputs + outputs) of every linear layer that gets one
    (arXiv 2106.09685, section 4.1). Experts of a mixture get none, the shared ones do (engines/lora.py).

    Args:
        facts: the model's.
        rank: of the adapters.
        targets: names of layers, or `all-linear`.
    """
    h, q, kv = facts.hidden, facts.query_width, facts.kv_width
    if facts.latent is None:
        each = {"q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": q + h}
    else:
        sizes = facts.latent
        down, up = sizes.kv_rank + sizes.rope, facts.heads * (sizes.nope + sizes.value)
        each = {"kv_a_proj_with_mqa": h + down, "kv_b_proj": sizes.kv_rank + up, "o_proj": facts.value_width + h}
        each |= {"q_a_proj": h + sizes.query_rank, "q_b_proj": sizes.query_rank + q} if sizes.query_rank else {
            "q_proj": h + q
        }  # fmt: skip
    inner = {name: h for name in ("gate_proj", "up_proj", "down_proj")[not facts.gated :]}
    dense = facts.layers - facts.sparse_layers

    def chosen(name: str) -> bool:
        return any(target in ("all-linear", name) or target.endswith(f".{name}") for target in targets)

    total = facts.layers * sum(width for name, width in each.items() if chosen(name))
    for name, width in inner.items():
        if chosen(name):
            total += dense * (width + facts.intermediate)
            total += facts.sparse_layers * (width + facts.shared_intermediate) * bool(facts.shared_intermediate)
    return rank * total
