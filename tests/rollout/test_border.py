"""User code behind its border: what it raises and returns becomes its episode's failure, by kind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rollcli.environments.base import StepResult
from rollcli.errors import EpisodeError, ImageError
from rollcli.rollout.border import EpisodeFailure, checked, environment_border


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyError("x"), "environment", "KeyError: 'x'"),
        (SystemExit(3), "environment", "SystemExit: 3"),
        (EpisodeError("no page"), "environment", "no page"),
        (ImageError("no picture"), "image", "no picture"),
        (EpisodeFailure("engine", "lost"), "engine", "lost"),
    ],
)
def test_whatever_is_raised_is_a_failure_of_its_kind(error, kind, message):
    with pytest.raises(EpisodeFailure) as failure, environment_border():
        raise error
    assert (failure.value.kind, failure.value.message) == (kind, message)


def test_a_cancellation_from_outside_passes_and_one_of_its_own_does_not():
    async def own() -> None:
        with pytest.raises(EpisodeFailure, match="cancelled itself"), environment_border():
            raise asyncio.CancelledError

    async def outer() -> None:
        async def wait() -> None:
            with environment_border():
                await asyncio.Event().wait()

        work = asyncio.create_task(wait())
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(own())
    asyncio.run(outer())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("won", "`play` returned str, not a StepResult"),
        (StepResult(reward=float("nan")), "of a play"),
        (StepResult(fields={"lock": threading.Lock()}), "pickle"),
    ],
)
def test_results_that_cannot_be_used_are_refused(result, message):
    with pytest.raises(EpisodeFailure, match=message):
        checked(result, "play")


def test_numbers_of_a_result_become_plain_floats():
    result = checked(StepResult(reward=True, metrics={"moves": 3}))
    assert (result.reward, result.metrics) == (1.0, {"moves": 3.0})
    assert type(result.reward) is float
