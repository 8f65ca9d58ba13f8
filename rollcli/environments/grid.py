"""What games on a grid share: reading moves, answering invalid ones, counting turns, telling why it ended."""

from __future__ import annotations

from dataclasses import dataclass

from rollcli.config.schema import Problems, finite, positive
from rollcli.data.carriers import Message, Task
from rollcli.data.games.moves import parse_moves
from rollcli.environments.base import StepResult

REASONS = ("solved", "lost", "max_turns")
"""Why an episode of a game is over."""


@dataclass
class GridGame:
    """A game of moves left, down, right and up; the task's opening message shows it.

    Each turn's metrics and fields hold `success`, which the reward of that name reads, `turns`, `invalid_turns`, and
    why the episode ended as 0 or 1 (`ended_solved`, `ended_lost`, `ended_max_turns`).
    """

    max_turns: int = 20
    """Turns after which the episode ends."""
    moves_per_turn: int = 1
    """Most moves of one turn; more are not played."""
    success_reward: float = 1.0
    """Reward of solving it."""
    move_reward: float = 0.0
    """Reward of each move; a small negative one makes short ways better."""
    invalid_reward: float = 0.0
    """Reward of a turn without a valid move."""
    invalid: str = "That is no valid move. Write one of: left, down, right, up.\n{state}"
    """What follows a turn without a valid move; `{state}` is the grid."""

    def __post_init__(self) -> None:
        self._turns = self._invalid_turns = 0

    def problems(self) -> Problems:
        yield from positive(self, "max_turns", "moves_per_turn")
        yield from finite(self, "success_reward", "move_reward", "invalid_reward")

    async def reset(self, task: Task) -> list[Message]:
        """Sets the game up from the task's payload and seed, and returns the task's messages."""
        self.start(task)
        return task.messages

    async def step(self, response: str) -> StepResult:
        """Plays the moves of a response."""
        self._turns += 1
        moves = parse_moves(response, self.moves_per_turn)
        reward, reason = (0.0 if moves else self.invalid_reward), ""
        self._invalid_turns += not moves
        for move in moves:
            extra, reason = self.move(move)
            reward += self.move_reward + extra + self.success_reward * (reason == "solved")
            if reason:
                break
        if not reason and self._turns >= self.max_turns:
            reason = "max_turns"
        text = self.render()
        shown = text if moves else self.invalid.replace("{state}", text)
        numbers = {"success": float(reason == "solved"), "turns": float(self._turns)}
        numbers["invalid_turns"] = float(self._invalid_turns)
        numbers |= {f"ended_{each}": float(reason == each) for each in REASONS}
        messages = [] if reason else [{"role": "user", "content": shown}]
        return StepResult(messages, bool(reason), reward, {**numbers, "done_reason": reason}, numbers)

    async def close(self) -> None:
        """Holds nothing."""

    def state_key(self) -> str:
        """Returns the grid: equal grids are equal states."""
        return self.render()

    def start(self, task: Task) -> None:
        """Sets the game up."""
        raise NotImplementedError

    def move(self, letter: str) -> tuple[float, str]:
        """Plays one of `L`, `D`, `R`, `U`; returns a reward beside those of the options, and one of `REASONS` or ''."""
        raise NotImplementedError

    def render(self) -> str:
        """Returns the grid as text."""
        raise NotImplementedError
