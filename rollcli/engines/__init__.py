"""Engines by name. An engine is imported only when a recipe chooses it."""

TRAIN_ENGINES = {
    "fsdp": "rollcli.engines.fsdp:FsdpEngine",
    "deepspeed": "rollcli.engines.deepspeed:DeepSpeedEngine",
    "megatron": "rollcli.engines.megatron:MegatronEngine",
}
INFER_ENGINES = {
    "transformers": "rollcli.engines.transformers:TransformersEngine",
    "vllm": "rollcli.engines.vllm:VllmEngine",
    "sglang": "rollcli.engines.sglang:SglangEngine",
}

ENGINE_OPTIONS = {
    "deepspeed": (
        "zero_optimization", "communication_data_type", "prescale_gradients", "gradient_predivide_factor",
        "disable_allgather", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
        "flops_profiler", "comms_logger", "timers", "log_level", "disable_python_gc",
    ),
    "fsdp": ("shard_size", "offload", "compile"),
    "transformers": ("max_context",),
}
"""Options of the built-in engines' own that `engine_args` may hold, known without importing them."""

DECIDED_BY_RECIPE = {
    "deepspeed": {
        "train_batch_size": "prompts_per_step",
        "train_micro_batch_size_per_gpu": "{block}.micro_batch_tokens",
        "gradient_accumulation_steps": "{block}.micro_batch_tokens",
        "managed_gradient_accumulation": "{block}.micro_batch_tokens",
        "gradient_allreduce_op": "algorithm.aggregation",
        "gradient_clipping": "{block}.optimizer.max_grad_norm",
        "optimizer": "{block}.optimizer",
        "scheduler": "{block}.optimizer.schedule",
        "bf16": "model.dtype",
        "fp16": "model.dtype",
        "amp": "model.dtype",
        "torch_autocast": "model.dtype",
        "data_types": "model.dtype",
        "activation_checkpointing": "{block}.recompute_activations",
        "tensor_parallel": "{block}.parallel",
        "sequence_parallel_size": "{block}.parallel",
        "checkpoint": "checkpoints",
        "tensorboard": "trackers",
        "wandb": "trackers",
        "csv_monitor": "trackers",
    },
}
"""Options of an engine's own that the recipe decides, and the recipe's key for each; `{block}` is the role's."""
