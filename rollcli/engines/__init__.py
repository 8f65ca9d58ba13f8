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
