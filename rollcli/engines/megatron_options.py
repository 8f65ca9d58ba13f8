"""Checks `engine_args` of the engine `megatron` against the fields of Megatron's own `TransformerConfig`.

The fields are read from the source of the installed version, because importing it takes seconds and a recipe is checked
often.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from rollcli.errors import EngineError
from rollcli.suggest import did_you_mean

_CLASSES = {
    "core/transformer/transformer_config.py": "TransformerConfig",
    "core/model_parallel_config.py": "ModelParallelConfig",
}
_PLAIN = {"bool": bool, "int": int, "float": float, "str": str, "None": type(None)}

DECIDED = frozenset(
    """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization
    layernorm_epsilon layernorm_zero_centered_gamma gated_linear_unit activation_func add_bias_linear add_qkv_bias
    qk_layernorm softmax_scale window_size rotary_interleaved num_moe_experts moe_router_topk moe_ffn_hidden_size
    moe_router_pre_softmax moe_router_load_balancing_type moe_router_score_function moe_layer_freq moe_grouped_gemm
    moe_shared_expert_intermediate_size mtp_num_layers multi_latent_attention hidden_dropout attention_dropout
    init_method output_layer_init_method params_dtype pipeline_dtype fp16 bf16 perform_initialization
    use_cpu_initialization masked_softmax_fusion tensor_model_parallel_size pipeline_model_parallel_size
    virtual_pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size""".split()
)
"""Fields that the model, `parallel` or the rest of the recipe decides."""


def check_options(options: dict[str, Any]) -> None:
    """Checks names and types.

    Raises:
        EngineError: a name is unknown, or its value is decided elsewhere or of another type; or Megatron is absent.
    """
    known = fields()
    for name, value in options.items():
        if name not in known:
            meant = did_you_mean(name, known.keys() - DECIDED)
            raise EngineError(
                f"the engine `megatron` has no option `{name}`" + (f" (did you mean `{meant}`?)" if meant else ""),
                hint="`engine_args` are fields of `megatron.core.transformer.TransformerConfig`",
            )
        if name in DECIDED:
            raise EngineError(
                f"the model or another key of the recipe decides `{name}`, so `engine_args` cannot", hint="leave it out"
            )
        if not _fits(value, known[name]):
            raise EngineError(
                f"the option `{name}` of the engine `megatron` cannot be {value!r}", hint=f"it is `{known[name]}`"
            )


@cache
def fields() -> dict[str, str]:
    """Returns the annotation of every field of the installed Megatron's configuration.

    Raises:
        EngineError: Megatron-Core is not installed.
    """
    package = importlib.util.find_spec("megatron")
    folders = [Path(folder) for folder in package.submodule_search_locations or ()] if package else []
    found: dict[str, str] = {}
    for file, name in _CLASSES.items():
        source = next((folder / file for folder in folders if (folder / file).is_file()), None)
        if source is None:
            raise EngineError(
                "the engine `megatron` needs Megatron-Core, which is not installed",
                hint="`pip install 'rollcli[megatron]'`",
            )
        parsed = ast.parse(source.read_text(encoding="utf-8"))
        (definition,) = (node for node in parsed.body if isinstance(node, ast.ClassDef) and node.name == name)
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = ast.unparse(node.annotation)
    return found


def _fits(value: Any, annotation: str) -> bool:
    """Whether a value of a recipe may stand where Megatron says `annotation`; what is not plain passes."""
    text = annotation
    if text.startswith("Optional["):
        text = text[len("Optional[") : -1] + " | None"
    kinds = [_PLAIN.get(part.strip()) for part in text.split("|")]
    if None in kinds:
        return True
    return type(value) in kinds or (type(value) is int and float in kinds)
