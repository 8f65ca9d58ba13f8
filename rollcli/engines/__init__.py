"""Engines by name. An engine is imported only when a recipe chooses it."""

TRAIN_ENGINES = {
    "fsdp": "rollcli.engines.fsdp:FsdpEngine",
}
INFER_ENGINES = {
    "transformers": "rollcli.engines.transformers:TransformersEngine",
}

ENGINE_OPTIONS = {
    "fsdp": (),
    "transformers": ("max_context",),
}
"""Options of the built-in engines' own that `engine_args` may hold, known without importing them."""
