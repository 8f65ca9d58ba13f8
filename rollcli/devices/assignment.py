"""Which device each role's workers go to: what the recipe's `placement` says, checked, or `auto`.

One process needs one accelerator; a replica that spreads over several has as many.
Roles may share accelerators; on a CPU all share the machine and hold none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from rollcli.config.schema import PolicyConfig, Recipe, RewardModelConfig, RlRecipe, RolloutConfig
from rollcli.errors import PlanError
from rollcli.suggest import did_you_mean

PLACED = ("policy", "rollout", "reference", "critic")
REWARD_MODELS = ("judge.", "reward_model.")
"""What the roles of a recipe's `reward_models` begin with; each has devices of its own where there are enough."""
_WORKER_KEYS = {
    "policy": "policy.workers",
    "reference": "reference.workers",
    "critic": "critic.workers",
    "rollout": "rollout.replicas",
}


def role_workers(recipe: Recipe) -> dict[str, int]:
    """Returns the devices' worth of workers of every role that a recipe starts, those that need a device first.

    A training worker is as many as the processes its copy of the model is spread over, a replica as its devices.
    """
    workers = {"policy": recipe.policy.processes}
    if isinstance(recipe, RlRecipe):
        needs = recipe.algorithm.needs() if recipe.algorithm is not None else frozenset()
        if needs & {"reference", "reference_distribution"} and not recipe.is_own_reference:
            workers["reference"] = recipe.reference_workers.processes
        if "critic" in needs:
            workers["critic"] = recipe.critic.processes
        workers["rollout"] = recipe.rollout.replicas * recipe.rollout.parallel.processes
        for model in recipe.reward_models:
            workers[model.role] = model.replicas * model.parallel.processes
        workers["environment"] = recipe.rollout.environment_workers
        workers["reward"] = recipe.rollout.reward_workers
    return workers


def is_placed(role: str) -> bool:
    """Whether a role's workers hold devices."""
    return role in PLACED or role.startswith(REWARD_MODELS)


def assign(recipe: Recipe, device_count: int) -> dict[str, list[int]]:
    """Returns the devices of each role's workers, one each in order of rank; empty lists when there is no device.

    `auto` gives policy and rollout devices of their own when there are enough for both, and otherwise the same ones.
    The critic gets its own when there are enough for all three, and is otherwise placed like the policy. The reference
    shares the policy's. Reward models get what is left, one after the other, and otherwise share the first devices.
    In an explicit placement reference and critic share the policy's when they are not named and are as many.

    Raises:
        PlanError: the placement names what is not there, leaves devices unused or does not match the number of
            workers; shows the arithmetic.
    """
    workers = {role: count for role, count in role_workers(recipe).items() if is_placed(role)}
    spread, keys = _spread(recipe), _worker_keys(recipe)
    if recipe.placement == "auto":
        return _automatic(workers, spread, keys, device_count)
    if not isinstance(recipe.placement, Mapping):
        raise PlanError(
            f"`placement`: `{recipe.placement}` is neither `auto` nor devices of each role",
            hint="write `placement: {policy: 0-3, rollout: 4-7}`, or leave it out",
        )
    if device_count == 0:
        raise PlanError(
            "`placement`: it names devices, and there is no accelerator here",
            hint="override it with `placement=auto`, or plan for others with `--gpus 8xH100-80GB`",
        )
    return _explicit(recipe.placement, workers, spread, keys, device_count)


def _spread(recipe: Recipe) -> dict[str, int]:
    """Returns over how many devices each of a role's workers is spread."""
    configs: dict[str, PolicyConfig | RolloutConfig | RewardModelConfig] = {"policy": recipe.policy}
    if isinstance(recipe, RlRecipe):
        configs |= {"reference": recipe.reference_workers, "critic": recipe.critic, "rollout": recipe.rollout}
        configs |= {model.role: model for model in recipe.reward_models}
    return {role: config.parallel.processes for role, config in configs.items()}


def _worker_keys(recipe: Recipe) -> dict[str, str]:
    """Returns the key of the recipe that says how many workers each role has."""
    models = recipe.reward_models if isinstance(recipe, RlRecipe) else []
    return _WORKER_KEYS | {model.role: f"reward_models[{at}].replicas" for at, model in enumerate(models)}


def parse_devices(text: str) -> list[int]:
    """Returns the devices that `0-3`, `5` or `0,2,4-5` stand for, in that order.

    Raises:
        ValueError: it is none of these.
    """
    devices: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", piece)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(text)
        devices += range(int(match[1]), int(match[2] or match[1]) + 1)
    return devices


def ranges(devices: list[int] | tuple[int, ...]) -> str:
    """Returns devices as they are written in a recipe, runs of numbers as ranges."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _automatic(
    workers: Mapping[str, int], spread: Mapping[str, int], keys: Mapping[str, str], device_count: int
) -> dict[str, list[int]]:
    if device_count == 0:
        return {role: [] for role in workers}
    for role, count in workers.items():
        if count > device_count:
            key, each = keys[role], spread[role]
            sizes = f" of {each} processes" if each > 1 else ""
            fewer = (
                f"set `{key}={device_count // each}`"
                if device_count >= each
                else f"lower `{key.rpartition('.')[0]}.parallel`"
            )
            raise PlanError(
                f"`{key}`: {count // each} {role} workers{sizes} need {count} devices, there are {device_count}",
                hint=f"{fewer}, or plan for more devices",
            )
    policy, reference, rollout, critic = (workers.get(role, 0) for role in ("policy", "reference", "rollout", "critic"))
    first = policy if policy + rollout <= device_count else 0
    apart = policy + rollout if policy + rollout + critic <= device_count else 0
    found = {
        "policy": range(policy),
        "reference": range(reference),
        "critic": range(apart, apart + critic),
        "rollout": range(first, first + rollout),
    }
    for role in (role for role in workers if role.startswith(REWARD_MODELS)):
        count, used = workers[role], max((devices.stop for devices in found.values()), default=0)
        begin = used if used + count <= device_count else 0
        found[role] = range(begin, begin + count)
    return {role: list(found[role]) for role in workers}


def _explicit(
    placement: Mapping[str, str | int], workers: Mapping[str, int], spread: Mapping[str, int],
    keys: Mapping[str, str], device_count: int,
) -> dict[str, list[int]]:  # fmt: skip
    found: dict[str, list[int]] = {}
    for role, text in ((role, str(devices)) for role, devices in placement.items()):
        _check_role(role, workers)
        found[role] = _role_devices(role, str(text), workers[role], spread[role], keys[role], device_count)
    for role in ("reference", "critic"):
        if "policy" in found and workers.get(role) == workers["policy"]:
            found.setdefault(role, list(found["policy"]))
    for role in workers:
        if role not in found:
            raise PlanError(
                f"`placement`: role `{role}` has no devices", hint=f"add `{role}:`, or write `placement: auto`"
            )
    used = {device for devices in found.values() for device in devices}
    unused = sorted(set(range(device_count)) - used)
    if unused:
        held = " + ".join(f"{role} {ranges(devices)}" for role, devices in found.items())
        raise PlanError(
            f"`placement`: {_devices(unused)} unused: {held} = {len(used)} of {device_count} devices",
            hint=f"name more devices and set the number of workers to match, or plan for {len(used)} devices",
        )
    return {role: found[role] for role in workers}


def _check_role(role: str, workers: Mapping[str, int]) -> None:
    if role in workers:
        return
    if role in PLACED:
        raise PlanError(
            f"`placement.{role}`: this recipe starts no {role} worker", hint=f"take it out; roles: {', '.join(workers)}"
        )
    meant = did_you_mean(role, workers)
    raise PlanError(
        f"`placement.{role}`: unknown role" + (f" (did you mean `{meant}`?)" if meant else ""),
        hint=f"roles that have devices: {', '.join(workers)}",
    )


def _role_devices(role: str, text: str, workers: int, each: int, key: str, device_count: int) -> list[int]:
    try:
        devices = parse_devices(text)
    except ValueError:
        raise PlanError(
            f"`placement.{role}`: `{text}` is not a list of devices", hint="write `0-3`, `5`, or `0,2,4-5`"
        ) from None
    beyond = [device for device in devices if device >= device_count]
    if beyond:
        there = f"devices 0-{device_count - 1}" if device_count > 1 else "device 0 only"
        raise PlanError(
            f"`placement.{role}`: {_devices(beyond)} not there; there are {there}", hint="plan for more devices"
        )
    twice = sorted(device for device, times in Counter(devices).items() if times > 1)
    if twice:
        raise PlanError(
            f"`placement.{role}`: `{text}` names device {ranges(twice)} twice", hint="one worker, one device"
        )
    if len(devices) != workers:
        fitting = f"set `{key}={len(devices) // each}`, or " if len(devices) % each == 0 else ""
        raise PlanError(
            f"`placement.{role}`: `{text}` is {len(devices)} devices for {key} = {workers // each}, "
            + ("one each" if each == 1 else f"{each} each"),
            hint=f"{fitting}name {workers} devices",
        )
    return devices


def _devices(devices: list[int]) -> str:
    return f"device {ranges(devices)} is" if len(devices) == 1 else f"devices {ranges(devices)} are"
