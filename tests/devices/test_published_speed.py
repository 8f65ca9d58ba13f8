"""Published pairs of settings: the simulation says the same one is faster. `-s` prints the ratios side by side."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rollcli.devices.facts import facts_from_config
from rollcli.devices.lengths import long_tailed
from rollcli.devices.roofline import Degrees
from rollcli.devices.simulate import Inputs, simulate
from rollcli.devices.workload import Work

DATA = yaml.safe_load((Path(__file__).parent / "published_speed.yaml").read_text())
SETTINGS, PAIRS = DATA["settings"], DATA["pairs"]


def inputs(setting):
    """Returns what a setting of the file stands for."""
    workers, tensor, pipeline, context, expert = setting["trainers"]
    number, spread = setting["replicas"]
    colocated = setting.get("colocated", False)
    return Inputs(
        facts=facts_from_config(DATA["models"][setting["model"]], setting["model"]),
        chip=SimpleNamespace(**DATA["chips"][setting["chip"]]),
        trainers=Degrees(tensor, pipeline, context, expert, workers),
        replicas=Degrees(tensor=spread, data=number),
        work=Work(
            setting["prompts"], setting["group"], setting["prompt"], long_tailed(setting["mean"], setting["longest"])
        ),
        colocated=colocated,
        max_staleness=setting.get("staleness", 0),
        minibatches=setting.get("minibatches", 1),
        forwards=setting.get("forwards", 0),
        recompute=setting.get("recompute", False),
        transport="cuda_ipc" if colocated else "broadcast",
    )


@cache
def step_s(name):
    return simulate(inputs(SETTINGS[name])).step_s


def ratios(slower, faster):
    """Returns the published ratio and the simulated one, and prints both."""
    published, simulated = (
        SETTINGS[slower]["published"] / SETTINGS[faster]["published"],
        step_s(slower) / step_s(faster),
    )
    print(f"\n{slower:24} / {faster:24} published {published:.2f}, simulated {simulated:.2f}", end="")
    return published, simulated


@pytest.mark.parametrize(("slower", "faster"), PAIRS, ids=lambda name: name)
def test_the_order_of_a_published_pair_is_reproduced(slower, faster):
    published, simulated = ratios(slower, faster)
    assert published > 1
    assert simulated > 1


@pytest.mark.parametrize("pair", DATA["not_reproduced"], ids=lambda pair: pair["pair"][0])
def test_a_pair_that_is_not_reproduced_says_why(pair):
    """Once it is, it belongs among the others."""
    published, simulated = ratios(*pair["pair"])
    assert published > 1 > simulated
    assert pair["why"]


def test_there_are_enough_pairs_and_each_is_cited():
    assert len(PAIRS) >= 10
    asynchronous = [pair for pair in PAIRS if SETTINGS[pair[1]].get("staleness") and SETTINGS[pair[0]].get("colocated")]
    assert len(asynchronous) >= 5
    for setting in SETTINGS.values():
        source = DATA["sources"][setting["source"]]
        assert source["url"].startswith("https://") and source["section"] and source["stated"] and source["assumed"]
