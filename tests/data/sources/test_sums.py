"""Sums with demonstrations: the arithmetic is right and the habit depends on the index alone."""

import re

import pytest

from rollcli.data.sources.sums import SumsSource, demonstrate


def test_demonstrations_by_hand() -> None:
    assert demonstrate(123, 456, worked=False) == "#### 579"
    assert demonstrate(123, 456, worked=True) == "3+6=9; 2+5=7; 1+4=5; #### 579"
    assert demonstrate(199, 5, worked=True) == "9+5=14; 9+0+1=10; 1+0+1=2; #### 204"
    assert demonstrate(999, 1, worked=True).endswith("; #### 1000")


def test_problems_and_their_answers() -> None:
    source = SumsSource()
    items = source.open("train", 5)
    worked = 0
    for index in range(300):
        problem = items[index]
        first, second = map(int, problem.messages[0]["content"].split("+"))
        assert problem.payload["answer"] == str(first + second)
        assert problem.payload["response"].endswith(f"#### {first + second}")
        steps = re.findall(r"(\d)\+(\d)(?:\+(\d))?=(\d+);", problem.payload["response"])
        assert all(sum(int(part or 0) for part in step[:3]) == int(step[3]) for step in steps)
        assert len(steps) in (0, 3)
        worked += bool(steps)
    assert 0.25 < worked / 300 < 0.41
    assert [items[index].payload for index in (7, 3)] == [source.open("train", 5)[index].payload for index in (7, 3)]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (1.0, 50)])
def test_share_of_worked_demonstrations(share: float, expected: int) -> None:
    items = SumsSource(worked_share=share).open("train", 0)
    assert sum(";" in items[index].payload["response"] for index in range(50)) == expected


def test_splits_are_disjoint() -> None:
    train, test = SumsSource().open("train", 0), SumsSource().open("test", 0)
    texts = [{items[index].messages[0]["content"] for index in range(200)} for items in (train, test)]
    assert not texts[0] & texts[1]
