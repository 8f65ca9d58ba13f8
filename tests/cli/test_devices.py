"""`roll devices`: the plan as a table, as JSON, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty
from rollcli.cli.devices import plan_lines
from rollcli.cli.output import Output
from rollcli.config.schema import (
    ModelConfig,
    PolicyConfig,
    RewardConfig,
    RlRecipe,
    RolloutConfig,
    SamplingConfig,
    TaskConfig,
)
from rollcli.devices.facts import facts_from_config
from rollcli.devices.hardware import cpu, parse_gpus
from rollcli.devices.plan import plan

QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_hidden_layers": 5, "vocab_size": 512, "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}  # fmt: skip
RECIPE = """\
model: {path: model}
steps: 3
algorithm: {name: grpo, kl: {coefficient: 0}}
minibatches: 4
rollout:
  max_prompt_tokens: 128
  sampling: {max_tokens: 256}
tasks:
  - {name: sums, source: sums, rewards: [{name: math}]}
"""


def recipe(workers=2, replicas=1, kl=0.0, answer=256, prompt=None, tokens=16384, recompute=False):
    return RlRecipe(
        model=ModelConfig("m"),
        tasks=[TaskConfig("sums", source=None, rewards=[RewardConfig("math")])],
        steps=1,
        policy=PolicyConfig(workers=workers, micro_batch_tokens=tokens, recompute_activations=recompute),
        algorithm=Grpo(kl=KlPenalty(coefficient=kl)),
        minibatches=4,
        rollout=RolloutConfig(
            replicas=replicas, max_prompt_tokens=prompt, sampling=SamplingConfig(max_tokens=answer)
        ),
    )  # fmt: skip


def large(workers, replicas):
    return recipe(workers, replicas, kl=0.04, answer=4096, prompt=1024, tokens=8192, recompute=True)


SPLIT = """\
hardware  8 × H200-141GB (139.7 GiB each)
plan      2 policy (fsdp) + 2 reference (fsdp) + 4 rollout (transformers)
          split: 2 policy + 4 rollout workers have a device each on 8
model     Qwen/Qwen2.5-7B, qwen2, 7,615,616,512 parameters

  gpu  GiB of     weights  optim  grads  activ  logits    kv  other  used
  0–1  policy        14.2   28.4   14.2   1.53    20.9     –   6.60  85.8
       reference     14.2      –      –   0.98    11.6     –   3.90  30.7
       ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▁▁▁  116.4 of 139.7 GiB, 23.3 free  ok
  2–5  rollout       14.2      –      –   1.41       –  35.0   1.00  51.6
       ▇▇▇▇▇▇▇▁▁▁▁▁▁▁▁▁▁▁▁▁  51.6 of 139.7 GiB, 88.1 free  ok
  6–7  unused           –      –      –      –       –     –      –     –

batch     64 prompts × 8 answers = 512 samples a step = 4 minibatches × 128
          128 samples ÷ 2 policy workers = 64 each, in at most 64 micro-batches
          of 1 × 5,120 tokens
sequence  ≤ 1,024 prompt + ≤ 4,096 answer = 5,120 tokens (context 32,768)
          each rollout replica decodes ≤ 128 at once (512 samples ÷ 4 replicas,
          `rollout.max_rows` 256)
host      environment 0.37 + reward 0.21 + driver, Ray 15.0 + offloaded,
          checkpoint 85.1 GiB beside the workers' own processes
note      gpu 6–7 unused: more `policy.workers` or `rollout.replicas` would use
          them"""
TOO_BIG = """\
hardware  8 × L40S-48GB (44.3 GiB each)
plan      8 policy (fsdp) + 8 reference (fsdp) + 8 rollout (transformers)
          colocated: 8 policy + 8 rollout workers on 8 devices: they share
model     Qwen/Qwen2.5-7B, qwen2, 7,615,616,512 parameters

  gpu  GiB of     weights  optim  grads  activ  logits    kv  other  used
  0–7  policy        3.55   7.09   3.55   1.53    20.9     –   6.60  43.2
       reference     3.55      –      –   0.98    11.6     –   3.90  20.0
       rollout       14.2      –      –   1.41       –  17.5   1.00  34.1
       ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇  64.2 of 44.3 GiB, 19.9 too much  over

batch     64 prompts × 8 answers = 512 samples a step = 4 minibatches × 128
          128 samples ÷ 8 policy workers = 16 each, in at most 16 micro-batches
          of 1 × 5,120 tokens
sequence  ≤ 1,024 prompt + ≤ 4,096 answer = 5,120 tokens (context 32,768)
          each rollout replica decodes ≤ 64 at once (512 samples ÷ 8 replicas,
          `rollout.max_rows` 256)
host      environment 0.37 + reward 0.21 + driver, Ray 15.0 + offloaded,
          checkpoint 198.6 GiB beside the workers' own processes
note      roles on gpu 0–7 take turns and give the device up: sample 36.1, sync
          34.4, train 64.2 GiB

too big   19.9 GiB more than gpu 0–7 has
change    all of these, and still more devices or a smaller model; no single one
          is enough
          policy.micro_batch_tokens=4096    frees 13.2, now 8192
          rollout.sampling.max_tokens=2048  frees 4.40, now 4096"""
MACHINE = """\
hardware  this machine: 4 cores, 16.0 GiB
plan      2 policy (fsdp) + 1 rollout (transformers)
          colocated: a machine without accelerators: all workers share it
model     tiny, llama, 260,032 parameters

  cpu  GiB of       weights  optim  grads  activ  logits    kv  other  used
       policy ×2      <0.01  <0.01  <0.01   1.12    0.25     –   1.07  2.45
       rollout        <0.01      –      –   0.03       –  0.16   0.38  0.57
       environment        –      –      –      –       –     –   0.37  0.37
       reward             –      –      –      –       –     –   0.21  0.21
       driver, Ray        –      –      –      –       –     –   0.84  0.84
       ▇▇▇▇▇▇▁▁▁▁▁▁▁▁▁▁▁▁▁▁  4.43 of 16.0 GiB, 11.6 free  ok

batch     64 prompts × 8 answers = 512 samples a step = 4 minibatches × 128
          128 samples ÷ 2 policy workers = 64 each, in at most 2 micro-batches
          of 32 × 512 tokens
sequence  ≤ 256 prompt + ≤ 256 answer = 512 tokens (context 512)
          each rollout replica decodes ≤ 256 at once (512 samples,
          `rollout.max_rows` 256)"""


def text(made, hardware, values, name):
    return "\n".join(plan_lines(plan(made, hardware, facts_from_config(values, name))))


def test_a_split_plan_at_80_columns():
    assert text(large(2, 4), parse_gpus("8xH200"), QWEN_7B, "Qwen/Qwen2.5-7B") == SPLIT


def test_a_plan_that_does_not_fit():
    assert text(large(8, 8), parse_gpus("8xL40S"), QWEN_7B, "Qwen/Qwen2.5-7B") == TOO_BIG


def test_one_device_is_one():
    assert "1 policy + 1 rollout workers on 1 device: they share" in text(
        recipe(1, 1), parse_gpus("1xH100"), TINY, "tiny"
    )


def test_a_machine_without_accelerators():
    assert text(recipe(), cpu(4, 16.0), TINY, "tiny") == MACHINE


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("verbose", [False, True])
def test_no_line_is_wider_than_asked(width, verbose):
    for made, hardware, values in (
        (large(8, 8), parse_gpus("8xH100"), QWEN_7B), (recipe(), cpu(4, 1.0), TINY)
    ):  # fmt: skip
        lines = plan_lines(plan(made, hardware, facts_from_config(values, "a/model")), verbose, width)
        assert max(map(len, lines)) <= width, max(lines, key=len)


def test_a_table_row_adds_up():
    found = plan(large(2, 4), parse_gpus("8xH200"), facts_from_config(QWEN_7B, "x"))
    row = next(line for line in plan_lines(found) if "reference" in line and "–" in line)
    numbers = [0.0 if word == "–" else float(word) for word in row.split()[1:]]
    assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.1)


@pytest.fixture
def planned(roll, workplace):
    """Plans a recipe of the working directory, whose model has only a configuration."""
    (workplace / "model").mkdir()
    (workplace / "model" / "config.json").write_text(json.dumps(TINY))
    (workplace / "r.yaml").write_text(RECIPE)

    def call(*words):
        return roll("devices", "plan", "r.yaml", *words)

    return call


def test_plan(planned):
    result = planned("--gpus", "4xL40S", "policy.workers=2", "rollout.replicas=2")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("hardware  4 × L40S-48GB (44.3 GiB each)\nplan      2 policy (fsdp) + 2 rollout")
    assert "×" in result.out and "\x1b" not in result.out


def test_a_critic_is_shown_where_the_algorithm_has_one(planned):
    result = planned("--gpus", "4xL40S", "algorithm.name=ppo", "algorithm.kl.coefficient=0.02", "epochs=2")
    assert result.code == 0, result.err
    assert "1 policy (fsdp) + 1 reference (fsdp) + 1 critic (fsdp) + 1 rollout (transformers)" in " ".join(
        result.out.split()
    )
    assert "1 policy + 1 critic + 1 rollout workers have a device each on 4" in result.out
    (row,) = (line for line in result.out.splitlines() if line.split()[1:2] == ["critic"])
    assert row.split()[0] == "2" and row.split()[6] == "–"  # no logits
    assert "2 epochs = 8 optimizer steps" in " ".join(result.out.split())
    assert "critic" not in planned("--gpus", "4xL40S").out


def test_formulas_stand_under_v(planned):
    assert "N 260,032 × 8 B ÷ 2 (fp32 AdamW moments)" not in planned("--cpu", "policy.workers=2").out
    assert "N 260,032 × 8 B ÷ 2 (fp32 AdamW moments)" in planned("--cpu", "policy.workers=2", "-v").out


def test_json_is_one_document(planned):
    result = planned("--gpus", "2xH100", "--json")
    document = json.loads(result.out)
    assert result.code == 0 and document["recipe"] == "r" and document["fits"] is True
    assert [role["role"] for role in document["roles"]] == ["policy", "rollout", "environment", "reward", "services"]
    assert document["devices"][0]["devices"] == [0]


def test_quiet_is_the_verdict(planned):
    assert planned("--gpus", "2xH100", "-q").out == "fits\n"


def test_what_does_not_fit_exits_1_and_says_what_to_change(planned):
    words = ("--gpus", "2xL4", "model.initialize={model_type: llama, hidden_size: 2048, intermediate_size: 8192, "
             "num_attention_heads: 32, num_hidden_layers: 16, vocab_size: 32000}")  # fmt: skip
    result = planned(*words)
    assert result.code == 1
    assert "too big " in result.out and "change " in result.out and "policy.micro_batch_tokens=" in result.out
    assert planned(*words, "-q").out == "does not fit\n"
    assert json.loads(planned(*words, "--json").out)["changes"]


ERRORS = {
    "chip": (
        ("--gpus", "8xH10"),
        "error: unknown accelerator `H10`",
        "did you mean `H100-80GB`, `H100-NVL-94GB`, `H100-PCIe-80GB`?",
    ),
    "nodes": (("--gpus", "8xH100", "--nodes", "0"), "error: `--nodes 0`: 0 nodes cannot be", "at least 1"),
    "cluster": (("--address", "127.0.0.1:1"), "error: cannot use Ray at `127.0.0.1:1`", "--address"),
    "count": (("--gpus", "0xH100"), "error: `0xH100`: 0 accelerators cannot be", "a count is from 1"),
    "role": (
        ("--gpus", "2xH100", "placement.polcy='0'", "placement.rollout='1'"),
        "error: command line, override 1: `placement.polcy`: unknown role (did you mean `policy`?)",
        "roles that have devices: policy, rollout",
    ),
    "context": (
        ("--cpu", "rollout.sampling.max_tokens=500"),
        "error: command line, override 1: `rollout.sampling.max_tokens`: 128 prompt (`rollout.max_prompt_tokens`) + "
        "500 answer = 628 tokens, the model's context is 512",
        "rollout.sampling.max_tokens=192",
    ),
    "model": (
        ("--cpu", "model.path=no/such"),
        "error: command line, override 1: `model.path`: the shapes of `no/such` are not known here",
        "hf download no/such config.json",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors_are_located_and_hint(planned, what):
    words, message, hint = ERRORS[what]
    result = planned(*words)
    assert result.code == 1 and result.out == ""
    plain = " ".join(result.err.split())
    assert " ".join(message.split()) in plain
    assert hint in plain


def test_gpus_and_cpu_exclude_each_other(planned):
    result = planned("--gpus", "8xH100", "--cpu")
    assert result.code == 2 and "exclude each other" in result.err


def test_nodes_without_gpus_are_refused(planned):
    result = planned("--nodes", "4")
    assert result.code == 2 and "give that too" in result.err


def test_mixed_pools_are_two_rows_with_their_own_memory(planned):
    result = planned("--gpus", "2xH100-80GB+2xL40S", "policy.workers=2", "rollout.replicas=2")
    assert result.code == 0, result.err
    assert "2 × H100-80GB (79.1 GiB each) + 2 × L40S-48GB (44.3 GiB each)" in result.out
    assert "of 79.1 GiB" in result.out and "of 44.3 GiB" in result.out


def test_hardware_and_chips_come_from_files(planned, workplace):
    (workplace / "mine.yaml").write_text(
        "Mine-96GB: {memory_gib: 96, bandwidth_gb_s: 3000, bf16_tflops: 400, fp8_tflops: 0, link_gb_s: 0, "
        "network_gb_s: 5}\n"
    )
    (workplace / "hardware.yaml").write_text("pools: [{chip: mine, count: 2, nodes: 2}]\n")
    assert planned("--gpus", "4xmine", "--chips", "mine.yaml").out.startswith("hardware  4 × Mine-96GB (96.0 GiB each)")
    result = planned("--hardware", "hardware.yaml", "--chips", "mine.yaml")
    assert "4 × Mine-96GB (96.0 GiB each) in 2 nodes of 2" in result.out
    assert "hardware.yaml:1:10: `pools`: unknown accelerator `mine`" in planned("--hardware", "hardware.yaml").err


def test_shapes_of_a_common_model_come_from_the_catalogue(planned, workplace, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(workplace / "hub"))
    result = planned("--gpus", "1xH200", "model.path=Qwen/Qwen2.5-1.5B-Instruct")
    assert "1,543,714,304 parameters\n          shapes from the catalogue of shapes" in result.out, result.err
    document = json.loads(planned("--gpus", "1xH200", "model.path=Qwen/Qwen2.5-1.5B-Instruct", "--json").out)
    assert document["model"]["origin"] == "the catalogue of shapes (devices/models.yaml)"
    assert "shapes from its `config.json`" in planned("--cpu").out


def test_a_placement_in_the_recipe_is_located(planned, workplace):
    (workplace / "r.yaml").write_text(RECIPE + "placement:\n  policy: '0'\n  rollout: '7'\n")
    assert "r.yaml:12:3: `placement.rollout`: device 7 is not there" in planned("--gpus", "2xH100").err


def test_color_paints_labels_only(capsys):
    from rollcli.cli.devices import show_plan

    found = plan(recipe(), cpu(4, 16.0), facts_from_config(TINY, "tiny"))
    show_plan(found, Output(color="always"))
    painted = capsys.readouterr().out
    assert "\x1b[2mhardware\x1b[0m" in painted
    show_plan(found, Output(color="never"))
    assert capsys.readouterr().out == "\n".join(plan_lines(found)) + "\n"


def test_it_imports_nothing_heavy(planned, workplace):
    code = """
import sys
from rollcli.cli.app import app
from typer.testing import CliRunner
result = CliRunner().invoke(app, ["devices", "plan", "r.yaml", "--cpu"])
assert result.exit_code == 0, result.output
heavy = {"torch", "ray", "transformers", "datasets"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=workplace)
