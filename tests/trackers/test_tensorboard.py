import sys
from importlib.util import find_spec

import pytest

from rollcli.config.schema import TrackerConfig
from rollcli.errors import PluginError
from rollcli.trackers.base import Mirror
from rollcli.trackers.tensorboard import TensorboardTracker

installed = pytest.mark.skipif(find_spec("tensorboard") is None, reason="the package `tensorboard` is not installed")


@installed
def test_event_files_hold_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    warnings = []
    mirror = Mirror([TrackerConfig(name="tensorboard")], warnings.append)
    mirror.start("run-1", {"seed": 1}, tmp_path, attempt=2, resume_step=20)
    mirror.log(21, {"reward": 0.5, "loss": float("nan")})
    mirror.log(22, {"reward": 0.75})
    mirror.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "attempt_2"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(21, 0.5), (22, 0.75)]
    assert events.Tags()["scalars"] == ["reward"]
    assert events.Tags()["tensors"] == ["config/text_summary"]
    assert warnings == []


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PluginError, match="needs the package `tensorboard`") as caught:
        TensorboardTracker(TrackerConfig(name="tensorboard"), lambda message: None)
    assert caught.value.hint == "pip install 'rollcli[tensorboard]'"
