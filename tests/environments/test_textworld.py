"""TextWorld: the adapter against a stand-in with the package's interface, and a real game where it is installed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rollcli.data.carriers import Task
from rollcli.environments.blocking import perform
from rollcli.environments.textworld import TextWorld, made
from rollcli.errors import DatasetNotFound, EpisodeError, PluginError


def task(seed: int = 0, split: str = "train") -> Task:
    return Task("t", 0, [{"role": "system", "content": "Play."}], seed=seed, split=split)


class Door:
    """A game of two points: open the door, then leave; staying loses."""

    def __init__(self, path: str) -> None:
        self.path, self.closed = path, False

    def reset(self) -> SimpleNamespace:
        self.score = 0
        return self.state("  BANNER\n\nLeave!\n\n\n\n\nA room.\n\n>     -= Room =-0/1", False)

    def step(self, command: str) -> tuple[SimpleNamespace, int, bool]:
        self.score += command in ("open door", "leave")
        over = command in ("leave", "stay")
        return self.state(f"\nYou {command}.\n\n>   -= Room =-", over and command == "leave"), self.score, over

    def state(self, text: str, won: bool) -> SimpleNamespace:
        return SimpleNamespace(feedback=text, admissible_commands=["open door", "leave"], score=self.score, max_score=2,
                               won=won, lost=False, objective="Leave!")  # fmt: skip

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    module = ModuleType("textworld")
    module.__version__ = "0"
    module.EnvInfos = SimpleNamespace
    module.GameOptions = SimpleNamespace

    def start(path: str, wanted: SimpleNamespace) -> Door:
        if not path.endswith(".z8"):
            raise ValueError("unsupported game format")
        return Door(path)

    def make(options: SimpleNamespace) -> None:
        if options.quest_length > 9:
            raise ValueError("quest too long")
        module.made.append(options.seeds)
        Path(options.path).write_text("game")
        Path(options.path).with_suffix(".json").write_text("{}")

    module.start, module.make, module.made = start, make, []
    monkeypatch.setitem(sys.modules, "textworld", module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return module


def test_an_episode(package: ModuleType) -> None:
    async def play() -> None:
        game = TextWorld()
        assert not list(game.problems())
        opened = await perform(game, "reset", task())
        assert [message["role"] for message in opened] == ["system", "user"]
        assert opened[1]["content"] == "Leave!\n\nA room.\n\nPossible commands: open door, leave"
        empty = await perform(game, "step", "<think>open door</think>\n")
        assert empty.messages[0]["content"] == "Write one command." and empty.reward == 0
        result = await perform(game, "step", "I would\n> open door\n")
        assert result.reward == 0.5 and result.messages[0]["content"].startswith("You open door.\n\nPossible")
        won = await perform(game, "step", "Action: leave")
        assert won.done and won.reward == 0.5 and won.fields["done_reason"] == "won"
        assert won.metrics == {"success": 1, "score": 1, "turns": 3, "ended_won": 1, "ended_lost": 0,
                               "ended_max_turns": 0}  # fmt: skip
        await perform(game, "close")
        assert game._game.closed

    asyncio.run(play())


def test_what_ends_without_success(package: ModuleType) -> None:
    game = TextWorld(max_turns=2, show_commands=False)
    assert game.reset(task())[1]["content"] == "Leave!\n\nA room."
    assert not game.step("wait").done
    assert game.step("wait").fields["done_reason"] == "max_turns"
    lost = TextWorld()
    lost.reset(task())
    result = lost.step("stay")
    assert result.done and result.fields["done_reason"] == "lost" and result.metrics["success"] == 0


def test_games_are_made_once_and_files_picked_by_seed(package: ModuleType, tmp_path: Path) -> None:
    for seed in (3, 3, 4):
        TextWorld().reset(task(seed))
    assert package.made == [3, 4]
    with pytest.raises(EpisodeError, match="quest of 10: quest too long"):
        made(package, 0, 1, 1, 10)
    assert len(list((tmp_path / "rollcli" / "textworld").iterdir())) == 4, "two games, and nothing half made"
    for name in ("a.z8", "a.json", "b.z8", "c.z8"):
        (tmp_path / name).write_text("x")
    games, names = TextWorld([f"{tmp_path}/[ab].*"], [f"{tmp_path}/c.z8"]), []
    for seed, split in ((0, "train"), (1, "train"), (2, "train"), (1, "test")):
        games.reset(task(seed, split))
        names.append(Path(games._game.path).name)
    assert names == ["a.z8", "b.z8", "a.z8", "c.z8"]
    with pytest.raises(DatasetNotFound, match="no game file at"):
        TextWorld([f"{tmp_path}/none*"]).reset(task())
    (tmp_path / "broken.zip").write_text("x")
    with pytest.raises(DatasetNotFound, match="is no game of TextWorld: unsupported"):
        TextWorld([f"{tmp_path}/broken.zip"]).reset(task())


def test_options_without_sense_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {key for key, _ in TextWorld(rooms=0, test_games=["x"]).problems()} == {"rooms", "test_games"}
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(PluginError, match="textworld") as caught:
        TextWorld().reset(task())
    assert "rollcli[textworld]" in caught.value.hint


def test_a_real_game_is_won_by_its_walkthrough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    textworld = pytest.importorskip("textworld")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    game = TextWorld(rooms=1, objects=2, quest_length=2)
    [_, opened] = game.reset(task(7))
    assert (
        "Possible commands: " in opened["content"] and "$$" not in opened["content"] and "\n>" not in opened["content"]
    )
    [file] = (tmp_path / "rollcli" / "textworld").glob("*.z8")
    solution = textworld.Game.load(str(file.with_suffix(".json"))).walkthrough
    assert not game.step("sing nonsense").done
    results = [game.step(command) for command in solution]
    assert results[-1].fields["done_reason"] == "won" and sum(result.reward for result in results) == 1
    game.close()
