"""Messages between caller and worker arrive whole, in time, or not at all."""

import os
import socket
import threading
import time

import pytest

from rollcli.rewards.launcher import preload, receive_frame, send_frame


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("payload", [b"", b"x", os.urandom(3_000_000)])
def test_frames_arrive_whole_and_in_order(pair, payload):
    sender = threading.Thread(target=lambda: [send_frame(pair[0], part) for part in (payload, b"next")])
    sender.start()
    assert receive_frame(pair[1]) == payload
    assert receive_frame(pair[1]) == b"next"
    sender.join()


def test_silence_and_a_message_that_stops_halfway_run_into_the_deadline(pair):
    with pytest.raises(TimeoutError):
        receive_frame(pair[1], deadline=time.monotonic() + 0.05)
    pair[0].sendall((10).to_bytes(8, "big") + b"half")
    with pytest.raises(TimeoutError):
        receive_frame(pair[1], deadline=time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        receive_frame(pair[1], deadline=time.monotonic() - 1)


def test_nobody_reading_runs_into_the_deadline(pair):
    with pytest.raises(TimeoutError):
        send_frame(pair[0], bytes(50_000_000), deadline=time.monotonic() + 0.05)


def test_closed_peer(pair):
    pair[0].close()
    with pytest.raises(EOFError):
        receive_frame(pair[1])


def test_a_message_of_absurd_length_is_not_read(pair):
    pair[0].sendall((1 << 50).to_bytes(8, "big"))
    with pytest.raises(ValueError, match="bytes"):
        receive_frame(pair[1], max_bytes=1 << 20)


def test_preload_imports_calls_and_passes_over_what_is_not_installed(monkeypatch):
    called = []
    monkeypatch.setattr(os, "marker", lambda: called.append(1), raising=False)
    preload(["no_such_module_anywhere", "os:marker", "json"])
    assert called == [1]
