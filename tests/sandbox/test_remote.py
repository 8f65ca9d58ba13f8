"""Values cross as plain data, and neither side can do more to the other than it should."""

import collections
import datetime
import decimal
import fractions
import math
import socket
import threading

import pytest

from rollcli.sandbox.remote import AnswerError, Peer, Remote


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    answer, tests = Peer(theirs, serves_all=True), Peer(ours, serves_all=False)
    yield answer, tests
    ours.close()
    theirs.close()


@pytest.fixture
def serving(pair):
    answer, tests = pair

    def start(value):
        threading.Thread(target=answer.serve, args=(answer.encode(value),), daemon=True).start()
        return tests.decode(tests.ready())

    return start


VALUES = [
    None, True, 0, -(2**80), 1.5, "é\ud800", b"\x00\xff", [1, [2]], (1, (2,)), {1: "a", (2,): [3]}, {1, 2},
    frozenset({3}),
    2 + 3j, range(1, 9, 2), decimal.Decimal("1.10"), fractions.Fraction(1, 3), datetime.date(2024, 2, 29),
    datetime.timedelta(1, 2, 3), collections.Counter("aab"), collections.OrderedDict(a=1), collections.deque([1]),
    ..., int,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_data_comes_back_the_same(pair, value):
    answer, tests = pair
    got = tests.decode(answer.encode(value))
    assert got == value and type(got) is type(value)


def test_floats_without_a_number(pair):
    answer, tests = pair
    assert math.isnan(tests.decode(answer.encode(math.nan)))


def test_subclasses_lose_their_methods(pair):
    class Same(int):
        __eq__ = lambda self, other: True  # noqa: E731
        __hash__ = int.__hash__

    answer, tests = pair
    got = tests.decode(answer.encode(Same(3)))
    assert type(got) is int and got != 4


def test_handles_are_equal_to_no_data(serving):
    class Alike:
        def __eq__(self, other):
            return True

        def __sub__(self, other):
            return 0

        __hash__ = None

    handle = serving(Alike())
    assert isinstance(handle, Remote) and handle != 3 and handle == handle
    with pytest.raises(TypeError):
        abs(handle - 3)


def test_handles_do_what_tests_need(serving):
    class Stack:
        def __init__(self):
            self.items = []

        def push(self, item):
            self.items.append(item)
            return self

        def __len__(self):
            return len(self.items)

        def __iter__(self):
            return iter(self.items)

        def __getitem__(self, index):
            return self.items[index]

    stack = serving(Stack)()
    stack.push(1).push(2)
    assert (len(stack), list(stack), stack[1], 2 in stack, stack.items) == (2, [1, 2], 2, True, [1, 2])
    stack.items = []
    assert not stack
    with pytest.raises(IndexError):
        stack[0]


def test_changes_in_place_come_back(serving):
    def grow(items, table, *, seen):
        items.sort()
        table["x"] = 1
        seen.add(2)

    items, table, seen = [3, 1], {}, set()
    serving(grow)(items, table, seen=seen)
    assert (items, table, seen) == ([1, 3], {"x": 1}, {2})


def test_a_function_of_the_tests_can_be_called_and_no_more(serving):
    def use(function, value):
        assert function(value) == value + 1
        return function.__globals__ if value else function.secret

    with pytest.raises(AttributeError):
        serving(use)(lambda x: x + 1, 1)


def test_attributes_of_a_function_of_the_tests_are_refused(serving):
    with pytest.raises(PermissionError):
        serving(lambda function: function.secret)(lambda: 1)


def test_what_tests_cannot_pass_is_named(serving):
    with pytest.raises(TypeError, match="object of the tests"):
        serving(print)(object())


def test_errors_keep_their_kind_or_are_the_answers(serving):
    def fail(kind):
        if kind == "value":
            raise ValueError("so")
        raise type("Own", (Exception,), {})("mine")

    function = serving(fail)
    with pytest.raises(ValueError, match="so"):
        function("value")
    with pytest.raises(AnswerError, match="Own: mine"):
        function("own")
