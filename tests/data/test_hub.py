import os
import socket
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from rollcli.data.hub import fetch_config, settle_offline


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


def test_a_hub_that_does_not_resolve_is_offline_for_children_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    assert settle_offline()
    assert constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_hub_that_resolves_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    assert not settle_offline()
    assert os.environ["HF_HUB_OFFLINE"] == "0"


def test_a_configuration_is_fetched_where_the_hub_resolves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def download(name: str, file: str, revision: str | None) -> str:
        asked.append((name, file, revision))
        if name == "no/one":
            raise OSError("not there")
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    assert fetch_config("some/model", "v1") == tmp_path / "config.json"
    assert fetch_config("no/one") is None
    assert fetch_config("/not/an/id") is None and fetch_config("plain") is None
    assert asked == [("some/model", "config.json", "v1"), ("no/one", "config.json", None)]


def test_nothing_is_fetched_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_config("some/model") is None
