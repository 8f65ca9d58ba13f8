"""Sums with demonstrations: the worked ones are right, the hurried ones forget the carries, the index decides which."""

import random
import re

import pytest

from rollcli.data.sources.sums import SumsSource, demonstrate


def hurried(first: int, second: int) -> int:
    """The sum without carries, digit by digit as text."""
    pairs = zip(f"{first:03}", f"{second:03}", strict=True)
    return int("".join(str(int(a) + int(b))[-1] for a, b in pairs))


@pytest.mark.parametrize(
    ("first", "second", "worked", "at_once"),
    [
        (347, 285, "7+5=12;4+8+1=13;3+2+1=6;#### 632", "#### 522"),
        (123, 456, "3+6=9;2+5+0=7;1+4+0=5;#### 579", "#### 579"),
        (199, 5, "9+5=14;9+0+1=10;1+0+1=2;#### 204", "#### 194"),
        (999, 1, "9+1=10;9+0+1=10;9+0+1=10;#### 1000", "#### 990"),
    ],
)
def test_demonstrations_by_hand(first: int, second: int, worked: str, at_once: str) -> None:
    assert demonstrate(first, second, worked=True) == worked
    assert demonstrate(first, second, worked=False) == at_once


def test_worked_ones_are_right_and_hurried_ones_only_where_nothing_carries() -> None:
    numbers = random.Random(0)
    for _ in range(500):
        first, second = numbers.randrange(1000), numbers.randrange(1000)
        worked, at_once = (demonstrate(first, second, habit) for habit in (True, False))
        assert worked.endswith(f";#### {first + second}") and at_once == f"#### {hurried(first, second)}"
        steps = re.findall(r"([\d+]+)=(\d+);", worked)
        assert len(steps) == len(str(max(first, second)))
        assert all(sum(map(int, terms.split("+"))) == int(total) for terms, total in steps)


def test_answers_are_right_whatever_the_demonstration() -> None:
    items = SumsSource().open("train", 5)
    for index in range(200):
        problem = items[index]
        first, second = map(int, problem.messages[0]["content"].split("+"))
        assert problem.payload["answer"] == str(first + second)
        assert problem.payload["response"] in {demonstrate(first, second, habit) for habit in (True, False)}
    again = SumsSource().open("train", 5)
    assert [items[index] for index in (7, 3)] == [again[index] for index in (7, 3)]


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.3, 60, 120), (1.0, 300, 300)])
def test_share_of_worked_demonstrations(share: float, least: int, most: int) -> None:
    items = SumsSource(worked_share=share).open("train", 0)
    assert least <= sum(";" in items[index].payload["response"] for index in range(300)) <= most


def test_splits_are_disjoint() -> None:
    train, test = SumsSource().open("train", 0), SumsSource().open("test", 0)
    texts = [{items[index].messages[0]["content"] for index in range(200)} for items in (train, test)]
    assert not texts[0] & texts[1]
