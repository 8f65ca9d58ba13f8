"""The resource pool: reserves the run's devices in Ray and says which worker goes where.

A GPU is a bundle of a Ray placement group, so a device is reserved once however many roles share it. A worker that
spreads over several GPUs of its host, such as a replica with tensor parallelism, reserves nothing of its own: it is put
where their bundles are, and told which they are. Workers on CPU need no reservation: they are told their share of the
cores instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rollcli.errors import PlanError

RESERVE_LIMIT_S = 60.0


class ResourcePool:
    """The run's devices.

    Args:
        assignment: devices of each role, in order of rank, e.g. `{"policy": [0, 1], "rollout": [0, 1]}`; empty on CPU.
        spread: devices of one worker of a role, where they are more than one.

    Raises:
        PlanError: the cluster does not have the devices, or they do not come free in time.
    """

    def __init__(self, assignment: Mapping[str, Sequence[int]], spread: Mapping[str, int] | None = None) -> None:
        self.assignment = {role: list(devices) for role, devices in assignment.items()}
        devices = sorted({device for held in self.assignment.values() for device in held})
        self._bundle = {device: index for index, device in enumerate(devices)}
        self._spread = {role: count for role, count in (spread or {}).items() if count > 1 and devices}
        self._group: PlacementGroup | None = _reserve(len(devices)) if devices else None
        self._places: list[tuple[str, str]] = self._located() if self._spread else []

    def options(self, role: str, rank: int) -> dict[str, Any]:
        """Returns the options under which Ray starts worker `rank` of `role`."""
        held = self.assignment.get(role, [])
        if self._group is None or not held:
            return {"num_cpus": 0, "num_gpus": 0}
        if role in self._spread:
            return self._several(role, held[rank * self._spread[role] : (rank + 1) * self._spread[role]])
        device = held[rank % len(held)]
        sharing = sum(held.count(device) for held in self.assignment.values())
        return {
            "num_cpus": 0,
            "num_gpus": 1 / sharing,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundle[device]
            ),
        }

    def shares(self, role: str, others: Sequence[str]) -> bool:
        """Whether a role has a device in common with one of the others; on a CPU all have."""
        mine = set(self.assignment.get(role, ()))
        return not self._bundle or any(mine & set(self.assignment.get(other, ())) for other in others)

    def _several(self, role: str, devices: Sequence[int]) -> dict[str, Any]:
        places = [self._places[self._bundle[device]] for device in devices]
        if len({node for node, _ in places}) > 1:
            raise PlanError(
                f"the {len(devices)} GPUs of a {role} worker are on different hosts",
                hint="name devices of one host in `placement`, or use fewer with `rollout.parallel.tensor`",
            )
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(places[0][0], soft=False),
            "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ",".join(gpu for _, gpu in places)}},
        }

    def _located(self) -> list[tuple[str, str]]:
        """Returns the node and the GPU behind every bundle, which only a task inside it sees."""

        @ray.remote(num_cpus=0, num_gpus=1)
        def place() -> tuple[str, str]:
            context = ray.get_runtime_context()
            return context.get_node_id(), str(context.get_accelerator_ids()["GPU"][0])

        asked = [
            place.options(scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index)).remote()
            for index in range(len(self._bundle))
        ]
        return ray.get(asked, timeout=RESERVE_LIMIT_S)

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
