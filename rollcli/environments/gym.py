"""Any Gymnasium environment, with a few lines of rendering and parsing.

@dataclass
class CartPole(Gym):
    id: str = "CartPole-v1"
    def render(self, observation): return "pole at {2:.2f}, push left or right".format(*observation)
    def parse(self, response): return {"left": 0, "right": 1}.get(response.strip())
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from rollcli.config.schema import Problems, finite, positive
from rollcli.data.carriers import Message, Task
from rollcli.data.games.moves import marked
from rollcli.environments.base import StepResult
from rollcli.errors import PluginError


def import_gymnasium() -> Any:
    """Returns the package.

    Raises:
        PluginError: it is not installed.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise PluginError(
            f"this environment is played by `gymnasium`, which does not import: {error}",
            hint="pip install 'rollcli[gymnasium]'",
        ) from error
    return gymnasium


@dataclass
class Gym:
    """A Gymnasium environment; `render` and `parse` are there to be overridden. Its calls run in threads."""

    blocking = True

    id: str
    """What `gymnasium.make` calls it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of `gymnasium.make`."""
    actions: list[str] = field(default_factory=list)
    """Words for the actions 0, 1, …; without them an action is written as its number."""
    instruction: str = ""
    """What the first observation is preceded by."""
    max_turns: int = 50
    """Turns after which the episode ends."""
    invalid_reward: float = 0.0
    """Reward of a turn without a valid action."""
    success_above: float = 0.0
    """An episode whose total of Gymnasium's rewards is greater is a success."""

    def __post_init__(self) -> None:
        self._turns, self._total = 0, 0.0
        self._game: Any = None

    def problems(self) -> Problems:
        yield from positive(self, "max_turns")
        yield from finite(self, "invalid_reward", "success_above")

    def make(self, seed: int) -> Any:
        """Returns the environment, which has Gymnasium's `reset`, `step` and `close`.

        Raises:
            PluginError: `gymnasium` is not installed.
        """
        return import_gymnasium().make(self.id, **self.options)

    def render(self, observation: Any) -> str:
        """Returns an observation as the model sees it."""
        return str(observation)

    def parse(self, response: str) -> Any:
        """Returns the action of a response, or None when it holds none."""
        text = marked(response)[0]
        words = [str(number) for number in range(int(getattr(self._game.action_space, "n", 0)))]
        words = self.actions or words
        found = re.findall("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in words) or r"(?!)", text, re.I)
        return [word.lower() for word in words].index(found[-1].lower()) if found else None

    def valid(self) -> str:
        """Returns what a turn without a valid action is told."""
        return f"Write one of: {', '.join(self.actions)}." if self.actions else f"Actions: {self._game.action_space}."

    def reset(self, task: Task) -> list[Message]:
        """Makes the environment and shows its first observation; the task's seed is its seed.

        Raises:
            PluginError: the package is not installed.
        """
        seed = task.seed % 2**31
        self._game = self.make(seed)
        observation, _ = self._game.reset(seed=seed)
        opening = "\n".join(part for part in (self.instruction, self.render(observation)) if part)
        return [*task.messages, {"role": "user", "content": opening}]

    def step(self, response: str) -> StepResult:
        """Takes the action of a response."""
        self._turns += 1
        action = self.parse(response)
        if action is None:
            reward, is_over, shown = self.invalid_reward, False, f"That is no valid action. {self.valid()}"
        else:
            observation, reward, terminated, truncated, _ = self._game.step(action)
            self._total += float(reward)
            is_over, shown = bool(terminated or truncated), self.render(observation)
        done = is_over or self._turns >= self.max_turns
        numbers = {"success": float(done and self._total > self.success_above), "turns": float(self._turns)}
        messages = [] if done else [{"role": "user", "content": shown}]
        reason = "" if not done else "over" if is_over else "max_turns"
        return StepResult(messages, done, float(reward), {**numbers, "done_reason": reason}, numbers)

    def close(self) -> None:
        """Closes the environment."""
        if self._game is not None:
            self._game.close()
