"""The catalogue of chips, the user's own, and what drivers call them."""

from __future__ import annotations

import pytest

from rollcli.devices.chips import BUILT_IN, Chip, catalogue, find_chip, read_chips, recognize
from rollcli.errors import ConfigError, PlanError

ASKED = """A100-40GB A100-80GB A10-24GB A6000-48GB L4-24GB L40S-48GB RTX3090-24GB RTX4090-24GB RTX5090-32GB V100-32GB
    T4-16GB H100-80GB H100-PCIe-80GB H200-141GB H20-96GB GH200-96GB B200-180GB B300-288GB MI210-64GB MI250-64GB
    MI300X-192GB MI325X-256GB MI355X-288GB Ascend910B-64GB Ascend910C-64GB""".split()
MINE = (
    "{vendor: me, memory_gib: 96, bandwidth_gb_s: 3000, bf16_tflops: 400, fp8_tflops: 0, link_gb_s: 0, network_gb_s: 5}"
)


def test_the_chips_people_have_are_there():
    assert set(ASKED) <= set(catalogue())


@pytest.mark.parametrize("chip", catalogue().values(), ids=lambda chip: chip.name)
def test_every_chip_is_possible_and_has_a_source(chip):
    nominal = float(chip.name.rpartition("-")[2].removesuffix("GB"))
    assert 0.88 * nominal < chip.memory_gib <= nominal
    assert not list(chip.problems()) and chip.has_rates
    assert chip.fp8_tflops == 0 or 1.9 < chip.fp8_tflops / chip.bf16_tflops < 2.1
    assert chip.vendor in ("NVIDIA", "AMD", "Huawei") and len(chip.source) > 15
    assert 10 < chip.bf16_tflops * 1000 / chip.bandwidth_gb_s < 800  # operations a byte


def test_the_package_file_is_in_the_format_of_users():
    assert read_chips(BUILT_IN) == catalogue()


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("H100", "H100-80GB"), ("h100 pcie", None), ("H100-PCIe", "H100-PCIe-80GB"), ("4090", "RTX4090-24GB"),
        ("RTX 4090", "RTX4090-24GB"), ("910B", "Ascend910B-64GB"), ("NVIDIA L40S", "L40S-48GB"),
        ("a100-40gb", "A100-40GB"), ("RTX A6000", "A6000-48GB"), ("MI300X", "MI300X-192GB"),
    ],
)  # fmt: skip
def test_names_are_found_in_many_spellings(name, chip):
    if chip is None:
        with pytest.raises(PlanError, match="unknown accelerator"):
            find_chip(name)
    else:
        assert find_chip(name).name == chip


def test_a_name_of_several_sizes_asks_which():
    with pytest.raises(PlanError, match="comes in sizes") as caught:
        find_chip("A100")
    assert "A100-40GB or A100-80GB" in caught.value.hint


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(PlanError, match="unknown accelerator `MI300`") as caught:
        find_chip("MI300")
    assert "did you mean `MI300X-192GB`" in caught.value.hint and "--chips" in caught.value.hint


DRIVERS = {
    ("NVIDIA H100 80GB HBM3", 79.6): "H100-80GB",
    ("NVIDIA H100 PCIe", 79.6): "H100-PCIe-80GB",
    ("NVIDIA H100 NVL", 93.6): "H100-NVL-94GB",
    ("NVIDIA A100-SXM4-40GB", 40.0): "A100-40GB",
    ("NVIDIA A100-SXM4-80GB", 80.0): "A100-80GB",
    ("NVIDIA A100 80GB PCIe", 80.0): "A100-PCIe-80GB",
    ("Tesla V100-SXM2-16GB", 16.0): "V100-16GB",
    ("Tesla T4", 15.0): "T4-16GB",
    ("NVIDIA GeForce RTX 3090", 24.0): "RTX3090-24GB",
    ("NVIDIA RTX A6000", 48.0): "A6000-48GB",
    ("NVIDIA RTX 6000 Ada Generation", 48.0): "RTX-6000-Ada-48GB",
    ("NVIDIA GH200 480GB", 95.6): "GH200-96GB",
    ("NVIDIA H200", 140.4): "H200-141GB",
}


@pytest.mark.parametrize(("name", "memory"), DRIVERS)
def test_what_a_driver_reports_is_recognized_with_its_own_memory(name, memory):
    found = recognize(name, memory)
    known = catalogue()[DRIVERS[name, memory]]
    assert (found.name, found.memory_gib, found.bandwidth_gb_s) == (known.name, memory, known.bandwidth_gb_s)


def test_another_memory_is_another_chip():
    found = recognize("NVIDIA GeForce RTX 4090 Laptop GPU", 16.0)
    assert (found.name, found.memory_gib) == ("NVIDIA GeForce RTX 4090 Laptop GPU", 16.0)
    assert not found.has_rates


def test_users_add_their_own_and_win(tmp_path):
    file = tmp_path / "chips.yaml"
    file.write_text(f"Mine-96GB: {MINE}\nL4-24GB: {MINE}\n")
    chips = read_chips(file)
    assert find_chip("mine", chips) == Chip("Mine-96GB", 96, 3000, 400, 0, 0, 5, "me")
    assert chips["L4-24GB"].memory_gib == 96 and chips["T4-16GB"] == catalogue()["T4-16GB"]


def test_every_mistake_of_a_file_is_shown_at_its_place(tmp_path):
    file = tmp_path / "chips.yaml"
    file.write_text(
        f"A: {MINE.replace('96', '-1')}\nB: {MINE.replace('memory_gib', 'memory')}\nC: 7\n"
        f"D: {MINE.replace('3000', 'fast')}\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_chips(file)
    text = str(caught.value)
    for wanted in (
        "chips.yaml:1:17: `A.memory_gib`: must be above 0, is -1", "chips.yaml:2:17: unknown key `B.memory`",
        "`B.memory_gib`: is required", "chips.yaml:3:1: `C`: expected a block of keys", "chips.yaml:4:33: `D.bandwidth",
    ):  # fmt: skip
        assert wanted in text, text
