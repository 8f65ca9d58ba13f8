"""Beside a CPU build of torch its companions of other builds are out of sight; beside another torch nothing changes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from rollcli import companions


def installed(monkeypatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(companions, "version", version)
    for name in companions.COMPANIONS:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("versions", "hidden"),
    [
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.1"}, {"torchvision", "torchaudio"}),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, set()),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, set()),
        ({}, set()),
    ],
)
def test_what_does_not_fit_is_hidden(monkeypatch, versions, hidden):
    installed(monkeypatch, **versions)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    companions.settle()
    found = {name for name in companions.COMPANIONS if name in sys.modules and sys.modules[name] is None}
    for name in found:
        assert importlib.util.find_spec(name) is None
        with pytest.raises(ImportError):
            __import__(name)
    assert found == hidden
    assert (companions.os.environ.get("DS_ACCELERATOR") == "cpu") == versions.get("torch", "").endswith("+cpu")


def test_what_is_in_use_already_stays(monkeypatch):
    installed(monkeypatch, torch="2.13.0+cpu", torchvision="0.28.0")
    monkeypatch.setitem(sys.modules, "torchvision", companions)
    companions.settle()
    assert sys.modules["torchvision"] is companions


@pytest.mark.parametrize("order", ["import rollcli, transformers", "import transformers, rollcli"])
def test_transformers_imports_its_models_whichever_came_first(order):
    code = f"{order}; from transformers import PreTrainedModel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "accelerator" not in done.stdout + done.stderr
