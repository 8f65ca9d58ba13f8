"""What an algorithm is by default, and that the list of names holds."""

import subprocess
import sys

import numpy as np
import pytest

from rollcli import registry
from rollcli.algorithms import BUILTIN
from rollcli.algorithms.base import Algorithm
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group, Task


def test_defaults() -> None:
    batch = Batch.from_sequences([(np.arange(4), np.array([False, True, True, True]))])
    algorithm = Algorithm()
    assert algorithm.needs() == {"old"} and algorithm.keep_group(Group(Task("t", 0, []), []))
    assert algorithm.loss_weights(batch).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    with pytest.raises(NotImplementedError):
        algorithm.advantages(batch)
    with pytest.raises(NotImplementedError):
        algorithm.loss(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BUILTIN)
def test_every_name_resolves(name: str) -> None:
    assert issubclass(registry.resolve("algorithms", name), Algorithm)


def test_a_recipe_is_checked_without_torch() -> None:
    modules = ", ".join(target.partition(":")[0] for target in BUILTIN.values())
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
