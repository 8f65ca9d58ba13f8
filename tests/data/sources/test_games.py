"""A source whose levels all belong to the other split says so."""

from dataclasses import dataclass

from rollcli.data.sources.frozen_lake import FrozenLakeSource
from rollcli.data.sources.games import GameSource
from rollcli.data.sources.sokoban import SokobanSource
from rollcli.engines.character_tokenizer import CHARACTERS
from rollcli.errors import DatasetNotFound


@dataclass
class One(GameSource):
    """The same level again and again."""

    def level(self, random):
        return "."

    def payload(self, level):
        return {}

    def show(self, level):
        return level


def test_a_level_is_in_one_split_alone() -> None:
    found = []
    for split in ("train", "test"):
        try:
            found.append(One().open(split, 0)[0].messages)
        except DatasetNotFound as error:
            assert split in error.message
    assert found == [[{"role": "user", "content": "."}]]


def test_it_must_show_the_state() -> None:
    assert [key for key, _ in One(prompt="play").problems()] == ["prompt"]


def test_the_embedded_tokenizer_knows_every_character_shown() -> None:
    for source in (FrozenLakeSource(), SokobanSource()):
        assert set(source.open("train", 0)[0].messages[0]["content"]) <= set(CHARACTERS)
