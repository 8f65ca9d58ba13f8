"""A vision-language model through the whole system: pictures in, a step of GRPO, a checkpoint that others load."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
import transformers
from safetensors.torch import load_file

from tests.engines import vision_model as small

RECIPE = """
model: {path: model}
steps: 2
prompts_per_step: 8
group_size: 8
tasks:
  - name: colours
    source: {name: dataset, path: data/colours.jsonl, images: images}
    rewards: [{name: "./colour.py:score"}]
algorithm: {name: grpo, kl: {coefficient: 0.0}}
policy: {packing: true, optimizer: {learning_rate: 1.0e-2}}
rollout: {sampling: {max_tokens: 2}}
evaluation: {problems_per_task: 4}
checkpoints: {every: 1}
"""
REWARD = "def score(response: str, answer: str) -> float:\n    return float(response.startswith(answer))\n"


def test_a_step_from_pictures_to_a_checkpoint(workspace, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    small.save(tmp_path / "model")
    problems = small.problems(tmp_path / "data", 48)
    # One picture is broken: its samples fail, and the run goes on.
    broken = {"question": "which colour?", "answer": "red", "images": ["broken.png"]}
    problems.write_text(problems.read_text() + f"{json.dumps(broken)}\n" * 4)
    (tmp_path / "data" / "broken.png").write_bytes(b"no picture")
    (tmp_path / "colour.py").write_text(REWARD)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    shown = workspace.roll("train", "recipe.yaml", "--dry-run")
    assert "<|vision|><|image|><|image|><|image|><|image|><|/vision|>which colour?" in shown
    workspace.roll("train", "recipe.yaml", "--name", "seen")

    first, second = workspace.metrics("seen")
    for step in (first, second):
        assert step["rollout_gap_max"] < 1e-4 and step["skipped_updates"] == 0
    run = workspace.runs / "seen"
    rows = [row for path in sorted((run / "rollouts").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert 0 < np.mean([row["reward"] for row in rows]) < 1
    image = json.loads(rows[0]["messages"])[0]["content"][0]["image"]
    assert Path(image).parent == tmp_path / "data" and rows[0]["prompt"] == "<image>which colour?"
    failed = {row["error_kind"] for row in rows if row["error"]}
    assert failed <= {"image"}

    before = load_file(tmp_path / "model" / "model.safetensors")
    folder = run / "checkpoints" / "step_000002" / "model"
    after = load_file(folder / "model.safetensors")
    assert before.keys() == after.keys() and any(name.startswith("visual.") for name in after)
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert len(same) <= 1, same  # a bias of keys may have a gradient of nothing
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(model).__name__ == "Qwen2VLForConditionalGeneration"
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    assert processor.merge_size == 2 and processor.patch_size == 4
    shown = workspace.roll("replay", "seen", "--step", "1", code=1)
    assert "has images" in shown and "not its pixels" in shown
