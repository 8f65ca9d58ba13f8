import hashlib
import json
import subprocess

import pytest

from rollcli import __version__
from rollcli.runs.manifest import ENVIRONMENT, add_attempt, build_manifest, digest, end_attempt, package_versions
from rollcli.runs.status import write_json

SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnop",
    "WANDB_API_KEY": "0123456789abcdef",
    "SWANLAB_API_KEY": "swan-secret",
    "AWS_SECRET_ACCESS_KEY": "aws-secret",
    "MY_PASSWORD": "hunter2-hunter2",
    "ROLL_TOKEN": "roll-secret",
}


def test_no_secret_of_the_environment_is_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    written = json.dumps(build_manifest({"seed": 1}, None, [], {}))
    assert not any(word in written for pair in SECRETS.items() for word in pair)
    assert json.loads(written)["environment"]["OMP_NUM_THREADS"] == "3"


def test_the_list_of_what_is_written_names_no_secret():
    assert not [name for name in ENVIRONMENT if any(word in name for word in ("TOKEN", "KEY", "SECRET", "PASSWORD"))]


def test_what_produced_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("steps: 1\n")
    made = build_manifest({"seed": 7, "steps": 1}, recipe, ["steps=1"], {"memory/policy_gib": 1.5})
    assert made["rollcli"] == __version__ and made["seed"] == 7 and made["overrides"] == ["steps=1"]
    assert made["recipe_digest"] == hashlib.sha256(b"steps: 1\n").hexdigest()[:16]
    assert made["packages"]["omegaconf"] and made["git"] is None and made["attempts"] == []


def test_versions_are_read_without_importing():
    assert set(package_versions()) >= {"torch", "transformers", "ray", "numpy"}


def test_a_digest_does_not_depend_on_order_and_does_on_values():
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert len({digest({"a": value}) for value in (1, "1", 2, None, True)}) == 5


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout with one commit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True)
    return tmp_path


def test_commit_and_uncommitted_changes(checkout):
    clean = build_manifest({}, None, [], {})["git"]
    assert len(clean["commit"]) == 40 and clean["diff"] == ""
    (checkout / "a.txt").write_text("two\n")
    assert "+two" in build_manifest({}, None, [], {})["git"]["diff"]


def test_changes_that_are_no_text_and_many(checkout):
    (checkout / "a.txt").write_bytes(b"\xe9\n" * 100_000)
    diff = build_manifest({}, None, [], {})["git"]["diff"]
    assert "\ufffd" in diff and len(diff) <= 64 * 1024


def test_attempts(tmp_path):
    file = tmp_path / "manifest.json"
    write_json(file, {"attempts": []})
    add_attempt(file, pid=1)
    end_attempt(file, status="stopped", step=3)
    add_attempt(file, pid=2)
    first, second = json.loads(file.read_text())["attempts"]
    assert (first["pid"], first["status"], first["step"]) == (1, "stopped", 3) and "ended" in first
    assert second["pid"] == 2 and "ended" not in second
