"""`roll verify`: what it prints, its exit code, and other projects' answers."""

from __future__ import annotations

import json
import math

import pytest

from rollcli.algorithms import aggregation, kl, ppo
from rollcli.cli.verify import NAME
from rollcli.engines import objectives
from rollcli.verify import subject, suite
from rollcli.verify.properties import PROPERTIES

THEIRS = """\
def group_advantages(rewards, groups, baseline="mean", scale="group"):
    return [0.0] * len(rewards)

def gae(rewards, values, mask, gamma, lam):
    raise RuntimeError("not today")
"""


def test_everything_holds(roll):
    result = roll("verify", "--json")
    document = json.loads(result.out)
    assert result.code == 0 and result.err == ""
    assert document["passed"] and document["subject"] == "rollcli"
    assert document["counts"] == {"ok": len(PROPERTIES), "FAILED": 0, "not offered": 0}
    assert [each["name"] for each in document["properties"]] == [each.name for each in PROPERTIES]


def test_the_table(roll):
    result = roll("verify", "--only", "aggregate")
    lines = result.out.splitlines()
    assert result.code == 0 and result.err == ""
    assert lines[0].split() == ["property", "right", "ours"]
    assert lines[1].split("  ")[0] == "token-mean counts tokens, not answers"
    assert lines[1].split()[-3:] == ["1.75", "1.75", "ok"]
    assert lines[-1].startswith("13 ok, 0 failed, in ")


def test_no_line_is_wider_than_80(roll):
    lines = roll("verify", "--only", "advantages").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "eight equal rewards of 0.1 give exactly 0     0 0 0 0 0 0…  0 0 0 0 0 0…  ok" in lines


def test_quiet(roll):
    assert roll("verify", "--only", "gae", "-q").out == "ok\n"
    assert roll("verify", "--only", "gae", "-qq").out == ""
    assert "gae\n" in roll("verify", "--only", "gae", "--list", "-q").out


def over_all(batch, divisor=None):
    return batch.tokens["loss_mask"] / len(batch.tokens["loss_mask"])


def through_pads(batch, rewards, values, gamma, lam):
    return rewards + gamma * lam * values


def no_temperature(self, tokens, outputs):
    return outputs.log_softmax(-1).gather(-1, tokens.ids[:, None])[:, 0]


@pytest.mark.parametrize(
    ("fault", "only", "name", "got"),
    [
        (("setitem", aggregation.MODES, "token-mean", over_all), "aggregation", "token-mean counts tokens", "0.875"),
        (("setattr", ppo, "generalized_advantages", through_pads), "gae", "does not bootstrap through pads", "[["),
        (("setitem", kl.ESTIMATORS, "k3", lambda d: kl.k3(d.detach())), "KL", "KL estimator k3: gradient", "[0]"),
        (("setattr", objectives.LogProbs, "column", no_temperature), "token_logprobs", "temperature 2 div", "[-0.4076"),
    ],
    ids=["wrong count", "bootstrap through pads", "KL without gradient", "temperature ignored"],
)
def test_a_fault_is_named_with_input_right_and_got(roll, monkeypatch, fault, only, name, got):
    how, *where = fault
    getattr(monkeypatch, how)(*where)
    result = roll("verify", "--only", only)
    assert result.code == 1
    lines = result.out.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("FAILED") and name in line)
    labels = [line.split()[0] for line in lines[place + 1 : place + 5]]
    assert labels == ["why", "input", "right", "got"]
    assert lines[place + 4].split("got", 1)[1].strip().startswith(got)
    assert roll("verify", "--only", only, "-q").out == "failed\n"


def test_another_project(roll, workplace):
    (workplace / "theirs.py").write_text(THEIRS)
    result = roll("verify", "./theirs.py")
    assert result.code == 1
    lines = result.out.splitlines()
    assert lines[0].split() == ["property", "right", "theirs"]
    status = {line[:NAME].rstrip(): line.split()[-1] for line in lines[1 : len(PROPERTIES) + 1]}
    assert status["eight equal rewards of 0.1 give exactly 0"] == "ok"
    assert status["one right answer of four"] == "FAILED"
    assert status["three tokens by hand"] == "FAILED"
    assert status["token-mean counts tokens, not answers"] == "-"
    assert "FAILED three tokens by hand" in lines and "  got    RuntimeError: not today" in lines
    assert " not offered, in " in lines[-1]


def test_another_project_that_is_right(roll, workplace):
    (workplace / "theirs.py").write_text("from rollcli.verify.subject import gae, whiten\n")
    document = json.loads(roll("verify", "theirs.py", "--json").out)
    assert document["passed"] and document["subject"] == "theirs.py"
    assert document["counts"]["ok"] == 7 and document["counts"]["FAILED"] == 0


def test_a_module(roll):
    assert roll("verify", "rollcli.verify.subject", "--only", "gae").code == 0


def test_what_is_not_there(roll):
    result = roll("verify", "--only", "advantags")
    assert result.code == 1 and result.err.startswith("error: no property `advantags` (did you mean `advantages`?)\n")
    result = roll("verify", "./absent.py")
    assert result.code == 1 and result.err.startswith("error: no file `./absent.py`\n")
    result = roll("verify", "json", "--json")
    assert result.code == 1 and json.loads(result.err)["error"]["hint"].endswith("`roll verify --list` shows them")


def test_list_shows_calls_and_runs_nothing(roll, monkeypatch):
    monkeypatch.delattr(subject, "advantages_of")
    result = roll("verify", "--list", "--only", "group_adv")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0] == "group_advantages(rewards, groups, baseline='mean', scale='group')"
    assert lines[1].startswith("  The advantage of each answer")
    assert "  one right answer of four" in lines and "    right  [1.5, -0.5, -0.5, -0.5]" in lines
    relation = roll("verify", "--list", "--only", "in a batch").out
    assert "    right  the same as with together=0" in relation.splitlines()


def test_list_as_json_is_enough_to_ask_elsewhere(roll):
    """What another program reads gives the same answers as the table itself."""

    def with_nan(value):
        return [with_nan(item) for item in value] if isinstance(value, list) else math.nan if value is None else value

    document = json.loads(roll("verify", "--list", "--json").out)
    assert set(document["calls"]) == {each.call for each in PROPERTIES}
    assert document["calls"]["entropy"] == {
        "signature": "entropy(logits)",
        "gives": "The entropy of each row's distribution, in nats.",
    }
    assert len(document["properties"]) == len(PROPERTIES)
    for read in document["properties"]:
        if read["section"] in ("loss aggregation", "advantages", "generalized advantages"):
            got = getattr(subject, read["call"])(**{name: with_nan(value) for name, value in read["inputs"].items()})
            assert suite.equal(got, read["right"], read["tolerance"]), read["name"]
    (relation,) = [read for read in document["properties"] if read["name"] == "packing rows changes no gradient"]
    assert relation["right"] is None and relation["same_as"] == {"packing": 0}
