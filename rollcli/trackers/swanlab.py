"""SwanLab: offline and local without network or login, online when a key is at hand.

One SwanLab run per attempt, all attempts of a run in one group. Resuming one SwanLab run is possible online only, and a
step that was logged before is dropped there: after a resume from an older checkpoint the repeated steps, the ones
that are true now, would be lost. The next attempt's run starts at the resumed step instead, so each curve lies on
the run's own step axis and attempts can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rollcli.config.schema import TrackerConfig
from rollcli.errors import PluginError
from rollcli.trackers.base import Warn

REACH_TIMEOUT_S = 5.0


class SwanlabTracker:
    """Mirrors metrics into SwanLab; never prompts, never writes to the terminal."""

    def __init__(self, config: TrackerConfig, warn: Warn) -> None:
        try:
            import swanlab
        except ImportError as error:
            raise PluginError(
                "tracker `swanlab` needs the package `swanlab`", hint="pip install 'rollcli[swanlab]'"
            ) from error
        self._swanlab = swanlab
        self._config = config
        self._warn = warn
        self._run: Any = None
        self._log: TextIO | None = None

    def start(
        self, run_id: str, config: Mapping[str, Any], folder: Path, attempt: int, resume_step: int | None
    ) -> None:
        """Opens the mirror of this attempt."""
        self._log = (folder / "swanlab.log").open("a", encoding="utf-8")
        self._redirect(self._log)
        settings = self._settings()
        with _excepthook_kept():
            self._run = self._swanlab.init(
                mode=self._mode(settings),
                project=self._config.project,
                log_dir=str(folder),
                name=f"{run_id}-attempt-{attempt}",
                group=run_id,
                config={**config, "attempt": attempt, "resume_step": resume_step},
                settings=settings,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Mirrors one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Sends what is left and closes."""
        if self._run is not None:
            with _excepthook_kept():
                self._run.finish()
        self._redirect(None)
        if self._log is not None:
            self._log.close()

    def _mode(self, settings: Any) -> str:
        """The configured mode; `offline`, with a warning, where going online cannot work."""
        mode = self._config.mode
        if mode == "online" and settings.api_key is None:
            self._warn("tracker `swanlab` is offline: no API key; set SWANLAB_API_KEY, or `mode: offline`")
            return "offline"
        if mode == "online" and not _reachable(settings.api_host):
            self._warn(
                f"tracker `swanlab` is offline: {settings.api_host} cannot be reached; upload later by `swanlab sync`"
            )
            return "offline"
        return mode

    def _settings(self) -> Any:
        """The manifest holds code version and packages; a Git remote may carry a token. Output stays with the run."""
        settings = self._swanlab.Settings
        return settings(
            interactive=False,
            terminal=settings.Terminal(proxy_type="none"),
            probe=settings.Probe(git=False, requirements=False),
        )

    def _redirect(self, file: TextIO | None) -> None:
        """Sends SwanLab's own messages to a file. It has no option for it, and they would tear the live view."""
        from swanlab.sdk.internal.pkg import console

        console.c.file = file


@contextmanager
def _excepthook_kept() -> Iterator[None]:
    """Undoes SwanLab's replacement of `sys.excepthook`. Its SIGINT handler is installed in a main thread only."""
    kept = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = kept


def _reachable(host: str) -> bool:
    """Whether the server answers. SwanLab itself takes 15 s and then reports a failed login, as for a wrong key."""
    import requests

    try:
        requests.head(host, timeout=REACH_TIMEOUT_S)
    except (requests.exceptions.ConnectionError, requests.exceptions.Timeout):
        return False
    return True
