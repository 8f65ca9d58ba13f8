"""Kuhn poker (Kuhn 1950, "A simplified two-person poker"): three cards, one bet, and what the other holds is hidden.

Each player puts in one chip and gets one of J, Q, K. The first passes or bets a second chip; a bet is called or folded;
after a pass the other may bet in turn. The higher card wins what is in the pot.
"""

from __future__ import annotations

from random import Random

_ENDS = {"pp": 1, "bp": 1, "bb": 2, "pbp": 1, "pbb": 2}
"""Chips that change hands by how a game was played."""
_FIRST_BETS = {"J": 1 / 3, "Q": 0.0, "K": 1.0}
"""Of the equilibria that Kuhn gives, by how often the first player bets on a jack, the one with a third."""
_FIRST_CALLS = {"J": 0.0, "Q": 2 / 3, "K": 1.0}
_SECOND_BETS = {"J": 1 / 3, "Q": 0.0, "K": 1.0}
_SECOND_CALLS = {"J": 0.0, "Q": 1 / 3, "K": 1.0}


def bet_chance(card: str, history: str) -> float:
    """Returns how often an equilibrium bets, or calls, with a card after moves such as `pb`.

    Kuhn 1950, section 3: nobody does better than a loss of 1/18 chip a game as the first against it.
    """
    return {"": _FIRST_BETS, "p": _SECOND_BETS, "b": _SECOND_CALLS, "pb": _FIRST_CALLS}[history][card]


class KuhnPoker:
    """A game for two; see `rollcli.environments.duel.Game`. What a player sees is its card and the moves: `K:pb`."""

    rules = (
        "Kuhn poker: each of two players has put in one chip and holds one of the cards J, Q, K. By turns you pass (p) "
        "or bet one chip (b); a pass after a bet folds, a bet after a bet calls. The higher card wins. You are the "
        "{player} player. You see your card and the moves so far. Write p or b.\n{state}"
    )
    players = ("first", "second")
    words = {"p": "p", "pass": "p", "fold": "p", "check": "p", "b": "b", "bet": "b", "call": "b"}

    def __init__(self, random: Random) -> None:
        self.cards = random.sample("JQK", 2)
        self.history = ""

    @property
    def player(self) -> int:
        """Whose turn it is."""
        return len(self.history) % 2

    @property
    def is_over(self) -> bool:
        """True after a call, a fold, or two passes."""
        return self.history in _ENDS

    def moves(self) -> list[str]:
        """Returns passing and betting: both are always allowed."""
        return [] if self.is_over else ["p", "b"]

    def play(self, move: str) -> None:
        """Passes or bets."""
        self.history += move

    def view(self, player: int) -> str:
        """Returns a player's own card, and the moves so far."""
        return f"{self.cards[player]}:{self.history}"

    def score(self, player: int) -> float:
        """Returns the chips won or lost, in halves of the most there can be: from -1 to 1."""
        if self.history.endswith("bp"):  # who folds has moved last
            won = 1 - (len(self.history) - 1) % 2
        else:
            won = int("JQK".index(self.cards[1]) > "JQK".index(self.cards[0]))
        return _ENDS[self.history] / 2 * (1 if won == player else -1)

    def best(self, random: Random) -> str:
        """Returns a move of an equilibrium, drawn by its chances."""
        return "b" if random.random() < bet_chance(self.cards[self.player], self.history) else "p"
