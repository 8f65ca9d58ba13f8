"""Asking a subject: what is right, wrong, absent, and what a subject may do."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from rollcli.errors import NotFound, PluginError
from rollcli.verify import suite
from rollcli.verify.properties import PROPERTIES, Property, SameAs

DOUBLE = Property("sums", "double is twice", "double", {"value": 2}, 4, "it must")
SAME = Property("sums", "sign does not matter", "square", {"value": 2}, SameAs({"value": -2}), "it must")


def ask(each: Property, function, **options) -> suite.Result:
    (result,) = suite.run([each], SimpleNamespace(**{each.call: function}), **options)
    return result


def test_right_and_wrong():
    assert ask(DOUBLE, lambda value: 2 * value).status == "ok"
    result = ask(DOUBLE, lambda value: 3 * value)
    assert (result.status, result.right, result.got, result.error) == ("FAILED", 4, 6, None)


def test_a_property_may_compare_two_answers():
    assert ask(SAME, lambda value: value**2).status == "ok"
    result = ask(SAME, lambda value: value)
    assert (result.status, result.right, result.got) == ("FAILED", -2, 2)


@pytest.mark.parametrize(
    ("raised", "told"),
    [(ValueError("two\nlines"), "ValueError: two lines"), (SystemExit(3), "SystemExit: 3"), (RecursionError(), "Rec")],
)
def test_what_a_subject_raises_is_its_answer(raised, told):
    def function(value):
        raise raised

    result = ask(DOUBLE, function)
    assert result.status == "FAILED" and result.error.startswith(told) and result.got is None
    assert ask(SAME, function).right is None


def test_ctrl_c_is_not_an_answer():
    def function(value):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(DOUBLE, function)


@pytest.mark.parametrize("answer", [None, "4", {"value": 4}, [None]])
def test_an_answer_that_is_no_number(answer):
    result = ask(DOUBLE, lambda value: answer)
    assert result.status == "FAILED" and result.error.startswith("TypeError: expected numbers, got ")


@pytest.mark.parametrize("answer", [4, 4.0, np.float32(4), np.array(4)])
def test_numbers_of_any_library(answer):
    result = ask(DOUBLE, lambda value: answer)
    assert result.status == "ok" and type(result.got) in (int, float)


def test_what_is_not_offered_is_no_failure_but_of_rollcli():
    assert suite.run([DOUBLE], object())[0].status == "not offered"
    assert suite.run([DOUBLE], object(), complete=True)[0].status == "FAILED"


def test_a_subject_cannot_change_the_inputs_of_the_next():
    each = Property("s", "n", "f", {"values": [1, 2]}, 3, "why")
    ask(each, lambda values: values.clear() or 3)
    assert each.inputs == {"values": [1, 2]}


@pytest.mark.parametrize(
    ("got", "right", "same"),
    [
        ([1, [2]], [1, [2]], True),
        ([1, 2], [1, [2]], False),
        ([1, [2]], [1, 2], False),
        ([1], [1, 1], False),
        ([], [], True),
        (1.0009, 1, True),
        (1.0011, 1, False),
        (1000.9, 1000, True),
        (0.0011, 0, False),
        (math.nan, 0, False),
        (math.inf, 0, False),
        (-0.0, 0, True),
    ],
)
def test_equal(got, right, same):
    assert suite.equal(got, right, 1e-3) is same


def test_select():
    assert len(suite.select(None)) == len(PROPERTIES)
    assert {each.section for each in suite.select("kl estimator")} == {"KL"}
    assert {each.call for each in suite.select("update_gradient")} == {"update_gradient"}
    with pytest.raises(NotFound, match=r"no property `advantges`.*mean `advantages`") as raised:
        suite.select("advantges")
    assert "loss aggregation" in raised.value.hint


def test_signature_and_meaning():
    assert suite.signature("group_advantages") == "group_advantages(rewards, groups, baseline='mean', scale='group')"
    assert suite.meaning("entropy").startswith("The entropy of each row")


def test_load_a_file_with_neighbors(tmp_path):
    (tmp_path / "neighbor_of_theirs.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "theirs.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbor_of_theirs import half\n"
        "@dataclass\nclass Options:\n    a: int = 1\ndef entropy(logits):\n    return half(4)\n"
    )
    assert suite.load_subject(str(tmp_path / "theirs.py")).entropy([]) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [("import nowhere_to_be_found", "ModuleNotFoundError"), ("1 / 0", "ZeroDivisionError"), ("exit(3)", "SystemExit")],
)
def test_a_file_that_does_not_import(tmp_path, text, told):
    (tmp_path / "theirs.py").write_text(text)
    with pytest.raises(PluginError, match=f"does not import: {told}"):
        suite.load_subject(str(tmp_path / "theirs.py"))


def test_subjects_that_are_none():
    with pytest.raises(PluginError, match="no file"):
        suite.load_subject("./absent.py")
    with pytest.raises(PluginError, match="does not import"):
        suite.load_subject("absent_module")
    with pytest.raises(PluginError, match="offers none"):
        suite.load_subject("json")
