"""A step's time from recipe or inputs: what adds up, what is refused, and a quick simulation beside a whole one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rollcli.devices.constants import Constants, fit
from rollcli.devices.lengths import Fixed, LogNormal, long_tailed
from rollcli.devices.roofline import Degrees
from rollcli.devices.simulate import Inputs, from_recipe, mean_batch, simulate
from rollcli.devices.workload import Work
from rollcli.errors import PlanError

H100 = SimpleNamespace(memory_gib=79.14, bandwidth_gb_s=3350, bf16_tflops=989, link_gb_s=900, network_gb_s=50)


@pytest.fixture
def inputs(qwen):
    """Eight devices, half of which sample."""
    work = Work(32, 8, 200, long_tailed(1000, 8192))
    return Inputs(qwen, H100, Degrees(data=4), Degrees(data=4), work, forwards=1, price=2.0)


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("staleness", [0, 2])
def test_stages_add_up_to_the_step(inputs, colocated, staleness):
    found = simulate(replace(inputs, colocated=colocated, max_staleness=staleness))
    assert sum(found.stages.values()) == pytest.approx(found.step_s)
    assert sum(found.steps) / len(found.steps) == pytest.approx(found.step_s)
    assert found.devices == ({"all": 4} if colocated else {"policy": 4, "rollout": 4})
    assert found.cost == pytest.approx(2.0 * sum(found.devices.values()) * found.step_s / 3600)
    assert all(0 <= share <= 1 for share in found.idle.values())
    assert ("switch" in found.stages) == colocated
    assert found.staleness <= staleness
    assert json.loads(json.dumps(found.to_dict()))["step_s"] == found.step_s


def test_the_timeline_covers_a_step(inputs):
    found = simulate(inputs)
    last = found.steps[-1]
    own = sorted((s.start, s.end) for s in found.timeline if s.devices == "policy")
    assert own[0][0] == pytest.approx(0) and own[-1][1] == pytest.approx(last)
    assert [start for start, _ in own[1:]] == pytest.approx([end for _, end in own[:-1]])
    replicas = {s.name: s for s in found.timeline if s.devices == "rollout"}
    assert replicas["rollout"].end == pytest.approx(replicas["tail"].start)
    assert replicas["tail"].end < last


def test_a_synchronous_step_with_equal_lengths_in_closed_form(inputs):
    work = Work(4, 8, 0, Fixed(100))
    found = simulate(replace(inputs, work=work, constants=replace(Constants(), step_s=5.0)), steps=2)
    # 8 rows on each of 4 replicas: weights and the cache of 50 tokens a row at 65 % of memory's speed, and the call.
    weights = 2 * (7_615_616_512 - 152_064 * 3584)
    step_s = (weights + 8 * 50 * 57_344) / (3350e9 * 0.65) + 0.004
    assert found.stages["rollout"] == pytest.approx(100 * step_s)
    assert found.stages["update"] == pytest.approx(found.costs["update"].seconds)
    assert found.costs["rollout"].seconds == pytest.approx(found.stages["rollout"])
    assert found.tokens_per_s == pytest.approx(32 * 100 / found.step_s)
    assert found.requests_per_s == pytest.approx(32 / found.step_s)
    assert found.controller_per_s == pytest.approx((2 * 32 + 4) / found.step_s)


def test_predictions_can_be_fitted_to_what_was_measured(inputs):
    true = replace(Constants(), train_compute=0.3, decode_bandwidth=0.5)
    told, happened = simulate(inputs), simulate(replace(inputs, constants=true))
    pairs = [(told.costs[stage], seconds) for stage, seconds in happened.stages.items()]
    found = fit(inputs.constants, pairs)
    again = simulate(replace(inputs, constants=found))
    assert abs(again.step_s / happened.step_s - 1) < 0.05 < abs(told.step_s / happened.step_s - 1)


def test_mean_batch_by_hand():
    tokens, squares = mean_batch(Work(2, 3, 10, Fixed(5)))
    assert (tokens, squares) == (6 * 15, 6 * 15**2)
    tokens, squares = mean_batch(Work(1, 1, 10, Fixed(5), turns=Fixed(4), observation_tokens=2))
    assert (tokens, squares) == (38, 38**2)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("colocated", [False, True])
def test_a_quick_simulation_comes_near_the_whole(inputs, staleness, colocated):
    large = replace(
        inputs, trainers=Degrees(data=64), replicas=Degrees(data=64), work=replace(inputs.work, prompts=512),
        max_staleness=staleness, colocated=colocated,
    )  # fmt: skip
    whole, quick = simulate(large), simulate(large, quick=True)
    assert quick.step_s == pytest.approx(whole.step_s, rel=0.2)
    assert quick.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.2)


def test_asynchrony_gains_most_where_the_tail_is_long(inputs):
    gains = {}
    for cv in (0.1, 1.5):
        setting = replace(inputs, work=replace(inputs.work, answers=LogNormal(1000, cv, 16384)))
        gains[cv] = simulate(setting).step_s / simulate(replace(setting, max_staleness=4)).step_s
    assert gains[1.5] > gains[0.1] > 1


def test_a_recipe_gives_its_inputs(rl, qwen):
    recipe = rl(workers=2, replicas=3, kl=0.1, prompts=16, group=4, minibatches=2, answer=512, tokens=4096)
    recipe.rollout.parallel.tensor, recipe.rollout.max_staleness = 2, 1
    found = from_recipe(recipe, qwen, H100, False, 100, environment_s=Fixed(3), price=1.5)
    assert (found.trainers.devices, found.replicas.devices, found.replicas.data) == (2, 6, 3)
    assert (found.work.prompts, found.work.group_size, found.work.answers.mean) == (16, 4, 128)
    assert (found.max_staleness, found.minibatches, found.micro_tokens, found.price) == (1, 2, 4096, 1.5)
    assert (found.forwards, found.critic, found.transport) == (2, False, "broadcast")
    assert found.work.environment_s == Fixed(3)
    assert found.assumptions == ("answers of 128 tokens on average (25% of `max_tokens`), long-tailed",)
    assert simulate(found).assumptions == found.assumptions
    critic = from_recipe(rl(critic=1), qwen, H100, True, 100, Fixed(50))
    assert (critic.critic, critic.transport, critic.assumptions) == (True, "cuda_ipc", ())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"price": -1.0}, "a price of -1.0"),
        ({"price": math.nan}, "a price of nan"),
        ({"transport": "pigeon"}, "unknown transport of weights `pigeon`"),
        ({"max_rows": 0}, "max_rows: 0 cannot be"),
        ({"replicas": Degrees(data=0)}, "rollout replicas: 0 cannot be"),
    ],
)
def test_inputs_that_cannot_be_are_refused(inputs, wrong, message):
    with pytest.raises(PlanError, match=message):
        simulate(replace(inputs, **wrong))


@pytest.mark.parametrize(
    "wrong", [{"refused": 1.0}, {"refused": -0.1}, {"prompts": 0}, {"group_size": 0}, {"answers": Fixed(0)}]
)
def test_work_that_cannot_be_is_refused(inputs, wrong):
    with pytest.raises(PlanError):
        simulate(replace(inputs, work=replace(inputs.work, **wrong)))
