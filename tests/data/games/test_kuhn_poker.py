"""The game's tree by hand, and the equilibrium against all that can be played."""

from __future__ import annotations

from itertools import permutations, product
from random import Random

import pytest

from rollcli.data.games.kuhn_poker import KuhnPoker, bet_chance


def dealt(cards: str, history: str = "") -> KuhnPoker:
    game = KuhnPoker(Random(0))
    game.cards, game.history = list(cards), history
    return game


@pytest.mark.parametrize(
    ("cards", "history", "chips"),
    [("KQ", "pp", 1), ("JQ", "pp", -1), ("JK", "bp", 1), ("JQ", "bb", -2), ("KJ", "pbp", -1), ("KJ", "pbb", 2)],
)
def test_scores_are_chips_in_halves_of_two(cards, history, chips):
    game = dealt(cards, history)
    assert game.is_over and (game.score(0), game.score(1)) == (chips / 2, -chips / 2) and game.moves() == []


def test_a_player_sees_its_own_card_and_the_moves():
    game = dealt("KQ")
    game.play("p")
    game.play("b")
    assert (game.player, game.view(0), game.view(1), game.moves()) == (0, "K:pb", "Q:pb", ["p", "b"])


def value(first, second) -> float:
    """Returns what the first player wins a game, in chips; a strategy is the chance to bet by card and history."""

    def walk(cards: tuple[str, ...], history: str) -> float:
        game = dealt("".join(cards), history)
        if game.is_over:
            return 2 * game.score(0)
        bet = (first, second)[game.player](cards[game.player], history)
        return sum(chance * walk(cards, history + move) for move, chance in (("b", bet), ("p", 1 - bet)) if chance)

    return sum(walk(cards, "") for cards in permutations("JQK", 2)) / 6


def test_nothing_does_better_against_the_equilibrium_on_either_side():
    assert value(bet_chance, bet_chance) == pytest.approx(-1 / 18)

    def strategies(histories: tuple[str, str]):
        places = list(product("JQK", histories))
        for bets in product((0.0, 1.0), repeat=len(places)):
            table = dict(zip(places, bets))
            yield lambda card, history, table=table: table[card, history]

    assert max(value(each, bet_chance) for each in strategies(("", "pb"))) == pytest.approx(-1 / 18)
    assert min(value(bet_chance, each) for each in strategies(("p", "b"))) == pytest.approx(-1 / 18)


def test_cards_and_moves_follow_the_seed():
    games = [KuhnPoker(Random(7)) for _ in range(2)]
    assert games[0].cards == games[1].cards and len(set(games[0].cards)) == 2
    drawn = [dealt("QJ", "pb").best(Random(seed)) for seed in range(300)]
    assert 150 < drawn.count("b") < 250, "two thirds of the time"
    assert {dealt("JK", "p").best(Random(seed)) for seed in range(20)} == {"b"}
