"""Weights from the policy to every rollout replica (the paper's ModelUpdateGroup).

The policy's first rank puts the whole weights into Ray's object store once; every replica of a host maps the same
memory. A failed call is made again for all, or ends the run: no replica goes on with other weights than its peers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rollcli.cluster.cluster import Cluster
from rollcli.errors import WorkerDied


async def sync_weights(policy: Cluster, rollout: Cluster, version: int) -> Any:
    """Brings every replica to the policy's weights, as `version`; returns a reference to the weights.

    Raises:
        WeightSyncError: names or shapes differ; the replica keeps its old weights.
        WorkerDied: a worker ended; it is named.
    """
    # Only the references travel through the driver. Ranks other than 0 take part in the gathering and return nothing.
    references = policy.call("weights")
    # Both at once: where rank 0 fails, its peers wait in a collective, and only its own result tells.
    try:
        await asyncio.gather(policy.gather(references[1:]), rollout.all("load_weights", references[0], version))
    except WorkerDied as error:
        if error.worker.rpartition("-")[0] not in (policy.role, rollout.role):
            # To a replica, the death of the policy's first rank is that of an actor it does not know.
            await policy.all("ready")
        raise
    return references[0]
