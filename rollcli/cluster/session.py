"""One Ray per run: started for it and stopped with it, or an existing cluster that is used and left up."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollcli.errors import EngineError

CONNECT_LIMIT_S = 10.0


@contextmanager
def ray_session(address: str | None, namespace: str) -> Iterator[None]:
    """Connects to Ray for as long as the block runs.

    Args:
        address: an existing cluster; None uses `$RAY_ADDRESS`, and without it starts a Ray of the run's own, on free
            ports, that no other run sees.
        namespace: keeps the run's actors apart from others' on a shared cluster.

    Raises:
        EngineError: no cluster at that address.
    """
    # Usage reports leave the machine; a run says nothing to anybody unless it is told to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's children inherit this; workers set their own number before torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ray otherwise empties CUDA_VISIBLE_DEVICES of actors that reserve no GPU, with a warning on every start.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    wanted = address or os.environ.get("RAY_ADDRESS") or "local"
    options = {} if wanted != "local" else {"include_dashboard": False}
    # Ray prints a paragraph on stdout for every worker that dies; who replaces it says so in a line of its own.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    try:
        _knock(wanted)
        ray.init(wanted, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise EngineError(
            f"cannot use Ray at `{wanted}`: {(str(error) or type(error).__name__).splitlines()[0]}",
            hint="check `--address` and `$RAY_ADDRESS`; without both, the run starts a Ray of its own",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def cluster_nodes(address: str) -> list[dict[str, Any]]:
    """Returns the nodes of a Ray cluster that is up, as `ray.nodes()` lists them; starts nothing on it.

    Raises:
        EngineError: no cluster at that address.
    """
    with ray_session(address, "plan"):
        import ray

        return ray.nodes()


def _knock(address: str) -> None:
    """Sees whether anybody listens there; Ray itself would try for several minutes.

    Raises:
        OSError: nobody does.
        ValueError: it is no address.
    """
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdigit() and int(port) < 2**16):
        raise ValueError("expected `HOST:PORT`")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_LIMIT_S).close()
