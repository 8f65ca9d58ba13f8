"""A vision-language model small enough for tests, its tokenizer and image processor, and problems it can learn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

from rollcli.data.images import VisionFormat
from rollcli.data.templates import ChatFormat

SPECIAL = ("<|unk|>", "<|end|>", "<|user|>", "<|assistant|>", "<|vision|>", "<|/vision|>", "<|image|>", "<|video|>")
WORDS = ("red", "blue", "which", "colour", "and", "now", "?", " ", "\n", "same", "no", "a", "b", "c", "d", "e")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision|><|image|><|/vision|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a word of the few there are."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z]+|[^a-z]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<|unk|>", eos_token="<|end|>", chat_template=TEMPLATE,
        additional_special_tokens=list(SPECIAL[2:]), clean_up_tokenization_spaces=False,
    )  # fmt: skip


def image_processor() -> transformers.BaseImageProcessor:
    """Patches of 4 x 4 pixels, of which 2 x 2 become one token."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 8 * 8, "longest_edge": 64 * 64}
    )


def chat_format() -> ChatFormat:
    """The format of all models here."""
    return ChatFormat(
        tokenizer(), vision=VisionFormat(image_processor(), SPECIAL.index("<|image|>"), [SPECIAL.index("<|video|>")])
    )


def config(kind: str = "qwen2_vl", **text: object) -> dict[str, object]:
    """What `model.initialize` takes."""
    vision: dict[str, object] = {
        "depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2,
    }  # fmt: skip
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    if kind == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return {
        "model_type": kind,
        "text_config": {
            "vocab_size": len(SPECIAL) + len(WORDS), "hidden_size": 32, "intermediate_size": 60, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
            "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            **text,
        },
        "vision_config": vision,
        "vision_start_token_id": SPECIAL.index("<|vision|>"),
        "vision_end_token_id": SPECIAL.index("<|/vision|>"),
        "image_token_id": SPECIAL.index("<|image|>"),
        "video_token_id": SPECIAL.index("<|video|>"),
        "tie_word_embeddings": False,
    }  # fmt: skip


def tiny(kind: str = "qwen2_vl", seed: int = 0) -> transformers.PreTrainedModel:
    """A random model, sharp enough that answers depend on what it sees."""
    torch.manual_seed(seed)
    settings = config(kind)
    model_type = settings.pop("model_type")
    made = transformers.AutoModelForImageTextToText.from_config(
        transformers.AutoConfig.for_model(model_type, **settings), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "visual" in name and parameter.ndim > 1:
                parameter.normal_(0, 0.2, generator=generator)
    return made.eval()


def save(folder: Path, kind: str = "qwen2_vl") -> Path:
    """Writes a whole model folder."""
    tiny(kind).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    image_processor().save_pretrained(folder)
    return folder


def picture(colour: str, width: int = 16, height: int = 16, seed: int = 0) -> Image.Image:
    """An image of one colour, with some noise."""
    noise = np.random.default_rng(seed).integers(0, 60, (height, width, 3))
    noise[..., 0 if colour == "red" else 2] += 190
    return Image.fromarray(noise.astype(np.uint8))


def problems(folder: Path, count: int) -> Path:
    """Writes pictures of two colours and a file that asks which."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        colour = ("red", "blue")[number % 2]
        picture(colour, seed=number).save(folder / f"{number}.png")
        lines.append(json.dumps({"question": "which colour?", "answer": colour, "images": [f"{number}.png"]}))
    (folder / "colours.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "colours.jsonl"
