"""Reading keys from a terminal in front is tested through `Follower`, in a terminal of its own."""

import os
import threading
import time

from rollcli.monitor.keys import Keys


def test_without_a_terminal_no_key_comes():
    keys = Keys(None)
    assert not keys.active and keys.wait(0.01) == ""
    keys.restore()


def test_a_pipe_is_not_read(tmp_path):
    read, write = os.pipe()
    os.write(write, b"nnn")
    with os.fdopen(read) as stream:
        keys = Keys(stream)
        assert not keys.active and keys.wait(0.01) == ""
        assert stream.readable() and os.read(read, 3) == b"nnn"
    os.close(write)


def test_a_terminal_that_is_not_ours_stays_as_it_is():
    import termios

    master, slave = os.openpty()
    with os.fdopen(slave) as stream:
        before = termios.tcgetattr(slave)
        keys = Keys(stream)
        assert not keys.active and termios.tcgetattr(slave) == before
    os.close(master)


def test_closed_input_is_no_terminal(tmp_path):
    stream = (tmp_path / "file").open("w")
    stream.close()
    assert not Keys(stream).active


def test_wake_ends_a_wait():
    keys = Keys(None)
    threading.Timer(0.05, keys.wake).start()
    begin = time.monotonic()
    assert keys.wait(30.0) == ""
    assert time.monotonic() - begin < 10


def test_many_wakes_do_not_block():
    keys = Keys(None)
    for _ in range(100_000):
        keys.wake()
    assert keys.wait(0.0) == ""
