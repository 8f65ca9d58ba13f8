"""Memory of a worker that trains: states, activations, logits, and what collectives need.

The engines' differences are here: what `fsdp`, `deepspeed` and `megatron` keep of weights, masters, moments, gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollcli.config.schema import PolicyConfig
from rollcli.devices.activations import activation_bytes
from rollcli.devices.facts import ModelFacts
from rollcli.devices.hardware import GIB
from rollcli.devices.parts import Part, Setting
from rollcli.devices.spread import Held, Spread, adapter_parameters, spread_of

FRAGMENTATION = 0.05
"""Share of the transient memory that the caching allocator of a GPU keeps beside what is in use. Not measured."""
SLACK = 0.25
"""Share of the transient memory that malloc keeps beside what is in use, on a CPU. Measured 2026-11-30, glibc, one
worker, a 28M-parameter model: 0.20 to 0.25 for 1,024 and 4,096 tokens; more with recomputation."""


def trained(setting: Setting, config: PolicyConfig) -> tuple[Part, ...]:
    """A model with its optimizer, and what an update takes."""
    spread = spread_of(config)
    kept, passing = _activations(setting, config, spread)
    tables = () if setting.facts.critic else logits(setting, training=True)
    transient = (kept, passing, *tables, *gathered(setting, spread, training=True))
    share, words = (FRAGMENTATION, "assumed") if setting.gpu else (SLACK, "measured")
    loose = kept.gib + passing.gib
    slack = Part("slack", share * loose, f"{share} × (activations + backward), {words}", ("loss", "backward"))
    return (*_states(setting, config, spread), *transient, slack)


def _states(setting: Setting, config: PolicyConfig, spread: Spread) -> Iterator[Part]:
    """Weights, master copies, moments and gradients of one process (ZeRO's Ψ, K = 12; arXiv 1910.02054, section 3.1).

    `fsdp` has float32 weights alone and casts what it gathers. DeepSpeed keeps float32 masters beside the weights from
    stage 1 on, and bfloat16 weights from stage 2 on; `megatron` keeps both in bfloat16. LoRA freezes the weights:
    moments and gradients are of adapters.
    """
    facts, half, gpu = setting.facts, setting.width == 2, setting.gpu
    engine, stage = spread.engine, spread.stage
    weights, moments = spread.sharded(facts, 3), spread.sharded(facts, 1)
    gradients = spread.sharded(facts, 2)
    if config.lora.rank:
        adapters = adapter_parameters(facts, config.lora.rank, config.lora.targets)
        share = 1 / spread.shard
        moments = gradients = Held(adapters * share, 0, f" adapters ÷ {spread.shard}")
    size = 2 if half and ((engine == "deepspeed" and stage >= 2) or engine == "megatron") else 4
    yield state("weights", size, facts, weights, "bf16" if size == 2 else "fp32", host=spread.offload_weights and gpu)
    if engine == "deepspeed" and stage:
        yield state("masters", 4, facts, moments, "fp32 copy", host=spread.offload_optimizer and gpu)
    elif size == 2:
        yield state("masters", 4, facts, weights, "fp32 copy")
    yield state("optimizer", 8, facts, moments, "fp32 AdamW moments", host=spread.offload_optimizer and gpu)
    away = spread.offload_optimizer and stage >= 2 and gpu
    yield state("gradients", 4, facts, gradients, "fp32", ("loss", "backward"), away)
    if engine == "megatron" and half:
        yield state("gradients", 2, facts, weights, "bf16, of one pass", ("backward",))


def state(
    name: str, size: int, facts: ModelFacts, mine: Held, what: str, stages: tuple[str, ...] = (), host: bool = False
) -> Part:
    """A number of bytes for each parameter that one process keeps."""
    where = ", in main memory" if host else ""
    return Part(
        name, size * mine.total / GIB, f"N {facts.total:,} × {size} B{mine.words} ({what}{where})", stages, host
    )


def gathered(setting: Setting, spread: Spread, training: bool) -> Iterator[Part]:
    """Weights that are whole for a while, and buffers of collectives.

    `fsdp` holds whole all that is outside the layers, the layer at hand and the one fetched ahead; in training also one
    layer's gradient before it is scattered, and that of the rest. ZeRO-3 keeps gathered weights up to a number, and
    sums gradients in buckets; below stage 2, in bfloat16, autocast keeps a cast copy of every weight.
    """
    facts, s = setting.facts, setting.width
    stages = ("loss", "backward") if training else ("loss",)
    if spread.engine == "fsdp":
        blocks, rest = (3, 2) if training else (2, 1)
        block, outside = spread.largest_block(facts), facts.outside_blocks
        gib = (blocks * block + rest * outside) * s / GIB
        words = f"({blocks} × layer {round(block):,} + {rest} × rest {outside:,}) × {s} B, whole"
        yield Part("gathered", gib, words, stages)
        return
    reduced, live = spread.buffers(facts)
    if training:
        yield Part("buffers", 4 * reduced / GIB, f"{round(reduced):,} gradients on their way × 4 B", stages)
    if training or spread.stage == 3:
        yield Part("gathered", s * live / GIB, f"{round(live):,} weights gathered at once × {s} B", stages)
    if spread.engine == "deepspeed" and spread.stage < 2 and s == 2 and training:
        yield state("gathered", 2, facts, spread.model(facts), "bf16, cast by autocast", stages)


def _activations(setting: Setting, config: PolicyConfig, spread: Spread) -> tuple[Part, Part]:
    """What the forward pass keeps, and what the backward pass of one layer adds to it (arXiv 2205.05198).

    Context parallelism splits tokens, tensor parallelism what is inside a layer, Megatron's sequence parallelism all of
    it. A pipeline's first process holds its layers of as many micro-batches as there are processes (1F1B, section 4.2).
    """
    facts, sizes, s = setting.facts, setting.sizes, setting.width
    parallel = config.parallel
    tokens = -(-sizes.micro_tokens // parallel.context)
    flight = min(parallel.pipeline, sizes.micro_batches)
    layers = -(-facts.layers // parallel.pipeline) * flight
    alike = spread.engine == "megatron" and (facts.experts > 0 or bool(config.engine_args.get("sequence_parallel")))
    row = sizes.micro_width * parallel.context if config.packing else 0
    layer = activation_bytes(facts, s, row, parallel.tensor, alike)
    update = ("loss", "backward")
    inputs = -(-facts.hidden // parallel.tensor) if alike else facts.hidden
    gradient = (2 * inputs + -(-4 * facts.feed_forward // parallel.tensor)) * s
    if config.recompute_activations:
        kept = layers * inputs * s
        formula = f"T {tokens:,} × {layers} layers × {inputs:,} · {s} B (inputs only; the rest is recomputed)"
        passing, of = layer + gradient, f"({layer:,} recomputed + {gradient:,})"
    else:
        kept = layers * layer
        formula = f"T {tokens:,} × {layers} layers × {layer:,} B"
        passing, of = gradient, f"{gradient:,}"
    return (
        Part("activations", tokens * kept / GIB, formula, update),
        Part("backward", tokens * passing / GIB, f"T {tokens:,} × {of} B, gradients inside one layer", ("backward",)),
    )


def logits(setting: Setting, training: bool) -> tuple[Part, ...]:
    """Float32 tables `[T, V]`: at most every token of a micro-batch predicts a trained one.

    Training holds logits, log-softmax and the gradients of both, and one table in the forward precision; during the
    backward pass only the logits, which metrics read afterwards. Without gradients two tables and one. Every peer of
    tensor and context parallelism has them whole: our engines gather what peers put out, and each computes the loss.
    """
    tokens, vocab, s = setting.sizes.micro_tokens, setting.facts.vocab, setting.width
    size = (16 if training else 8) + (s if s < 4 else 0)
    formula = (
        f"T {tokens:,} × V {vocab:,} × {size} B (logits, log-softmax{', gradients' * training}; at most all trained)"
    )
    at_loss = Part("logits", tokens * vocab * size / GIB, formula, ("loss",))
    if not training:
        return (at_loss,)
    kept = Part(
        "logits", tokens * vocab * 4 / GIB, f"T {tokens:,} × V {vocab:,} × 4 B, kept for metrics", ("backward",)
    )
    return at_loss, kept
