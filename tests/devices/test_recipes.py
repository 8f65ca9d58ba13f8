"""Every recipe that states its devices fits on them, by the plan's own arithmetic."""

from __future__ import annotations

import pytest

from rollcli.config.find import shipped
from rollcli.config.load import load_recipe
from rollcli.devices.facts import model_facts
from rollcli.devices.hardware import parse_gpus
from rollcli.devices.plan import plan

STATED = {
    "rlvr-mix": "8xH100-80GB",
    "ppo-code": "8xH100-80GB",
    "dapo-math": "16x8xH100-80GB",
    "gspo-moe": "4x8xH100-80GB",
    "gigpo-sokoban": "2xH100-80GB",
    "async-math": "8xH100-80GB",
    "lora-single-gpu": "1xRTX4090-24GB",
    "grpo-gsm8k": "1xH100-80GB",
    "agentic-webshop": "8xH100-80GB",
    "agentic-tool": "8xH100-80GB",
}


@pytest.mark.parametrize("name", STATED)
def test_a_recipe_fits_on_the_devices_it_states(name):
    loaded = load_recipe(str(shipped() / f"{name}.yaml"))
    found = plan(loaded.recipe, parse_gpus(STATED[name]), model_facts(loaded.recipe.model))
    assert found.fits, [change.override for change in found.changes]
    assert {device.status for device in found.devices} <= {"ok", "tight"}, "no device is left out"


def test_recipes_with_a_gpu_in_their_description_are_all_here():
    said = {path.stem for path in shipped().glob("*.yaml") if "GPUs" in path.read_text().splitlines()[0]}
    assert said <= set(STATED)
