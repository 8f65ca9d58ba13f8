"""Single keys from a terminal, without Enter and without an echo that would tear the frame."""

from __future__ import annotations

import os
import select
import termios
import tty
from typing import Any, TextIO

KEYS = "npbw"


class Keys:
    """Waits for keys or a wake-up.

    The terminal is put into cbreak mode, which keeps ctrl-c a signal, and given back by `restore`. Where `stream` is
    None or no terminal, or this process is in the background of one, no key comes and nothing is changed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._descriptor: int | None = None
        self._before: list[Any] | None = None
        try:
            descriptor = stream.fileno() if stream is not None else -1
            # Changing the terminal from the background would stop this process.
            if descriptor >= 0 and os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp():
                self._before = termios.tcgetattr(descriptor)
                tty.setcbreak(descriptor, termios.TCSANOW)
                self._descriptor = descriptor
        except (AttributeError, OSError, ValueError, termios.error):
            self._descriptor = None

    @property
    def active(self) -> bool:
        """Whether keys can come."""
        return self._descriptor is not None

    def wait(self, timeout_s: float) -> str:
        """Waits for keys, a wake-up or the end of the time; returns the keys that mean something."""
        sources = [self._wake_read] + ([self._descriptor] if self._descriptor is not None else [])
        ready, _, _ = select.select(sources, [], [], timeout_s)
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        if self._descriptor is None or self._descriptor not in ready:
            return ""
        try:
            pressed = os.read(self._descriptor, 64)
        except OSError:
            pressed = b""
        if not pressed:
            self.restore()
        return "".join(key for key in pressed.decode("ascii", "ignore") if key in KEYS)

    def wake(self) -> None:
        """Ends a `wait` at once; may be called from any thread and from a signal handler."""
        try:
            os.write(self._wake_write, b".")
        except OSError:
            pass

    def restore(self) -> None:
        """Gives the terminal back as it was; may be called more than once."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and self._before is not None:
            try:
                termios.tcsetattr(descriptor, termios.TCSANOW, self._before)
            except (OSError, termios.error):
                pass

    def close(self) -> None:
        """Gives the terminal back and closes the wake-up pipe."""
        self.restore()
        os.close(self._wake_read)
        os.close(self._wake_write)
