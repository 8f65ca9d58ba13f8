"""Where user code is called: whatever an environment raises or returns is the affair of its episode alone."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollcli.environments.base import StepResult
from rollcli.errors import EpisodeError, ImageError, RewardError
from rollcli.rewards.base import RewardResult, to_result


class EpisodeFailure(Exception):
    """Why an episode failed; `kind` is the word it is counted under. It becomes the trajectory's `error`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@contextmanager
def environment_border() -> Iterator[None]:
    """Makes whatever user code raises the failure of its episode: a bad rollout is data."""
    try:
        yield
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():
            raise
        raise EpisodeFailure("environment", "CancelledError: the environment cancelled itself") from None
    except EpisodeFailure:
        raise
    except ImageError as error:
        raise EpisodeFailure("image", error.message) from error
    except (EpisodeError, RewardError) as error:
        raise EpisodeFailure("environment", error.message) from error
    # An environment may raise anything, and its results may be anything.
    except (Exception, SystemExit) as error:
        raise EpisodeFailure("environment", f"{type(error).__name__}: {error}") from error


def checked(result: Any, method: str = "step") -> StepResult:
    """Returns what a method gave back with plain finite numbers, and fields that can be sent to a reward worker.

    Raises:
        EpisodeFailure: it is no such thing.
    """
    with environment_border():
        if not isinstance(result, StepResult):
            raise EpisodeError(f"`{method}` returned {type(result).__name__}, not a StepResult")
        numbers = to_result(RewardResult(result.reward, result.metrics), f"of a {method}")
        pickle.dumps(result.fields)
        return dataclasses.replace(result, reward=numbers.score, metrics=numbers.metrics)
