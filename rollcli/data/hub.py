"""The hub, and what to do where it cannot be reached."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from urllib.parse import urlparse

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


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


def fetch_config(name: str, revision: str | None = None) -> Path | None:
    """Returns the `config.json` of a hub id, downloaded into the hub's cache; None where the hub cannot be reached or
    does not give it out."""
    if not _HUB_ID.fullmatch(name) or settle_offline():
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except (HfHubHTTPError, HFValidationError, OSError):
        return None
