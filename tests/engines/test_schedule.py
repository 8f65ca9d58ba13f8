"""The learning rate as a function of the step, by hand."""

import pytest

from rollcli.config.schema import OptimizerConfig
from rollcli.engines.schedule import learning_rate


def rates(steps, total: int, **options) -> list[float]:
    config = OptimizerConfig(learning_rate=2.0, **options)
    return [learning_rate(config, step, total) for step in steps]


def test_cosine_late_in_a_run_with_warmup() -> None:
    """Step 198 of 220 with 22 of warm-up: 8/9 of the way, (1 + cos 160°) / 2 = 0.0302 of the peak, and not 0."""
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=22)
    assert learning_rate(config, 198, 220) == pytest.approx(0.0301537, abs=1e-6)


def test_warmup_rises_from_above_zero_to_the_peak() -> None:
    assert rates(range(6), 100, warmup_steps=4) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0])
    for schedule in ("linear", "cosine"):
        assert rates(range(5), 100, warmup_steps=4, schedule=schedule) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])


def test_shapes_by_hand() -> None:
    assert rates([0, 7, 10**6], 8) == [2.0, 2.0, 2.0]
    assert rates([0, 2, 4, 6, 8, 9], 8, schedule="linear") == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0, 0.0])
    assert rates([0, 2, 4, 6, 8, 9], 8, schedule="cosine") == pytest.approx(
        [2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5, 0.0, 0.0], abs=1e-12
    )


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_every_step_of_the_run_learns_something(schedule) -> None:
    for total, warmup in [(1, 0), (2, 0), (10, 3), (10, 9)]:
        assert all(rate > 0 for rate in rates(range(total), total, schedule=schedule, warmup_steps=warmup))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warmup_longer_than_the_run(schedule) -> None:
    got = rates(range(5), 5, schedule=schedule, warmup_steps=9)
    assert got == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
