"""Games with two players: each has its own chat, trajectory and reward."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from rollcli.config.build import build_recipe
from rollcli.data.carriers import Group, Task
from rollcli.data.games.kuhn_poker import KuhnPoker
from rollcli.data.games.tictactoe import TicTacToe
from rollcli.engines.base import SamplingParams
from rollcli.engines.character_tokenizer import CHARACTERS
from rollcli.environments.duel import Duel, parse
from rollcli.errors import ConfigError
from tests.environments.episodes import episode, texts
from tests.rollout.doubles import Model


def problem(index: int = 0, split: str = "train", seed: int = 5) -> Task:
    return Task("t", index, [], {"success": 0.0}, seed=seed, split=split)


def test_a_game_against_itself_is_two_trajectories_of_opposite_reward():
    model = Model("1.", "4.", "2.", "I take 5.", "3.")
    first, second = episode(Duel(prompt="{player}:{state}"), model, problem())
    assert texts([first, second]) == [
        "X:123\n456\n789>1.X23\nO56\n789>2.XX3\nOO6\n789>3.", "O:X23\n456\n789>4.XX3\nO56\n789>I take 5.",
    ]  # fmt: skip
    assert [(each.agent, each.reward, each.accuracy, each.turn_rewards) for each in (first, second)] == [
        ("first", 1.0, 1.0, [0.0, 0.0, 1.0]), ("second", -1.0, 0.0, [0.0, -1.0]),
    ]  # fmt: skip
    assert first.metrics["win"] == second.metrics["loss"] == 1.0 and first.metrics["turns"] == 3.0
    assert first.state_keys[1:] == ["X23\nO56\n789", "XX3\nOO6\n789"]
    assert len(Group(problem(), [first, second]).by_agent()) == 2


def test_a_draw():
    players = episode(Duel(), Model(*(f"{field}." for field in "159287364")), problem())
    assert [(each.reward, each.accuracy, each.metrics["draw"]) for each in players] == [(0.0, 0.5, 1.0)] * 2


@pytest.mark.parametrize("said", ["1.", "0.", "none."])
def test_an_invalid_move_loses(said):
    first, second = episode(Duel(), Model("1.", said), problem())
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert (first.metrics["invalid"], second.metrics["invalid"], second.metrics["invalid_moves"]) == (0.0, 1.0, 1.0)


def test_an_invalid_move_may_be_told_first():
    duel = Duel(prompt="{state}", allowed_invalid=1, invalid="no\n{state}")
    first, second = episode(duel, Model("1.", "1.", "4.", "9.", "x.", "5."), problem())
    assert texts([second])[0].startswith("X23\n456\n789>1.no\nX23\n456\n789>4.")
    assert (second.reward, second.metrics["invalid_moves"], len(second.turns)) == (-1.0, 2.0, 3)
    assert first.reward == 1.0


def test_who_may_say_no_more_loses():
    model = Model("1.", "4.", "2.")
    first, second = episode(Duel(), model, problem(), sampling=SamplingParams(max_tokens=2))
    assert (first.reward, second.reward, first.metrics["invalid"]) == (-1.0, 1.0, 1.0)
    [failed] = episode(Duel(), Model(), problem(), max_prompt_tokens=3)
    assert failed.error_kind == "prompt_too_long"


class Center:
    """Takes the first free field it sees; against chance that wins now and then."""

    async def __call__(self, request):
        board = "".join(map(chr, request.prompt))[-12:-1]
        return await Model(f"{min(field for field in board if field.isdigit())}.")(request)


def test_opponents_alternate_seats_and_are_the_same_for_a_group():
    for index in (0, 1):
        duel = Duel(opponent="random", prompt="{state}")
        one, same = (episode(duel, Center(), problem(index)) for _ in range(2))
        assert [each.agent for each in one] == [("first", "second")[index]] and texts(one) == texts(same)
    boards = {texts(episode(duel, Center(), problem(1, seed=seed)))[0][:11] for seed in range(9)}
    assert len(boards) > 2, "another problem has another opponent"


def test_perfect_play_is_not_beaten_and_evaluation_has_its_own_opponent():
    results = Counter()
    for index in range(12):
        [done] = episode(Duel(opponent="perfect"), Center(), problem(index, seed=index))
        results[done.reward] += 1
    assert set(results) <= {0.0, -1.0} and results[-1.0]
    assert len(episode(Duel(), Center(), problem(split="test"))) == 1
    assert len(episode(Duel(test_opponent="self"), Center(), problem(split="test"))) == 2


def test_a_hidden_card_is_seen_by_its_player_alone():
    cards = KuhnPoker(Random("5/game")).cards
    first, second = episode(Duel("kuhn_poker", prompt="{state}"), Model("pass.", "bet.", "fold."), problem())
    assert texts([first, second]) == [f"{cards[0]}:>pass.{cards[0]}:pb>fold.", f"{cards[1]}:p>bet."]
    assert (first.reward, second.reward) == (-0.5, 0.5)


def test_the_last_move_named_counts():
    words = TicTacToe.words
    assert parse("5", words) == "5" and parse("<answer>3</answer> not 4", words) == "3"
    assert parse("field 15", words) is None and parse("", words) is None
    assert parse("I CALL", KuhnPoker.words) == "b"


def test_boards_are_of_the_embedded_models_characters():
    assert set(TicTacToe(Random(0)).view(0) + KuhnPoker(Random(0)).view(0) + "XO") <= set(CHARACTERS)


def recipe(folder, **options):
    task = {
        "name": "t",
        "source": "seeds",
        "rewards": [{"name": "success"}],
        "environment": {"name": "duel", **options},
    }
    values = {"model": {"path": "embedded:sums"}, "steps": 1, "tasks": [task], "algorithm": "grpo"}
    return build_recipe(values, {}, folder).tasks[0].environment


def test_a_game_of_ones_own_is_found_beside_the_recipe(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from rollcli.data.games.tictactoe import TicTacToe\nclass Tiny(TicTacToe):\n    rules = 'tiny {state}'\n"
    )
    duel = recipe(tmp_path, game="./mine.py:Tiny")
    assert texts(episode(duel, Model("1.", "1."), problem()))[0].startswith("tiny 123")
    for options, message in (
        ({"game": "chess"}, "must be `kuhn_poker`, `tictactoe`"),
        ({"game": "./mine.py:Tinny"}, "did you mean `Tiny`"),
        ({"prompt": "play"}, "must show the game"),
        ({"allowed_invalid": -1}, "must not be negative"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe(tmp_path, **options)
