"""Engines by name. An engine is imported only when a recipe chooses it."""

TRAIN_ENGINES = {
    "fsdp": "rollcli.engines.fsdp:FsdpEngine",
}
INFER_ENGINES = {
    "transformers": "rollcli.engines.transformers:TransformersEngine",
}
