"""One GPU, both halves of the system on it: bfloat16 training by `fsdp`, sampling beside it, weights by CUDA IPC.

    python tests/gpu/smoke.py [STORIES_FOLDER]

Trains a few steps of a 0.5B-shaped model of random weights, and of the one in STORIES_FOLDER where that is given,
through the real command line. For each it prints the transport, step times, the gap between sampled and trained
log-probabilities, and the GPU's peak memory beside what `roll devices plan` said. Under eight minutes; run by hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROLL = Path(sys.executable).with_name("roll")
LIMIT_S = 200
HALF_BILLION = (
    "{model_type: qwen2, hidden_size: 896, intermediate_size: 4864, num_hidden_layers: 24, num_attention_heads: 14,"
    " num_key_value_heads: 2, vocab_size: 151936, max_position_embeddings: 1024, tie_word_embeddings: true}"
)
COMMON = ("steps=4", "evaluation.at_start=false", "evaluation.problems_per_task=8", "rollout.sync.verify=true")


def main() -> int:
    """Measures both models; returns how many of them failed."""
    models = {"0.5B-shaped, random": [f"model.initialize={HALF_BILLION}", "policy.recompute_activations=true"]}
    if len(sys.argv) > 1:
        models["stories260K"] = [f"model.path={sys.argv[1]}", "model.chat_template=plain"]
    return sum(not measure(label, [*COMMON, *overrides]) for label, overrides in models.items())


def measure(label: str, overrides: list[str]) -> bool:
    """Runs one model and prints what it took; returns whether the run finished."""
    planned = subprocess.run(
        [ROLL, "devices", "plan", "grpo-math", *overrides, "--json"], capture_output=True, text=True, timeout=60
    )
    with tempfile.TemporaryDirectory() as folder:
        peak = [0.0]
        done = threading.Event()
        watcher = threading.Thread(target=watch, args=(done, peak))
        watcher.start()
        command = [ROLL, "train", "grpo-math", "--name", "smoke", *overrides]
        environment = {**os.environ, "ROLL_RUNS": folder}
        try:
            run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        finally:
            done.set()
            watcher.join()
        if run.returncode:
            print(f"{label}: exit {run.returncode}\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")
            return False
        steps = [json.loads(line) for line in (Path(folder) / "smoke" / "metrics.jsonl").read_text().splitlines()]
    print(f"{label}: {len(steps)} steps; peak {peak[0]:.1f} GiB on the GPU, planned {predicted(planned.stdout)}")
    for step in steps:
        times = {name: value for name, value in step.items() if name.startswith("time/")}
        print({**times, **{name: step.get(name) for name in ("sync_mib", "rollout_gap_mean", "rollout_gap_max")}})
    return True


def predicted(text: str) -> str:
    """Returns what the plan says of each device."""
    try:
        return ", ".join(f"{device['used_gib']:.1f} GiB" for device in json.loads(text)["devices"])
    except (ValueError, KeyError, TypeError):
        return f"nothing readable: {text[:200]!r}"


def watch(done: threading.Event, peak: list[float]) -> None:
    """Keeps the most memory that the GPU's processes held together, in GiB."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    while not done.wait(0.5):
        used = subprocess.run(query, capture_output=True, text=True).stdout.split()
        peak[0] = max(peak[0], sum(map(float, used)) / 1024)


if __name__ == "__main__":
    sys.exit(main())
