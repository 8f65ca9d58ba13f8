"""What a worker asks of its engine, and what it hands out.

Whole workers also run in test_weights.py and in the runs of tests/e2e.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file

from rollcli.algorithms.base import Algorithm
from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.ppo import Ppo
from rollcli.cluster.train_worker import TrainWorker
from rollcli.cluster.worker import WorkerSpec
from rollcli.config.schema import LoraConfig, ModelConfig, OptimizerConfig, PolicyConfig
from rollcli.data.carriers import Task
from rollcli.data.stream import TaskStream
from rollcli.engines.objectives import Distribution, LogProbs, Values

# --- what is asked of the engine


class EngineDouble:
    """Keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def update(self, batch, objective, rate):
        self.asked.append((batch, objective, rate))
        return {"loss": float(len(self.asked))}, np.zeros(3, np.float32)

    def forward(self, batch, objective):
        self.asked.append((batch, objective))
        return np.ones(3, np.float32)


def local(role: str, algorithm: Algorithm | None = None, **optimizer) -> TrainWorker:
    """A worker in this process, on no model."""
    worker = object.__new__(TrainWorker)
    worker.spec = WorkerSpec(role, 0, 1, 1, {}, None, None)
    worker.recipe = SimpleNamespace(algorithm=algorithm, steps=4)
    worker.config = PolicyConfig(optimizer=OptimizerConfig(learning_rate=2.0, **optimizer))
    worker.engine = EngineDouble()
    return worker


def test_all_updates_of_a_step_share_its_learning_rate():
    worker = local("policy", Grpo(), schedule="linear")
    for step in range(4):
        shards = ["first", "second", "third"][: step or 1]
        results = worker.update(shards, step, Grpo().state(), 0.7)
        assert [part for part, _, _ in worker.engine.asked] == shards and len(results) == len(shards)
        assert {rate for _, _, rate in worker.engine.asked} == {[2.0, 1.5, 1.0, 0.5][step]}
        worker.engine.asked.clear()


def test_the_warmup_counts_steps_too():
    worker = local("policy", Grpo(), warmup_steps=3)
    for step in range(4):
        worker.update(["shard"] * 2, step, Grpo().state(), 1.0)
    assert [rate for _, _, rate in worker.engine.asked] == [0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 2.0, 2.0]


def test_the_role_decides_what_is_learned():
    algorithm = Ppo()
    for role, objective in (("policy", LogProbs(0.7, algorithm)), ("critic", Values(algorithm))):
        worker = local(role, algorithm)
        metrics, column = worker.update(["shard"], 0, algorithm.state(), 0.7)[0]
        assert worker.engine.asked[0][1] == objective and metrics == {"loss": 1.0} and column.shape == (3,)


def test_an_update_goes_on_from_the_algorithms_state():
    """The driver's algorithm adapts between steps; what a worker made of its own recipe is as at the start."""
    driver = Grpo(kl=KlPenalty(0.1, target=0.5, horizon=10))
    driver.observe({"kl_reference": 5.0}, samples=5)
    worker = local("policy", Grpo(kl=KlPenalty(0.1, target=0.5, horizon=10)))
    worker.update([], 0, driver.state(), 1.0)
    assert worker.recipe.algorithm.kl.current == driver.kl.current == pytest.approx(0.11)


def test_each_forward_pass_has_its_objective():
    worker = local("reference")
    worker.logprobs("batch", 0.7), worker.distribution("batch", 0.8), worker.values("batch")
    assert worker.engine.asked == [("batch", LogProbs(0.7)), ("batch", Distribution(0.8)), ("batch", Values())]


@pytest.mark.parametrize(("role", "frozen"), [("policy", False), ("reference", True)])
def test_an_engine_is_made_of_what_the_recipe_says_its_seed_included(monkeypatch, role: str, frozen: bool):
    """Adapters start from the seed."""
    worker, made = local(role), {}
    worker.recipe = SimpleNamespace(model=ModelConfig("m", dtype="bfloat16"), seed=17)
    worker.config.engine_args = {"own": 1}
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    monkeypatch.setattr("rollcli.engines.models.load_policy", lambda *given, training: ("loaded", given[2], training))
    monkeypatch.setattr("rollcli.registry.resolve", lambda *_: lambda *given, **named: made.update(named, given=given))
    worker.connect("here", 1)
    assert made.pop("given") == (("loaded", 17, True), worker.config)
    assert made == {"frozen": frozen, "dtype": "bfloat16", "seed": 17, "own": 1}


def test_a_policy_with_adapters_is_its_own_reference_without_them():
    worker = local("policy")
    switched: list[str] = []

    @contextlib.contextmanager
    def without_adapter():
        switched.append("off")
        yield
        switched.append("on")

    worker.engine.without_adapter = without_adapter
    worker.logprobs("batch", 0.7, False)
    assert switched == []  # it has none
    worker.config.lora = LoraConfig(rank=2)
    worker.logprobs("batch", 0.7), worker.logprobs("batch", 0.7, False), worker.distribution("batch", 0.7, False)
    assert switched == ["off", "on"] * 2


# --- real workers


@pytest.fixture(scope="module")
def worker(ray, values, tmp_path_factory):
    spec = WorkerSpec("policy", 0, 1, 1, values, None, str(tmp_path_factory.mktemp("logs")))
    actor = ray.remote(TrainWorker).remote(spec)
    host, port = ray.get(actor.address.remote(), timeout=120)
    with socket.socket() as probe:
        probe.bind((host, port))  # it is free
    ray.get(actor.connect.remote(host, port), timeout=120)
    return actor


def handed_out(ray, worker) -> dict[str, np.ndarray]:
    """Returns the weights of all buckets."""
    ray.get(worker.begin_weights.remote(True), timeout=60)
    found: dict[str, np.ndarray] = {}
    while (bucket := ray.get(worker.next_bucket.remote(), timeout=60))[1] is not None:
        found |= {name: entry.bits for name, entry in bucket[0].items()}
    return found


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
    weights = handed_out(ray, worker)
    saved = load_file(model / "model.safetensors")
    assert saved and all(np.array_equal(saved[name].numpy(), weights[name]) for name in saved)
    ray.get(worker.load.remote(str(tmp_path)), timeout=120)
    again = handed_out(ray, worker)
    assert all(np.array_equal(weights[name], again[name]) for name in weights)
    assert ray.get(worker.model_seconds.remote()) >= 0


def test_a_critics_worker_trains_a_critic(ray, values, tmp_path: Path):
    from rollcli.config.load import rebuild

    ppo = {**values, "algorithm": {"name": "ppo"}}
    actor = ray.remote(TrainWorker).remote(WorkerSpec("critic", 0, 1, 1, ppo, None, str(tmp_path / "logs")))
    ray.get(actor.connect.remote(*ray.get(actor.address.remote(), timeout=120)), timeout=120)
    batch = ray.get(actor.demonstrations.remote([TaskStream(rebuild(values).tasks, 0).draw()]), timeout=60)
    mask = batch.tokens["loss_mask"]
    assert not ray.get(actor.values.remote(batch), timeout=60).any()
    batch.tokens |= {"values": np.zeros(len(mask), np.float32), "returns": mask.astype(np.float32),
                     "loss_weights": (mask / mask.sum()).astype(np.float32)}  # fmt: skip
    metrics, column = ray.get(actor.update.remote([batch], 0, Ppo().state(), 1.0), timeout=60)[0]
    assert metrics["loss"] == pytest.approx(0.5) and metrics["return_mean"] == 1 and not column.any()
    moved = ray.get(actor.values.remote(batch), timeout=60)
    assert (moved[mask] > 0).all() and not moved[~mask].any()
    ray.get(actor.save.remote(str(tmp_path / "critic")), timeout=60)
    assert load_file(tmp_path / "critic" / "model" / "model.safetensors")["score.weight"].any()
    ray.get(actor.load.remote(str(tmp_path / "critic")), timeout=60)
    assert np.array_equal(ray.get(actor.values.remote(batch), timeout=60), moved)
