import time

import pytest


@pytest.fixture
def until():
    """Waits for a condition, with a deadline instead of a guess."""

    def wait(condition, seconds=10.0):
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, "the condition did not come true in time"
            time.sleep(0.01)
        return value

    return wait
