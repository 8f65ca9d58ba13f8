"""Completion: what is offered, that it is light, that it never fails, and how bash splits words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollcli.cli import complete


def values(items):
    return [value for value, _ in items]


def test_recipes_by_name_and_by_path(workplace):
    assert ("sums", "Sums of three digits") in complete.recipe("su")
    assert values(complete.recipe("rec")) == ["recipes/"]
    assert complete.recipe("recipes/") == [("recipes/sums.yaml", "Sums of three digits")]
    assert values(complete.recipe("ba")) == ["bad.yaml"]


def test_runs_newest_first(make_run):
    make_run("old", started=1.0)
    make_run("new", started=2.0, state="finished")
    assert complete.run("") == [("new", "sums finished step 142"), ("old", "sums stopped step 142")]


def test_checkpoints(make_run):
    make_run("sums-7f3a", (100, 140))
    assert values(complete.checkpoint("sums")) == ["sums-7f3a@140", "sums-7f3a@100"]
    assert values(complete.checkpoint("sums-7f3a@10")) == ["sums-7f3a@100"]


def test_keys_a_level_at_a_time():
    top = values(complete.override(""))
    assert {"steps=", "model.", "algorithm=", "algorithm.", "tasks[0]."} <= set(top) and "model=" not in top
    assert values(complete.override("algorithm.clip")) == ["algorithm.clip_high=", "algorithm.clip_low="]
    assert dict(complete.override("group"))["group_size="] == "Answers sampled to each problem."
    assert "tasks[0].source.prompt=" in values(complete.override("tasks[0].source."))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("algorithm.scale", ["group", "batch", "none"]),
        ("pipeline", ["rl", "sft"]),
        ("policy.packing", ["true", "false"]),
        ("trackers[0].mode", ["offline", "local", "online"]),
        ("steps", []),
        ("nothing.of.that", []),
    ],
)
def test_values(key, expected):
    assert complete.choices(key) == expected


def test_names_are_values():
    assert "grpo" in complete.choices("algorithm") and "grpo" in complete.choices("algorithm.name")
    assert "transformers" in complete.choices("rollout.engine")
    assert "policy.engine=fsdp" in values(complete.override("policy.engine="))


def test_keys_to_explain():
    assert "rollout.sampling" in values(complete.key("rollout.s")) and "rollout.sampling.top_k" not in values(
        complete.key("rollout.s")
    )


def test_errors_are_swallowed_and_items_capped():
    @complete.completer
    def broken(incomplete):
        raise RuntimeError

    @complete.completer
    def many(incomplete):
        return ((f"x{number}", "") for number in range(100))

    assert broken("") == [] and len(many("x")) == complete.MOST == 50


@pytest.mark.parametrize(
    ("words", "at", "joined", "before"),
    [
        (["roll", "train", "x", "a", "=", "b"], 5, ["roll", "train", "x", "b"], "a="),
        (["roll", "train", "x", "a", "="], 4, ["roll", "train", "x", ""], "a="),
        (["roll", "train", "x", "a", "=", "b", "c"], 6, ["roll", "train", "x", "a=b", "c"], ""),
        (["roll", "eval", "r", "@", "1"], 4, ["roll", "eval", "@1"], "r"),
        (["roll", "runs", "ls", "--status", "=", "f"], 5, ["roll", "runs", "ls", "--status", "f"], ""),
        (["roll", "train", ""], 2, ["roll", "train", ""], ""),
    ],
)
def test_words_that_bash_split(monkeypatch, words, at, joined, before):
    monkeypatch.setenv("_ROLL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(at))
    monkeypatch.setattr(complete, "_before", "")
    complete.join_words()
    import os

    assert os.environ["COMP_WORDS"].split("\n") == joined and os.environ["COMP_CWORD"] == str(len(joined) - 1)
    assert complete._before == before


def test_through_the_application(roll_process, make_run):
    make_run("sums-7f3a", (140,))

    def bash(*words):
        return roll_process(_ROLL_COMPLETE="complete_bash", COMP_WORDS="\n".join(words), COMP_CWORD=str(len(words) - 1))

    assert bash("roll", "tr").out.split() == ["train"]
    assert bash("roll", "train", "sums", "algorithm.scale", "=", "g").out.split() == ["group"]
    assert bash("roll", "eval", "sums-7f3a", "@").out.split() == ["@140"]
    assert bash("roll", "runs", "ls", "--sta").out.split() == ["--status"]
    fish = {"_ROLL_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert roll_process(**fish, _TYPER_COMPLETE_ARGS="roll train su").out == "sums\tSums of three digits\n"


def test_completers_import_nothing_heavy(workplace):
    code = (
        "import sys; from rollcli.cli import complete as c; "
        "[f(w) for f, w in ((c.recipe, ''), (c.run, ''), (c.checkpoint, ''), (c.override, ''), "
        "(c.override, 'algorithm='), (c.key, ''), (c.reward, ''))]; "
        "assert c.override(''); "
        "print(*(m for m in ('torch', 'ray', 'omegaconf', 'transformers', 'datasets', 'vllm') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "\n" and done.stderr == ""


def test_a_file_that_is_no_text_does_not_hide_the_others(workplace):
    (workplace / "awful.yaml").write_bytes(b"description: \xff\xfe")
    assert complete.recipe("awf") == [("awful.yaml", "")]
    assert {"sums", "bad.yaml", "awful.yaml"} <= set(values(complete.recipe("")))
