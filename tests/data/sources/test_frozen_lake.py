"""FrozenLake's problems: apart by split, the same again, demonstrated by turns."""

from rollcli.data.games import frozen_lake
from rollcli.data.sources.frozen_lake import FrozenLakeSource


def test_maps_are_solvable_repeatable_and_apart_by_split() -> None:
    source = FrozenLakeSource()
    train, test = source.open("train", 1), source.open("test", 1)
    maps = [train[index].payload["map"] for index in range(50)]
    assert maps == [source.open("train", 1)[index].payload["map"] for index in range(50)]
    assert not set(maps) & {test[index].payload["map"] for index in range(20)}
    assert all(frozen_lake.is_solvable(tuple(text.split())) for text in maps)


def test_a_demonstrated_turn_is_the_solvers_on_the_grid_before_it() -> None:
    items = FrozenLakeSource(demonstrate=True, expert_share=1.0).open("train", 1)
    for index in range(20):
        problem = items[index]
        roles = [message["role"] for message in problem.messages]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)] and len(roles) % 2
        rows = tuple(problem.payload["map"].split())
        at = "".join(problem.messages[-1]["content"].split("\n")[-4:]).index("P")
        assert problem.payload["response"] == frozen_lake.policy(rows, False)[at]


def test_the_rest_of_demonstrated_turns_is_random() -> None:
    items = FrozenLakeSource(demonstrate=True, expert_share=0.0).open("train", 1)
    assert {items[index].payload["response"] for index in range(60)} == set("LDRU")


def test_options_without_sense_are_named() -> None:
    source = FrozenLakeSource(size=1, frozen_share=0.1, words="aab", prompt="go", expert_share=2.0)
    assert {key for key, _ in source.problems()} == {"size", "frozen_share", "words", "prompt", "expert_share"}


def test_a_whole_game_ends_with_its_last_turn() -> None:
    source = FrozenLakeSource(demonstrate=True, whole_games=True, expert_share=1.0, demonstrated_turns=3, size=3)
    for index in range(30):
        problem = source.open("train", 1)[index]
        says = [message["content"] for message in problem.messages if message["role"] == "assistant"]
        rows = problem.payload["map"].split("\n")
        # On the ice of 3 x 3 the way takes at least 4 moves, of which 3 are shown.
        assert len(says) == 2 and len(rows) == 3
