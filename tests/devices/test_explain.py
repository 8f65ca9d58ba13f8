"""Predicted beside measured: what is compared with what, and that a fit brings them together."""

from __future__ import annotations

import pytest

from rollcli.devices.constants import CPU, Constants
from rollcli.devices.explain import Comparison, Lengths, calibrated, chip_of, estimate, memory, stages
from rollcli.devices.hardware import cpu, parse_gpus
from rollcli.devices.lengths import Fixed
from rollcli.devices.plan import plan
from rollcli.errors import PlanError

LENGTHS = Lengths(100.0, Fixed(200))


def test_memory_is_of_all_workers_of_a_role_and_the_largest_of_all_steps(rl, tiny):
    found = plan(rl(workers=2, replicas=2), cpu(2, 16.0), tiny)
    predicted = estimate(found)
    assert predicted["memory/policy_gib"] == pytest.approx(2 * found.roles["policy"].used_gib, abs=1e-4)
    assert set(predicted) == {f"memory/{role}_gib" for role in ("policy", "rollout", "environment", "reward")}
    rows = [{"memory/policy_gib": 1.0}, {"memory/policy_gib": 3.0}, {"memory/rollout_gib": None}]
    [compared] = memory({"memory/policy_gib": 2.0, "memory/rollout_gib": 1.0}, rows)
    assert (compared.name, compared.measured, compared.ratio) == ("memory/policy_gib", 3.0, 1.5)
    assert Comparison("x", 0.0, 1.0).ratio == float("inf")


def test_cores_are_a_chip_and_several_kinds_are_none():
    assert chip_of(cpu(4, 16.0)).bf16_tflops == pytest.approx(2 * chip_of(cpu(2, 16.0)).bf16_tflops)
    assert chip_of(parse_gpus("8xH100-80GB")).name.startswith("H100")
    with pytest.raises(PlanError, match="one kind"):
        chip_of(parse_gpus("2xH100-80GB+2xL40S"))


def test_times_are_means_after_the_first_step(rl, tiny):
    rows = [{"time/update_s": 100.0}, {"time/update_s": 2.0}, {"time/update_s": 4.0}]
    found = stages(rl(), tiny, cpu(2, 16.0), "colocated", LENGTHS, rows, CPU)
    assert [(each.name, each.measured) for each, _ in found] == [("time/update_s", 3.0)]
    with pytest.raises(PlanError, match="not finished a step"):
        stages(rl(), tiny, cpu(2, 16.0), "colocated", LENGTHS, [], CPU)


def test_a_machine_with_other_constants_is_found_out(rl, qwen):
    """A run is made up by the simulation under other constants: the fit explains it better than by half."""
    hardware, recipe = parse_gpus("8xH100-80GB"), rl(workers=4, replicas=4, prompt=1024, answer=1024)
    real = Constants(train_compute=0.25, decode_bandwidth=0.45, decode_call_s=0.008)
    asked = (recipe, qwen, hardware, "split", LENGTHS)
    probe = [{f"time/{name}_s": 1.0 for name in ("rollout", "update", "logprobs", "sync")}]
    made_up = {each.name: each.predicted for each, _ in stages(*asked, probe, real)}
    before = {each.name: abs(each.ratio - 1) for each, _ in stages(*asked, [made_up], Constants())}
    fitted = calibrated(*asked, [made_up], Constants())
    after = {each.name: abs(each.ratio - 1) for each, _ in stages(*asked, [made_up], fitted)}
    for name in ("time/rollout_s", "time/update_s"):
        assert before[name] > 0.2 and after[name] < 0.05, (name, before, after)
