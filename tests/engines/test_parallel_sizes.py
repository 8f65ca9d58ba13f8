"""Sizes against the arithmetic, done here by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollcli.config.schema import ParallelConfig
from rollcli.engines.parallel_sizes import check_parallel_sizes, parallel_problems
from rollcli.errors import EngineError

DENSE = {"model_type": "llama", "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96,
         "num_hidden_layers": 6, "vocab_size": 61}  # fmt: skip
MIXTRAL = DENSE | {"model_type": "mixtral", "num_local_experts": 8}
QWEN = DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 18, "intermediate_size": 97}


def problems(model: dict, vocabulary: bool = False, **sizes: int) -> list[tuple[str, str]]:
    return list(parallel_problems(model, ParallelConfig(**sizes), vocabulary))


@pytest.mark.parametrize("model", [DENSE, MIXTRAL, QWEN])
def test_one_process_always_fits(model) -> None:
    assert problems(model) == []
    check_parallel_sizes(model, ParallelConfig(), "megatron")


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (DENSE, {"tensor": 4}),
        (DENSE, {"tensor": 2, "pipeline": 3}),
        (MIXTRAL, {"expert": 8}),
        (QWEN, {"tensor": 2, "expert": 4}),
        (QWEN, {"tensor": 4, "expert": 2}),  # experts stay whole, so that 18 channels need not divide
        (DENSE | {"num_key_value_heads": None}, {"tensor": 12}),
    ],
)
def test_sizes_that_divide_fit(model, sizes) -> None:
    assert problems(model, **sizes) == []


@pytest.mark.parametrize(
    ("model", "sizes", "field", "words"),
    [
        (DENSE, {"tensor": 5}, "tensor", "12 attention heads (12 = 2 × 5 + 2)"),
        (DENSE, {"tensor": 6}, "tensor", "4 key and value heads (4 = 0 × 6 + 4)"),
        (DENSE | {"intermediate_size": 98}, {"tensor": 4}, "tensor", "98 inner channels"),
        (QWEN, {"tensor": 4}, "tensor", "18 inner channels of an expert (18 = 4 × 4 + 2)"),
        (DENSE, {"pipeline": 4}, "pipeline", "6 layers (6 = 1 × 4 + 2)"),
        (MIXTRAL, {"expert": 3}, "expert", "8 experts (8 = 2 × 3 + 2)"),
        (DENSE, {"expert": 2}, "expert", "a `llama` model has no experts"),
    ],
)
def test_sizes_that_do_not_divide_are_told_with_the_arithmetic(model, sizes, field: str, words: str) -> None:
    assert any(where == field and words in message for where, message in problems(model, **sizes))
    with pytest.raises(EngineError, match=f"engine `other`.*`parallel.{field}`") as raised:
        check_parallel_sizes(model, ParallelConfig(**sizes), "other")
    assert words in str(raised.value)


def test_the_vocabulary_must_divide_only_where_it_is_not_padded() -> None:
    assert problems(DENSE, tensor=2) == []
    ((field, message),) = problems(DENSE, vocabulary=True, tensor=2)
    assert field == "tensor" and "61 words of the vocabulary (61 = 30 × 2 + 1)" in message


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"context": 3}, "4 key and value heads (4 = 1 × 3 + 1)"),
        ({"context": 8}, "12 attention heads (12 = 1 × 8 + 4)"),
        ({"tensor": 4, "context": 2}, "1 key and value heads of a process (1 = 0 × 2 + 1)"),
    ],
)
def test_heads_are_shared_by_context_only_where_the_engine_says_so(sizes, words: str) -> None:
    found = list(parallel_problems(DENSE, ParallelConfig(**sizes), context_heads=True))
    assert any(field == "context" and words in message for field, message in found)
    assert problems(DENSE, **sizes) == []
    assert not list(parallel_problems(DENSE, ParallelConfig(tensor=2, context=2), context_heads=True))


def test_a_configuration_that_does_not_say_a_size_passes() -> None:
    assert problems({}, tensor=7, pipeline=3) == []


def test_it_imports_no_torch() -> None:
    code = "import sys, rollcli.engines.facts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
