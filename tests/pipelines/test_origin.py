"""A file of rollouts says what it is from, and what differs is said in words."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from rollcli import __version__
from rollcli.config.schema import ModelConfig
from rollcli.pipelines.origin import Origin, origin_of
from rollcli.runs.locations import EMBEDDED


@pytest.fixture
def model(tmp_path):
    """A copy of an embedded model, to be changed."""
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED / "sums", folder)
    return folder


def digests(path: Path | str, **options) -> tuple[str, str]:
    origin = origin_of(ModelConfig(str(path), **options), 3)
    return origin.model, origin.tokenizer


def test_what_it_says():
    origin = origin_of(ModelConfig("embedded:sums"), 7)
    assert (origin.version, origin.model_path, origin.policy_version) == (__version__, "embedded:sums", 7)
    assert len(origin.model) == len(origin.tokenizer) == 16 and origin.model != origin.tokenizer


def test_the_same_files_elsewhere_are_the_same_model(model):
    assert digests(model) == digests("embedded:sums")


def test_each_digest_follows_its_own_files(model):
    before = digests(model)
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    after = digests(model)
    assert after[0] != before[0] and after[1] == before[1]
    (model / "tokenizer_config.json").write_text("{}")
    assert digests(model)[0] == after[0] and digests(model)[1] != after[1]
    # A file that moves its end into its neighbor is another.
    (model / "merges.txt").write_text("x")
    assert digests(model)[1] != after[1]


def test_a_model_made_at_random_is_known_by_its_settings(model):
    one, other = ({"model_type": "llama", "hidden_size": size} for size in (8, 16))
    assert digests(model, initialize=one) == digests(model, initialize=dict(reversed(one.items())))
    assert digests(model, initialize=one)[0] != digests(model, initialize=other)[0] != digests(model)[0]
    assert digests(model, initialize=one)[1] == digests(model)[1]


def test_a_model_of_the_hub_is_known_by_its_commit(model, monkeypatch, tmp_path):
    snapshots = {name: tmp_path / "hub" / "snapshots" / name for name in ("aaa", "bbb")}
    for folder in snapshots.values():
        shutil.copytree(model, folder)
    current = {"main": "aaa", "v1": "bbb"}

    def cached(path, file, revision=None):
        assert path == "org/model"
        return str(snapshots[current[revision or "main"]] / file)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    first, tagged = digests("org/model"), digests("org/model", revision="v1")
    assert first[0] != tagged[0] and first[1] != tagged[1]
    current["main"] = "bbb"
    assert digests("org/model") == tagged


@pytest.mark.parametrize("path", ["org/model-that-nobody-downloaded", "not an id", "no-run@12", "a/b/c"])
def test_a_model_that_is_not_there_ends_nothing(path, monkeypatch, tmp_path):
    monkeypatch.setenv("ROLL_RUNS", str(tmp_path))
    assert digests(path) == digests(path)


def test_metadata_and_back():
    origin = origin_of(ModelConfig("embedded:sums"), 7)
    written = {key.encode(): value.encode() for key, value in origin.metadata().items()}
    assert Origin.from_metadata({**written, b"pandas": b"{}"}) == origin
    assert Origin.from_metadata(None) is None and Origin.from_metadata({b"pandas": b"{}"}) is None
    for key in written:
        assert Origin.from_metadata({k: v for k, v in written.items() if k != key}) is None
    assert Origin.from_metadata({**written, b"rollcli.policy_version": b"x"}) is None


def test_differences_say_which():
    here = Origin("1.0", "org/a", "m1", "t1", 4)
    assert list(here.differences(here)) == []
    changes = {
        "model": ("m2", "their model is `org/a` as it was (m2), not `org/a` (m1)"),
        "tokenizer": ("t2", "their tokenizer is another one (t2, not t1)"),
        "policy_version": (3, "they belong to version 3 of the policy, not 4"),
        "version": ("0.9", "rollcli 0.9 recorded them, this is 1.0"),
    }
    for name, (value, told) in changes.items():
        assert list(dataclasses.replace(here, **{name: value}).differences(here)) == [told]
    every = dataclasses.replace(here, **{name: value for name, (value, _) in changes.items()}, model_path="org/b")
    assert len(list(every.differences(here))) == 4
    assert next(every.differences(here)) == "their model is `org/b` (m2), not `org/a` (m1)"
    # The same files under another name are the same.
    assert list(dataclasses.replace(here, model_path="elsewhere").differences(here)) == []
