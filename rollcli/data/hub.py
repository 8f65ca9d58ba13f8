"""The hub, and what to do where it cannot be reached."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlparse


def settle_offline() -> bool:
    """Goes offline, for this process and those it starts, where the hub's name does not resolve.

    The hub's own clients would try again and again, with a message each time, for half a minute. Returns whether this
    process is offline.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        try:
            socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
        except OSError:
            os.environ["HF_HUB_OFFLINE"] = "1"
            constants.HF_HUB_OFFLINE = True
    return constants.HF_HUB_OFFLINE
