"""What a model's `config.json` says about its size: shapes, and the exact number of parameters by part.

Counts follow transformers' modules of each family: dense Llama (SmolLM2 is one), Mistral, Qwen2, Qwen3; mixtures of
experts Mixtral, Qwen3-MoE. Any other architecture is counted as a plain decoder from its shapes, if it has them all
and nothing that would make the count senseless; `approximate` then says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollcli.config.schema import ModelConfig
from rollcli.errors import PlanError
from rollcli.runs.locations import resolve_model

SHAPES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class Family:
    """How one `model_type` of transformers differs from a plain decoder.

    Attributes:
        qkv_bias: biases of query, key and value; None reads `attention_bias`, which then counts for the output too.
        mlp_bias: reads `mlp_bias`.
        qk_norm: a norm of each head's query and key.
        defaults: what transformers takes for a key that the configuration leaves out.
    """

    qkv_bias: bool | None = False
    mlp_bias: bool = False
    qk_norm: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias=None, mlp_bias=True, defaults={"max_position_embeddings": 2048}),
    "mistral": Family(defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072}),
    "qwen2": Family(qkv_bias=True, defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768}),
    "qwen3": Family(
        qkv_bias=None,
        qk_norm=True,
        defaults={"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    ),
    "mixtral": Family(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
    ),
    "qwen3_moe": Family(
        qkv_bias=None,
        qk_norm=True,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
}
_BEYOND_SHAPES = ("kv_lora_rank", "n_shared_experts", "shared_expert_intermediate_size", "vision_config",
                  "state_size", "ssm_cfg", "encoder_layers", "linear_num_key_heads")  # fmt: skip
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelFacts:
    """Shapes of one decoder.

    Attributes:
        name: what the recipe calls the model.
        model_type: family, as transformers names it.
        kv_heads: heads of keys and values.
        intermediate: width of a dense feed-forward.
        context: most positions the model was made for; 0 when its configuration does not say.
        qkv_bias, output_bias, mlp_bias: linear layers that add a bias.
        experts: experts of a sparse layer; 0 in a dense model.
        active_experts: experts that one token passes.
        expert_intermediate: width of one expert.
        sparse_layers: layers with experts; the others are dense.
        critic: one value for each position in place of logits.
        approximate: why the count is not exact; empty when it is.
    """

    name: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    context: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_intermediate: int = 0
    sparse_layers: int = 0
    critic: bool = False
    approximate: tuple[str, ...] = ()

    @property
    def query_width(self) -> int:
        """Width of all heads' queries together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all heads' keys together, and of their values."""
        return self.kv_heads * self.head_dim

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters by part: `embeddings`, `attention`, `mlp`, `norms`, `head`.

        A tied head has none of its own; a critic's has a weight for each input and a bias.
        """
        return self._count(self.experts)

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    @property
    def active(self) -> int:
        """Parameters that one token passes: of the experts, only those it is routed to."""
        return sum(self._count(self.active_experts).values())

    @property
    def largest_block(self) -> int:
        """Parameters of the largest decoder layer, the unit that full sharding gathers."""
        mlp = max(
            self._expert_layer(self.experts) if self.sparse_layers else 0,
            self._dense_layer() if self.sparse_layers < self.layers else 0,
        )
        return self._attention_layer() + mlp + self._norms_layer()

    @property
    def outside_blocks(self) -> int:
        """Parameters outside the decoder layers: embeddings, final norm, head."""
        return self.parameters["embeddings"] + self.parameters["head"] + self.hidden

    def _count(self, experts: int) -> dict[str, int]:
        dense = (self.layers - self.sparse_layers) * self._dense_layer()
        return {
            "embeddings": self.vocab * self.hidden,
            "attention": self.layers * self._attention_layer(),
            "mlp": dense + self.sparse_layers * self._expert_layer(experts),
            "norms": self.layers * self._norms_layer() + self.hidden,
            "head": self.hidden + 1 if self.critic else 0 if self.tied else self.vocab * self.hidden,
        }

    def _attention_layer(self) -> int:
        weights = 2 * self.hidden * (self.query_width + self.kv_width)
        biases = self.qkv_bias * (self.query_width + 2 * self.kv_width) + self.output_bias * self.hidden
        return weights + biases

    def _dense_layer(self) -> int:
        return 3 * self.hidden * self.intermediate + self.mlp_bias * (2 * self.intermediate + self.hidden)

    def _expert_layer(self, experts: int) -> int:
        """The router scores every expert, however many are used."""
        return self.hidden * self.experts + experts * 3 * self.hidden * self.expert_intermediate

    def _norms_layer(self) -> int:
        return 2 * self.hidden + self.qk_norm * 2 * self.head_dim


def model_facts(model: ModelConfig | str) -> ModelFacts:
    """Returns the facts of a recipe's model: its `initialize` block, or the `config.json` of its path.

    Raises:
        ModelNotFound: no such embedded model, run or step.
        PlanError: no configuration to be had here, or one that does not say enough; with what is missing.
    """
    model = ModelConfig(model) if isinstance(model, str) else model
    if model.initialize is not None:
        values = dict(model.initialize)
        return facts_from_config(values, model.path, "`model.initialize`")
    path = find_config(model.path, model.revision)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"`model.path`: `{path}` cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise PlanError(f"`model.path`: `{path}` does not hold a model's configuration")
    return facts_from_config(values, model.path, f"`{path}`")


def find_config(name: str, revision: str | None = None) -> Path:
    """Returns the `config.json` of a model: folder, checkpoint, `embedded:NAME`, `RUN@STEP`, or a hub id in the cache.

    Raises:
        ModelNotFound, PlanError: it is not on this machine.
    """
    folder = Path(resolve_model(name)).expanduser()
    if (folder / "config.json").is_file():
        return folder / "config.json"
    if folder.is_dir():
        raise PlanError(
            f"`model.path`: there is no `config.json` in `{folder}`", hint="give a folder in the hub's layout"
        )
    cache = _hub_cache()
    repository = cache / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text(encoding="ascii").strip() if reference.is_file() else revision or ""
    config = repository / "snapshots" / commit / "config.json"
    if commit and config.is_file():
        return config
    raise PlanError(
        f"`model.path`: the shapes of `{name}` are not known here: "
        f"it is no folder, and `{cache}` has no `config.json` of it",
        hint=f"fetch it with `hf download {name} config.json`, or set `model.path=` to a local folder",
    )


def facts_from_config(values: Mapping[str, Any], name: str, source: str = "the configuration") -> ModelFacts:
    """Returns the facts that a configuration in the hub's naming holds.

    Raises:
        PlanError: shapes are missing or impossible, or the architecture has parts that shapes do not tell.
    """
    text = values.get("text_config")
    if isinstance(text, Mapping) and "vision_config" in values:
        tied = {"tie_word_embeddings": values.get("tie_word_embeddings", False)}
        found = facts_from_config({**tied, **text}, name, source)
        why = (*found.approximate, "the vision part is not counted")
        return replace(found, model_type=str(values.get("model_type")), approximate=why)
    model_type = str(values.get("model_type", "unknown"))
    family = FAMILIES.get(model_type)
    missing = [key for key in SHAPES if not isinstance(values.get(key), int)]
    if missing:
        of = "" if family else f" of the unknown architecture `{model_type}`"
        raise PlanError(f"{source}{of} lacks {', '.join(f'`{key}`' for key in missing)}", hint="add them, as integers")
    if family is None:
        odd = [key for key in _BEYOND_SHAPES if values.get(key)]
        if odd:
            raise PlanError(
                f"{source}: architecture `{model_type}` has parts that are not modelled (`{'`, `'.join(odd)}`)",
                hint=f"known: {', '.join(FAMILIES)}, and plain decoders",
            )
    facts = _facts(values, name, model_type, family or Family(qkv_bias=None, mlp_bias=True))
    for label in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab"):
        if getattr(facts, label) < 1:
            raise PlanError(f"{source}: {label} is {getattr(facts, label)}, must be at least 1")
    return facts


def _facts(values: Mapping[str, Any], name: str, model_type: str, family: Family) -> ModelFacts:
    def get(key: str, default: Any = None) -> Any:
        found = values.get(key)
        return family.defaults.get(key, default) if found is None else found

    heads, hidden, layers = values["num_attention_heads"], values["hidden_size"], values["num_hidden_layers"]
    experts = next((get(key) for key in _EXPERT_KEYS if get(key)), 0)
    attention_bias = bool(get("attention_bias", False))
    known = model_type in FAMILIES
    return ModelFacts(
        name=name,
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=get("num_key_value_heads", heads),
        head_dim=get("head_dim", hidden // max(heads, 1)),
        intermediate=values["intermediate_size"],
        vocab=values["vocab_size"],
        tied=bool(get("tie_word_embeddings", False)),
        context=get("max_position_embeddings", 0),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=family.mlp_bias and bool(get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        experts=experts,
        active_experts=get("num_experts_per_tok", 1) if experts else 0,
        expert_intermediate=get("moe_intermediate_size", values["intermediate_size"]) if experts else 0,
        sparse_layers=_sparse_layers(values, layers) if experts else 0,
        approximate=() if known else (f"architecture `{model_type}` counted as a plain decoder of its shapes",),
    )


def _sparse_layers(values: Mapping[str, Any], layers: int) -> int:
    """Counts the layers with experts: all, less those that Qwen3-MoE's two keys make dense."""
    dense, every = values.get("mlp_only_layers") or (), values.get("decoder_sparse_step") or 1
    return sum(layer not in dense and (layer + 1) % every == 0 for layer in range(layers))


def _hub_cache() -> Path:
    """Folder of the hub's cache, as `huggingface_hub` finds it."""
    home = os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", Path(home) / "hub")).expanduser()
