"""Hardware by name, given, and found."""

from __future__ import annotations

import pytest

from rollcli.devices import hardware
from rollcli.devices.hardware import CHIPS, cpu, find_chip, parse_gpus, this_machine
from rollcli.errors import PlanError


@pytest.mark.parametrize("text", ["8xH100-80GB", "8xH100", "8 x h100-80gb", "8×H100", "8*H100-80GB"])
def test_count_and_chip_are_read_in_every_spelling(text):
    found = parse_gpus(text)
    assert (found.kind, found.name, found.count, found.memory_gib) == ("gpu", "H100-80GB", 8, 79.14)


def test_a_chip_without_a_count_is_one():
    assert parse_gpus("L40S-48GB").count == 1


def test_a_chip_has_less_memory_than_its_name_says():
    for chip in CHIPS.values():
        nominal = float(chip.name.rpartition("-")[2].removesuffix("GB"))
        assert 0.88 * nominal < chip.memory_gib <= nominal


def test_an_unknown_chip_names_the_nearest():
    with pytest.raises(PlanError, match="unknown accelerator `H10`") as caught:
        parse_gpus("8xH10")
    assert "did you mean `H100-80GB`" in caught.value.hint


def test_a_name_of_several_sizes_asks_which():
    with pytest.raises(PlanError, match="comes in sizes") as caught:
        find_chip("A100")
    assert "A100-40GB or A100-80GB" in caught.value.hint


@pytest.mark.parametrize("text", ["0xH100", "-1xH100", "99999999xH100"])
def test_counts_that_cannot_be_are_refused(text):
    with pytest.raises(PlanError, match="cannot be"):
        parse_gpus(text)


@pytest.mark.parametrize("text", ["", "8x", "8", "8xH100+4xA100", "xH100 /"])
def test_what_is_no_hardware_shows_the_form(text):
    with pytest.raises(PlanError) as caught:
        parse_gpus(text)
    assert "8xH100-80GB" in caught.value.hint


def test_a_cpu_is_this_machine_or_what_is_given():
    here = cpu()
    assert here.kind == "cpu" and here.count == 0 and here.cores >= 1 and here.memory_gib > 0.1
    given = cpu(16, 64.0)
    assert (given.cores, given.memory_gib, given.label) == (16, 64.0, "this machine: 16 cores, 64.0 GiB")


@pytest.mark.parametrize(("cores", "memory"), [(0, 8.0), (4, 0.0), (4, -1.0)])
def test_a_machine_without_cores_or_memory_is_refused(cores, memory):
    with pytest.raises(PlanError, match="cannot be"):
        cpu(cores, memory)


def test_this_machine_has_the_accelerators_nvidia_smi_lists(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'NVIDIA L40S, 46068'\necho 'NVIDIA L4, 23034'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(hardware, "_SMI", (str(fake),))
    found = this_machine()
    assert (found.kind, found.name, found.count) == ("gpu", "NVIDIA L4", 2)
    assert found.memory_gib == pytest.approx(23034 / 1024)


@pytest.mark.parametrize("script", ["exit 9", "echo no devices were found", ""])
def test_this_machine_is_a_cpu_without_usable_nvidia_smi(tmp_path, monkeypatch, script):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(hardware, "_SMI", (str(fake),))
    assert this_machine().kind == "cpu"


def test_a_control_group_limits_cores_and_memory(monkeypatch):
    files = {"/sys/fs/cgroup/cpu.max": "100000 100000\n", "/sys/fs/cgroup/memory.max": f"{2**30}\n"}
    monkeypatch.setattr(hardware, "_read", lambda path: files[path])
    assert hardware.available_cores() == 1
    assert hardware.available_memory_gib() == 1.0
