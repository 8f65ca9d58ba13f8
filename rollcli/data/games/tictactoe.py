"""Tic-tac-toe: three in a row win. A free field shows its number, 1 to 9, so that a board is eleven characters."""

from __future__ import annotations

from functools import cache
from random import Random

LINES = ("123", "456", "789", "147", "258", "369", "159", "357")
_MARKS = "XO"


class TicTacToe:
    """A game for two; see `rollcli.environments.duel.Game`."""

    rules = (
        "Tic-tac-toe: three of your marks in a row, a column or a diagonal win. X moves first. You are {player}. "
        "A free field shows its number; write the number of the field you take.\n{state}"
    )
    players = ("X", "O")
    words = {field: field for field in "123456789"}

    def __init__(self, random: Random) -> None:
        self.board = "123456789"

    @property
    def player(self) -> int:
        """Whose turn it is: X moves first."""
        return sum(mark in _MARKS for mark in self.board) % 2

    @property
    def is_over(self) -> bool:
        """True when somebody has won, or no field is free."""
        return winner(self.board) is not None or not self.moves()

    def moves(self) -> list[str]:
        """Returns the free fields."""
        return [mark for mark in self.board if mark not in _MARKS]

    def play(self, move: str) -> None:
        """Takes a free field."""
        self.board = self.board.replace(move, _MARKS[self.player])

    def view(self, player: int) -> str:
        """Returns the board as three lines: nothing is hidden."""
        return "\n".join(self.board[start : start + 3] for start in (0, 3, 6))

    def score(self, player: int) -> float:
        """Returns 1 for the winner, -1 for the loser, and 0 for a draw."""
        won = winner(self.board)
        return 0.0 if won is None else 1.0 if won == player else -1.0

    def best(self, random: Random) -> str:
        """Returns one of the moves that minimax finds best."""
        worths = {move: -_worth(self.board.replace(move, _MARKS[self.player])) for move in self.moves()}
        return random.choice([move for move, worth in worths.items() if worth == max(worths.values())])


def winner(board: str) -> int | None:
    """Returns the player with three in a row."""
    for line in LINES:
        marks = {board[int(field) - 1] for field in line}
        if len(marks) == 1:
            return _MARKS.index(marks.pop())
    return None


@cache
def _worth(board: str) -> int:
    """Returns what a position is worth to the player to move when both play best: 1, 0 or -1."""
    if winner(board) is not None:
        return -1  # the other has just won
    free = [mark for mark in board if mark not in _MARKS]
    mark = _MARKS[(9 - len(free)) % 2]
    return max((-_worth(board.replace(move, mark)) for move in free), default=0)
