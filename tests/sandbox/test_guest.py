"""Frames between host and guest; what a guest does is tested through `session.run`."""

import socket

import pytest

from rollcli.sandbox.guest import receive, send


def test_messages_cross_whole():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, {"source": "é" * 1000})
        send(ours, [])
        assert (receive(theirs), receive(theirs)) == ({"source": "é" * 1000}, [])
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs)
