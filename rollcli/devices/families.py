"""How the architectures of transformers differ from a plain decoder, as far as their parameters go.

A plain decoder is Llama: RMS norms before attention and feed-forward, separate query, key, value and output matrices
without biases, a gated feed-forward of three matrices, and a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """How one `model_type` of transformers differs from a plain decoder.

    Attributes:
        qkv_bias: biases of query, key and value; None reads `attention_bias` (or `qkv_bias`).
        output_bias: bias of attention's output; None is as `attention_bias` says where that is read, else none.
        mlp_bias: biases of the feed-forward; None reads `mlp_bias`.
        gated: the feed-forward has three matrices, else two.
        qk_norm: a norm of each head's query and key; None reads `use_qk_norm`.
        norms: of the hidden state, in each layer.
        norm_tensors: of each norm: 2 where it has a bias.
        head_bias: the head adds one.
        expert_bias: router and experts add one.
        sinks: each head has one number more, its attention sink.
        vision: the tower beside it, of those that `vision_facts.py` counts.
        defaults: what transformers takes for a key that the configuration leaves out.
    """

    qkv_bias: bool | None = False
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    gated: bool = True
    qk_norm: bool | None = False
    norms: int = 2
    norm_tensors: int = 1
    head_bias: bool = False
    expert_bias: bool = False
    sinks: bool = False
    vision: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN2 = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_QWEN3 = {**_QWEN2, "head_dim": 128}
_QWEN_VL = {"num_key_value_heads": 8, "max_position_embeddings": 32768}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
_GEMMA3 = {
    **_GEMMA, "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
}  # fmt: skip
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}

FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias=None, mlp_bias=None, defaults={"max_position_embeddings": 2048}),
    "smollm3": Family(
        qkv_bias=None, mlp_bias=None,
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    ),
    "mistral": Family(defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072}),
    "mixtral": Family(
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
    ),
    "qwen2": Family(qkv_bias=True, defaults=_QWEN2),
    "qwen2_moe": Family(
        qkv_bias=None, output_bias=False,
        defaults={
            "num_key_value_heads": 16, "max_position_embeddings": 32768, "qkv_bias": True, "num_experts": 60,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3": Family(qkv_bias=None, qk_norm=True, defaults=_QWEN3),
    "qwen3_moe": Family(
        qkv_bias=None, qk_norm=True,
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, **_EXPERTS},
    ),
    "qwen2_vl": Family(qkv_bias=True, vision="qwen2_vl", defaults=_QWEN_VL),
    "qwen2_5_vl": Family(qkv_bias=True, vision="qwen2_5_vl", defaults=_QWEN_VL),
    "qwen3_vl": Family(
        qkv_bias=None, qk_norm=True, vision="qwen3_vl", defaults={**_QWEN3, "max_position_embeddings": 128000}
    ),
    "gemma": Family(qkv_bias=None, defaults={**_GEMMA, "num_key_value_heads": 16, "max_position_embeddings": 8192}),
    "gemma2": Family(
        qkv_bias=None, norms=4, defaults={**_GEMMA, "num_key_value_heads": 4, "max_position_embeddings": 8192}
    ),
    "gemma3_text": Family(qkv_bias=None, qk_norm=True, norms=4, defaults=_GEMMA3),
    "gemma3": Family(qkv_bias=None, qk_norm=True, norms=4, vision="siglip", defaults=_GEMMA3),
    "phi": Family(
        qkv_bias=True, output_bias=True, mlp_bias=True, gated=False, norms=1, norm_tensors=2, head_bias=True,
        defaults={"max_position_embeddings": 2048},
    ),
    "phi3": Family(defaults={"max_position_embeddings": 4096}),
    "deepseek_v2": Family(
        qkv_bias=None,
        defaults={
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0, "max_position_embeddings": 2048,
        },
    ),
    "deepseek_v3": Family(
        qkv_bias=None,
        defaults={
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "max_position_embeddings": 4096,
        },
    ),
    "glm4_moe": Family(
        qkv_bias=None, output_bias=False, qk_norm=None,
        defaults={
            "num_key_value_heads": 8, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "max_position_embeddings": 131072,
        },
    ),
    "gpt_oss": Family(
        qkv_bias=None, expert_bias=True, sinks=True,
        defaults={
            "head_dim": 64, "num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 4,
            "attention_bias": True, "max_position_embeddings": 131072,
        },
    ),
}  # fmt: skip
"""The architectures whose counts are exact."""
