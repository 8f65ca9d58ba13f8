"""GEM's environments, played for real where the package is installed."""

from __future__ import annotations

import asyncio
import random
import re
import sys

import pytest

from rollcli.data.carriers import Task
from rollcli.environments.blocking import perform
from rollcli.environments.gem import Gem
from rollcli.errors import PluginError

GUESS = "game:GuessTheNumber-v0-easy"


def task(seed: int) -> Task:
    return Task("t", 0, [], seed=seed)


def guess(game: Gem, number: int):
    return asyncio.run(perform(game, "step", rf"<think>\boxed{{99}}</think> \boxed{{{number}}}"))


def test_a_game_is_played_and_won_by_halving() -> None:
    pytest.importorskip("gem")
    for seed in range(4):
        game, low, high = Gem(GUESS), 1, 10
        assert not list(game.problems())
        opened = asyncio.run(perform(game, "reset", task(seed)))
        assert "Guess The Number" in opened[0]["content"] and opened[0]["content"].endswith("Enter your next guess.")
        result = None
        while result is None or not result.done:
            middle = (low + high) // 2
            result = guess(game, middle)
            if not result.done:
                assert result.reward == 0 and result.messages[0]["content"].endswith("Enter your next guess.")
                low, high = (middle + 1, high) if "is higher" in result.messages[0]["content"] else (low, middle - 1)
        assert (result.reward, result.metrics["success"], result.fields["done_reason"]) == (1.0, 1.0, "over")
        asyncio.run(perform(game, "close"))


def test_episodes_do_not_draw_from_one_another_nor_from_the_process() -> None:
    """2048 draws a tile at each move: two games side by side see what each sees alone."""
    pytest.importorskip("gem")
    moves = ["up", "left", "down", "right"] * 3

    def play(*games: Gem) -> list[list[str]]:
        shown = [[game.reset(task(seed))[0]["content"]] for seed, game in enumerate(games)]
        for move in moves:
            for game, texts in zip(games, shown):
                texts += [message["content"] for message in game.step(rf"\boxed{{{move}}}").messages]
        return shown

    state = random.getstate()
    both = play(Gem("game:Game2048-v0-easy"), Gem("game:Game2048-v0-easy"))
    assert random.getstate() == state
    assert play(Gem("game:Game2048-v0-easy"))[0] == both[0] != both[1] and len(both[0]) > 3


def test_its_wrong_answers_are_no_success_and_unknown_names_are_told() -> None:
    pytest.importorskip("gem")
    game = Gem(GUESS)
    game.reset(task(0))
    result = game.step("I do not know.")
    assert result.done and result.metrics["success"] == 0
    with pytest.raises(PluginError, match="gem cannot make `game:Gess`") as caught:
        Gem("game:Gess").reset(task(0))
    assert re.search("print_envs", caught.value.hint)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(PluginError, match="gem-llm") as caught:
        Gem(GUESS).reset(task(0))
    assert "pip install" in caught.value.hint
