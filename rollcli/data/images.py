"""Images in a chat, from a data set's column to the tensors that a vision-language model reads.

    source ──{"type": "image", "image": path or bytes}──▶ ChatFormat ──▶ token ids, and the processor's tensors
    tensors ──GenerateRequest.images──▶ rollout engine        tensors ──Trajectory, Batch.images──▶ training engine

A message's content is a text, or a list of parts `{"type": "text", "text": …}` and `{"type": "image", "image": …}` as
chat templates take them. A sequence's images travel as its image processor's arrays, by name, all images of the
sequence one after the other; a sequence without images has None, and costs nothing. In its token ids each image is as
many placeholder tokens as the model has vectors for it, so a token's place is the same for both engines. A placeholder
that the model samples ends its turn: it stands for no image.

Images are opened by PIL from local files or bytes, never from the network.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollcli.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BaseImageProcessor

    from rollcli.data.carriers import Message

Images = dict[str, np.ndarray]
"""The processor's arrays of one sequence: `pixel_values` `[patches, values]`, `image_grid_thw` `[images, 3]`."""
MARK = "<image>"
"""Stands in a problem's text, and where a message is shown to people, for an image."""


def images_of(messages: Sequence[Message]) -> list[Any]:
    """Returns the images of a chat in order: paths, bytes, or whatever else `open_image` takes."""
    return [
        part.get("image")
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part.get("type") == "image"
    ]


def text_of(message: Message) -> str:
    """Returns a message's text; `<image>` stands for an image."""
    content = message["content"]
    if not isinstance(content, list):
        return content
    return "".join(MARK if part.get("type") == "image" else part.get("text", "") for part in content)


def with_images(text: str, images: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the parts of a message: images stand where `<image>` does, or else before the text.

    A mark without an image stays, as a part without one, so that the problem is counted as a failed sample.
    """
    if MARK not in text:
        return [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    first, *rest = text.split(MARK)
    parts = [{"type": "text", "text": first}] if first else []
    for number in range(max(len(rest), len(images))):
        parts.append({"type": "image", "image": images[number] if number < len(images) else None})
        if number < len(rest) and rest[number]:
            parts.append({"type": "text", "text": rest[number]})
    return parts


def referring(messages: Sequence[Message]) -> list[Message]:
    """Returns a chat as JSON can hold it: in place of an image its path, or its digest and size in bytes or pixels."""
    return [
        {**message, "content": [_reference(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def identity(message: Message) -> str:
    """Returns a text that two messages share only where they show the same."""
    content = referring([message])[0]["content"]
    return json.dumps(content) if isinstance(content, list) else str(content)


def _reference(part: Mapping[str, Any]) -> Mapping[str, Any]:
    image = part.get("image")
    if part.get("type") != "image" or image is None or isinstance(image, str):
        return part
    if isinstance(image, Mapping):
        return _reference({**part, "image": image.get("bytes") or image.get("path")})
    raw = image if isinstance(image, bytes) else np.asarray(image).tobytes()
    size = [len(raw)] if isinstance(image, bytes) else list(np.asarray(image).shape)
    return {**part, "image": {"sha256": hashlib.sha256(raw).hexdigest(), "size": size}}


def open_image(image: Any) -> Image:
    """Returns an image as RGB.

    Args:
        image: a local path, the bytes of a file, `{"bytes": …, "path": …}` as data sets hold it, pixels
            `[height, width, 3]` uint8, or PIL's.

    Raises:
        ImageError: it cannot be read.
    """
    import PIL.Image

    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    what = f"image `{image}`" if isinstance(image, str) else f"an image given as {type(image).__name__}"
    if isinstance(image, str) and "://" in image:
        raise ImageError(f"{what} is not a local file", hint="download the images, and give their paths")
    try:
        if isinstance(image, np.ndarray):
            image = PIL.Image.fromarray(image)
        elif isinstance(image, (str, Path, bytes)):
            with PIL.Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
                return opened.convert("RGB")
        if isinstance(image, PIL.Image.Image):
            return image.convert("RGB")
    # What PIL's readers of broken files raise.
    except (OSError, ValueError, TypeError, SyntaxError, EOFError, PIL.Image.DecompressionBombError) as error:
        raise ImageError(f"{what} cannot be read: {error}", hint="mend or remove it") from error
    raise ImageError(f"{what} is no image", hint="give a path, the bytes of a file, or PIL's")


def digest(images: Images | None) -> bytes:
    """Returns what tells a sequence's images from others; empty without any."""
    if images is None:
        return b""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(images):
        found.update(f"{name}{images[name].dtype}{images[name].shape}".encode())
        found.update(np.ascontiguousarray(images[name]).data)
    return found.digest()


def joined(parts: Sequence[Images | None]) -> Images | None:
    """Returns the images of several sequences, or of several turns of one, as those of one; None without any."""
    given = [part for part in parts if part is not None]
    if len(given) < 2:
        return given[0] if given else None
    return {name: np.concatenate([part[name] for part in given]) for name in given[0]}


class VisionFormat:
    """How a model's image processor turns images into tensors, and how many placeholder tokens stand for each.

    Args:
        processor: the model's, of the family Qwen-VL: its arrays are `pixel_values` and `image_grid_thw`.
        placeholder: id of the token that stands for a part of an image.
        others: ids of further tokens that a model must not be given without what they stand for, such as a video's.
    """

    def __init__(self, processor: BaseImageProcessor, placeholder: int, others: Sequence[int] = ()) -> None:
        self.processor = processor
        self.placeholder = placeholder
        self.ends = (placeholder, *others)

    def tensors(self, images: Sequence[Any]) -> Images:
        """Returns the tensors of images.

        Raises:
            ImageError: one cannot be read, or is of a shape that the processor refuses.
        """
        opened = [open_image(image) for image in images]
        try:
            made = self.processor(images=opened, return_tensors="np")
        except ValueError as error:
            sizes = ", ".join(f"{image.width}x{image.height}" for image in opened)
            raise ImageError(f"the model's image processor refuses an image of {sizes}: {error}") from error
        return {name: np.asarray(values) for name, values in made.items()}

    def expanded(self, ids: np.ndarray, images: Images | None) -> np.ndarray:
        """Returns ids `[T]` with one placeholder an image, with as many as each image takes.

        Raises:
            ImageError: there are more placeholders than images, or fewer.
        """
        places = ids == self.placeholder
        counts = image_tokens(images, self.processor.merge_size)
        if places.sum() != len(counts):
            raise ImageError(
                f"the chat has {len(counts)} images, and places for {int(places.sum())} as the template writes it",
                hint="a text must not hold the model's image token, and the template must show every image once",
            )
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[places] = counts
        return np.repeat(ids, repeats)


def image_tokens(images: Images | None, merge: int) -> np.ndarray:
    """Returns how many placeholder tokens each image of a sequence takes, int64 `[images]`.

    Args:
        images: the sequence's.
        merge: patches along each side that the model makes one vector of.
    """
    return np.zeros(0, np.int64) if images is None else images["image_grid_thw"].prod(axis=1) // merge**2
