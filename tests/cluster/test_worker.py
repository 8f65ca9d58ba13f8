"""What every worker has, seen in real actors: plain ones and asynchronous ones, which start off the main thread."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from rollcli.cluster.worker import Worker, WorkerSpec
from rollcli.config.schema import RlRecipe

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Probe(Worker):
    """Looks at itself."""

    def look(self) -> dict[str, Any]:
        import torch

        return {
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "variables": [
                os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM")
            ],
            "recipe": (type(self.recipe).__name__, self.recipe.group_size, self.recipe.tasks[0].rewards[0].name),
        }

    def say(self) -> None:
        print("said through python", flush=True)
        print("said as an error", file=sys.stderr, flush=True)
        os.write(1, b"said by a library\n")
        subprocess.run(["echo", "said by a child"])

    def interrupt(self) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "alive"

    def with_child(self) -> tuple[float, float]:
        before = self.memory()
        code = "x = bytearray(200 << 20); print(flush=True); input()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
            child.stdout.readline()
            during = self.memory()
            child.kill()
        return before, during


class AsyncProbe(Probe):
    async def later(self) -> None:
        await asyncio.sleep(0)


@pytest.fixture(scope="module", params=[Probe, AsyncProbe])
def actor(request, ray, values, tmp_path_factory) -> tuple[Any, WorkerSpec]:
    logs = tmp_path_factory.mktemp("logs") / "made"
    spec = WorkerSpec("policy", 1, 2, 1, values, None, str(logs))
    return ray.remote(request.param).remote(replace(spec, threads=1)), spec


def test_name(spec):
    assert spec.name == "policy-0" and replace(spec, role="rollout", rank=3).name == "rollout-3"


def test_threads_recipe_and_readiness(ray, actor):
    seen = ray.get(actor[0].look.remote(), timeout=60)
    assert seen["threads"] == 1 and seen["variables"] == ["1", "1", "false"]
    assert seen["recipe"] == (RlRecipe.__name__, 16, "math")
    assert ray.get(actor[0].ready.remote()) == {"name": "policy-1", "pid": seen["pid"]}


def test_threads_reach_torch_that_is_there_already(ray, values):
    spec = WorkerSpec("policy", 0, 1, 2, values, None, None)

    class Late(Probe):
        def __init__(self, spec: WorkerSpec) -> None:
            import torch

            torch.set_num_threads(1)
            super().__init__(spec)

    assert ray.get(ray.remote(Late).remote(spec).look.remote(), timeout=60)["threads"] == 2


def test_everything_it_prints_is_in_its_log(ray, actor):
    ray.get(actor[0].say.remote(), timeout=60)
    text = (Path(actor[1].logs) / "policy-1.log").read_text()
    for source in ("through python", "as an error", "by a library", "by a child"):
        assert f"said {source}" in text


def test_ignores_interrupts(ray, actor):
    assert ray.get(actor[0].interrupt.remote(), timeout=60) == "alive"
    assert ray.get(actor[0].ready.remote(), timeout=60)["name"] == "policy-1"


def test_memory_counts_children(ray, actor):
    before, during = ray.get(actor[0].with_child.remote(), timeout=60)
    assert before > 0.02 and 0.19 < during - before < 0.6
