"""`roll` itself: the top screen, the version, options of every command, and words that are wrong."""

from __future__ import annotations

import json

import pytest

TOP = """\
Usage: roll COMMAND [ARGUMENTS] [OPTIONS]

Reinforcement learning post-training for language models.

Run
  train    Start a run from a recipe
  resume   Continue a run from its newest checkpoint
  eval     Measure a checkpoint on held-out problems

Inspect
"""
END = """\
Every command takes
  -q, -v  less or more: -qq nothing, -vv library logs     --json  one document
  --color auto|always|never     --no-progress [env: ROLL_NO_PROGRESS]     --help
"""


def test_help_is_one_screen(roll):
    result = roll("--help")
    assert result.code == 0 and result.err == ""
    assert result.out.startswith(TOP) and result.out.endswith(END)
    lines = result.out.rstrip("\n").splitlines()
    assert len(lines) <= 23, "the prompt takes the last of 24 lines"
    assert max(map(len, lines)) <= 80


def test_roll_alone_shows_help_as_an_error(roll):
    result = roll()
    assert result.code == 2 and result.out == ""
    assert result.err.startswith(TOP)


def test_options_without_a_command(roll):
    result = roll("-v")
    assert result.code == 2
    assert result.err == "error: missing command\n\nhint: run `roll --help` to see how it is used\n"


def test_a_command_that_is_close(roll):
    result = roll("trian")
    assert result.code == 2
    assert result.err == (
        "error: no such command `trian`. Did you mean `train`?\n\nhint: run `roll --help` to see how it is used\n"
    )


def test_an_option_that_is_close(roll):
    result = roll("train", "sums", "--stepz", "3")
    assert result.code == 2
    assert result.err == (
        "error: no such option `--stepz`\n\n"
        "hint: did you mean `--steps`? run `roll train --help` to see how it is used\n"
    )


def test_usage_errors_as_json(roll):
    result = roll("runs", "show", "--json")
    assert result.code == 2 and result.out == ""
    error = json.loads(result.err)["error"]
    assert error["type"] == "UsageError" and error["message"] == "missing argument `RUN`"


def test_version(roll):
    from rollcli import __version__

    assert roll("--version").out.startswith(f"rollcli {__version__} (Python 3.")
    assert roll("--version", "-q").out == f"{__version__}\n"
    assert "torch" in roll("--version", "-v").out
    assert json.loads(roll("--version", "--json").out)["rollcli"] == __version__


@pytest.mark.parametrize("words", [("-q", "config", "validate", "sums"), ("config", "validate", "sums", "-q")])
def test_options_stand_before_or_after_the_command(roll, words):
    assert roll(*words).out == "recipes/sums.yaml\n"


def test_doubly_quiet_prints_nothing(roll):
    result = roll("config", "validate", "sums", "-qq")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_color_and_its_absence(roll):
    assert "\x1b[32mok\x1b[0m" in roll("config", "validate", "sums", "--color", "always").out
    assert "\x1b" not in roll("config", "validate", "sums").out
    assert "\x1b" in roll("--color=always", "--help").out


def test_json_has_no_color(roll):
    assert "\x1b" not in roll("config", "validate", "sums", "--json", "--color", "always").out
