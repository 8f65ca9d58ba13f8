"""Memory of one worker, part by part, with the formula each number comes from.

    peak of a worker = what is always there + the largest stage

Stages do not overlap in time: a policy worker is at the `loss`, in the `backward` pass, gathers weights for a `sync` or
all of its state for a `checkpoint`; a rollout replica is in `prefill`, `decode` or takes weights in a `sync`. Symbols:
N parameters (each formula says what divides them, spread.py), T tokens of a micro-batch, V vocabulary, L layers, s
bytes of one number in the forward pass (4 on a CPU, 2 on a GPU).

Sources: ZeRO (arXiv 1910.02054, section 3 and 5) for weights, gradients and optimizer; the counting of "Reducing
Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, equations 1, 2 and 5), done anew in
activations.py; PagedAttention (arXiv 2309.06180, section 3) for keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from rollcli.config.schema import RewardModelConfig, RlRecipe
from rollcli.devices.arithmetic import arithmetic
from rollcli.devices.facts import ModelFacts, model_facts
from rollcli.devices.hardware import GIB
from rollcli.devices.parts import Part, Setting, peak_gib
from rollcli.devices.spread import adapter_parameters, held, spread_of
from rollcli.devices.training_memory import gathered, logits, state, trained

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
GPU_SHARE = {"vllm": ("gpu_memory_utilization", 0.9), "sglang": ("mem_fraction_static", 0.88)}
"""Option that says which share of a GPU an engine takes when it starts, and its default (vLLM 0.20, SGLang 0.5)."""


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


def _policy(setting: Setting) -> tuple[Part, ...]:
    """What is trained, and what the first worker gathers for a sync and for a checkpoint."""
    recipe, total = setting.recipe, setting.facts.total
    config, spread = recipe.policy, spread_of(recipe.policy)
    parts = trained(setting, config)
    if isinstance(recipe, RlRecipe) and (config.processes > 1 or setting.gpu):
        whole = spread.engine == "megatron"
        bucket = 4 * total / GIB if whole else setting.bucket_gib
        words = f"N {total:,} × 4 B, whole" if whole else f"a bucket of {bucket:.2f} GiB (`rollout.sync.bucket_mib`)"
        parts += (Part("sync", bucket, f"{words} on the first worker", ("sync",), whole and setting.gpu, True),)
    if config.processes > 1 or setting.gpu:
        updated = adapter_parameters(setting.facts, config.lora.rank, config.lora.targets) or total
        saved = (4 * total + 8 * updated) / GIB
        words = f"N {total:,} × 4 B + {updated:,} × 8 B, whole on the first worker"
        parts += (Part("checkpoint", saved, words, ("checkpoint",), setting.gpu, True),)
    return parts


def _critic(setting: Setting) -> tuple[Part, ...]:
    """What a policy of the critic's settings would hold, with one value for each position in place of logits."""
    assert isinstance(setting.recipe, RlRecipe)
    recipe = replace(setting.recipe, policy=setting.recipe.critic)
    facts = replace(setting.facts, critic=True)
    return trained(replace(setting, recipe=recipe, facts=facts, sizes=arithmetic(recipe, facts)), recipe.policy)


def _reference(setting: Setting) -> tuple[Part, ...]:
    """Frozen weights, spread like the policy's, and forward passes only."""
    assert isinstance(setting.recipe, RlRecipe)
    config = setting.recipe.reference_workers
    facts, spread, s = setting.facts, spread_of(config), setting.width
    tokens, sizes = setting.sizes.micro_tokens, config.parallel
    weights = spread.sharded(facts, 3)
    size = s if spread.engine != "fsdp" else 4
    masters = (state("masters", 4, facts, weights, "fp32 copy"),) if spread.engine == "megatron" and s == 2 else ()
    width = 2 * facts.hidden + -(-3 * facts.feed_forward // sizes.tensor)
    mine = -(-tokens // sizes.context)
    return (
        state("weights", size, facts, weights, f"{size * 8} bit", host=spread.offload_weights and setting.gpu),
        *masters,
        *gathered(setting, spread, training=False),
        Part(
            "activations",
            mine * width * s / GIB,
            f"T {mine:,} × (2h + 3i) {width:,} × {s} B, one layer at a time",
            ("loss",),
        ),
        *logits(setting, training=False),
    )


def _rollout(setting: Setting) -> tuple[Part, ...]:
    """One process of a replica: its part of the model, keys and values of the replica's rows, one step's logits.

    Keys and values are split by heads, as far as there are any, and by a pipeline's layers; compressed ones
    (arXiv 2405.04434, section 2.1.2) not by heads. vLLM and SGLang take a share of the device when they start: what the
    rest leaves of it holds keys and values, and rows that find no place wait. They give it back while they sleep.
    """
    facts, sizes, s = setting.facts, setting.sizes, setting.width
    assert isinstance(setting.recipe, RlRecipe)
    rollout = setting.recipe.rollout
    sampling, parallel = rollout.sampling, rollout.parallel
    paged = rollout.engine in GPU_SHARE
    mine = held(facts, parallel.tensor, parallel.pipeline)
    heads = 1 if facts.latent and paged else min(parallel.tensor, facts.kv_heads)
    layers = -(-facts.layers // parallel.pipeline)
    per_token = layers * -(-facts.cache_width(paged) // heads) * s
    prefill = min(max(PREFILL_TOKENS, sizes.prompt), sizes.rows * sizes.prompt)
    working = 2 * facts.hidden + -(-3 * facts.feed_forward // parallel.tensor)
    table = s + 16 + 36 * (sampling.top_p < 1 or sampling.top_k > 0)
    split = "".join(f" ÷ {word} {by}" for word, by in (("heads", heads), ("pipeline", parallel.pipeline)) if by > 1)
    using = ("prefill", "decode")
    found = [
        state("weights", s, facts, mine, f"{s * 8} bit"),
        Part(
            "kv",
            sizes.rows * sizes.sequence * per_token / GIB,
            f"{sizes.rows:,} rows × {sizes.sequence:,} tokens × {facts.layers} layers × "
            f"{facts.cache_width(paged):,} · {s} B{split}",
            (*using, "sync") if paged else using,
        ),
        Part(
            "activations",
            prefill * (working * s + (0 if paged else per_token)) / GIB,
            f"prefill of {prefill:,} tokens × ((2h + 3i) {working:,} × {s} B"
            + (")" if paged else f" + their kv {per_token:,} B)"),
            ("prefill",),
        ),
        Part(
            "activations",
            0.0 if paged else sizes.rows * facts.heads * sizes.sequence * 12 / GIB,
            f"{sizes.rows:,} rows × {facts.heads} heads × {sizes.sequence:,} scores × 12 B, one layer at a time",
            ("decode",),
        ),
        Part(
            "logits",
            sizes.rows * facts.vocab * table / GIB,
            f"{sizes.rows:,} rows × V {facts.vocab:,} × {table} B (logits, logprobs, probabilities, cumulative fp64)",
            ("decode",),
        ),
        Part("sync", setting.bucket_gib * s / 4, f"a bucket of {setting.bucket_gib:.2f} GiB at {s} of 4 B", ("sync",)),
    ]
    if paged and setting.gpu and setting.memory_gib:
        found[1:2] = _paged(setting, found)
    return tuple(found)


def _paged(setting: Setting, parts: list[Part]) -> Iterator[Part]:
    """Keys and values in all that is left of an engine's share of the device, one whole row at least.

    Where the share is too small for that the engine does not start, however large the device is: what it may not take
    counts as taken.
    """
    assert isinstance(setting.recipe, RlRecipe)
    rollout, asked = setting.recipe.rollout, parts[1]
    option, usual = GPU_SHARE[rollout.engine]
    share = rollout.engine_args.get(option, usual)
    taken, row = share * setting.memory_gib, asked.gib / max(setting.sizes.rows, 1)
    rest = peak_gib(tuple(part for part in parts if part is not asked)) + CONTEXT_GIB
    kept = max(taken - rest, row)
    words = f"{share} (`rollout.engine_args.{option}`) × {setting.memory_gib:.1f} GiB - {rest:.1f} GiB of the rest: "
    yield replace(asked, gib=kept, formula=f"{words}{int(kept / row):,} of {asked.formula}")
    if taken - rest < row:
        words = f"(1 - {share}) × {setting.memory_gib:.1f} GiB, not the engine's, which lacks room for one row"
        yield Part("reserved", (1 - share) * setting.memory_gib, words, asked.stages)


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
    working = 2 * facts.hidden + 3 * facts.feed_forward
    formula = f"a pass of {tokens:,} tokens × (2h + 3i) {working:,} × {width} B"
    return Part("activations", tokens * working * width / GIB, formula, ("prefill",))


def _services(setting: Setting) -> tuple[Part, ...]:
    """The driver with a step's columns, Ray, and the weights on their way to the replicas, once in its object store."""
    parts = [Part(name, mib * MIB / GIB, f"{mib} MiB, measured") for name, mib in SERVICES_MIB.items()]
    if isinstance(setting.recipe, RlRecipe):
        total, s = setting.facts.total, setting.width
        if setting.recipe.rollout.sync.transport in ("auto", "object_store"):
            parts.append(Part("transit", s * total / GIB, f"N {total:,} × {s} B in the object store"))
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
