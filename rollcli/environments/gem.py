"""Environments of GEM (package `gem-llm`, arXiv 2510.01051) by name: games, math, code, those of reasoning_gym."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollcli.environments.gym import Gym
from rollcli.errors import PluginError

_GLOBAL_RANDOM = threading.Lock()


@dataclass
class Gem(Gym):
    """One episode of `gem.make(id, **options)`, such as `game:GuessTheNumber-v0-easy`.

    The model's turn goes to GEM as it is; most of its environments read the last `\\boxed{…}`. The episode's success is
    a total reward of 1, which is what GEM gives for a solution.
    """

    success_above: float = 0.999
    """An episode whose total of GEM's rewards is greater is a success."""

    def make(self, seed: int) -> Any:
        """Returns the environment; a random state of its own keeps the episodes of one process apart.

        Raises:
            PluginError: the package is not installed, or has no environment of this name.
        """
        try:
            import gem
        except ImportError as error:
            raise PluginError(
                f"this environment is played by `gem-llm`, which does not import: {error}",
                # It asks for one version of reasoning-gym, older than ours, with which it runs all the same.
                hint="pip install --no-deps gem-llm && pip install 'msgspec>=0.19' 'nltk>=3.9'",
            ) from error
        try:
            return _Own(lambda: gem.make(self.id, **self.options), seed)
        except (ImportError, TypeError, ValueError) as error:
            raise PluginError(f"gem cannot make `{self.id}`: {error}", hint="`gem.print_envs()` lists them") from error

    def parse(self, response: str) -> str:
        """Returns the turn without its thinking: GEM reads it itself."""
        return response.rpartition("</think>")[2]


class _Own:
    """An environment of GEM, all of whose draws from Python's and NumPy's global generators are the episode's own.

    GEM seeds and uses those generators; without this, episodes that play at once would draw from one another's.
    """

    def __init__(self, make: Callable[[], Any], seed: int) -> None:
        self._states: tuple[Any, Any] | None = None
        self._game = self._apart(lambda: (random.seed(seed), np.random.seed(seed), make())[-1])

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Returns the first observation."""
        observation, info = self._apart(lambda: self._game.reset(seed=seed))
        return _with_suffix(observation, info), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Returns what GEM's `step` does."""
        observation, reward, terminated, truncated, info = self._apart(lambda: self._game.step(action))
        return _with_suffix(observation, info), float(reward), terminated, truncated, info

    def close(self) -> None:
        """Closes it, where it holds anything."""
        getattr(self._game, "close", lambda: None)()

    def _apart(self, call: Callable[[], Any]) -> Any:
        with _GLOBAL_RANDOM:
            outside = random.getstate(), np.random.get_state()
            if self._states is not None:
                _set(self._states)
            try:
                return call()
            finally:
                self._states = random.getstate(), np.random.get_state()
                _set(outside)


def _set(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _with_suffix(observation: Any, info: dict[str, Any]) -> str:
    """Returns an observation with what GEM asks for at its end (`Enter your next guess.`)."""
    return "\n".join(part for part in (str(observation).rstrip("\n"), info.get("suffix", "")) if part)
