"""Engines by name. An engine is imported only when a recipe chooses it.

A new one takes three things:

1. A module with a class that does what `InferEngine` or `TrainEngine` says (base.py). A training engine derives from
   `TrainingEngine` (training.py), which has the pass, the metrics and the checkpoints; one that keeps a `transformers`
   model as it is, whole or as DTensors, from `ShardedWeights` (sharded_weights.py). A rollout engine takes from
   requests.py what is refused, when a stop text ends an answer, and an answer under way; from sampling.py the draws.
   Weights go by the hub's names (naming.py).
2. Its name below, and in facts.py its package, its options and what it can do, so that a recipe is checked without it.
3. A line in the tests that ask the same of every engine: in `CASES` of tests/engines/train_ranks.py, or `served` of
   tests/engines/test_infer_contract.py.

One that lives elsewhere is named `./mine.py:Engine`, or by an entry point (registry.py), and needs the class alone.
"""

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
