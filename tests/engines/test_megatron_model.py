"""The mask that tells packed sequences apart, and Megatron's configuration of a model.

What the model computes is tested in test_megatron.py, against `transformers`.
"""

from __future__ import annotations

import pytest
import torch
import transformers

pytest.importorskip("megatron.core")

from rollcli.config.schema import ParallelConfig, PolicyConfig
from rollcli.engines.megatron_model import _packed, attention_mask, transformer_config

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_token_sees_its_own_sequence_up_to_itself(window: int | None) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 0, 0, 1, 2]])
    sequence = [[0, 0, 0, 0, 1, 1], [0, 0, 1, 2, 2, 2]]
    hidden = attention_mask(positions, window)
    assert hidden.shape == (2, 1, 6, 6)
    for row in range(2):
        for query in range(6):
            for key in range(6):
                near = window is None or query - key < window
                seen = key <= query and near and sequence[row][key] == sequence[row][query]
                assert bool(hidden[row, 0, query, key]) == (not seen)


def test_bounds_of_packed_sequences() -> None:
    packed = _packed(torch.tensor([[0, 1, 2, 0, 0, 1]]))
    assert packed.cu_seqlens_q.tolist() == [0, 3, 4, 6] and packed.cu_seqlens_q.dtype == torch.int32
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 3 and packed.qkv_format == "thd"


def test_settings_of_a_dense_model() -> None:
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
    config = transformer_config(model, PolicyConfig(recompute_activations=True), torch.float32, {})
    assert (config.num_layers, config.num_query_groups, config.kv_channels) == (2, 2, 8)
    assert config.add_qkv_bias and not config.qk_layernorm and not config.add_bias_linear
    assert config.softmax_scale == pytest.approx(8**-0.5) and config.num_moe_experts is None
    assert config.recompute_granularity == "full" and not config.sequence_parallel and not config.bf16
    assert not config.masked_softmax_fusion and config.hidden_dropout == config.attention_dropout == 0


@pytest.mark.parametrize(("normalized", "before"), [(True, False), (False, True)])
def test_settings_of_a_mixture(normalized: bool, before: bool) -> None:
    options = {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": normalized}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **options))
    recipe = PolicyConfig(parallel=ParallelConfig(tensor=2))
    config = transformer_config(model, recipe, torch.bfloat16, {"moe_token_dispatcher_type": "alltoall"})
    assert (config.num_moe_experts, config.moe_ffn_hidden_size, config.moe_router_topk) == (4, 16, 8)
    assert config.moe_router_pre_softmax == before and config.qk_layernorm and config.bf16
    assert config.sequence_parallel and config.expert_tensor_parallel_size == 2  # tokens of a mixture are shared
    assert config.moe_token_dispatcher_type == "alltoall"
