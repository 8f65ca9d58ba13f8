"""Memory of one worker, part by part, with the formula each number comes from.

    peak of a worker = what is always there + the largest stage

Stages do not overlap in time: a policy worker is at the `loss`, in the `backward` pass or gathers weights for a
`sync`; a rollout replica is in `prefill` or `decode`. Symbols in formulas: N parameters, W workers that share them,
T tokens of a micro-batch, V vocabulary, L layers, s bytes of one number in the forward pass (4 on a CPU, 2 on a GPU).

Sources: ZeRO (arXiv 1910.02054, section 3) for weights, gradients and optimizer, all sharded by FSDP2; the counting
of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section 4.1), done anew for
decoders with gated feed-forwards and grouped queries as transformers runs them; tests count autograd's saved tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from rollcli.config.schema import Recipe, RewardModelConfig, RlRecipe
from rollcli.devices.arithmetic import Arithmetic, arithmetic
from rollcli.devices.facts import ModelFacts, model_facts
from rollcli.devices.hardware import GIB

MIB = 2**20
PREFILL_TOKENS = 8192  # of one pass of the `transformers` rollout engine
CLASSIFIER_TOKENS = 16384  # of one pass of a classifier, `engines/classifier.py`

FLOORS_MIB = {
    "policy": 390, "reference": 390, "critic": 390, "rollout": 390, "environment": 380, "reward": 210,
    "judge": 390, "reward_model": 390,
}  # fmt: skip
"""Resident memory of a started worker before its model, on a CPU: Python, NumPy, Ray, torch, transformers (an
environment worker tokenizes, which imports both); a reward worker with its launcher and child. Measured 2026-11-30:
torch 2.13.0+cpu, transformers 5.19.0, ray 2.60.0, Python 3.11, Linux x86-64. Shared libraries count in each process."""
SERVICES_MIB = {"driver": 300, "Ray": 560}
"""The driver, and Ray's own processes (raylet, GCS, agents, monitors) on one node. Measured like `FLOORS_MIB`."""
CONTEXT_GIB = 1.0
"""CUDA context, cuBLAS and NCCL buffers of one process on a GPU. Not measured: the difference between "memory in use"
and "allocated by PyTorch" in reported out-of-memory messages (0.6 GiB for a bare context on H200, 1.1 GiB in FSDP)."""
SLACK = 0.25
"""Share of the transient memory that malloc keeps beside what is in use, on a CPU. Measured 2026-11-30, glibc, one
worker, a 28M-parameter model: 0.20 to 0.25 for 1,024 and 4,096 tokens; more with recomputation."""


@dataclass(frozen=True)
class Part:
    """One part of a worker's memory.

    Attributes:
        name: `weights`, `optimizer`, `gradients`, `activations`, `logits`, `kv`, or others that tables sum up.
        gib: size in GiB.
        formula: where the number comes from, with its numbers.
        stages: when it is there; empty is always.
    """

    name: str
    gib: float
    formula: str
    stages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """What the parts of one role depend on."""

    recipe: Recipe
    facts: ModelFacts
    sizes: Arithmetic
    gpu: bool

    @property
    def width(self) -> int:
        """Bytes of one number in the forward pass; the recipe's `model.dtype` when it names one."""
        named = {"float32": 4, "bfloat16": 2}
        return named.get(self.recipe.model.dtype, 2 if self.gpu else 4)


def parts_of(role: str, setting: Setting) -> tuple[Part, ...]:
    """Returns the memory of one worker of `role`, which is one of `policy`, `reference`, `critic`, `rollout`,
    `environment`, `reward`, `services` and the roles of reward models.

    Raises:
        PlanError: a reward model's configuration is not to be found.
    """
    kind = role.partition(".")[0]
    builders = {
        "policy": _policy, "reference": _reference, "critic": _critic, "rollout": _rollout, "services": _services,
        "judge": partial(_judge, role), "reward_model": partial(_classifier, role),
    }  # fmt: skip
    build = builders.get(kind)
    parts = build(setting) if build else ()
    if role != "services":
        parts = (*parts, _floor(kind, setting.gpu and build is not None))
    return tuple(part for part in parts if part.gib > 0)


def peak_stage(parts: tuple[Part, ...]) -> str | None:
    """Returns the stage in which the parts need most, or None when none has a stage."""
    stages = dict.fromkeys(stage for part in parts for stage in part.stages)
    return max(stages, key=lambda stage: stage_gib(parts, stage), default=None)


def stage_gib(parts: tuple[Part, ...], stage: str | None) -> float:
    """Returns the memory in `stage`: its parts and those always there."""
    return sum(part.gib for part in parts if not part.stages or stage in part.stages)


def peak_gib(parts: tuple[Part, ...]) -> float:
    """Returns the most memory the parts take at any time."""
    return stage_gib(parts, peak_stage(parts))


def activation_bytes(facts: ModelFacts, width: int, row: int) -> int:
    """Returns the bytes that one token keeps in one layer for the backward pass.

    Each of the two norms keeps a float32 input and, in the forward precision, its normalized and its scaled output:
    2h(4 + 2s). Attention keeps queries, its output, keys and values, the latter repeated to all heads where a mask is
    given, as in packed rows; a norm of queries and keys keeps both in float32 and normalized. The mask is one number
    per key. A gated feed-forward keeps 4 tables of its own width; an expert keeps 4, its input and its output.

    Args:
        width: bytes of a number (s).
        row: tokens of a packed row (the mask's width); 0 when rows are not packed.
    """
    keys = facts.query_width if row else facts.kv_width
    attention = 2 * facts.query_width + 2 * keys + row
    dense = 4 * facts.intermediate
    sparse = facts.active_experts * (4 * facts.expert_intermediate + 2 * facts.hidden) + 2 * facts.experts
    share = facts.sparse_layers / facts.layers
    mlp = share * sparse + (1 - share) * dense
    norms = 2 * facts.hidden * (4 + 2 * width) + facts.qk_norm * (facts.query_width + facts.kv_width) * (4 + width)
    return round(norms + (attention + mlp) * width)


def _policy(setting: Setting) -> tuple[Part, ...]:
    """One rank of FSDP2. The first rank, which alone collects the whole weights for a sync, stands for all."""
    facts, parts = setting.facts, _trained(setting)
    if setting.recipe.policy.processes > 1:
        whole = Part("sync", 4 * facts.total / GIB, f"N {facts.total:,} × 4 B, whole on the first worker", ("sync",))
        return (*parts, whole)
    return parts


def _critic(setting: Setting) -> tuple[Part, ...]:
    """What a policy of the critic's settings would hold, with one value for each position in place of logits."""
    assert isinstance(setting.recipe, RlRecipe)
    recipe = replace(setting.recipe, policy=setting.recipe.critic)
    facts = replace(setting.facts, critic=True)
    return _trained(replace(setting, recipe=recipe, facts=facts, sizes=arithmetic(recipe, facts)))


def _trained(setting: Setting) -> tuple[Part, ...]:
    """A model with its optimizer, and what an update takes."""
    facts, workers = setting.facts, setting.recipe.policy.processes
    update = ("loss", "backward")
    kept, passing = _activations(setting)
    parts = [
        _sharded("weights", 4, facts, workers, "fp32 master"),
        _sharded("optimizer", 8, facts, workers, "fp32 AdamW moments"),
        _sharded("gradients", 4, facts, workers, "fp32", update),
        kept,
        passing,
        *(() if facts.critic else _logits(setting, training=True)),
        _gathered(setting, training=True),
    ]
    if not setting.gpu:
        gib = SLACK * (kept.gib + passing.gib)
        parts.append(Part("slack", gib, f"{SLACK} × (activations + backward), measured", update))
    return tuple(parts)


def _reference(setting: Setting) -> tuple[Part, ...]:
    """Frozen weights, sharded like the policy's, and forward passes only."""
    facts, tokens = setting.facts, setting.sizes.micro_tokens
    width = 2 * facts.hidden + 3 * _feed_forward(facts)
    return (
        _sharded("weights", 4, facts, setting.recipe.reference_workers.processes, "fp32"),
        _gathered(setting, training=False),
        Part(
            "activations",
            tokens * width * setting.width / GIB,
            f"T {tokens:,} × (2h + 3i) {width:,} × {setting.width} B, one layer at a time",
            ("loss",),
        ),
        *_logits(setting, training=False),
    )


def _rollout(setting: Setting) -> tuple[Part, ...]:
    """One replica of the rollout engine: a copy of the model, keys and values of its rows, and one step's logits."""
    facts, sizes, s = setting.facts, setting.sizes, setting.width
    assert isinstance(setting.recipe, RlRecipe)
    sampling = setting.recipe.rollout.sampling
    per_token = 2 * facts.layers * facts.kv_width * s
    prefill = max(PREFILL_TOKENS, sizes.prompt)
    prefill = min(prefill, sizes.rows * sizes.prompt)
    working = 2 * facts.hidden + 3 * _feed_forward(facts)
    table = s + 16 + 36 * (sampling.top_p < 1 or sampling.top_k > 0)
    return (
        Part("weights", s * facts.total / GIB, f"N {facts.total:,} × {s} B"),
        Part(
            "kv",
            sizes.rows * sizes.sequence * per_token / GIB,
            f"{sizes.rows:,} rows × {sizes.sequence:,} tokens × 2 · {facts.layers} layers · {facts.kv_width:,} · {s} B",
        ),
        Part(
            "activations",
            prefill * (working * s + per_token) / GIB,
            f"prefill of {prefill:,} tokens × ((2h + 3i) {working:,} × {s} B + their kv {per_token:,} B)",
            ("prefill",),
        ),
        Part(
            "activations",
            sizes.rows * facts.heads * sizes.sequence * 12 / GIB,
            f"{sizes.rows:,} rows × {facts.heads} heads × {sizes.sequence:,} scores × 12 B, one layer at a time",
            ("decode",),
        ),
        Part(
            "logits",
            sizes.rows * facts.vocab * table / GIB,
            f"{sizes.rows:,} rows × V {facts.vocab:,} × {table} B (logits, logprobs, probabilities, cumulative fp64)",
            ("decode",),
        ),
    )


def _judge(role: str, setting: Setting) -> tuple[Part, ...]:
    """A rollout replica of the judge's model: a policy's longest sequence is its prompt, as many tokens its verdict's
    surroundings."""
    model, facts, width = _reward_model(role, setting)
    longest = min(2 * setting.sizes.sequence, facts.context or 2 * setting.sizes.sequence)
    rows, per_token = min(model.max_rows, setting.sizes.answers), 2 * facts.layers * facts.kv_width * width
    each = model.parallel.processes
    shared = f" ÷ {each} devices" if each > 1 else ""
    return (
        Part("weights", width * facts.total / each / GIB, f"N {facts.total:,} × {width} B{shared}"),
        Part(
            "kv",
            rows * longest * per_token / each / GIB,
            f"{rows:,} rows × {longest:,} tokens, twice the policy's at most, × {per_token:,} B{shared}",
        ),
        _prefill(facts, width, PREFILL_TOKENS),
    )


def _classifier(role: str, setting: Setting) -> tuple[Part, ...]:
    """A model without a head of its vocabulary's size, one pass at a time."""
    _, facts, width = _reward_model(role, setting)
    return (
        Part("weights", width * facts.total / GIB, f"N {facts.total:,} × {width} B"),
        _prefill(facts, width, CLASSIFIER_TOKENS),
    )


def _reward_model(role: str, setting: Setting) -> tuple[RewardModelConfig, ModelFacts, int]:
    """Returns a reward model, its shapes and the bytes of one of its numbers."""
    assert isinstance(setting.recipe, RlRecipe)
    model = next(each for each in setting.recipe.reward_models if each.role == role)
    width = {"float32": 4, "bfloat16": 2}.get(model.model.dtype, 2 if setting.gpu else 4)
    return model, replace(model_facts(model.model), critic=model.kind == "classifier"), width


def _prefill(facts: ModelFacts, width: int, tokens: int) -> Part:
    working = 2 * facts.hidden + 3 * _feed_forward(facts)
    formula = f"a pass of {tokens:,} tokens × (2h + 3i) {working:,} × {width} B"
    return Part("activations", tokens * working * width / GIB, formula, ("prefill",))


def _services(setting: Setting) -> tuple[Part, ...]:
    """The driver with a step's columns, Ray, and the weights on their way to the replicas, once in its object store."""
    parts = [Part(name, mib * MIB / GIB, f"{mib} MiB, measured") for name, mib in SERVICES_MIB.items()]
    if isinstance(setting.recipe, RlRecipe):
        total = setting.facts.total
        parts.append(Part("transit", 4 * total / GIB, f"N {total:,} × 4 B in the object store"))
        if setting.recipe.algorithm is not None and "reference_distribution" in setting.recipe.algorithm.needs():
            parts.append(_distribution(setting))
    return tuple(parts)


def _distribution(setting: Setting) -> Part:
    """The reference's log-probabilities of the whole vocabulary at every token of a step, `[T, V]` in the driver."""
    sizes, vocab = setting.sizes, setting.facts.vocab
    gib = sizes.samples * sizes.sequence * vocab * 4 / GIB
    return Part("distribution", gib, f"{sizes.samples:,} samples × {sizes.sequence:,} tokens × V {vocab:,} × 4 B")


def _floor(role: str, gpu: bool) -> Part:
    if gpu:
        return Part("context", CONTEXT_GIB, f"{CONTEXT_GIB} GiB for CUDA context and libraries, assumed")
    return Part("process", FLOORS_MIB[role] * MIB / GIB, f"{FLOORS_MIB[role]} MiB for the bare process, measured")


def _sharded(name: str, size: int, facts: ModelFacts, workers: int, what: str, stages: tuple[str, ...] = ()) -> Part:
    shared = f" ÷ W {workers}" if workers > 1 else ""
    return Part(name, size * facts.total / workers / GIB, f"N {facts.total:,} × {size} B{shared} ({what})", stages)


def _gathered(setting: Setting, training: bool) -> Part:
    """What FSDP2 holds whole: all that is outside the layers, the layer at hand and the one fetched ahead; in
    training also one layer's gradient before it is scattered, and that of the rest."""
    facts, s = setting.facts, setting.width
    blocks, rest = (3, 2) if training else (2, 1)
    gib = (blocks * facts.largest_block + rest * facts.outside_blocks) * s / GIB
    formula = f"({blocks} × layer {facts.largest_block:,} + {rest} × rest {facts.outside_blocks:,}) × {s} B, whole"
    return Part("gathered", gib, formula, ("loss", "backward") if training else ("loss",))


def _activations(setting: Setting) -> tuple[Part, Part]:
    """What the forward pass keeps, and what the backward pass of one layer adds to it."""
    facts, sizes, s = setting.facts, setting.sizes, setting.width
    policy, tokens = setting.recipe.policy, setting.sizes.micro_tokens
    layer = activation_bytes(facts, s, sizes.micro_width if policy.packing else 0)
    update = ("loss", "backward")
    gradient = (2 * facts.hidden + 4 * _feed_forward(facts)) * s
    if policy.recompute_activations:
        kept = facts.layers * facts.hidden * s
        formula = (
            f"T {tokens:,} × {facts.layers} layers × {facts.hidden:,} · {s} B (inputs only; the rest is recomputed)"
        )
        passing, of = layer + gradient, f"({layer:,} recomputed + {gradient:,})"
    else:
        kept = facts.layers * layer
        formula = f"T {tokens:,} × {facts.layers} layers × {layer:,} B"
        passing, of = gradient, f"{gradient:,}"
    return (
        Part("activations", tokens * kept / GIB, formula, update),
        Part("backward", tokens * passing / GIB, f"T {tokens:,} × {of} B, gradients inside one layer", ("backward",)),
    )


def _logits(setting: Setting, training: bool) -> tuple[Part, ...]:
    """Float32 tables `[T, V]`: at most every token of a micro-batch predicts a trained one.

    Training holds logits, log-softmax and the gradients of both, and one table in the forward precision; during the
    backward pass only the logits, which metrics read afterwards. Without gradients two tables and one.
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


def _feed_forward(facts: ModelFacts) -> int:
    """Width of the feed-forward that one token passes, all its experts together."""
    sparse = facts.active_experts * facts.expert_intermediate if facts.sparse_layers else 0
    return max(sparse, facts.intermediate if facts.sparse_layers < facts.layers else 0)
