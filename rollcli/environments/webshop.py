"""WebShop: search a catalogue, open a product, choose its options, buy; the reward is how well it fits the wish."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollcli.config.schema import Problems, finite, positive
from rollcli.data.carriers import Message, Task
from rollcli.data.webshop.catalogue import Files, load
from rollcli.data.webshop.goals import Goal
from rollcli.data.webshop.pages import PageStyle, Visit, parse_action
from rollcli.data.webshop.reward import Score, score
from rollcli.environments.base import StepResult


@dataclass
class WebShop:
    """One visit for the goal of a task (source `webshop`).

    The catalogue is loaded and indexed once in a process, in a thread: other episodes go on meanwhile. Each turn's
    metrics and fields hold `success` (the score is 1), `score`, `turns`, `invalid_actions`, why the visit ended
    (`ended_bought`, `ended_max_turns`) and, after a purchase, the parts of its score (`attributes`, `options`, `price`,
    `type`).
    """

    blocking = True

    max_turns: int = 15
    """Turns after which the visit ends without a purchase."""
    score_weight: float = 1.0
    """Reward of a purchase is its score, from 0 to 1, times this …"""
    success_reward: float = 0.0
    """… and this beside it when the score is 1."""
    invalid_reward: float = 0.0
    """Reward of a turn without an action that there is on its page."""
    invalid: str = "That is none of the available actions.\n{state}"
    """What follows such a turn; `{state}` is the page."""

    def __post_init__(self) -> None:
        self._turns = self._invalid_actions = 0

    def problems(self) -> Problems:
        yield from positive(self, "max_turns")
        yield from finite(self, "score_weight", "success_reward", "invalid_reward")

    def reset(self, task: Task) -> list[Message]:
        """Enters the shop, and returns the task's messages, which show its first page.

        Raises:
            DatasetNotFound: a file of the shop is not on this machine.
        """
        shop = task.payload["shop"]
        paths = {role: shop[role] and Path(shop[role]) for role in ("products", "attributes", "human")}
        self._goal = Goal.from_payload(task.payload["goal"])
        style = PageStyle(**task.payload["style"])
        self._visit = Visit(load(Files(**paths, most=shop["most"])), self._goal.instruction, style)
        self._price_seed = task.payload["price_seed"]
        return task.messages

    def step(self, response: str) -> StepResult:
        """Takes the action of a response."""
        self._turns += 1
        action = parse_action(response)
        valid = action is not None and self._visit.act(*action)
        self._invalid_actions += not valid
        bought = self._buy() if self._visit.bought else None
        reward = 0.0 if valid else self.invalid_reward
        if bought:
            reward += self.score_weight * bought.total + self.success_reward * (bought.total == 1)
        reason = "bought" if bought else "max_turns" if self._turns >= self.max_turns else ""
        numbers = self._numbers(bought, reason)
        fields = {**numbers, "done_reason": reason}
        if reason:
            return StepResult([], True, reward, fields, numbers)
        page = self._visit.render()
        text = page if valid else self.invalid.replace("{state}", page)
        return StepResult([{"role": "user", "content": text}], False, reward, fields, numbers)

    def close(self) -> None:
        """Holds nothing but the shop, which is everybody's."""

    def state_key(self) -> str:
        """Returns where the visit is and what it has chosen."""
        return self._visit.key()

    def _buy(self) -> Score:
        product = self._visit.product
        return score(self._goal, product, product.price(self._price_seed), self._visit.options)

    def _numbers(self, bought: Score | None, reason: str) -> dict[str, float]:
        total = bought.total if bought else 0.0
        return {
            "success": float(total == 1),
            "score": total,
            **(bought.metrics() if bought else {}),
            "turns": float(self._turns),
            "invalid_actions": float(self._invalid_actions),
            "ended_bought": float(reason == "bought"),
            "ended_max_turns": float(reason == "max_turns"),
        }
