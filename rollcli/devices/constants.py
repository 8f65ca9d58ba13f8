"""What share of its data sheet a device reaches, and how a run teaches that: the time model's only free numbers.

A stage's time is a sum of parts, each in proportion to one constant: seconds at peak rate divided by the share of the
peak that is reached, or a number of calls times the overhead of one. So fitting the constants to a run is a linear
problem in the parts, with a factor for each: `fit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from rollcli.errors import PlanError
from rollcli.suggest import did_you_mean


@dataclass(frozen=True)
class Constants:
    """Shares of peak rates that are reached, and overheads.

    Defaults are round numbers in the range that public measurements show, none fitted to a figure that tests compare
    with: 40 % of peak for training of models from 7B up (Megatron-LM, arXiv 2104.04473, table 1: 44 to 52 %; less with
    ragged batches), 60 to 80 % of memory bandwidth while decoding, 70 % of a link in large collectives.

    Attributes:
        train_compute: of the matrix peak, in forward and backward passes of training.
        prefill_compute: of the matrix peak, in prefill and forward passes without gradients.
        decode_compute: of the matrix peak, in decoding many rows.
        decode_bandwidth: of memory bandwidth, in decoding.
        optimizer_bandwidth: of memory bandwidth, in the optimizer's step.
        link: of the bandwidth between devices of one machine.
        network: of the bandwidth between machines.
        decode_call_s: launching one decode step: kernels, scheduler, sampling.
        hop_s: latency of one small collective between devices of one machine.
        pass_s: launching one forward, or forward and backward, of one micro-batch.
        step_s: fixed cost of a training step: transfer of the batch, barriers, metrics.
        store_gb_s: of the object store, copying in and out together.
        storage_gb_s: of one machine's disk or share of the file system.
        host_gb_s: between a device and its machine's memory, when a role hands a device over.
    """

    train_compute: float = 0.40
    prefill_compute: float = 0.50
    decode_compute: float = 0.50
    decode_bandwidth: float = 0.65
    optimizer_bandwidth: float = 0.70
    link: float = 0.70
    network: float = 0.70
    decode_call_s: float = 0.004
    hop_s: float = 1e-5
    pass_s: float = 0.02
    step_s: float = 2.0
    store_gb_s: float = 2.0
    storage_gb_s: float = 2.0
    host_gb_s: float = 20.0


CPU = Constants(decode_call_s=0.002, pass_s=0.005, step_s=0.05)
"""For a machine without accelerators: nothing is launched on a device, and models are small."""
NAMES = tuple(each.name for each in fields(Constants))
LEAST, MOST = 0.05, 20.0


@dataclass(frozen=True)
class Cost:
    """Seconds by the constant they are in proportion to.

    Attributes:
        parts: constant to seconds.
    """

    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """All parts together."""
        return sum(self.parts.values())

    def __add__(self, other: Cost) -> Cost:
        names = dict.fromkeys([*self.parts, *other.parts])
        return Cost({name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in names})

    def __mul__(self, times: float) -> Cost:
        return Cost({name: seconds * times for name, seconds in self.parts.items()})


def slowest(*costs: Cost) -> Cost:
    """Returns the cost that takes longest: of what is done at the same time, as in a roofline."""
    return max(costs, key=lambda cost: cost.seconds)


def fit(constants: Constants, pairs: Iterable[tuple[Cost, float]], trust: float = 0.03) -> Constants:
    """Returns the constants under which predictions come closest to what was measured.

    Each pair is a stage's predicted cost, under `constants`, and its measured seconds t. With A[i, j] the seconds of
    part j, factors x ≥ 0 minimize Σ_i ((A x)_i / t_i - 1)² + trust² Σ_j (x_j - 1)²: relative errors, so that short
    stages count like long ones; the second term keeps near what it was what the measurements say little about, and a
    constant that no stage has a part of stays as it is. Factors are then held between `LEAST` and `MOST`, and shares
    of a peak below 1.

    Args:
        trust: how many relative errors a doubled factor weighs.

    Raises:
        PlanError: there is nothing to fit to, or a time is not above 0.
    """
    known = list(pairs)
    if not known:
        raise PlanError("there is no measured stage to fit the time model to", hint="give a run with finished steps")
    wrong = [seconds for _, seconds in known if not (np.isfinite(seconds) and seconds > 0)]
    if wrong:
        raise PlanError(f"a stage that took {wrong[0]:g} s cannot be fitted", hint="leave stages without a time out")
    names = [name for name in NAMES if any(cost.parts.get(name) for cost, _ in known)]
    if not names:
        return constants
    rows = np.array([[cost.parts.get(name, 0.0) / seconds for name in names] for cost, seconds in known])
    matrix = np.vstack([rows, trust * np.eye(len(names))])
    target = np.concatenate([np.ones(len(rows)), np.full(len(names), trust)])
    factors = np.clip(least_squares(matrix, target), LEAST, MOST)
    return replace(constants, **{n: _scaled(constants, n, float(x)) for n, x in zip(names, factors, strict=True)})


def least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns x ≥ 0 that minimizes |matrix x - target|² (Lawson and Hanson, Solving Least Squares Problems, ch. 23).

    Args:
        matrix: [rows, columns], of full column rank.
        target: [rows].
    """
    columns = matrix.shape[1]
    x, free = np.zeros(columns), np.zeros(columns, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(matrix.T @ target).max()))
    for _ in range(10 * columns):
        gradient = matrix.T @ (target - matrix @ x)
        if free.all() or gradient[~free].max() <= tolerance:
            break
        free[np.argmax(np.where(free, -np.inf, gradient))] = True
        while True:
            wanted = np.zeros(columns)
            wanted[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            below = free & (wanted <= 0)
            if not below.any():
                break
            # Goes towards the unconstrained solution until the first variable is 0, and holds that one there.
            shares = x[below] / (x[below] - wanted[below])
            x = x + shares.min() * (wanted - x)
            free &= x > 1e-12
            x[~free] = 0.0
        x = wanted
    return x


def _scaled(constants: Constants, name: str, factor: float) -> float:
    """Returns a constant under which its parts take `factor` times as long."""
    value = getattr(constants, name)
    if name.endswith("_gb_s"):
        return value / factor
    return value * factor if name.endswith("_s") else min(value / factor, 1.0)


def read_constants(path: Path | None, default: Constants | None = None) -> Constants:
    """Returns the constants of a file that `write_constants` wrote; `default`, or the usual ones, without one.

    Raises:
        PlanError: there is no such file, or it holds anything else than known constants above 0.
    """
    if path is None:
        return default or Constants()
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PlanError(f"constants `{path}` cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(values, Mapping):
        raise PlanError(f"`{path}` holds no constants", hint="`roll devices explain RUN --calibrate FILE` writes some")
    for name, value in values.items():
        if name not in NAMES:
            meant = did_you_mean(str(name), NAMES)
            raise PlanError(f"`{path}`: unknown constant `{name}`" + (f" (did you mean `{meant}`?)" if meant else ""))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise PlanError(f"`{path}`: `{name}` must be a number above 0, is `{value}`")
    return Constants(**values)


def write_constants(path: Path, constants: Constants) -> None:
    """Writes constants as YAML.

    Raises:
        PlanError: the file cannot be written.
    """
    try:
        path.write_text(yaml.safe_dump(vars(constants).copy(), sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"`{path}` cannot be written: {error.strerror}", hint="name another place") from error
