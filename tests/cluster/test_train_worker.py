"""How weights become arrays and tensors again; whole workers run in test_weights.py and in the runs of tests/e2e."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollcli.cluster.train_worker import TrainWorker, to_numpy, to_tensors
from rollcli.data.carriers import Task
from rollcli.data.stream import TaskStream


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_round_trip_keeps_type_shape_and_bits(dtype):
    values = torch.tensor([[0.0, -0.0, 1.0, 3.0], [1e-3, float("inf"), -2.5, 65504.0]]).to(dtype)
    back = to_tensors({"x": to_numpy(values)})["x"]
    assert back.dtype is dtype and back.shape == (2, 4)
    assert torch.equal(back.view(torch.uint8), values.view(torch.uint8))


def test_every_bfloat16_pattern_survives():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    array, name = to_numpy(every)
    assert (array.dtype, name) == (np.uint16, "bfloat16") and array.tolist() == list(range(2**16))
    assert torch.equal(to_tensors({"x": (array, name)})["x"].view(torch.uint16), every.view(torch.uint16))


def test_views_parameters_and_read_only_arrays(recwarn):
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    parameter = torch.nn.Parameter(whole.t())
    array = to_numpy(parameter)
    assert array.tolist() == whole.t().tolist()
    array.flags.writeable = False
    assert to_tensors({"x": array})["x"].tolist() == array.tolist()
    assert not recwarn.list


def test_tensors_share_the_memory_they_came_in():
    array = np.zeros(3, np.float32)
    assert to_tensors({"x": array})["x"].data_ptr() == array.ctypes.data


@pytest.fixture(scope="module")
def worker(ray, values, tmp_path_factory):
    from rollcli.cluster.worker import WorkerSpec

    spec = WorkerSpec("policy", 0, 1, 1, values, None, str(tmp_path_factory.mktemp("logs")))
    actor = ray.remote(TrainWorker).remote(spec)
    host, port = ray.get(actor.address.remote(), timeout=120)
    with socket.socket() as probe:
        probe.bind((host, port))  # it is free
    ray.get(actor.connect.remote(host, port, 1), timeout=120)
    return actor


def test_demonstrations_are_trained_on_the_answer_alone(ray, worker, values):
    from rollcli.config.load import rebuild

    tasks: list[Task] = [TaskStream(rebuild(values).tasks, 0).draw() for _ in range(2)]
    batch = ray.get(worker.demonstrations.remote(tasks), timeout=60)
    assert len(batch) == 2
    for row, task in enumerate(tasks):
        trained = batch.tokens["loss_mask"][batch.offsets[row] : batch.offsets[row + 1]]
        # One token for each character of the answer, one for its end; all of them last.
        assert trained.sum() == len(task.payload["response"]) + 1 and trained[-trained.sum() :].all()


def test_checkpoint_is_complete_and_restores(ray, worker, tmp_path: Path):
    ray.get(worker.save.remote(str(tmp_path)), timeout=120)
    model = tmp_path / "model"
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= {path.name for path in model.iterdir()}
    weights = ray.get(worker.weights.remote())
    saved = load_file(model / "model.safetensors")
    assert saved and all(np.array_equal(saved[name].numpy(), weights[name]) for name in saved)
    ray.get(worker.load.remote(str(tmp_path)), timeout=120)
    again = ray.get(worker.weights.remote())
    assert all(np.array_equal(weights[name], again[name]) for name in weights)
    assert ray.get(worker.model_seconds.remote()) >= 0
