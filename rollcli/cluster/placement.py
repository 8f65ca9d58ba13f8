"""The resource pool: reserves the run's devices in Ray and says which worker goes where.

A GPU is a bundle of a Ray placement group, so a device is reserved once however many roles share it. Workers on CPU
need no reservation: they are told their share of the cores instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollcli.errors import PlanError

RESERVE_LIMIT_S = 60.0


class ResourcePool:
    """The run's devices.

    Args:
        assignment: devices of each role, one worker each, e.g. `{"policy": [0, 1], "rollout": [0, 1]}`; empty on CPU.

    Raises:
        PlanError: the cluster does not have the devices, or they do not come free in time.
    """

    def __init__(self, assignment: Mapping[str, Sequence[int]]) -> None:
        self.assignment = {role: list(devices) for role, devices in assignment.items()}
        devices = sorted({device for held in self.assignment.values() for device in held})
        self._bundle = {device: index for index, device in enumerate(devices)}
        self._group: PlacementGroup | None = _reserve(len(devices)) if devices else None

    def options(self, role: str, rank: int) -> dict[str, Any]:
        """Returns the options under which Ray starts worker `rank` of `role`."""
        held = self.assignment.get(role, [])
        if self._group is None or not held:
            return {"num_cpus": 0, "num_gpus": 0}
        device = held[rank % len(held)]
        sharing = sum(held.count(device) for held in self.assignment.values())
        return {
            "num_cpus": 0,
            "num_gpus": 1 / sharing,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundle[device]
            ),
        }

    def release(self) -> None:
        """Gives the devices back; on a cluster that stays up they would otherwise stay reserved."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _reserve(count: int) -> PlacementGroup:
    there = int(ray.cluster_resources().get("GPU", 0))
    if there < count:
        raise PlanError(
            f"the recipe asks for {count} GPUs, the cluster has {there}",
            hint="use fewer workers, or see what would fit with `roll devices plan RECIPE --gpus N`",
        )
    group = placement_group([{"GPU": 1}] * count, strategy="PACK")
    if not group.wait(RESERVE_LIMIT_S):
        remove_placement_group(group)
        free = int(ray.available_resources().get("GPU", 0))
        raise PlanError(
            f"{count} GPUs did not come free in {RESERVE_LIMIT_S:.0f} s: {there} in the cluster, {free} free now",
            hint="wait for other jobs to end, or use fewer workers",
        )
    return group
