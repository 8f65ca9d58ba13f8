"""What the recipe may say to DeepSpeed, and how it is told what it may not."""

from __future__ import annotations

import pytest

from rollcli.config.schema import LoraConfig, ParallelConfig, PolicyConfig
from rollcli.errors import EngineError

pytest.importorskip("deepspeed")

from rollcli.engines.deepspeed_options import STAGE, check_options


def refusal(options: dict, config: PolicyConfig | None = None) -> EngineError:
    with pytest.raises(EngineError) as caught:
        check_options(config or PolicyConfig(), options)
    return caught.value


def test_zero_is_passed_as_it_is() -> None:
    zero = check_options(
        PolicyConfig(), {"zero_optimization": {"stage": 2, "reduce_bucket_size": 123, "overlap_comm": True}}
    )
    assert (zero.stage, zero.reduce_bucket_size, zero.overlap_comm) == (2, 123, True)
    zero = check_options(PolicyConfig(), {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    assert zero.offload_optimizer.device == "cpu" and zero.stage == STAGE


@pytest.mark.parametrize("options", [{}, {"zero_optimization": None}, {"zero_optimization": {}}], ids=str)
def test_the_stage_that_shards_everything_is_the_default(options: dict) -> None:
    assert check_options(PolicyConfig(), options).stage == 3


def test_an_unknown_key_is_refused_with_the_word_meant() -> None:
    error = refusal({"zero_optimisation": {"stage": 1}})
    assert (
        "`policy.engine_args.zero_optimisation`" in error.message
        and "did you mean `zero_optimization`?" in error.message
    )
    assert "communication_data_type" in error.hint


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stage": 4}, "zero_optimization.stage"),
        ({"stage": "two"}, "zero_optimization.stage"),
        ({"reduce_bucket_sise": 5}, "did you mean `reduce_bucket_size`?"),
        ({"stage": 3, "stage3_prefetch_bucket": 5}, "did you mean `stage3_prefetch_bucket_size`?"),
        ({"offload_optimizer": {"devise": "cpu"}}, "zero_optimization.offload_optimizer.devise"),
        ({"offload_optimizer": {"device": "disk"}}, "zero_optimization.offload_optimizer.device"),
        ("stage 2", "zero_optimization"),
    ],
    ids=str,
)
def test_what_deepspeed_does_not_understand_is_located(settings, said: str) -> None:
    assert said in refusal({"zero_optimization": settings}).message


@pytest.mark.parametrize(
    "settings",
    [
        {"offload_optimizer": {"device": "nvme"}},
        {"offload_param": {"device": "nvme"}},
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        {"offload_optimizer": {"device": "cpu", "super_offload": True}},
        {"zenflow": {"topk_ratio": 0.1}},
    ],
    ids=str,
)
def test_what_a_checkpoint_would_miss_is_refused(settings: dict) -> None:
    error = refusal({"zero_optimization": settings})
    assert "not supported" in error.message and error.hint


@pytest.mark.parametrize(
    "config",
    [
        PolicyConfig(parallel=ParallelConfig(tensor=2)),
        PolicyConfig(workers=2, parallel=ParallelConfig(expert=2)),
        PolicyConfig(lora=LoraConfig(rank=8)),
    ],
    ids=["tensor", "expert", "lora"],
)
def test_what_the_engine_has_not_is_refused(config: PolicyConfig) -> None:
    error = refusal({}, config)
    assert "`deepspeed`" in error.message and "fsdp" in error.hint
