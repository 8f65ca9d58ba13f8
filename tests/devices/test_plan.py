"""The plan as the runtime and the command line call it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollcli.devices.hardware import cpu, parse_gpus
from rollcli.devices.plan import assign, plan
from rollcli.errors import PlanError


def test_a_plan_that_fits_advises_nothing(rl, tiny):
    found = plan(rl(), cpu(4, 64.0), tiny)
    assert found.fits and found.changes == []
    assert found.batch == list(found.sizes.lines)


def test_a_plan_that_does_not_fit_advises(rl, qwen):
    found = plan(rl(workers=4, replicas=4), parse_gpus("8xL4"), qwen)
    assert not found.fits and found.changes


def test_plan_and_runtime_assign_the_same(rl, tiny):
    for recipe in (rl(workers=4, replicas=4), rl(workers=8, replicas=8, kl=0.1)):
        assert plan(recipe, parse_gpus("8xH100"), tiny).assignment == assign(recipe, 8)


def test_a_wrong_placement_stops_the_plan(rl, tiny):
    with pytest.raises(PlanError, match="unused"):
        plan(rl(placement={"policy": "0", "rollout": "1"}), parse_gpus("4xH100"), tiny)


def test_planning_imports_nothing_heavy():
    code = """
import sys
import rollcli.devices.plan, rollcli.devices.hardware, rollcli.devices.facts
heavy = {"torch", "ray", "transformers", "datasets"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
