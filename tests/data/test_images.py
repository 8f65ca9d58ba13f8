"""Images in chats: how they are found, named, opened, and counted in tokens."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rollcli.data import images
from rollcli.data.images import VisionFormat
from rollcli.errors import ImageError

PIXELS = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)


def png(pixels: np.ndarray = PIXELS) -> bytes:
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def test_an_image_may_be_given_in_many_ways(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png())
    ways = [str(file), png(), {"bytes": png(), "path": None}, {"bytes": None, "path": str(file)}, PIXELS,
            Image.fromarray(PIXELS), Image.fromarray(PIXELS).convert("RGBA")]  # fmt: skip
    for way in ways:
        opened = images.open_image(way)
        assert opened.mode == "RGB" and np.array_equal(np.asarray(opened), PIXELS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.png", "image `nowhere.png` cannot be read"),
        (b"no image", "given as bytes cannot be read"),
        (png(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))[:500], "cannot be read"),
        (3, "given as int is no image"),
        ({"bytes": None, "path": None}, "is no image"),
        ("https://example.org/a.png", "is not a local file"),
    ],
)
def test_what_is_no_image(given: object, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        images.open_image(given)


def test_images_stand_where_the_text_marks_them() -> None:
    def shown(text: str, *given: str) -> str:
        parts = images.with_images(text, given)
        return " ".join(f"[{part['image']}]" if part["type"] == "image" else part["text"] for part in parts)

    assert shown("why?", "a", "b") == "[a] [b] why?"
    assert shown("<image>and<image>?", "a", "b") == "[a] and [b] ?"
    assert shown("see <image>", "a", "b") == "see  [a] [b]"
    assert shown("<image><image>", "a") == "[a] [None]"
    message = {"role": "user", "content": images.with_images("<image>and<image>?", ["a", "b"])}
    assert images.images_of([message, {"role": "user", "content": "text"}]) == ["a", "b"]
    assert images.text_of(message) == "<image>and<image>?" and images.text_of({"content": "text"}) == "text"


def test_records_hold_where_an_image_came_from_and_not_its_pixels() -> None:
    given = ["a.png", png(), Image.fromarray(PIXELS), {"bytes": png(), "path": "b.png"}]
    chat = [{"role": "user", "content": images.with_images("why?", given)}, {"role": "user", "content": "text"}]
    kept = json.loads(json.dumps(images.referring(chat)))
    assert kept[1] == chat[1]
    path, raw, pixels, both, text = kept[0]["content"]
    assert path["image"] == "a.png" and text["text"] == "why?"
    assert raw["image"] == both["image"] and raw["image"]["size"] == [len(png())]
    assert pixels["image"]["size"] == [8, 6, 3] and len(pixels["image"]["sha256"]) == 64


def test_identity_tells_images_apart() -> None:
    def message(image: object) -> dict:
        return {"role": "user", "content": images.with_images("why?", [image])}

    assert images.identity({"content": "text"}) == "text"
    assert images.identity(message(png())) == images.identity(message(png()))
    assert images.identity(message(png())) != images.identity(message(png(PIXELS[::-1])))


def test_digest_and_joining() -> None:
    first = {"pixel_values": np.zeros((4, 3)), "image_grid_thw": np.array([[1, 2, 2]])}
    other = {"pixel_values": np.ones((8, 3)), "image_grid_thw": np.array([[1, 2, 4]])}
    assert images.digest(None) == b"" != images.digest(first) != images.digest(other)
    assert images.digest(first) == images.digest({name: first[name].copy() for name in reversed(first)})
    assert images.joined([None, None]) is None and images.joined([None, first]) is first
    both = images.joined([first, None, other])
    assert both["pixel_values"].shape == (12, 3) and both["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]
    assert images.image_tokens(both, 2).tolist() == [1, 2] and images.image_tokens(None, 2).tolist() == []


class Processor:
    """Refuses thin images; makes a patch of every 2 x 2 pixels."""

    merge_size = 2

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, np.ndarray]:
        if any(image.width < 2 for image in images):
            raise ValueError("too thin")
        grids = np.array([[1, image.height // 2, image.width // 2] for image in images])
        return {"pixel_values": np.zeros((int(grids.prod(axis=1).sum()), 12)), "image_grid_thw": grids}


def test_each_image_takes_as_many_placeholders_as_it_has_vectors() -> None:
    format = VisionFormat(Processor(), placeholder=9, others=[8])
    made = format.tensors([PIXELS, np.zeros((4, 4, 3), np.uint8)])
    assert format.expanded(np.array([1, 9, 2, 9, 3]), made).tolist() == [1, 9, 9, 9, 2, 9, 3]
    assert format.expanded(np.array([1, 2]), None).tolist() == [1, 2] and format.ends == (9, 8)
    for ids in ([1, 9, 2], [9, 9, 9]):
        with pytest.raises(ImageError, match="the chat has 2 images, and places for"):
            format.expanded(np.array(ids), made)
    with pytest.raises(ImageError, match=r"refuses an image of 1x8: too thin"):
        format.tensors([PIXELS[:, :1]])
