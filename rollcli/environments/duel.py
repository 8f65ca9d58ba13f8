"""Two players and one game: the model against itself, or against a fixed opponent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, Protocol

from rollcli import registry
from rollcli.config.schema import Problems, not_negative
from rollcli.data.carriers import Message, Task
from rollcli.data.games.moves import marked
from rollcli.environments.base import Model, StepResult
from rollcli.errors import OutOfTokens, PluginError

GAMES = {
    "kuhn_poker": "rollcli.data.games.kuhn_poker:KuhnPoker",
    "tictactoe": "rollcli.data.games.tictactoe:TicTacToe",
}
"""Games by name."""
SEATS = ("first", "second")
"""Agents by the order in which they move."""
_INVALID = "That is no valid move.\n{state}"


class Game(Protocol):
    """A zero-sum game of two players, 0 and 1; made anew for each episode with a `Random` that everything comes from.

    Attributes:
        rules: the opening message; `{state}` is what the player sees, `{player}` its name.
        players: what they are called in it.
        words: how moves are written, and the move that each word stands for.
        player: whose turn it is.
        is_over: True when nobody may move.
    """

    rules: str
    players: tuple[str, str]
    words: Mapping[str, str]
    player: int
    is_over: bool

    def moves(self) -> list[str]:
        """Returns the moves that are allowed now."""

    def play(self, move: str) -> None:
        """Makes one of them."""

    def view(self, player: int) -> str:
        """Returns what a player sees: equal views are equal states to it."""

    def score(self, player: int) -> float:
        """Returns a player's result of a game that is over, from -1 to 1; the other's is its negative."""

    def best(self, random: Random) -> str:
        """Returns a best move of the player whose turn it is, who knows what it sees."""


@dataclass
class Duel:
    """A game (source `seeds`), with a trajectory and a reward for each player that the model is.

    Against itself the model is the agents `first` and `second`, whose accuracy is 0.5 by construction: evaluation has
    an opponent of its own. Against another it moves first in problems of an even number, and second in the rest. The
    reward is the game's score, `success` 1 for a win and 0.5 for a draw. Metrics are `win`, `draw`, `loss`, `invalid`
    (lost by a move that there was not), `invalid_moves` and `turns`.
    """

    game: str = field(default="tictactoe", metadata={"target": True})
    """`tictactoe`, `kuhn_poker`, or a class of one's own as `./file.py:Game`."""
    opponent: Literal["self", "random", "perfect"] = "self"
    """Who plays against the model in training: itself, random moves, or best play."""
    test_opponent: Literal["self", "random", "perfect"] = "random"
    """Who plays against it in evaluation."""
    prompt: str | None = None
    """The opening message, in place of the game's; `{state}` is what the player sees, `{player}` who it is."""
    allowed_invalid: int = 0
    """Invalid moves of a player that are only told; one more loses."""
    invalid: str = _INVALID
    """What follows an invalid move that is allowed; `{state}` is what the player sees."""

    def problems(self) -> Problems:
        yield from not_negative(self, "allowed_invalid")
        if self.prompt is not None and "{state}" not in self.prompt:
            yield "prompt", "must show the game: write `{state}` where the player's view stands"
        if self.game not in GAMES and ":" not in self.game:
            yield "game", f"must be {', '.join(f'`{name}`' for name in GAMES)} or `./file.py:Game`, is `{self.game}`"
            return
        try:
            _game(self.game)
        except PluginError as error:
            yield "game", f"{error}; {error.hint}"

    async def play(self, task: Task, model: Model) -> dict[str, StepResult]:
        """Plays a game to its end, or until somebody cannot move.

        Raises:
            OutOfTokens: the opening message is too long.
        """
        opponent = self.test_opponent if task.split == "test" else self.opponent
        mine = (0, 1) if opponent == "self" else (task.index % 2,)
        # Everything that is not the model's is the same in all episodes of a group.
        chance, game = Random(f"{task.seed}/opponent"), _game(self.game)(Random(f"{task.seed}/game"))
        players = {seat: _Player(self, seat, game, task, model) for seat in mine}
        forfeited: int | None = None
        while not game.is_over and forfeited is None:
            seat = game.player
            if seat in players:
                move = await players[seat].move()
            else:
                move = chance.choice(game.moves()) if opponent == "random" else game.best(chance)
            if move is None:
                forfeited = seat
            else:
                game.play(move)
        return {SEATS[seat]: _result(player, game, forfeited) for seat, player in players.items()}

    async def close(self) -> None:
        """Holds nothing."""


class _Player:
    """One seat of a game that the model takes, and its chat."""

    def __init__(self, options: Duel, seat: int, game: Game, task: Task, model: Model) -> None:
        self.options, self.seat, self.game, self.model = options, seat, game, model
        self.chat: list[Message] = list(task.messages)
        self.turns = self.invalid_moves = 0
        self._shown = (options.prompt or game.rules).replace("{player}", game.players[seat])

    async def move(self) -> str | None:
        """Asks the model for a move; None when it has none, or may say no more."""
        shown = self._shown
        while True:
            self.chat.append({"role": "user", "content": shown.replace("{state}", self.game.view(self.seat))})
            try:
                reply = await self.model(list(self.chat), SEATS[self.seat])
            except OutOfTokens:
                if not self.turns:
                    raise
                return None
            self.turns += 1
            self._shown = "{state}"
            self.chat.append({"role": "assistant", "content": reply.text})
            move = parse(reply.text, self.game.words)
            if move in self.game.moves():
                return move
            self.invalid_moves += 1
            if self.invalid_moves > self.options.allowed_invalid:
                return None
            shown = self.options.invalid


def parse(response: str, words: Mapping[str, str]) -> str | None:
    """Returns the move that a response ends with: the last of the game's words in it, or in what it marks as its move.

    >>> parse("Not 3, I take 5.", {"3": "3", "5": "5"})
    '5'
    """
    either = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
    found = re.findall(rf"(?<!\w)(?:{either})(?!\w)", marked(response)[0], re.IGNORECASE)
    return {word.lower(): move for word, move in words.items()}[found[-1].lower()] if found else None


def _result(player: _Player, game: Game, forfeited: int | None) -> StepResult:
    lost = forfeited == player.seat
    score = game.score(player.seat) if forfeited is None else -1.0 if lost else 1.0
    numbers = {
        "success": 1.0 if score > 0 else 0.0 if score < 0 else 0.5,
        "win": float(score > 0),
        "draw": float(score == 0),
        "loss": float(score < 0),
        "invalid": float(lost),
        "invalid_moves": float(player.invalid_moves),
        "turns": float(player.turns),
    }
    return StepResult([], True, score, numbers, numbers)


def _game(name: str) -> Any:
    return registry.resolve("games", GAMES.get(name, name))
