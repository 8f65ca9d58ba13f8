"""What a model's `config.json` says about its size: shapes, and the exact number of parameters by part.

Counts follow transformers' modules of each family (families.py). Any other architecture is counted as a plain decoder
from its shapes, if it has them all and nothing that would make the count senseless; `approximate` then says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rollcli.config.schema import ModelConfig
from rollcli.devices.families import FAMILIES, Family
from rollcli.devices.shapes import Fetch, model_shapes
from rollcli.devices.vision_facts import vision_parameters
from rollcli.errors import PlanError

SHAPES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_BEYOND_SHAPES = ("kv_lora_rank", "n_shared_experts", "shared_expert_intermediate_size", "vision_config",
                  "state_size", "ssm_cfg", "encoder_layers", "linear_num_key_heads")  # fmt: skip
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): what is cached is compressed.

    Attributes:
        query_rank: width of the compressed query; 0 where queries are not compressed.
        kv_rank: width of the compressed keys and values of one token.
        rope: width of the one key, shared by all heads, that carries the position.
        nope, value: widths of a head's other key, and of its value.
    """

    query_rank: int
    kv_rank: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True)
class ModelFacts:
    """Shapes of one decoder.

    Attributes:
        name: what the recipe calls the model.
        model_type: family, as transformers names it.
        kv_heads: heads of keys and values.
        head_dim: width of a head's query.
        intermediate: width of a dense feed-forward.
        context: most positions the model was made for; 0 when its configuration does not say.
        qkv_bias, output_bias, mlp_bias, head_bias, expert_bias: linear layers that add a bias.
        gated: the feed-forward has three matrices, else two.
        qk_norm: queries and keys are normalized, each head by itself.
        norms, norm_tensors: norms of the hidden state in each layer, and what each consists of.
        sinks: each head has an attention sink.
        experts: routed experts of a sparse layer; 0 in a dense model.
        active_experts: of these, those that one token passes.
        expert_intermediate: width of one expert.
        shared_intermediate: width of the shared experts, which every token passes, together.
        shared_gate: one number weighs the shared experts' output.
        sparse_layers: layers with experts; the others are dense.
        latent: how keys and values are compressed; None where they are not.
        vision: parameters of the vision tower.
        critic: one value for each position in place of logits.
        approximate: why the count is not exact; empty when it is.
        origin: where the shapes come from.
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
    head_bias: bool = False
    expert_bias: bool = False
    gated: bool = True
    qk_norm: bool = False
    norms: int = 2
    norm_tensors: int = 1
    sinks: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    shared_gate: bool = False
    sparse_layers: int = 0
    latent: Latent | None = None
    vision: int = 0
    critic: bool = False
    approximate: tuple[str, ...] = ()
    origin: str = field(default="", compare=False)

    @property
    def query_width(self) -> int:
        """Width of all heads' queries together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all heads' keys together, and of their values at most."""
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of all heads' values together, and of attention's output before its last matrix."""
        return self.heads * (self.latent.value if self.latent else self.head_dim)

    def cache_width(self, compressed: bool = True) -> int:
        """Returns the numbers that one token has in the KV cache of one layer.

        Args:
            compressed: a model with latent attention caches that (vLLM, SGLang), else whole keys and values.
        """
        if self.latent is None:
            return 2 * self.kv_width
        return self.latent.kv_rank + self.latent.rope if compressed else self.kv_width + self.value_width

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters by part: `embeddings`, `attention`, `mlp`, `norms`, `head`, and `vision` where there is a tower.

        A tied head has none of its own; a critic's has a weight for each input and a bias.
        """
        return self._count(self.experts)

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    @property
    def active(self) -> int:
        """Parameters that one token passes: of the routed experts, only those it is routed to."""
        return sum(self._count(self.active_experts).values())

    @property
    def routed(self) -> int:
        """Parameters of all routed experts, which expert parallelism splits; the router is not among them."""
        return self.sparse_layers * self.experts * self._expert()

    @property
    def routed_layer(self) -> int:
        """Parameters of one sparse layer's routed experts."""
        return self.experts * self._expert() if self.sparse_layers else 0

    @property
    def unsplit(self) -> int:
        """Parameters that tensor parallelism leaves whole on every device: norms, the router, biases that are added
        after a sum, and the down-projections of latent attention."""
        return self.layers * self.unsplit_layer + self.norm_tensors * self.hidden + self.vision

    @property
    def unsplit_layer(self) -> int:
        """The same of one layer, the sparse ones counting evenly."""
        share = self.sparse_layers / self.layers
        whole = self._norms_layer() + (self.output_bias + self.mlp_bias) * self.hidden
        if self.latent:
            whole += self.hidden * (self.latent.query_rank + self.latent.kv_rank + self.latent.rope)
        router = self.hidden * self.experts + self.expert_bias * self.experts + self.shared_gate * self.hidden
        return whole + round(share * router)

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
        return self.parameters["embeddings"] + self.parameters["head"] + self.norm_tensors * self.hidden

    @property
    def feed_forward(self) -> int:
        """Width of the feed-forward that one token passes in the widest layer, all its experts together."""
        sparse = self.active_experts * self.expert_intermediate + self.shared_intermediate
        dense = self.intermediate if self.sparse_layers < self.layers else 0
        return max(sparse if self.sparse_layers else 0, dense)

    def _count(self, experts: int) -> dict[str, int]:
        dense = (self.layers - self.sparse_layers) * self._dense_layer()
        head = self.vocab * (self.hidden * (not self.tied) + self.head_bias)
        parts = {
            "embeddings": self.vocab * self.hidden,
            "attention": self.layers * self._attention_layer(),
            "mlp": dense + self.sparse_layers * self._expert_layer(experts),
            "norms": self.layers * self._norms_layer() + self.norm_tensors * self.hidden,
            "head": self.hidden + 1 if self.critic else head,
        }
        return {**parts, "vision": self.vision} if self.vision else parts

    def _attention_layer(self) -> int:
        if self.latent is None:
            weights = 2 * self.hidden * (self.query_width + self.kv_width) + self.sinks * self.heads
            return weights + self.qkv_bias * (self.query_width + 2 * self.kv_width) + self.output_bias * self.hidden
        sizes = self.latent
        rank = sizes.query_rank
        query = rank * (self.hidden + self.query_width) if rank else self.hidden * self.query_width
        down, up = sizes.kv_rank + sizes.rope, sizes.kv_rank * self.heads * (sizes.nope + sizes.value)
        biases = self.qkv_bias * (rank + down) + self.output_bias * self.hidden
        return query + self.hidden * down + up + self.value_width * self.hidden + biases

    def _dense_layer(self) -> int:
        matrices = 2 + self.gated
        biases = self.mlp_bias * ((matrices - 1) * self.intermediate + self.hidden)
        return matrices * self.hidden * self.intermediate + biases

    def _expert(self) -> int:
        biases = self.expert_bias * (2 * self.expert_intermediate + self.hidden)
        return 3 * self.hidden * self.expert_intermediate + biases

    def _expert_layer(self, experts: int) -> int:
        """The router scores every expert, however many are used."""
        router = self.hidden * self.experts + self.expert_bias * self.experts
        shared = 3 * self.hidden * self.shared_intermediate + self.shared_gate * self.hidden
        return router + shared + experts * self._expert()

    def _norms_layer(self) -> int:
        of_heads = self.qk_norm * 2 * self.head_dim
        if self.latent:
            of_heads += self.latent.query_rank + self.latent.kv_rank
        return self.norms * self.norm_tensors * self.hidden + of_heads


def model_facts(model: ModelConfig | str, fetch: Fetch | None = None) -> ModelFacts:
    """Returns the facts of a recipe's model: of its `initialize` block, its `config.json`, or the catalogue's shapes.

    Args:
        model: the recipe's block, or a path alone.
        fetch: gets a `config.json` that is not on this machine.

    Raises:
        ModelNotFound: no such embedded model, run or step.
        PlanError: no configuration to be had here, or one that does not say enough; with what is missing.
    """
    model = ModelConfig(model) if isinstance(model, str) else model
    found = model_shapes(model, fetch)
    return replace(facts_from_config(found.values, model.path, found.source), origin=found.origin)


def facts_from_config(values: Mapping[str, Any], name: str, source: str = "the configuration") -> ModelFacts:
    """Returns the facts that a configuration in the hub's naming holds.

    Raises:
        PlanError: shapes are missing or impossible, or the architecture has parts that shapes do not tell.
    """
    model_type = str(values.get("model_type", "unknown"))
    family = FAMILIES.get(model_type)
    tower = values.get("vision_config")
    if isinstance(tower, Mapping):
        # Some configurations hold the decoder's shapes beside `vision_config`, others in a block of their own.
        text = values.get("text_config")
        inner = {**values, **(text if isinstance(text, Mapping) else {}), "vision_config": None, "text_config": None}
        for key in ("tie_word_embeddings", "model_type"):
            inner[key] = values.get(key)
        found = facts_from_config(inner, name, source)
        if family is not None and family.vision is not None:
            return replace(found, vision=vision_parameters(family.vision, tower, found.hidden))
        return replace(found, approximate=(*found.approximate, "the vision part is not counted"))
    known = {
        **(family.defaults if family else {}),
        **{key: value for key, value in values.items() if value is not None},
    }
    missing = [key for key in SHAPES if not isinstance(known.get(key), int)]
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
    if "q_lora_rank" in values and values["q_lora_rank"] is None:
        known["q_lora_rank"] = 0
    facts = _facts(known, name, model_type, family or Family(qkv_bias=None, mlp_bias=None))
    for label in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab"):
        if getattr(facts, label) < 1:
            raise PlanError(f"{source}: {label} is {getattr(facts, label)}, must be at least 1")
    if family is None:
        why = f"architecture `{model_type}` counted as a plain decoder of its shapes"
        return replace(facts, approximate=(why,))
    return facts


def _facts(known: Mapping[str, Any], name: str, model_type: str, family: Family) -> ModelFacts:
    """Returns the facts of a configuration whose gaps are filled."""
    heads, hidden, layers = known["num_attention_heads"], known["hidden_size"], known["num_hidden_layers"]
    attention_bias = bool(known.get("attention_bias", False))
    latent = None
    if known.get("kv_lora_rank"):
        sizes = (known[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
        latent = Latent(*sizes, known["v_head_dim"])
    facts = ModelFacts(
        name=name,
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else known.get("num_key_value_heads", heads),
        head_dim=latent.nope + latent.rope if latent else known.get("head_dim", hidden // max(heads, 1)),
        intermediate=known["intermediate_size"],
        vocab=known["vocab_size"],
        tied=bool(known.get("tie_word_embeddings", False)),
        context=known.get("max_position_embeddings", 0),
        qkv_bias=bool(known.get("qkv_bias", attention_bias)) if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias and family.qkv_bias is None if family.output_bias is None else family.output_bias,
        mlp_bias=bool(known.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
        head_bias=family.head_bias,
        gated=family.gated,
        qk_norm=bool(known.get("use_qk_norm", False)) if family.qk_norm is None else family.qk_norm,
        norms=family.norms,
        norm_tensors=family.norm_tensors,
        sinks=family.sinks,
        latent=latent,
    )
    experts = next((known[key] for key in _EXPERT_KEYS if known.get(key)), 0)
    if not experts:
        return facts
    width = known.get("moe_intermediate_size", known["intermediate_size"])
    return replace(
        facts,
        experts=experts,
        active_experts=known.get("num_experts_per_tok", 1),
        expert_intermediate=width,
        expert_bias=family.expert_bias,
        shared_intermediate=known.get("n_shared_experts", 0) * width or known.get("shared_expert_intermediate_size", 0),
        shared_gate=bool(known.get("shared_expert_intermediate_size")),
        sparse_layers=_sparse_layers(known, layers),
    )


def _sparse_layers(known: Mapping[str, Any], layers: int) -> int:
    """Counts the layers with experts: all, less those that `first_k_dense_replace` (DeepSeek), `mlp_only_layers` and
    `decoder_sparse_step` (Qwen) make dense."""
    dense, every = known.get("mlp_only_layers", ()), known.get("decoder_sparse_step", 1)
    first = known.get("first_k_dense_replace", 0)
    return sum(layer >= first and layer not in dense and (layer + 1) % every == 0 for layer in range(layers))
