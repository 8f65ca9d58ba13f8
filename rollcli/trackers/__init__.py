"""Mirrors of the metrics. The tracker of record is `metrics.jsonl` in the run directory, which is always written."""

BUILTIN = {
    "swanlab": "rollcli.trackers.swanlab:SwanlabTracker",
    "tensorboard": "rollcli.trackers.tensorboard:TensorboardTracker",
}
