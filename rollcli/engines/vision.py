"""What engines know of vision-language models: which there are, where their tokens stand, what a pass of theirs takes.

Supported are models of the family Qwen-VL (Qwen2-VL, Qwen2.5-VL, Qwen3-VL), by the engines `fsdp` and `transformers`,
in one process or sharded, but not split (`parallel`). An image's tokens have a height and a width beside their place in
time, and a text goes on after the larger of the two (M-RoPE): positions are those that the model's own
`get_rope_index` gives each sequence by itself, whatever shares its row.

In training, placeholders that were sampled, which end their turn and stand for no image, are given to the model as
another token. What they are changes nothing: nothing is predicted from a turn's last token. The vision part is trained
like the rest; where a whole minibatch has no image its gradient is 0, and only weight decay moves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollcli.data.images import Images, image_tokens, joined
from rollcli.errors import EngineError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from rollcli.data.batch import Batch
    from rollcli.data.packing import MicroBatch

FAMILY = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""`model_type` of what is supported."""


def sees(config: PretrainedConfig) -> bool:
    """Whether a configuration is that of a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def check_none(config: PretrainedConfig, engine: str) -> None:
    """Checks that an engine which sees no images is given a model which sees none.

    Raises:
        EngineError: the model is a vision-language model.
    """
    if sees(config):
        raise EngineError(
            f"the engine `{engine}` does not run vision-language models here, and this is a `{config.model_type}`",
            hint="set `policy.engine: fsdp` and `rollout.engine: transformers`",
        )


def of(model: PreTrainedModel) -> Vision | None:
    """Returns what is known of a vision-language model, before it is sharded; None for any other.

    Raises:
        EngineError: its family is not supported.
    """
    if not sees(model.config):
        return None
    check_family(model.config)
    return Vision(model)


def check_family(config: PretrainedConfig) -> None:
    """Checks that a vision-language model is of the family that is supported.

    Raises:
        EngineError: it is not.
    """
    if config.model_type not in FAMILY:
        raise EngineError(
            f"a `{config.model_type}` model sees images in a way that is not supported",
            hint=f"use a model of one of the types {', '.join(FAMILY)}",
        )


class Vision:
    """Positions and images of one model's sequences.

    Attributes:
        placeholder: id of the token that stands for a part of an image.
        placeholders: ids of all tokens that stand for a part of something, an image or a video.
        merge: patches along each side of an image that become one vector.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self.placeholder: int = config.image_token_id
        self.placeholders = np.array([config.image_token_id, config.video_token_id])
        self.merge: int = config.vision_config.spatial_merge_size
        self._other = int(np.setdiff1d(np.arange(3), self.placeholders)[0])
        self._rope_index = model.base_model.get_rope_index
        part = config.vision_config
        self._patch_values = part.in_channels * part.temporal_patch_size * part.patch_size**2

    def problem(self, ids: np.ndarray, images: Images | None) -> str | None:
        """Says why a prompt and its images do not belong together, or returns None."""
        tokens, wanted = int(np.isin(ids, self.placeholders).sum()), int(image_tokens(images, self.merge).sum())
        if tokens != wanted:
            return f"the prompt has {tokens} image tokens, and its images make {wanted}"
        if len(ids) and ids[-1] in self.placeholders:
            return "the prompt ends in an image, and nothing can be sampled from there"
        return None

    def positions(self, ids: np.ndarray, images: Images) -> np.ndarray:
        """Returns time, height and width of a sequence's tokens, int64 `[3, T]`."""
        shown = torch.from_numpy(np.asarray(ids, dtype=np.int64)[None])
        found, _ = self._rope_index(
            shown,
            mm_token_type_ids=(shown == self.placeholder).int(),
            image_grid_thw=torch.from_numpy(np.array(images["image_grid_thw"])),
        )
        return found[:, 0].numpy()

    def lay_out(self, batch: Batch, micro: MicroBatch) -> tuple[np.ndarray, np.ndarray, Images]:
        """Returns ids `[R, W]`, positions `[4, R, W]` and the images of a micro-batch, in the order of its rows.

        The first of the four positions tells packed sequences apart, the others are time, height and width. A
        micro-batch without an image gets one more row that shows a black one, which nothing looks at: every rank runs
        the vision part in every pass, for its weights are gathered from all of them.

        Raises:
            EngineError: the placeholders of a sequence do not fit its images.
        """
        flat = np.full(micro.ids.size, self._other, dtype=np.int64)
        tokens = batch.tokens["ids"][micro.source]
        stray = np.isin(tokens, self.placeholders) & batch.tokens["loss_mask"][micro.source]
        flat[micro.place] = np.where(stray, self._other, tokens)
        positions = np.repeat(micro.positions[None], 4, axis=0)
        grid = positions.reshape(4, -1)
        owners = batch.rows[micro.source]
        found: list[Images | None] = []
        for start in np.flatnonzero(np.diff(owners, prepend=-1)):
            index = owners[start]
            images = None if batch.images is None else batch.images[index]
            place = micro.place[start : start + batch.lengths[index]]
            if (counted := int((flat[place] == self.placeholder).sum())) != image_tokens(images, self.merge).sum():
                raise EngineError(f"a sequence has {counted} image tokens, which its images do not fit")
            if images is not None:
                grid[1:, place] = self.positions(flat[place], images)
                found.append(images)
        ids = flat.reshape(micro.ids.shape)
        if not found:
            row = np.full((1, ids.shape[1]), self._other, dtype=np.int64)
            row[0, 0] = self.placeholder
            ids = np.concatenate([ids, row])
            positions = np.concatenate([positions, np.zeros((4, 1, ids.shape[1]), np.int64)], axis=1)
            positions[:, -1] = np.arange(ids.shape[1])
            found.append(self._black())
        return ids, positions, joined(found)

    def _black(self) -> Images:
        """Returns an image of one token."""
        return {
            "pixel_values": np.zeros((self.merge**2, self._patch_values), np.float32),
            "image_grid_thw": np.array([[1, self.merge, self.merge]], np.int64),
        }


def tensors(images: Images, device: torch.device) -> dict[str, Any]:
    """Returns images as the model takes them."""
    return {name: torch.from_numpy(np.array(values)).to(device) for name, values in images.items()}
