"""Weights from the policy to every rollout replica (the paper's ModelUpdateGroup).

The policy's first rank puts the whole weights into Ray's object store once; every replica of a host maps the same
memory. All replicas take a version or the call fails.
"""

from __future__ import annotations

from rollcli.cluster.cluster import Cluster


async def sync_weights(policy: Cluster, rollout: Cluster, version: int) -> None:
    """Brings every replica to the policy's weights, as `version`.

    Raises:
        WeightSyncError: names or shapes differ; the replica keeps its old weights.
    """
    # Only the references travel through the driver. Ranks other than 0 take part in the gathering and return nothing.
    references = policy.call("weights")
    await policy.gather(references[1:])
    await rollout.all("load_weights", references[0], version)
