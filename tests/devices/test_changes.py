"""Advice: what it names must work."""

from __future__ import annotations

import pytest

from rollcli.devices.changes import changed, changes
from rollcli.devices.hardware import cpu, parse_gpus
from rollcli.devices.layout import lay_out


def test_each_single_change_makes_it_fit_and_the_one_before_does_not(rl, qwen):
    recipe, hardware = rl(workers=8, replicas=8, prompt=1024, answer=4096), parse_gpus("16xH200")
    before = lay_out(recipe, hardware, qwen)
    found, together = changes(recipe, hardware, qwen)
    assert not before.fits and not together
    assert [change.override for change in found][:2] == [
        "policy.recompute_activations=true", "policy.micro_batch_tokens=8192"
    ]  # fmt: skip
    for change in found:
        after = lay_out(changed(recipe, change.key, change.new), hardware, qwen)
        assert change.fits and after.fits
        assert change.frees_gib == pytest.approx(after.free_gib - before.free_gib, abs=0.01)


def test_changes_that_only_together_suffice_do(rl, qwen):
    recipe, hardware = rl(workers=8, replicas=8, kl=0.1, prompt=1024, answer=4096), parse_gpus("8xH100")
    found, together = changes(recipe, hardware, qwen)
    assert together and len(found) > 1
    for change in found:
        assert not lay_out(recipe, hardware, qwen).fits
        recipe = changed(recipe, change.key, change.new)
    assert lay_out(recipe, hardware, qwen).fits
    assert found[-1].fits


def test_what_cannot_fit_says_so(rl, qwen):
    found, together = changes(rl(workers=1), parse_gpus("1xL4"), qwen)
    assert together
    assert not any(change.fits for change in found)


def test_demonstrations_are_advised_too(sft, qwen):
    recipe, hardware = sft(workers=8, tokens=131072), parse_gpus("8xH100")
    found, _ = changes(recipe, hardware, qwen)
    assert "policy.micro_batch_tokens" in [change.key for change in found]
    assert not any(change.key.startswith("rollout") for change in found)


def test_more_workers_are_advised_only_where_there_are_devices(sft, qwen):
    few, _ = changes(sft(workers=1, tokens=1024), parse_gpus("1xH100"), qwen)
    assert "policy.workers" not in [change.key for change in few]
    more, together = changes(sft(workers=1, tokens=1024), parse_gpus("8xH100"), qwen)
    assert not together
    assert ("policy.workers", 2) in [(change.key, change.new) for change in more]


def test_fewer_workers_help_on_a_cpu(rl, tiny):
    recipe = rl(workers=4)
    hardware = cpu(4, lay_out(rl(workers=2), cpu(4, 100.0), tiny).devices[0].used_gib + 0.01)
    found, _ = changes(recipe, hardware, tiny)
    assert ("policy.workers", 2) in [(change.key, change.new) for change in found]


def test_the_recipe_itself_is_not_touched(rl, qwen, gpus):
    recipe = rl()
    changes(recipe, gpus(2, 10.0), qwen)
    assert recipe == rl()


def test_a_critics_own_settings_are_advised(rl, qwen):
    recipe, hardware = rl(workers=8, critic=8, replicas=8, prompt=1024, answer=4096), parse_gpus("16xH100")
    found, _ = changes(recipe, hardware, qwen)
    keys = [change.key for change in found]
    assert not lay_out(recipe, hardware, qwen).fits and "critic.recompute_activations" in keys
    none, _ = changes(rl(workers=8, replicas=8, prompt=1024, answer=4096), parse_gpus("16xH100"), qwen)
    assert none and not any(change.key.startswith("critic") for change in none)
