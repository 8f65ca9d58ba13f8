"""Which names of an answer its tests see, and how each test is told."""

import socket
import threading

from rollcli.sandbox.checks import run_checks, serve_answer

FIELDS = {"tests": (), "setup": "", "preamble": "", "entry_point": None, "pytest": False, "stop_early": False}


def verdicts(source: str, skip: int = 0, **fields) -> list[bool]:
    ours, theirs = socket.socketpair()
    told = []
    with ours, theirs:
        threading.Thread(target=serve_answer, args=(source, theirs), daemon=True).start()
        run_checks({**FIELDS, **fields}, skip, ours, "", lambda passed, _: told.append(passed))
        ours.shutdown(socket.SHUT_RDWR)
    return told


def test_each_test_is_told_in_order():
    tests = ("assert f(1) == 1", "assert f(1) == 2", "assert f(2) == 2")
    assert verdicts("f = lambda x: x", tests=tests) == [True, False, True]
    assert verdicts("f = lambda x: x", skip=1, tests=tests) == [False, True]
    assert verdicts("f = lambda x: x", tests=tests, stop_early=True) == [True, False]


def test_builtins_and_modules_are_the_real_ones():
    source = "f = lambda x: 0\nclass math: isclose = lambda *_: True\ndef abs(x): return 0\ndef set(x): return 0"
    tests = ("assert math.isclose(f(1), 2)", "assert abs(f(1) - 2) < 1e-6", "assert set([f(1)]) == set([2])")
    assert verdicts(source, tests=tests) == [False, False, False]
    assert verdicts("import math\nf = lambda x: 2.0", tests=tests) == [True, True, True]


def test_setup_uses_the_answers_names():
    source = "class Node:\n    def __init__(self, x): self.x, self.left = x, None\ndef total(n): return n.x + n.left.x"
    assert verdicts(source, setup="root = Node(1)\nroot.left = Node(2)", tests=("assert total(root) == 3",)) == [True]


def test_a_setup_that_fails_fails_every_test():
    assert verdicts("x = 1", setup="1 / 0", tests=("assert 1", "assert 1")) == [False, False]


def test_with_an_entry_point_nothing_else_is_seen():
    tests = ("assert g(1) == 1", "assert f(1) == 1")
    assert verdicts("f = g = lambda x: x", entry_point="f", tests=tests) == [False, True]


def test_an_entry_point_may_be_named_like_a_builtin():
    assert verdicts("def sum(a, b): return a", entry_point="sum", tests=("assert sum(3, 4) == 3",)) == [True]
