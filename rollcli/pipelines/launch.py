"""Starts a run and brings it to an end: records, Ray, workers, signals, and what to say when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcli.checkpoints import store
from rollcli.cluster.session import ray_session
from rollcli.config.dump import to_values, to_yaml
from rollcli.config.load import LoadedRecipe, read_values
from rollcli.config.schema import Recipe, RlRecipe
from rollcli.errors import Interrupted, RollError, WorkerDied
from rollcli.pipelines import preflight
from rollcli.pipelines.base import Pipeline
from rollcli.pipelines.recorder import Recorder
from rollcli.pipelines.rl import RlPipeline
from rollcli.pipelines.roles import Roles
from rollcli.pipelines.sft import SftPipeline
from rollcli.runs import manifest
from rollcli.runs.directory import RunDirectory, step_name, unwritable
from rollcli.runs.locations import pinned
from rollcli.runs.resume import UNRECORDED, check_unchanged, cut_after
from rollcli.runs.status import StatusFile, write_json
from rollcli.trackers.base import Mirror

TRAINERS = ("policy", "reference", "critic")
"""Roles whose workers cannot be replaced one by one."""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
"""What the system says when records cannot be written."""


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        state: `finished`, `stopped` or `failed`.
        step: steps done in all.
        checkpoint: the newest whole checkpoint.
        start_accuracy: held-out accuracy before the first update.
        end_accuracy: the newest held-out accuracy.
        exit_code: 0, 1, 130 (Ctrl-C) or 143 (SIGTERM).
        reason: why, in words.
        hint: what to do next.
    """

    state: str
    step: int
    checkpoint: Path | None
    start_accuracy: float | None
    end_accuracy: float | None
    exit_code: int
    reason: str = ""
    hint: str | None = None


def launch(
    loaded: LoadedRecipe, directory: RunDirectory, *, resume_step: int | None = None, resume: bool = False,
    allow_change: tuple[str, ...] = (), address: str | None = None, grace_s: float = 120.0,
) -> Outcome:  # fmt: skip
    """Runs a recipe in `directory` until it is finished or told to stop.

    Args:
        loaded: the checked recipe.
        directory: a new run's directory, or with `resume` that of an earlier attempt.
        resume_step: checkpoint to go on from; None is the newest whole one.
        resume: go on instead of starting.
        allow_change: keys in which the recipe may differ from the run's.
        address: an existing Ray cluster.
        grace_s: seconds that SIGTERM leaves for a checkpoint.

    Raises:
        RollError: the run failed; status and events say so already.
    """
    try:
        first = _Launch(loaded, directory, address, grace_s, go_on=True)
        afresh = loaded.recipe.algorithm.state()
        try:
            return first.run(resume, resume_step, allow_change)
        except WorkerDied as error:
            if not first.goes_on(error):
                raise
            because = f"{error}; the run goes on from its last checkpoint"
        # Once: what ends a trainer twice will end it again. Without a checkpoint it starts where the first did.
        loaded.recipe.algorithm.restore(afresh)
        return _Launch(loaded, directory, address, grace_s, because=because).run(True, None, allow_change)
    except OSError as error:
        if isinstance(error, RollError) or error.errno not in UNWRITABLE:
            raise
        raise unwritable(directory.path, error) from error


class _Launch:
    """One attempt of a run."""

    def __init__(
        self, loaded: LoadedRecipe, directory: RunDirectory, address: str | None, grace_s: float, *,
        go_on: bool = False, because: str | None = None,
    ) -> None:  # fmt: skip
        self.go_on = go_on
        self.because = because
        self.loaded = loaded
        self.recipe = loaded.recipe
        self.directory = directory
        self.address = address
        self.grace_s = grace_s
        # A run that serves as the starting point may go on; a resume must find the weights this one began with.
        self.recipe.model.path = pinned(self.recipe.model.path)
        self.values = to_values(self.recipe, loaded.folder)
        self.signal: int | None = None
        self.pipeline: Pipeline | None = None

    def run(self, resume: bool, resume_step: int | None, allow_change: tuple[str, ...]) -> Outcome:
        """Sets the records up, runs, and writes down how it ended, whatever happened."""
        start = self._go_back(resume_step, allow_change) if resume else None
        self.attempt = self.directory.new_attempt()
        if resume:
            cut_after(self.directory, UNRECORDED if start is None else start[0], self.attempt)
        self._write_records()
        status = StatusFile(self.directory.status, recipe=self.loaded.name, steps=self.recipe.steps)
        if start is not None:
            status.update(checkpoint=start[0], step=start[0])
        mirror = Mirror(self.recipe.trackers, lambda message: self.recorder.warning(message), self.loaded.folder)
        self.recorder = Recorder(self.directory, status, mirror)
        if self.because is not None:
            self.recorder.warning(self.because)
        for message in preflight.warnings(self.recipe):
            self.recorder.warning(message)
        if resume and start is None:
            self.recorder.warning("there is no whole checkpoint: the run starts again at step 0")
        try:
            mirror.start(
                self.directory.id, self.values, self.directory.path, self.directory.attempts(), start and start[0]
            )
            outcome = asyncio.run(self._main(start))
        except Interrupted as stop:
            outcome = self._outcome("stopped", stop.exit_code, stop.message, stop.hint)
        except asyncio.CancelledError:
            outcome = self._outcome("stopped", 128 + (self.signal or signal.SIGINT), self._killed(), self._resume())
        # The border of the run: whatever ends it must be written down before it is told.
        except BaseException as error:
            # On a full disk the records fail as well; what ended the run must be told all the same.
            with contextlib.suppress(OSError):
                with (self.attempt / "driver.log").open("a") as log:
                    log.write(traceback.format_exc())
                if self.goes_on(error):
                    # The next attempt says so: what this one records now is cut, being after the checkpoint.
                    self.recorder.close()
                else:
                    self._end(self._outcome("failed", 1, _reason(error), getattr(error, "hint", None)))
            raise
        self._end(outcome)
        return outcome

    def goes_on(self, error: BaseException) -> bool:
        """Whether the caller makes another attempt: a trainer's process ended, whose state a checkpoint has."""
        died = isinstance(error, WorkerDied) and error.worker.rpartition("-")[0] in TRAINERS
        return died and self.go_on and self.signal is None

    def _go_back(self, step: int | None, allow_change: tuple[str, ...]) -> tuple[int, Path, list[str]] | None:
        """Returns the checkpoint to go on from, or None when the run never wrote one."""
        check_unchanged(read_values(self.directory.config), self.values, allow_change)
        return store.newest_whole(self.directory.checkpoints, step)

    def _write_records(self) -> None:
        self.directory.config.write_text(to_yaml(self.values), encoding="utf-8")
        if not self.directory.manifest.exists():
            facts = manifest.build_manifest(
                self.values, self.loaded.path, self.loaded.overrides, _estimate(self.recipe)
            )
            write_json(self.directory.manifest, facts)
        manifest.add_attempt(self.directory.manifest, overrides=self.loaded.overrides, pid=os.getpid())

    async def _main(self, start: tuple[int, Path, list[str]] | None) -> Outcome:
        self._listen()
        # Workers of an attempt that was killed may still be ending on a cluster that stays up.
        namespace = f"{self.directory.id}-{self.attempt.name}"
        with ray_session(self.address, namespace), contextlib.ExitStack() as stack:
            # Ray puts handlers of its own in place when it starts.
            self._listen()
            folder = str(self.loaded.folder.resolve()) if self.loaded.folder else None
            assignment = _assignment(self.recipe)
            roles = Roles(self.recipe, self.values, folder, str(self.attempt.resolve()), assignment)
            stack.callback(roles.release)
            self._announce(roles)
            self.pipeline = (RlPipeline if isinstance(self.recipe, RlRecipe) else SftPipeline)(
                self.recipe, roles, self.recorder
            )
            await self._or_stopped(roles.ready())
            if start is not None:
                for message in start[2]:
                    self.recorder.warning(message)
                await self.pipeline.restore(start[1])
            if self.signal is None:
                self.recorder.status.update(state="running")
                try:
                    await self.pipeline.run()
                finally:
                    await self.pipeline.close()
        if self.signal is not None and not self.pipeline.finished:
            name = signal.Signals(self.signal).name
            return self._outcome("stopped", 128 + self.signal, f"stopped by {name}", self._resume())
        supervised = not isinstance(self.recipe, RlRecipe)
        hint = f"train it further with `roll train RECIPE model.path={self.directory.id}`" if supervised else None
        return self._outcome("finished", 0, "all steps done", hint)

    def _announce(self, roles: Roles) -> None:
        self.recorder.events.emit(
            "run_started",
            run=self.directory.id,
            recipe=self.loaded.name,
            pipeline=self.recipe.pipeline,
            algorithm=self.recipe.algorithm.name,
            steps=self.recipe.steps,
            attempt=self.directory.attempts(),
            overrides=self.loaded.overrides,
            devices=", ".join(f"{len(cluster)} {cluster.role}" for cluster in roles.all),
            logs=str(self.attempt),
        )

    def _listen(self) -> None:
        """Makes this process the only one that handles signals: the first asks, the second ends."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number, asyncio.current_task())

    def _on_signal(self, number: int, main: asyncio.Task) -> None:
        if self.signal is not None:
            self._kill(main)
            return
        self.signal = number
        step = self.pipeline.stop() if self.pipeline else 0
        self.recorder.events.emit("stopping", signal=signal.Signals(number).name, step=step)
        self.recorder.status.update(state="stopping")
        if number == signal.SIGTERM:
            # The machine goes away; a checkpoint that does not make it in time is better not begun than torn.
            asyncio.get_running_loop().call_later(self.grace_s, self._kill, main)

    def _kill(self, main: asyncio.Task) -> None:
        """Ends at once: the newest whole checkpoint stands, nothing new is written."""
        if self.pipeline is not None:
            self.pipeline.killed = True
        main.cancel()

    def _killed(self) -> str:
        steps = store.list_checkpoints(self.directory.checkpoints)
        return "killed; " + (f"the newest checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint")

    def _resume(self) -> str:
        return f"go on with `roll resume {self.directory.id}`"

    async def _or_stopped(self, work: Any) -> None:
        """Waits for `work`, or for a signal: nothing is lost by leaving while the workers start."""
        task = asyncio.ensure_future(work)
        while not task.done() and self.signal is None:
            await asyncio.wait([task], timeout=0.2)
        if task.done():
            return task.result()
        task.cancel()
        raise Interrupted(
            "stopped before training began; there is nothing to save",
            hint=self._resume(),
            exit_code=128 + self.signal,
        )

    def _outcome(self, state: str, exit_code: int, reason: str, hint: str | None = None) -> Outcome:
        steps = store.list_checkpoints(self.directory.checkpoints)
        accuracies = self.pipeline.accuracies if self.pipeline else {}
        return Outcome(
            state=state,
            step=self.pipeline.steps_done if self.pipeline else 0,
            checkpoint=self.directory.checkpoints / step_name(steps[-1]) if steps else None,
            start_accuracy=accuracies.get("start"),
            end_accuracy=accuracies.get("end"),
            exit_code=exit_code,
            reason=reason,
            hint=hint,
        )

    def _end(self, outcome: Outcome) -> None:
        self.recorder.events.emit(
            "run_finished", status=outcome.state, reason=outcome.reason, exit_code=outcome.exit_code,
            steps=outcome.step, hint=outcome.hint,
        )  # fmt: skip
        self.recorder.status.update(state=outcome.state, reason=outcome.reason, accuracy=outcome.end_accuracy)
        manifest.end_attempt(self.directory.manifest, status=outcome.state, reason=outcome.reason, step=outcome.step)
        self.recorder.close()


def _assignment(recipe: Any) -> dict[str, list[int]]:
    """Returns the devices of each role; none on a cluster without GPUs."""
    import ray

    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus:
        return {}
    from rollcli.devices.plan import assign

    return assign(recipe, gpus)


def _estimate(recipe: Recipe) -> dict[str, float]:
    """Returns what the plan predicts for this machine; nothing for a model whose shapes it does not know."""
    from rollcli.devices.explain import estimate
    from rollcli.devices.facts import model_facts
    from rollcli.devices.hardware import this_machine
    from rollcli.devices.plan import plan

    try:
        return estimate(plan(recipe, this_machine(), model_facts(recipe.model)))
    except RollError:
        # It is for the record alone: what can be run need not be planned.
        return {}


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, RollError) else f"{type(error).__name__}: {error}"
