"""The table of properties: plain data, each named once, in a place of its own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rollcli.verify import subject
from rollcli.verify.properties import PROPERTIES, Property, SameAs


def plain(value) -> bool:
    return isinstance(value, (int, float, str)) or (isinstance(value, list) and all(map(plain, value)))


def numbers(value) -> list[float]:
    return [number for item in value for number in numbers(item)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("each", PROPERTIES, ids=lambda each: each.name)
def test_each_is_plain_data_and_says_why(each):
    assert all(map(plain, each.inputs.values()))
    assert each.why and len(each.name) <= 44, "a longer name does not fit the table"
    if isinstance(each.expected, SameAs):
        assert all(map(plain, each.expected.inputs.values()))
    else:
        assert all(math.isfinite(number) for number in numbers(each.expected))


def test_names_are_unique():
    names = [each.name for each in PROPERTIES]
    assert len(set(names)) == len(names)


def test_every_call_is_one_that_rollcli_offers_and_documents():
    for call in {each.call for each in PROPERTIES}:
        assert getattr(subject, call).__doc__


def test_nan_stands_off_the_mask_alone():
    for each in PROPERTIES:
        for name in ("losses", "rewards", "values", "advantages"):
            column = each.inputs.get(name)
            if column and isinstance(column[0], list) and "mask" in each.inputs:
                pairs = zip(numbers(column), numbers(each.inputs["mask"]))
                assert not any(math.isnan(value) and flag for value, flag in pairs), each.name


def test_right_inputs_replace_those_that_differ():
    each = Property("s", "n", "f", {"rows": [1], "together": 1}, SameAs({"together": 0}), "why")
    assert each.right_inputs == {"rows": [1], "together": 0}
    assert replace(each, expected=1).right_inputs is None
