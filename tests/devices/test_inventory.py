"""Hardware from a file and from a Ray cluster's list of nodes."""

from __future__ import annotations

import pytest

from rollcli.devices.hardware import parse_gpus
from rollcli.devices.inventory import from_ray_nodes, read_hardware
from rollcli.errors import ConfigError, PlanError

MINE = "{memory_gib: 96, bandwidth_gb_s: 3000, bf16_tflops: 400, fp8_tflops: 0, link_gb_s: 0, network_gb_s: 5}"


@pytest.fixture
def written(tmp_path):
    """Writes a hardware file."""

    def write(text):
        file = tmp_path / "hardware.yaml"
        file.write_text(text)
        return file

    return write


def test_pools_of_a_file_are_those_of_the_command_line(written):
    file = written("pools:\n  - {chip: H100-80GB, count: 8, nodes: 4}\n  - {chip: L40S, count: 16}\n")
    assert read_hardware(file) == parse_gpus("4x8xH100-80GB+16xL40S")


def test_a_file_may_bring_its_chips(written):
    found = read_hardware(written(f"pools: [{{chip: mine, count: 4}}]\nchips:\n  mine: {MINE}\n"))
    assert (found.count, found.memory_gib, found.pools[0].chip.name) == (4, 96, "mine")


def test_a_machine_without_accelerators(written):
    found = read_hardware(written("cpu: {cores: 64, memory_gib: 512}"))
    assert (found.kind, found.cores, found.memory_gib) == ("cpu", 64, 512)


WRONG = {
    "nothing": ("{}", "either `pools` or `cpu`"),
    "both": ("pools: [{chip: L4, count: 1}]\ncpu: {cores: 1, memory_gib: 1}", "either `pools` or `cpu`"),
    "key": ("pool: []", "hardware.yaml:1:1: unknown key `pool` (did you mean `pools`?)"),
    "count": ("pools:\n  - {chip: L4, count: 0}", "hardware.yaml:2:16: `pools[0].count`: must be from 1"),
    "type": ("pools:\n  - {chip: L4, count: many}", "hardware.yaml:2:16: `pools[0].count`"),
    "no list": ("pools: 8xH100", "hardware.yaml:1:1: `pools`: expected a list"),
    "empty": ("pools: []", "hardware.yaml:1:1: `pools`: expected a list"),
    "memory": ("cpu: {cores: 4, memory_gib: 0}", "hardware.yaml:1:17: `cpu.memory_gib`: must be above 0"),
    "own chips": ("pools: [{chip: L4, count: 1}]\nchips: 3", "hardware.yaml:2:1: `chips`: expected a block"),
    "not YAML": ("pools: [", "not valid YAML"),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_of_a_file_are_shown_at_their_place(written, what):
    text, message = WRONG[what]
    with pytest.raises(ConfigError) as caught:
        read_hardware(written(text))
    assert message in str(caught.value)


def test_an_unknown_chip_of_a_file_is_located(written):
    with pytest.raises(PlanError, match=r"hardware\.yaml:2:6: `pools`: unknown accelerator `H10`") as caught:
        read_hardware(written("pools:\n  - {chip: H10, count: 8}"))
    assert "H100-80GB" in caught.value.hint


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hardware(tmp_path / "none.yaml")


def node(alive=True, **resources):
    return {"Alive": alive, "Resources": {key.replace("__", ":"): value for key, value in resources.items()}}


def test_nodes_of_a_cluster_are_pooled_by_kind():
    eight = {"GPU": 8.0, "accelerator_type:H100": 1.0}
    nodes = [{"Alive": True, "Resources": eight}, node(CPU=16.0), {"Alive": True, "Resources": eight}]
    nodes += [{"Alive": True, "Resources": {"GPU": 4.0, "accelerator_type:L4": 1.0}}, node(False, GPU=8.0)]
    assert from_ray_nodes(nodes) == parse_gpus("2x8xH100+4xL4")


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("A100-40G", "A100-40GB"), ("A100-80G", "A100-80GB"), ("L40S", "L40S-48GB"), ("T4", "T4-16GB"),
        ("AMD-Instinct-MI300X-OAM", "MI300X-192GB"), ("Ascend910B", "Ascend910B-64GB"), ("H20", "H20-96GB"),
    ],
)  # fmt: skip
def test_kinds_as_ray_writes_them(kind, chip):
    (pool,) = from_ray_nodes([{"Alive": True, "Resources": {"GPU": 8.0, f"accelerator_type:{kind}": 1.0}}]).pools
    assert (pool.chip.name, pool.count, pool.per_node) == (chip, 8, 8)


def test_a_kind_that_comes_in_sizes_is_the_smallest_and_says_so():
    found = from_ray_nodes([{"Alive": True, "Resources": {"GPU": 8.0, "accelerator_type:A100": 1.0}}])
    assert found.pools[0].chip.name == "A100-40GB"
    assert found.notes == (
        "Ray says `A100`, which may be `A100-40GB` or `A100-80GB`: planned with the smaller; `--gpus` says which",
    )


def test_clusters_that_cannot_be_planned_for_say_why():
    with pytest.raises(PlanError, match="no live node"):
        from_ray_nodes([node(False, CPU=4.0)])
    with pytest.raises(PlanError, match="does not say of what kind"):
        from_ray_nodes([node(GPU=2.0)])
    with pytest.raises(PlanError, match="unknown accelerator `TPU-V9`"):
        from_ray_nodes([{"Alive": True, "Resources": {"GPU": 8.0, "accelerator_type:TPU-V9": 1.0}}])


def test_a_cluster_without_accelerators_is_its_largest_machine():
    found = from_ray_nodes([node(CPU=4.0, memory=2.0**33), node(CPU=16.0, memory=2.0**36)])
    assert (found.kind, found.cores, found.memory_gib) == ("cpu", 16, 64.0)
