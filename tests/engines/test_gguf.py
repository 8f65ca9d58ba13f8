"""GGUF models are converted once, whole or not at all; the reading of the format is transformers' business."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rollcli.engines import gguf as module
from rollcli.engines.gguf import convert, ensure_converted
from rollcli.errors import EngineError, ModelNotFound
from rollcli.runs.locations import gguf_folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    return path


class Tokenizer:
    """Saves itself as one file."""

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


@pytest.fixture
def loaded(monkeypatch) -> transformers.LlamaForCausalLM:
    """What transformers makes of a GGUF file: a model in half of whose settings its origin is written."""
    settings = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **settings))
    model.config.quantization_config = {"quant_method": "gguf"}
    asked: list[tuple] = []

    def load(folder: Path, gguf_file: str, **options: object) -> transformers.LlamaForCausalLM:
        asked.append((folder, gguf_file, options))
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Tokenizer())
    model.asked = asked
    return model


def test_what_is_no_gguf_file_is_left_alone(tmp_path):
    assert ensure_converted("gpt2") is False and ensure_converted(str(tmp_path)) is False
    with pytest.raises(ModelNotFound):
        ensure_converted(str(tmp_path / "absent.gguf"))


def test_what_is_converted_is_not_converted_again(file, monkeypatch):
    folder = gguf_folder(str(file))[1]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: pytest.fail("converted again"))
    assert ensure_converted(str(file)) is False


def test_conversion_runs_apart_and_its_failure_names_the_file(file, monkeypatch):
    commands = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=len(commands) - 1, stderr="Traceback …\nImportError: no gguf\n")

    monkeypatch.setattr(module.subprocess, "run", run)
    assert ensure_converted(str(file)) is True
    assert commands[0][1:] == ["-m", "rollcli.engines.gguf", str(file), str(gguf_folder(str(file))[1])]
    with pytest.raises(EngineError, match=r"tiny\.gguf` cannot be converted: ImportError: no gguf") as caught:
        ensure_converted(str(file))
    assert "rollcli[gguf]" in caught.value.hint


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the extra `gguf`")
def test_a_file_that_is_no_model_is_an_error_and_leaves_nothing(file, cache):
    with pytest.raises(EngineError, match="cannot be converted"):
        ensure_converted(str(file))
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_converted_model_has_the_same_weights_and_no_trace_of_its_origin(file, loaded, cache):
    folder = gguf_folder(str(file))[1]
    convert(file, folder)
    ((where, name, options),) = loaded.asked
    assert (where, name, options) == (file.parent, "tiny.gguf", {"dtype": torch.float32})
    saved = load_file(folder / "model.safetensors")
    assert saved and all(torch.equal(saved[name], loaded.state_dict()[name]) for name in saved)
    assert all(tensor.dtype is torch.float32 for tensor in saved.values())
    assert "quantization_config" not in (folder / "config.json").read_text()
    assert (folder / "tokenizer.json").is_file() and list(folder.parent.iterdir()) == [folder]
    assert ensure_converted(str(file)) is False


def test_two_at_once_leave_one_whole_model(file, loaded, monkeypatch):
    folder = gguf_folder(str(file))[1]

    class Slow(Tokenizer):
        """While it is saved, another run converts the same file."""

        def save_pretrained(self, target: Path) -> None:
            monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Tokenizer())
            loaded.config.quantization_config = {}
            convert(file, folder)
            super().save_pretrained(target)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Slow())
    convert(file, folder)
    assert list(folder.parent.iterdir()) == [folder]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


def test_a_conversion_that_fails_leaves_nothing(file, loaded, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    folder = gguf_folder(str(file))[1]
    with pytest.raises(OSError):
        convert(file, folder)
    assert list(folder.parent.iterdir()) == []
