"""A `transformers` language model or critic as a model of Megatron-Core: its configuration, its layers, its forward.

Llama, Mistral, Qwen 2 and 3, Mixtral and Qwen 3 MoE differ in what a few settings say. The layers are Megatron's
own; only the norm is ours, because Megatron's plain one refuses sequence parallelism. The attention takes any mask,
so packed sequences are told apart by one. On a GPU with Transformer Engine installed its attention for packed
sequences takes the place of the masked one, which needs memory by the square of a row (written, not run here).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedModel

from rollcli.config.schema import PolicyConfig
from rollcli.engines.parallel_sizes import number_of_experts
from rollcli.errors import EngineError

ARCHITECTURES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type` that the mapping knows."""


def check_architecture(model: PreTrainedModel) -> None:
    """Refuses a model that the mapping does not know.

    Raises:
        EngineError: with the architectures known, or what about this one is not.
    """
    config = model.config
    known = f"known: {', '.join(ARCHITECTURES)}; the engine `fsdp` takes any model"
    if config.model_type not in ARCHITECTURES:
        raise EngineError(f"the engine `megatron` does not know the architecture `{config.model_type}`", hint=known)
    rotary = model.model.rotary_emb
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    names = {name for name, _ in model.named_parameters()}
    if rotary.rope_type in ("dynamic", "longrope"):
        why = f"its positions are scaled by `{rotary.rope_type}`, which depends on the longest row"
    elif kinds - {"full_attention"}:
        why = f"some of its layers are {', '.join(sorted(kinds - {'full_attention'}))}"
    elif config.hidden_act != "silu":
        why = f"its activation is `{config.hidden_act}`, not `silu`"
    elif any(name.endswith(("o_proj.bias", "up_proj.bias")) for name in names):
        why = "its output and inner projections have biases"
    elif number_of_experts(config.to_dict()) and any(name.endswith("mlp.up_proj.weight") for name in names):
        why = "some of its layers are dense, others mixtures"
    else:
        return
    raise EngineError(f"the engine `megatron` does not support this `{config.model_type}` model: {why}", hint=known)


def transformer_config(
    model: PreTrainedModel, recipe: PolicyConfig, dtype: torch.dtype, options: dict[str, Any]
) -> TransformerConfig:
    """Returns Megatron's configuration of a model that `check_architecture` let pass."""
    config, parallel = model.config, recipe.parallel
    names = {name.rpartition("layers.0.")[2] for name, _ in model.named_parameters()}
    experts = number_of_experts(config.to_dict())
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    settings: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head,
        "softmax_scale": model.model.rotary_emb.attention_scaling**2 * head**-0.5,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": "self_attn.q_proj.bias" in names,
        "qk_layernorm": "self_attn.q_norm.weight" in names,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        # The fused kernel builds a causal mask of its own, and packed sequences would see each other.
        "masked_softmax_fusion": False,
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": bool(experts) and parallel.tensor > 1,
    }
    if experts:
        settings |= {
            "num_moe_experts": experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", config.intermediate_size),
            # A softmax over the chosen experts is one over all of them, normalized to those chosen.
            "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall" if torch.cuda.is_available() else "allgather",
            "expert_model_parallel_size": parallel.expert,
            "expert_tensor_parallel_size": 1 if parallel.expert > 1 else parallel.tensor,
        }
    if recipe.recompute_activations:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    try:
        return TransformerConfig(**(settings | options))
    except (ValueError, AssertionError, ImportError) as error:
        raise EngineError(
            f"Megatron refuses these settings: {error or type(error).__name__}", hint="change `engine_args`"
        ) from error


class RmsNorm(torch.nn.RMSNorm):
    """The norm of all these architectures, built as Megatron builds one."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class Gpt(torch.nn.Module):
    """A language model, or a critic with one value for each position, on Megatron's layers.

    Args:
        model: the hub's model; only its configuration and frequencies are read.
        config: what `transformer_config` returned.
        vocabulary: rows of the embedding, padding included.

    Attributes:
        gpt: Megatron's model.
        head: the critic's last layer; None for a language model.
    """

    def __init__(self, model: PreTrainedModel, config: TransformerConfig, vocabulary: int) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = model.config.vocab_size
        critic = model.get_output_embeddings() is None
        self.tied = critic or model.config.tie_word_embeddings
        self.window = getattr(model.config, "sliding_window", None)
        transformer_engine = importlib.util.find_spec("transformer_engine") is not None
        self.flash = torch.cuda.is_available() and transformer_engine and not self.window
        self.gpt = GPTModel(
            config, _spec(config, self.flash), vocabulary, model.config.max_position_embeddings,
            share_embeddings_and_output_weights=self.tied, position_embedding_type="none", parallel_output=False,
        )  # fmt: skip
        # The output layer sees places of whole sequences, whatever the layers below share.
        self.gpt.output_layer.sequence_parallel = False
        self.gpt.output_layer.allreduce_dgrad = config.tensor_model_parallel_size > 1
        self.head = None
        if critic:
            self.head = torch.nn.Linear(config.hidden_size, 1, model.score.bias is not None, dtype=config.params_dtype)
        # The hub's own frequencies carry rope_theta and every scaling that does not depend on the row.
        self.register_buffer("frequencies", model.model.rotary_emb.inv_freq.detach().float().clone(), persistent=False)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> torch.Tensor:
        """Returns float32 outputs `[N, K]` at N > 0 places of ids `[R, W]`; see `TrainingEngine.predict`."""
        if self.flash:
            rows, columns = torch.zeros_like(rows), rows * ids.shape[1] + columns
            ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
        turns = positions.T[:, :, None, None] * self.frequencies
        attention = {"attention_mask": None, "packed_seq_params": _packed(positions)}
        if not self.flash:
            attention = {"attention_mask": attention_mask(positions, self.window)}
        hidden = self.gpt.embedding(input_ids=ids, position_ids=positions)
        hidden = self.gpt.decoder(hidden_states=hidden, rotary_pos_emb=torch.cat([turns, turns], -1), **attention)
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        picked = hidden[columns, rows]
        if self.head is not None:
            return self.head(picked).float()
        weight = self.gpt.shared_embedding_or_output_weight() if self.tied else None
        logits, _ = self.gpt.output_layer(picked[:, None], weight=weight)
        return logits[:, 0, : self.vocabulary].float()


def attention_mask(positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Returns what a token must not see, `[R, 1, W, W]`, of positions `[R, W]` that count from 0 in every sequence."""
    sequence = (positions == 0).cumsum(1)
    place = torch.arange(positions.shape[1], device=positions.device)
    back = place[:, None] - place[None, :]
    hidden = (back < 0) | (back >= window) if window else back < 0
    return (hidden | (sequence[:, :, None] != sequence[:, None, :]))[:, None]


def _packed(positions: torch.Tensor) -> PackedSeqParams:
    """Returns where the sequences of one row begin, as Transformer Engine's attention takes it."""
    starts = (positions[0] == 0).nonzero()[:, 0]
    bounds = torch.cat([starts, starts.new_tensor([positions.shape[1]])]).int()
    longest = int(bounds.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _spec(config: TransformerConfig, flash: bool) -> TransformerBlockSubmodules:
    """Returns Megatron's own layers with our norm."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    if flash:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        attention.core_attention = TEDotProductAttention
    layers: list[ModuleSpec] = [dataclasses.replace(layer) for _ in range(config.num_layers)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RmsNorm)
