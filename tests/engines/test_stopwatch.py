import time

from rollcli.engines.stopwatch import Stopwatch


def test_adds_up_what_passes_inside_blocks_only(monkeypatch) -> None:
    clock = iter([10.0, 12.5, 100.0, 101.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch = Stopwatch()
    with watch:
        pass
    with watch:
        pass
    assert watch.seconds == 3.5
