"""Devices of each role: automatic, explicit, and everything wrong with an explicit one."""

from __future__ import annotations

import pytest

from rollcli.config.schema import ModelConfig, ParallelConfig, RewardModelConfig
from rollcli.devices.assignment import assign, parse_devices, ranges, role_workers
from rollcli.errors import PlanError


def test_workers_of_every_role(rl, sft):
    assert role_workers(rl(workers=2, replicas=3)) == {"policy": 2, "rollout": 3, "environment": 1, "reward": 1}
    assert role_workers(rl(workers=2, kl=0.1))["reference"] == 2
    assert role_workers(sft(workers=2)) == {"policy": 2}


def test_the_critic_has_its_own_number_of_workers(rl):
    assert role_workers(rl(workers=2, critic=3)) == {
        "policy": 2, "critic": 3, "rollout": 1, "environment": 1, "reward": 1
    }  # fmt: skip
    assert list(role_workers(rl(workers=2, critic=3, kl=0.1)))[:3] == ["policy", "reference", "critic"]


def test_the_critic_has_devices_of_its_own_when_there_are_enough_for_all(rl):
    recipe = rl(workers=2, replicas=3, critic=2, kl=0.1)
    assert assign(recipe, 7) == {"policy": [0, 1], "reference": [0, 1], "critic": [5, 6], "rollout": [2, 3, 4]}
    assert assign(recipe, 6) == {"policy": [0, 1], "reference": [0, 1], "critic": [0, 1], "rollout": [2, 3, 4]}
    assert assign(recipe, 0) == {"policy": [], "reference": [], "critic": [], "rollout": []}


def test_too_many_critics_name_their_own_key(rl):
    with pytest.raises(PlanError, match=r"`critic\.workers`: 5 critic workers need 5 devices, there are 4") as caught:
        assign(rl(critic=5), 4)
    assert caught.value.hint.startswith("set `critic.workers=4`")


def test_an_unnamed_critic_shares_the_policys_devices_if_it_has_as_many(rl):
    placement = {"policy": "1-2", "rollout": "0"}
    assert assign(rl(workers=2, critic=2, placement=placement), 3)["critic"] == [1, 2]
    assert assign(rl(workers=2, critic=2, placement={**placement, "critic": "3-4"}), 5)["critic"] == [3, 4]
    with pytest.raises(PlanError, match="role `critic` has no devices"):
        assign(rl(workers=2, critic=1, placement=placement), 3)
    with pytest.raises(PlanError, match=r"`placement\.critic`: `0` is 1 devices for critic\.workers = 2"):
        assign(rl(workers=2, critic=2, placement={**placement, "critic": "0"}), 3)
    with pytest.raises(PlanError, match=r"`placement\.critic`: this recipe starts no critic worker"):
        assign(rl(workers=2, placement={**placement, "critic": "0"}), 3)


def test_without_devices_every_role_holds_none(rl):
    assert assign(rl(workers=2, replicas=3, kl=0.1), 0) == {"policy": [], "reference": [], "rollout": []}


def test_automatic_splits_when_there_are_enough_devices(rl):
    assert assign(rl(workers=3, replicas=2, kl=0.1), 5) == {
        "policy": [0, 1, 2], "reference": [0, 1, 2], "rollout": [3, 4]
    }  # fmt: skip


def test_automatic_shares_when_there_are_not(rl):
    assert assign(rl(workers=3, replicas=2), 4) == {"policy": [0, 1, 2], "rollout": [0, 1]}
    assert assign(rl(), 1) == {"policy": [0], "rollout": [0]}


def test_automatic_of_demonstrations(sft):
    assert assign(sft(workers=2), 8) == {"policy": [0, 1]}


@pytest.mark.parametrize("role", ["policy", "rollout"])
def test_automatic_with_too_few_devices_shows_the_numbers(rl, role):
    recipe = rl(**{"workers" if role == "policy" else "replicas": 5})
    with pytest.raises(PlanError, match=f"5 {role} workers need 5 devices, there are 4") as caught:
        assign(recipe, 4)
    assert caught.value.hint.startswith("set `policy.workers=4`" if role == "policy" else "set `rollout.replicas=4`")


def test_an_explicit_placement(rl):
    recipe = rl(workers=4, replicas=4, placement={"policy": "0-3", "rollout": "4,6-7,5"})
    assert assign(recipe, 8) == {"policy": [0, 1, 2, 3], "rollout": [4, 6, 7, 5]}


def test_roles_may_overlap(rl):
    recipe = rl(workers=2, replicas=2, placement={"policy": "0-1", "rollout": "1-2"})
    assert assign(recipe, 3) == {"policy": [0, 1], "rollout": [1, 2]}


def test_an_unnamed_reference_shares_the_policys_devices(rl):
    recipe = rl(kl=0.1, placement={"policy": "1", "rollout": "0"})
    assert assign(recipe, 2)["reference"] == [1]
    recipe = rl(kl=0.1, placement={"policy": "1", "rollout": "0", "reference": "2"})
    assert assign(recipe, 3)["reference"] == [2]


WRONG = {
    "unknown role": ({"polcy": "0", "rollout": "1"}, "`placement.polcy`: unknown role (did you mean `policy`?)"),
    "role not started": (
        {"policy": "0", "rollout": "1", "reference": "1"},
        "`placement.reference`: this recipe starts no reference worker",
    ),
    "role left out": ({"policy": "0"}, "`placement`: role `rollout` has no devices"),
    "not devices": ({"policy": "0-x", "rollout": "1"}, "`placement.policy`: `0-x` is not a list of devices"),
    "backwards": ({"policy": "3-0", "rollout": "1"}, "`placement.policy`: `3-0` is not a list of devices"),
    "out of range": (
        {"policy": "2", "rollout": "1"},
        "`placement.policy`: device 2 is not there; there are devices 0-1",
    ),
    "far out of range": (
        {"policy": "0-999999", "rollout": "1"},
        "`placement.policy`: devices 2-999999 are not there; there are devices 0-1",
    ),
    "twice": ({"policy": "0,0", "rollout": "1"}, "`placement.policy`: `0,0` names device 0 twice"),
    "wrong number": (
        {"policy": "0-1", "rollout": "1"},
        "`placement.policy`: `0-1` is 2 devices for policy.workers = 1, one each",
    ),
    "unused": (
        {"policy": "0", "rollout": "0"},
        "`placement`: device 1 is unused: policy 0 + rollout 0 = 1 of 2 devices",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_placement_is_said(rl, what):
    placement, message = WRONG[what]
    with pytest.raises(PlanError) as caught:
        assign(rl(placement=placement), 2)
    assert str(caught.value) == message
    assert caught.value.hint


def test_a_word_other_than_auto_is_refused(rl):
    with pytest.raises(PlanError, match="`placement`: `spread` is neither `auto`"):
        assign(rl(placement="spread"), 2)


def test_a_placement_without_devices_is_refused(rl):
    with pytest.raises(PlanError, match="there is no accelerator here") as caught:
        assign(rl(placement={"policy": "0", "rollout": "1"}), 0)
    assert "placement=auto" in caught.value.hint


def test_workers_of_several_processes_are_counted_as_the_recipe_counts_them(rl):
    recipe = rl(workers=4, replicas=2)
    recipe.policy.parallel.tensor = recipe.rollout.parallel.tensor = 2
    assert assign(recipe, 12) == {"policy": list(range(8)), "rollout": [8, 9, 10, 11]}
    with pytest.raises(
        PlanError, match=r"`policy\.workers`: 4 policy workers of 2 processes need 8 devices, there are 6"
    ) as caught:
        assign(recipe, 6)
    assert caught.value.hint.startswith("set `policy.workers=3`")
    with pytest.raises(PlanError) as caught:
        assign(recipe, 1)
    assert caught.value.hint.startswith("lower `policy.parallel`")
    for devices, hint in (("0-5", "set `policy.workers=3`, or name 8 devices"), ("0-4", "name 8 devices")):
        recipe.placement = {"policy": devices, "rollout": "8-11"}
        with pytest.raises(PlanError, match=r"devices for policy\.workers = 4, 2 each") as caught:
            assign(recipe, 12)
        assert caught.value.hint == hint


@pytest.mark.parametrize(("text", "devices"), [("0", [0]), ("0-3", [0, 1, 2, 3]), (" 0, 2 ,4-5", [0, 2, 4, 5])])
def test_devices_are_read(text, devices):
    assert parse_devices(text) == devices


@pytest.mark.parametrize("text", ["", "a", "0-", "-1", "1-0", "0;1", "0,,1", "1.5"])
def test_what_is_no_device_is_refused(text):
    with pytest.raises(ValueError):
        parse_devices(text)


def test_ranges_are_written_as_they_are_read():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert parse_devices(ranges([0, 1, 2, 5, 7, 8])) == [0, 1, 2, 5, 7, 8]
    assert ranges([]) == ""


JUDGE = RewardModelConfig("big", ModelConfig("x"), parallel=ParallelConfig(tensor=2))
CLASSIFIER = RewardModelConfig("rm", ModelConfig("x"), kind="classifier", replicas=3)


def test_reward_models_have_devices_of_their_own_while_there_are_any(rl):
    recipe = rl(workers=2, replicas=2, reward_models=[JUDGE, CLASSIFIER])
    assert role_workers(recipe) == {
        "policy": 2, "rollout": 2, "judge.big": 2, "reward_model.rm": 3, "environment": 1, "reward": 1
    }  # fmt: skip
    all_apart = {"policy": [0, 1], "rollout": [2, 3], "judge.big": [4, 5], "reward_model.rm": [6, 7, 8]}
    assert assign(recipe, 9) == all_apart
    assert assign(recipe, 8) == {**all_apart, "reward_model.rm": [0, 1, 2]}
    assert assign(recipe, 0) == {role: [] for role in all_apart}
    with pytest.raises(PlanError, match=r"`reward_models\[1\]\.replicas`: 3 reward_model\.rm workers need 3 devices"):
        assign(rl(reward_models=[JUDGE, CLASSIFIER]), 2)


def test_reward_models_are_placed_by_their_roles(rl):
    placement = {"policy": "0", "rollout": "1", "judge.big": "2-3"}
    assert assign(rl(placement=placement, reward_models=[JUDGE]), 4)["judge.big"] == [2, 3]
    with pytest.raises(PlanError, match=r"did you mean `judge\.big`"):
        assign(rl(placement={"policy": "0", "judge.bug": "2-3"}, reward_models=[JUDGE]), 4)
    with pytest.raises(PlanError, match=r"`2` is 1 devices for reward_models\[0\]\.replicas = 1, 2 each"):
        assign(rl(placement={**placement, "judge.big": "2"}, reward_models=[JUDGE]), 4)
