"""How step time, idle share and controller load grow with the number of GPUs: simulated, run by hand.

    python tests/benchmarks/step_scaling.py [--quick]

Qwen2.5-7B on H100; half of the devices sample, half train; 64 samples in flight for each device, so 65,536 for 1,024.
Weak scaling: the batch grows with the devices. Beside it the same batch of 16,384 samples on more and more of them.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace

from rollcli.devices.facts import facts_from_config
from rollcli.devices.lengths import long_tailed
from rollcli.devices.roofline import Degrees
from rollcli.devices.simulate import Inputs, simulate
from rollcli.devices.workload import Work

H100 = SimpleNamespace(memory_gib=79.14, bandwidth_gb_s=3350, bf16_tflops=989, link_gb_s=900, network_gb_s=50)
QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
GPUS, GROUP, SAMPLES_PER_GPU, FIXED_SAMPLES = (8, 64, 256, 1024), 16, 64, 16_384


def setting(gpus: int, samples: int, staleness: int) -> Inputs:
    """Returns a step of so many samples; with staleness k, k + 1 batches of them are in flight at most."""
    work = Work(samples // GROUP, GROUP, 200, long_tailed(4000, 32_768))
    half = Degrees(data=gpus // 2)
    return Inputs(
        facts_from_config(QWEN, "Qwen2.5-7B"), H100, half, half, work, max_staleness=staleness, forwards=1, price=2.5
    )


def show(title: str, settings: dict[int, Inputs], quick: bool) -> None:
    """Prints a table, a line for each number of GPUs."""
    print(f"\n{title}")
    print("  GPUs   samples   step s  idle policy  idle rollout  tokens/s/GPU  events/s  cost/step  simulated in")
    for gpus, inputs in settings.items():
        began = time.perf_counter()
        found = simulate(inputs, quick=quick, steps=2)
        took = time.perf_counter() - began
        samples = inputs.work.prompts * inputs.work.group_size
        print(
            f"{gpus:6,}  {samples:8,} {found.step_s:8.1f} {found.idle['policy']:11.0%} {found.idle['rollout']:13.0%}"
            f" {found.tokens_per_s / gpus:13,.0f} {found.controller_per_s:9,.0f} {found.cost:10,.2f} {took:11.2f} s",
            flush=True,
        )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the simulation a search uses: a part of each step")
    quick = parser.parse_args().quick
    for staleness in (0, 1, 4):
        name = f"max_staleness {staleness}"
        # With k, batches of 1 / (k + 1) of the samples keep as many in flight.
        weak = {gpus: setting(gpus, gpus * SAMPLES_PER_GPU // (staleness + 1) // GROUP * GROUP, staleness)
                for gpus in GPUS}  # fmt: skip
        show(f"{name}, {SAMPLES_PER_GPU} samples in flight for each GPU", weak, quick)
    for staleness in (0, 1):
        strong = {gpus: setting(gpus, FIXED_SAMPLES, staleness) for gpus in GPUS}
        show(f"max_staleness {staleness}, {FIXED_SAMPLES:,} samples a step on all", strong, quick)


if __name__ == "__main__":
    main()
