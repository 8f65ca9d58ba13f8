"""Hardware by name, given, and found."""

from __future__ import annotations

import pytest

from rollcli.devices import hardware
from rollcli.devices.hardware import cpu, parse_gpus, this_machine
from rollcli.errors import PlanError


@pytest.mark.parametrize("text", ["8xH100-80GB", "8xH100", "8 x h100-80gb", "8×H100", "8*H100-80GB"])
def test_count_and_chip_are_read_in_every_spelling(text):
    found = parse_gpus(text)
    assert (found.kind, found.count, found.memory_gib) == ("gpu", 8, 79.14)
    assert [(pool.chip.name, pool.count, pool.nodes) for pool in found.pools] == [("H100-80GB", 8, 1)]


def test_a_chip_without_a_count_is_one():
    assert parse_gpus("L40S-48GB").count == 1


def test_an_unknown_chip_names_the_nearest():
    with pytest.raises(PlanError, match="unknown accelerator `H10`") as caught:
        parse_gpus("8xH10")
    assert "did you mean `H100-80GB`" in caught.value.hint


@pytest.mark.parametrize(
    "text", ["0xH100", "-1xH100", "99999999xH100", "2x0xH100", "0x8xH100", "1048576xH100+1xL4", "1048576x2xL4"]
)
def test_counts_that_cannot_be_are_refused(text):
    with pytest.raises(PlanError, match="cannot be"):
        parse_gpus(text)


@pytest.mark.parametrize("text", ["", "8x", "8", "8xH100+", "8xH100++4xL4", "xH100 /"])
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
    assert [(pool.chip.name, pool.count) for pool in found.pools] == [("L40S-48GB", 1), ("L4-24GB", 1)]
    assert [pool.chip.memory_gib for pool in found.pools] == [46068 / 1024, 23034 / 1024]
    assert found.memory_gib == 23034 / 1024 and found.cores >= 1


def test_this_machine_may_have_chips_of_which_only_the_memory_is_known(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nprintf 'NVIDIA X9, 40960\\nNVIDIA X9, 40960\\n'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(hardware, "_SMI", (str(fake),))
    (pool,) = this_machine().pools
    assert (pool.chip.name, pool.chip.memory_gib, pool.count, pool.chip.has_rates) == ("NVIDIA X9", 40.0, 2, False)


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


def test_pools_are_joined_and_devices_counted_through_them():
    found = parse_gpus("2x8xH100-80GB+12xL40S")
    assert [(pool.chip.name, pool.count, pool.per_node, pool.nodes) for pool in found.pools] == [
        ("H100-80GB", 16, 8, 2), ("L40S-48GB", 12, 8, 2)
    ]  # fmt: skip
    assert (found.count, found.memory_gib) == (28, 44.34)
    assert [found.pool_of(device).chip.name for device in (0, 15, 16, 27)] == ["H100-80GB"] * 2 + ["L40S-48GB"] * 2
    assert [found.node_of(device) for device in (0, 7, 8, 15, 16, 23, 24, 27)] == [0, 0, 1, 1, 2, 2, 3, 3]
    for look_up in (found.pool_of, found.node_of):
        with pytest.raises(IndexError):
            look_up(28)
    assert found.label == (
        "16 × H100-80GB (79.1 GiB each) in 2 nodes of 8 + 12 × L40S-48GB (44.3 GiB each) in 2 nodes of 8"
    )


def test_nodes_multiply_one_pool():
    assert parse_gpus("8xH100", nodes=4) == parse_gpus("4x8xH100")
    assert parse_gpus("4x8xH100").count == 32
    assert parse_gpus("4xGH200-96GB").pools[0].nodes == 4  # one in each machine
    with pytest.raises(PlanError, match="`--nodes 0`: 0 nodes cannot be"):
        parse_gpus("8xH100", nodes=0)
    with pytest.raises(PlanError, match="2 pools") as caught:
        parse_gpus("8xH100+4xL4", nodes=2)
    assert caught.value.hint.endswith("`--gpus 2x8xH100+2x4xL4`")
    with pytest.raises(PlanError, match="says 2 nodes"):
        parse_gpus("2x8xH100", nodes=4)


def test_the_document_holds_every_pool():
    document = parse_gpus("8xH100+2xL4").to_dict()
    assert (document["kind"], document["count"], document["name"]) == ("gpu", 10, "H100-80GB + L4-24GB")
    assert document["pools"][1]["chip"]["bandwidth_gb_s"] == 300
    assert cpu(4, 8.0).to_dict() == {
        "kind": "cpu", "name": "this machine", "count": 0, "memory_gib": 8.0, "cores": 4, "pools": []
    }  # fmt: skip
