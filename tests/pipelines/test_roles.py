"""Which workers a recipe starts, with how many threads, and how they meet; the clusters are doubles."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollcli.config.dump import to_values
from rollcli.config.load import load_recipe
from rollcli.errors import ConfigError, WorkerDied
from rollcli.pipelines import roles as module
from rollcli.pipelines.roles import Roles, max_prompt_tokens

LIMIT_S = 30
PPO = ("algorithm={name: ppo, kl: {coefficient: 0}}",)


class ClusterDouble:
    """Remembers how it was started and what it is asked."""

    started: list[ClusterDouble] = []
    answers: dict[str, Any] = {}

    def __init__(self, worker: type, specs: list, pool: Any, peers: int = 1, **options: Any) -> None:
        self.peers = peers
        self.worker, self.specs, self.pool, self.options = worker, specs, pool, options
        self.role, self.asked, self.killed = specs[0].role, [], False
        self.workers = [spec.name for spec in specs]
        self.started.append(self)

    def __len__(self) -> int:
        return len(self.specs)

    async def ready(self) -> list:
        return await self.all("ready")

    async def all(self, method: str, *arguments: Any) -> list:
        self.asked.append((method, arguments))
        answer = self.answers.get(f"{self.role}.{method}", 1.0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        return [answer] * len(self) if not isinstance(answer, list) else answer

    async def first(self, method: str, *arguments: Any) -> Any:
        await self.all(method, *arguments)
        return ("host", 5000 + len(self.role))

    def kill(self) -> None:
        self.killed = True


@pytest.fixture(autouse=True)
def doubles(monkeypatch):
    monkeypatch.setattr(ClusterDouble, "started", [])
    monkeypatch.setattr(ClusterDouble, "answers", {"rollout.context": [128, 96]})
    monkeypatch.setattr(module, "Cluster", ClusterDouble)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 8)


def make(*overrides: str, name: str = "grpo-math", **options: Any) -> Roles:
    loaded = load_recipe(name, overrides)
    return Roles(loaded.recipe, to_values(loaded.recipe, loaded.folder), "/folder", "/logs", {}, **options)


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def names(roles: Roles) -> list[str]:
    return [spec.name for cluster in roles.all for spec in cluster.specs]


def test_a_role_nobody_needs_is_never_started():
    roles = make()
    assert names(roles) == ["policy-0", "rollout-0", "environment-0", "reward-0"] and roles.reference is None
    assert len(ClusterDouble.started) == 4


def test_counts_and_reference_follow_the_recipe():
    roles = make(
        "algorithm.kl.coefficient=0.1", "policy.workers=2", "rollout.replicas=3", "rollout.environment_workers=2",
        "rollout.reward_workers=4",
    )  # fmt: skip
    counts = {cluster.role: len(cluster) for cluster in roles.all}
    assert counts == {"policy": 2, "reference": 2, "rollout": 3, "environment": 2, "reward": 4}
    spec = roles.rollout.specs[2]
    assert (spec.rank, spec.count, spec.folder, spec.logs) == (2, 3, "/folder", "/logs")


def test_a_critic_has_its_own_workers_and_threads_where_the_algorithm_wants_one():
    roles = make(*PPO, "critic.workers=4", "policy.workers=2")
    assert [(c.role, len(c), c.specs[0].threads) for c in (roles.policy, roles.critic)] == [
        ("policy", 2, 4), ("critic", 4, 2)
    ]  # fmt: skip
    run(roles.ready())
    assert {("connect", ("host", 5006)), ("ready", ())} <= set(roles.critic.asked)
    assert "memory/critic_gib" in run(roles.memory())
    for none in (make("critic.workers=4"), make(*PPO, train=False)):
        assert none.critic is None and "critic-0" not in names(none)


def test_asynchronous_workers_take_more_calls_than_rays_default_allows():
    roles = make()
    for cluster in (roles.rollout, roles.environments, *roles.rewards.values()):
        assert cluster.options == {"max_concurrency": 1_000_000}
    assert roles.policy.options == {}


def test_threads_share_the_cores_unless_told():
    roles = make("policy.workers=2", "rollout.replicas=3", "algorithm.kl.coefficient=1")
    # Training and sampling take turns: 8 cores for 2 ranks; one is left to the others while 3 replicas sample.
    assert [cluster.specs[0].threads for cluster in (roles.policy, roles.reference)] == [4, 4]
    assert roles.rollout.specs[0].threads == 2
    assert {cluster.specs[0].threads for cluster in (roles.environments, roles.rewards["reward"])} == {1}
    told = make("policy.threads=7", "rollout.threads=6")
    assert (told.policy.specs[0].threads, told.rollout.specs[0].threads) == (7, 6)
    assert make("rollout.replicas=20", "policy.workers=20").rollout.specs[0].threads == 1


def test_supervised_fine_tuning_starts_the_policy_alone():
    roles = make(name="sft-tiny")
    assert names(roles) == ["policy-0"]
    run(roles.ready())
    assert {("connect", ("host", 5006)), ("ready", ())} <= set(roles.policy.asked)


def test_evaluation_starts_no_trainer():
    roles = make("algorithm.kl.coefficient=1", train=False)
    assert names(roles) == ["rollout-0", "environment-0", "reward-0"] and roles.policy is None
    run(roles.ready())


def test_they_are_introduced_with_the_smallest_context():
    roles = make("rollout.replicas=2", "algorithm.kl.coefficient=1")
    run(roles.ready())
    assert ("connect", ("host", 5006)) in roles.policy.asked
    assert ("connect", ("host", 5009)) in roles.reference.asked
    # 96 of context, 48 of them for the answer.
    rewards = {"reward": ["reward-0"]}
    assert roles.environments.asked[-1] == ("connect", (["rollout-0", "rollout-1"], rewards, 48, 96))


TASKS = (
    "tasks=[{name: a, source: sums, rewards: [{name: math}], reward_workers: 3}, "
    "{name: b, source: sums, rewards: [{name: math}]}, {name: c, source: sums, rewards: [{name: math}]}]"
)


def test_a_task_may_have_reward_workers_of_its_own():
    roles = make(TASKS, "rollout.reward_workers=2")
    assert {role: len(cluster) for role, cluster in roles.rewards.items()} == {"reward.a": 3, "reward": 2}
    run(roles.ready())
    (_, rewards, _, _) = roles.environments.asked[-1][1]
    assert rewards == {"reward.a": [f"reward.a-{n}" for n in range(3)], "reward": ["reward-0", "reward-1"]}
    assert "memory/reward.a_gib" in run(roles.memory())


def test_reward_workers_that_no_task_shares_are_not_started():
    roles = make("tasks[0].reward_workers=2", "rollout.reward_workers=7")
    assert {role: len(cluster) for role, cluster in roles.rewards.items()} == {"reward.sums": 2}


class Charges:
    """A supervisor that keeps what it is put in charge of."""

    def __init__(self) -> None:
        self.prepare: dict[str, Any] = {}

    def add(self, cluster: Any, prepare: Any) -> None:
        self.prepare[cluster.role] = prepare


def test_all_that_produces_samples_may_be_replaced_and_trainers_may_not():
    roles, charges = make(TASKS, "algorithm.kl.coefficient=1"), Charges()
    roles.supervise(charges)
    assert set(charges.prepare) == {"rollout", "environment", "reward", "reward.a"}


def test_a_new_reward_worker_is_introduced():
    roles, charges = make(TASKS), Charges()
    roles.supervise(charges)

    async def main() -> None:
        await roles.ready()
        roles.rewards["reward.a"].workers[2] = "another"
        await charges.prepare["reward.a"](2)

    run(main())
    assert roles.environments.asked[-1] == ("reconnect", ("reward.a", 2, "another"))


JUDGED = (
    "reward_models=[{name: j, model: {path: some/judge}, replicas: 2}, "
    "{name: rm, kind: classifier, model: {path: some/classifier}}]",
    "tasks[0].rewards=[{name: judge, args: {model: j}}, {name: reward_model, args: {model: rm}}]",
)  # fmt: skip


def test_reward_models_are_roles_of_their_own_and_reward_workers_know_them():
    roles = make(*JUDGED)
    assert names(roles)[-4:] == ["reward-0", "judge.j-0", "judge.j-1", "reward_model.rm-0"]
    started = {cluster.role: cluster for cluster in roles.all}
    assert started["judge.j"].worker is module.JudgeWorker
    assert started["reward_model.rm"].worker is module.ClassifierWorker
    assert started["judge.j"].options == {"max_concurrency": 1_000_000}
    run(roles.ready())
    models = {"judge.j": ["judge.j-0", "judge.j-1"], "reward_model.rm": ["reward_model.rm-0"]}
    assert ("connect", (models,)) in roles.rewards["reward"].asked
    assert "memory/judge.j_gib" in run(roles.memory())
    assert not make(*JUDGED, sample=False).reward_models
    assert set(make(*JUDGED, train=False).reward_models) == set(models)


def test_new_reward_models_and_those_who_ask_them_are_introduced():
    roles, charges = make(*JUDGED), Charges()
    roles.supervise(charges)
    connected: list[Any] = []

    async def gather(references: list) -> None:
        connected.extend(references)

    async def main() -> None:
        await roles.ready()
        roles.reward_models["judge.j"].workers[1] = "another"
        await charges.prepare["judge.j"](1)
        reward = roles.rewards["reward"]
        assert reward.asked[-1] == ("reconnect", ("judge.j", 1, "another"))
        reward.gather = gather
        reward.workers[0] = SimpleNamespace(connect=SimpleNamespace(remote=lambda models: models))
        await charges.prepare["reward"](0)

    run(main())
    # A new reward worker is told of the judge as it is now.
    assert connected == [{"judge.j": ["judge.j-0", "another"], "reward_model.rm": ["reward_model.rm-0"]}]
    assert roles.environments.asked[-1][1][:2] == ("reward", 0)


class Weights:
    """A weight sync that keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    async def sync(self, version: int) -> None:
        self.asked.append(("sync", version))

    async def bring(self, rank: int) -> None:
        self.asked.append(("bring", rank))


def test_a_new_replica_has_the_weights_that_are_served_before_anyone_asks_it():
    roles, charges = make("rollout.replicas=2"), Charges()
    roles.supervise(charges)
    roles.weights = weights = Weights()

    async def main() -> None:
        await roles.ready()
        await roles.sync(7)
        roles.rollout.workers[1] = "late"
        await charges.prepare["rollout"](1)

    run(main())
    assert weights.asked == [("sync", 7), ("bring", 1)]
    assert [call for call in roles.environments.asked if call[0] == "reconnect"] == [
        ("reconnect", ("rollout", 1, "late"))
    ]


class Gathered:
    """A replica that keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda: self.asked.append(method))


def test_a_new_replica_leaves_the_device_to_the_trainers_whose_turn_it_is():
    roles, charges, late = make("rollout.replicas=2"), Charges(), Gathered()
    roles.supervise(charges)
    roles.weights = Weights()

    async def gather(calls: list) -> list:
        return calls

    async def main() -> None:
        await roles.ready()
        roles.rollout.workers[1], roles.rollout.gather = late, gather
        await roles.sync(7)
        await charges.prepare["rollout"](1)
        assert late.asked == []
        await roles.training_turn()
        await charges.prepare["rollout"](1)

    run(main())
    assert late.asked == ["offload"] and roles.weights.asked == [("sync", 7), ("bring", 1), ("bring", 1)]


def test_a_replica_may_be_replaced_where_there_is_no_trainer():
    roles, charges = make(train=False), Charges()
    roles.supervise(charges)

    async def main() -> None:
        await roles.ready()
        await charges.prepare["rollout"](0)

    run(main())
    assert roles.environments.asked[-1] == ("reconnect", ("rollout", 0, "rollout-0"))


def moves(*overrides: str, assignment: dict | None = None) -> list[str]:
    """Returns who was asked to move what in two steps, weights in between."""
    roles = make(*overrides)
    if assignment is not None:
        roles.pool.assignment, roles.pool._bundle = assignment, {0: 0}
    order: list[str] = []
    for cluster in (roles.policy, roles.rollout, roles.reference):
        if cluster is not None:

            async def every(method: str, *_: Any, role: str = cluster.role) -> list[None]:
                order.append(f"{role} {method}")
                return [None]

            cluster.all = every

    class Sync(Weights):
        async def sync(self, version: int) -> None:
            order.append(f"sync {version}")

    roles.weights = Sync()

    async def main() -> None:
        for version in range(2):
            await roles.sync(version)
            await roles.training_turn()

    run(main())
    return order


def test_roles_that_share_devices_take_turns_and_both_have_weights_while_they_are_synced():
    first = ["sync 0", "policy offload", "rollout offload", "policy onload"]
    assert moves() == [*first, "rollout onload", "sync 1", "policy offload", "rollout offload", "policy onload"]
    assert moves(assignment={"policy": [0], "rollout": [1]}) == ["sync 0", "sync 1"]
    assert moves("rollout.max_staleness=1") == ["sync 0", "sync 1"]
    assert "reference offload" in moves("algorithm.kl.coefficient=0.1")


def test_a_worker_that_dies_while_others_still_start_ends_the_waiting():
    roles = make()
    ClusterDouble.answers |= {"rollout.ready": WorkerDied("`rollout-0` did not start"), "policy.connect": None}
    with pytest.raises(WorkerDied, match="rollout-0"):
        run(roles.ready())


def test_release_kills_all_and_gives_the_devices_back(monkeypatch):
    roles = make()
    released = []
    monkeypatch.setattr(roles.pool, "release", lambda: released.append(True))
    roles.release()
    assert all(cluster.killed for cluster in ClusterDouble.started) and released == [True]


def test_memory_and_model_seconds_by_role():
    roles = make("rollout.replicas=2")
    assert run(roles.memory()) == {
        "memory/policy_gib": 1.0, "memory/rollout_gib": 2.0, "memory/environment_gib": 1.0, "memory/reward_gib": 1.0,
    }  # fmt: skip
    ClusterDouble.answers |= {"policy.model_seconds": 3.0, "rollout.model_seconds": [2.0, 4.0]}
    assert run(roles.model_seconds()) == {"time/policy_model_s": 3.0, "time/rollout_model_s": 3.0}
    ClusterDouble.answers |= {"policy.model_seconds": 3.5, "rollout.model_seconds": [3.0, 4.0]}
    assert run(roles.model_seconds()) == {"time/policy_model_s": 0.5, "time/rollout_model_s": 0.5}


def test_room_for_the_prompt():
    recipe = load_recipe("grpo-math", ["rollout.sampling.max_tokens=48"]).recipe
    assert max_prompt_tokens(recipe, 128) == 80
    recipe.rollout.max_prompt_tokens = 30
    assert max_prompt_tokens(recipe, 128) == 30
    recipe.rollout.max_prompt_tokens = 100
    with pytest.raises(ConfigError, match=r"is 100, but context 128 - `rollout.sampling.max_tokens` 48 leaves 80"):
        max_prompt_tokens(recipe, 128)
    recipe.rollout.max_prompt_tokens = None
    assert max_prompt_tokens(recipe, 49) == 1
    with pytest.raises(ConfigError, match="48 - 48 = 0 tokens are left") as caught:
        max_prompt_tokens(recipe, 48)
    assert "max_tokens=24" in caught.value.hint
