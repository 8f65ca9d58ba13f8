"""Replay: trains on rollouts that a run recorded, under other settings if so wished, and samples nothing.

    checkpoint → (recorded groups → forward passes → advantages → update) for each step → recorded beside replayed

The step is `RlPipeline.step` itself; only where groups come from and where numbers go is another. So with the run's own
settings every number comes out as it was recorded, and what differs is due to what was changed, on equal data.
Nothing is written into the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollcli.checkpoints import store
from rollcli.cluster.session import ray_session
from rollcli.config.build import in_order
from rollcli.config.dump import to_values
from rollcli.config.load import LoadedRecipe, load_recipe
from rollcli.config.locate import Place
from rollcli.config.schema import ModelConfig, RlRecipe
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group
from rollcli.data.images import images_of
from rollcli.devices.assignment import ranges
from rollcli.errors import ConfigError, NotFound, ReplayError
from rollcli.pipelines import preflight
from rollcli.pipelines.origin import origin_of
from rollcli.pipelines.recorder import Recorder
from rollcli.pipelines.rl import RlPipeline, staged
from rollcli.pipelines.roles import Roles
from rollcli.pipelines.samples import read_origin, read_rollouts
from rollcli.runs.directory import RunDirectory, list_checkpoints, step_name
from rollcli.runs.events import finite, read_lines
from rollcli.runs.listing import find_run
from rollcli.runs.resume import flat_differences
from rollcli.runs.status import StatusFile
from rollcli.trackers.base import Mirror

FREE = ("algorithm", "minibatches", "epochs", "policy", "critic", "model.dtype", "model.attention")
"""Keys that decide what is made of rollouts; all others decide which rollouts there are, or nothing here."""


@dataclass
class ReplayedStep:
    """One step's training metrics, as the run recorded them and as they came out now; None for what is not finite.

    `recorded` has those of `replayed` that the run measured too.
    """

    step: int
    recorded: dict[str, float | None]
    replayed: dict[str, float | None]

    @property
    def differing(self) -> list[str]:
        """Metrics that did not come out as recorded; one that was not recorded is none of them."""
        return [name for name, value in self.recorded.items() if self.replayed[name] != value]


@dataclass
class Replay:
    """What a replay found.

    Attributes:
        run: the run's id.
        start: step of the checkpoint it went on from, 0 for the starting model.
        steps: the steps that were asked for.
    """

    run: str
    start: int
    steps: list[ReplayedStep]

    @property
    def equal(self) -> bool:
        """Whether every number came out as recorded."""
        return not any(step.differing for step in self.steps)


class ReplayPipeline(RlPipeline):
    """A pipeline whose groups come from files. `changed` holds the keys that differ from the run's recipe."""

    def __init__(
        self, recipe: RlRecipe, roles: Roles, recorder: Recorder, run: RunDirectory, changed: Sequence[str] = (),
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        super().__init__(recipe, roles, recorder)
        self.run_directory = run
        self.changed = changed
        self.tell = tell
        self.measured: dict[int, dict[str, float]] = {}

    def connect_rollout(self) -> None:
        """Nothing samples."""

    async def replay(self, last: int) -> None:
        """Replays every step up to `last`; `measured` then holds the metrics of each."""
        while self.steps_done < last:
            self.recorder.begin_step(self.steps_done + 1)
            await self.step()
            self.steps_done += 1

    async def sync_weights(self) -> None:
        """Nothing samples, so nobody waits for weights."""

    async def take_devices(self) -> None:
        """Nothing samples, so nobody else has them."""

    @staged("rollout")
    async def roll_out(self) -> list[Group]:
        """Returns the step's groups as they were recorded.

        Raises:
            ReplayError: they lack what the algorithm needs.
        """
        step = self.steps_done + 1
        groups = await asyncio.to_thread(read_rollouts, rollouts_of(self.run_directory, step))
        for group in groups:
            self._check_group(step, group)
        return groups

    def _check_group(self, step: int, group: Group) -> None:
        if images_of(group.task.messages):
            raise ReplayError(
                f"`{group.id}` of step {step} has images, and rollouts keep where an image came from, not its pixels",
                hint="train the step again",
            )
        if self.algorithm.greedy_baseline and not group.greedy:
            raise ReplayError(
                f"`{self.algorithm.name}` compares with a greedy answer, and step {step} recorded none",
                hint="replay a run of an algorithm that samples one, or choose another algorithm",
            )
        if self.algorithm.compares_group() and len(group.usable) < 2:
            raise ReplayError(
                f"`{self.algorithm.name}` compares the answers of a group, and `{group.id}` of step {step} has "
                f"{len(group.usable)}",
                hint="choose an algorithm that does not, such as `algorithm=reinforce_pp`",
            )

    async def record(self, groups: list[Group], batch: Batch, updates: dict[str, float]) -> None:
        """Keeps the step's training metrics."""
        self.measured[self.steps_done + 1] = updates

    async def restore(self, path: Path) -> None:
        """Goes on from a checkpoint, as far as it fits what was changed."""
        state = store.read_state(path)
        self.steps_done = state["step"]
        self.algorithm.restore(self._fitting(state["algorithm"]))
        await self.roles.policy.all("load", str(path.resolve()))
        if self.roles.critic is None:
            return
        if (path / "critic").is_dir() and "critic.path" not in self.changed:
            await self.roles.critic.all("load", str((path / "critic").resolve()))
        else:
            self.tell("the critic starts untrained: the checkpoint has none for this replay")

    def _fitting(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the algorithm's state: the checkpoint's, except of blocks whose settings were changed."""
        state = self.algorithm.state()
        afresh = []
        for block, value in recorded.items():
            if "algorithm.name" in self.changed or _touches(self.changed, f"algorithm.{block}"):
                afresh += [block] if value != state.get(block) else []
            else:
                state[block] = value
        if afresh:
            self.tell(f"what the algorithm had learned starts afresh: {', '.join(afresh)}")
        return state


def replay(
    run: str, steps: tuple[int, int], overrides: Sequence[str] = (), *, address: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Replay:  # fmt: skip
    """Replays the steps `steps[0]` to `steps[1]` of a run.

    Args:
        run: its id, or its directory.
        steps: first and last step.
        overrides: `key=value` laid over the run's recipe.
        address: an existing Ray cluster.
        tell: told in words what is about to happen.

    Raises:
        RollError: the run or the steps are not there, the rollouts are not this model's, or a change is of no use here.
    """
    directory = find_run(run)
    loaded = load_recipe(str(directory.config), overrides)
    if not isinstance(loaded.recipe, RlRecipe):
        raise ConfigError(f"run `{directory.id}` has no rollouts: it learned from demonstrations")
    changed = check_changes(load_recipe(str(directory.config)), loaded)
    first, last = steps
    start, checkpoint, skipped = starting_point(directory, first)
    check_recorded(directory, range(start + 1, last + 1), range(first, last + 1))
    preflight.check_models(loaded.recipe)
    for step in range(start + 1, last + 1):
        check_origin(rollouts_of(directory, step), loaded.recipe.model, step - 1)
    for message in skipped:
        tell(message)
    origin = f"the checkpoint of step {start}" if checkpoint else "the starting model"
    earlier = f", which takes {_steps(start + 1, first - 1)} as well" if start + 1 < first else ""
    tell(f"replaying {_steps(first, last)} of `{directory.id}` from {origin}{earlier}")
    measured = asyncio.run(_train(loaded, directory, checkpoint, last, changed, address, tell))
    recorded = {record.get("step"): record for record in read_lines(directory.metrics)}
    found = []
    for step in range(first, last + 1):
        values = finite(measured[step])
        before = recorded.get(step, {})
        found.append(ReplayedStep(step, {name: before[name] for name in values if name in before}, values))
    return Replay(directory.id, start, found)


def check_changes(before: LoadedRecipe, after: LoadedRecipe) -> list[str]:
    """Returns the keys that were changed.

    Raises:
        ConfigError: with each change that a replay cannot make, at its place, and why.
    """
    old, new = (to_values(each.recipe, each.folder) for each in (before, after))
    changes = flat_differences(old, new)
    problems = [
        _place(after, key).problem(f"`{key}`: {_why_not(key, was, now, before.recipe)}")
        for key, was, now in changes
        if not any(_is_below(key, free) for free in FREE)
    ]
    if problems:
        free = ", ".join(f"`{key}`" for key in FREE)
        raise ConfigError(in_order(list(dict.fromkeys(problems))), hint=f"a replay may change {free}")
    return [key for key, _, _ in changes]


def _why_not(key: str, was: Any, now: Any, recipe: RlRecipe) -> str:
    if _is_below(key, "model"):
        return f"the rollouts are tokens of `{recipe.model.path}`, and mean nothing to another model or tokenizer"
    if _is_below(key, "rollout.sampling.temperature"):
        return f"the rollouts were sampled at {was}, and their log-probabilities depend on it, so it cannot be {now}"
    return "the rollouts are recorded, and this would change nothing about them"


def _place(loaded: LoadedRecipe, key: str) -> Place:
    """Returns where the user wrote a key, or the block around it."""
    path: tuple[str | int, ...] = ()
    for part in key.replace("[", ".[").split("."):
        path += (int(part[1:-1]),) if part.startswith("[") else (part,)
    while path and path not in loaded.places:
        path = path[:-1]
    return loaded.places[path]


def _is_below(key: str, block: str) -> bool:
    return key == block or key.startswith((f"{block}.", f"{block}["))


def _touches(changed: Sequence[str], block: str) -> bool:
    return any(_is_below(key, block) for key in changed)


def starting_point(directory: RunDirectory, first: int) -> tuple[int, Path | None, list[str]]:
    """Returns the newest whole checkpoint before step `first`, and a message for each that is not whole.

    Only looks: the run may be going on.
    """
    skipped = []
    for step in sorted(list_checkpoints(directory.checkpoints), reverse=True):
        path = directory.checkpoints / step_name(step)
        if step >= first:
            continue
        fault = store.fault_of(path)
        if fault is None:
            return step, path, skipped
        skipped.append(f"checkpoint of step {step} is {fault}; passed over")
    return 0, None, skipped


def rollouts_of(directory: RunDirectory, step: int) -> Path:
    """Returns the file of a step's rollouts."""
    return directory.rollouts / f"{step_name(step)}.parquet"


def check_recorded(directory: RunDirectory, steps: Sequence[int], asked: Sequence[int]) -> None:
    """Checks that the rollouts of `asked` and of all `steps` that lead there were recorded.

    Raises:
        NotFound: a step was not; the hint says which were.
    """
    for step in [*asked, *steps]:
        if rollouts_of(directory, step).is_file():
            continue
        names = [path.stem.removeprefix("step_") for path in directory.rollouts.glob("step_*.parquet")]
        there = ranges([int(name) for name in names if name.isdigit()])
        needed = "" if step in asked else f", which step {asked[0]} follows after its checkpoint"
        raise NotFound(
            f"run `{directory.id}` has no recorded rollouts of step {step}{needed}",
            hint=f"it has those of steps {there}" if there else "it has none yet",
        )


def check_origin(path: Path, model: ModelConfig, version: int) -> None:
    """Checks that a file holds rollouts for version `version` of a policy that began as `model`.

    Raises:
        ReplayError: they are of another model, tokenizer or version, and which.
    """
    origin = read_origin(path)
    if origin is None:
        raise ReplayError(
            f"`{path}` does not say which model and version its rollouts are of",
            hint="an earlier rollcli recorded them; train the step again to replay it",
        )
    differences = list(origin.differences(origin_of(model, version)))
    if differences:
        raise ReplayError(
            f"rollouts in `{path}` cannot be replayed: {'; '.join(differences)}",
            hint="replay rollouts with what recorded them: the same model, tokenizer and rollcli",
        )


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}-{last}"


async def _train(
    loaded: LoadedRecipe, directory: RunDirectory, checkpoint: Path | None, last: int, changed: Sequence[str],
    address: str | None, tell: Callable[[str], None],
) -> dict[int, dict[str, float]]:  # fmt: skip
    """Starts the workers that training needs, and no others; returns each step's metrics."""
    recipe: RlRecipe = loaded.recipe
    folder = str(loaded.folder.resolve()) if loaded.folder else None
    values = to_values(recipe, loaded.folder)
    with ray_session(address, f"replay-{time.time_ns()}"), contextlib.ExitStack() as stack:
        roles = Roles(recipe, values, folder, None, _assignment(recipe), sample=False)
        stack.callback(roles.release)
        # Events go to a directory that is nobody's run.
        scratch = RunDirectory(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="roll-replay-"))))
        status = StatusFile(scratch.status, recipe="replay", steps=recipe.steps)
        recorder = Recorder(scratch, status, Mirror([], tell))
        stack.callback(recorder.close)
        pipeline = ReplayPipeline(recipe, roles, recorder, directory, changed, tell)
        await roles.ready()
        if checkpoint is not None:
            await pipeline.restore(checkpoint)
        await pipeline.replay(last)
    return pipeline.measured


def _assignment(recipe: RlRecipe) -> dict[str, list[int]]:
    """Returns the devices of the trained roles: the replicas need none, wherever the recipe puts them."""
    import ray

    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus:
        return {}
    from rollcli.devices.plan import assign

    alone = replace(recipe, placement="auto", rollout=replace(recipe.rollout, replicas=1))
    return {role: devices for role, devices in assign(alone, gpus).items() if role != "rollout"}
