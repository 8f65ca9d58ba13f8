"""`grpo-math` measured in this process, with or without a planted fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollcli.doctor import gap

FAULTY = Path(__file__).with_name("faulty.py")


@pytest.fixture
def measured() -> Iterator[Callable[..., gap.Measurement]]:
    """Measures `grpo-math` with overrides; `engine` names a double of `faulty.py`."""
    with ExitStack() as stack:

        def measure(*overrides: str, engine: str | None = None, samples: int = 8) -> gap.Measurement:
            fault = [f"rollout.engine={FAULTY}:{engine}"] if engine else []
            loaded = gap.load_subject("grpo-math", ["policy.threads=1", *fault, *overrides])
            return gap.measure(stack.enter_context(gap.bench_of(loaded, samples, 24)))

        yield measure
