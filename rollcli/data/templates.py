"""From chat messages to token ids, by the model's own chat template and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from rollcli.data.carriers import Message
from rollcli.data.images import Images, VisionFormat, images_of, text_of
from rollcli.errors import ConfigError, EpisodeError, ImageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}"

_TURN = "TheTurnOfTheModel"
"""Stands for the model's turn where a template is asked what follows one: templates trim and rewrite real answers."""
_EARLIER = "AnEarlierTurnOfTheModel"


class ChatFormat:
    """A tokenizer with its chat template: prompts in, token ids out; sampled ids in, text out.

    Args:
        tokenizer: the model's tokenizer.
        template: Jinja text or a path to it that replaces the tokenizer's own template; `plain` joins the messages by
            line breaks, for base models.
        stop_token_ids: ids that end a turn beside the tokenizer's end-of-sequence token.
        vision: how images are shown to the model; None for a model that sees none.

    Raises:
        ConfigError: neither the tokenizer nor the recipe has a chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, stop_token_ids: Sequence[int] = (),
        vision: VisionFormat | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.vision = vision
        self.tools: list[Mapping[str, Any]] | None = None
        if template is not None:
            tokenizer.chat_template = template_text(template)
        if tokenizer.chat_template is None:
            raise ConfigError(
                "the model's tokenizer has no chat template",
                hint="set `model.chat_template` to a Jinja file, or to `plain` for a base model",
            )
        ends = [tokenizer.eos_token_id, *stop_token_ids]
        if all(token is None for token in ends):
            raise ConfigError(
                "the model's tokenizer has no end-of-sequence token: an answer could never end",
                hint="set `eos_token` in the model's tokenizer_config.json",
            )
        self.stop_token_ids = tuple(sorted({int(token) for token in ends if token is not None}))

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Ids that stand for an image or a video and end a turn where the model samples one."""
        return () if self.vision is None else self.vision.ends

    def with_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatFormat:
        """Returns the same format with functions, as JSON schemas, that the template tells the model of.

        Raises:
            EpisodeError: the template has no place for them.
        """
        if not tools:
            return self
        other = copy.copy(self)
        other.tools = list(tools)
        probe = [{"role": "user", "content": ""}]
        if other._render(probe, True) == self._render(probe, True):
            raise EpisodeError(
                "the model's chat template has no place for tools",
                hint="describe them in the prompt, or set `model.chat_template` to one that shows `tools`",
            )
        return other

    def images(self, messages: Sequence[Message]) -> Images | None:
        """Returns the tensors of a chat's images; None where it has none.

        Raises:
            ImageError: one cannot be read, or the model sees no images.
        """
        images = images_of(messages)
        if not images:
            return None
        if self.vision is None:
            raise ImageError(
                f"the chat has {len(images)} images, and the model sees none",
                hint="use a vision-language model with its `preprocessor_config.json`, or a source without images",
            )
        if any(image is None for image in images):
            given = sum(image is not None for image in images)
            raise ImageError(f"the problem has places for {len(images)} images, and {given} images")
        return self.vision.tensors(images)

    def prompt(self, messages: Sequence[Message], images: Images | None = None) -> np.ndarray:
        """Returns the ids of a chat that the model is to continue, int32 `[T]`; never truncated.

        Args:
            messages: the chat.
            images: what `images` returned for it, where that is known.

        Raises:
            ImageError: the chat's images cannot be shown.
        """
        ids = self._ids(messages, add_generation_prompt=True)
        return self._expanded(ids, self.images(messages) if images is None else images)

    def demonstration(
        self, messages: Sequence[Message], response: str, every_turn: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a whole chat, int32 `[T]`, and the mask of the answer with its end token, bool `[T]`.

        Args:
            messages: the chat that `response` answers.
            response: the demonstrated answer.
            every_turn: the mask holds the model's earlier turns as well.

        Raises:
            EpisodeError: the template renders the opened chat differently from the finished one, or earlier turns
                differently once the chat goes on, so that no mask is exact.
        """
        whole, mask = self._demonstrated(messages, response)
        for place, message in enumerate(messages if every_turn else ()):
            if message["role"] == "assistant":
                ids, answered = self._demonstrated(messages[:place], text_of(message))
                if not np.array_equal(whole[: len(ids)], ids):
                    raise EpisodeError("the chat template rewrites earlier turns when the chat goes on")
                mask[: len(ids)] |= answered
        return whole, mask

    def _demonstrated(self, messages: Sequence[Message], response: str) -> tuple[np.ndarray, np.ndarray]:
        prompt = self._ids(messages, add_generation_prompt=True)
        whole = self._ids([*messages, {"role": "assistant", "content": response}], add_generation_prompt=False)
        if len(whole) <= len(prompt) or not np.array_equal(whole[: len(prompt)], prompt):
            raise EpisodeError("the chat template's opened chat is not a prefix of the finished one")
        ends = np.flatnonzero(np.isin(whole[len(prompt) :], self.stop_token_ids))
        if len(ends):
            whole = whole[: len(prompt) + ends[-1] + 1]
        else:
            end = self.tokenizer.eos_token_id
            whole = np.append(whole, np.int32(self.stop_token_ids[0] if end is None else end))
        answer = len(whole) - len(prompt)
        whole = self._expanded(whole, self.images(messages))
        return whole, np.arange(len(whole)) >= len(whole) - answer

    def between(
        self, messages: Sequence[Message], observed: Sequence[Message], images: Images | None = None, ended: bool = True
    ) -> np.ndarray:
        """Returns the ids between the model's turn, which answers `messages`, and its next one, int32 `[T]`.

        They are what the template puts after the turn's end token, so that the sampled ids stay as sampled, thinking
        included that the template would take out of earlier turns; with the end token where the turn was `ended` by
        something else, such as a stop word. A template that gives turns no end token has all that follows the turn's
        text here. `images` are those of `observed`.

        Raises:
            EpisodeError: the template rewrites what came before, so that no such ids exist.
        """
        # What the model said before is no concern of what follows now: templates take thinking out of earlier turns.
        earlier = [{**each, "content": _EARLIER} if each["role"] == "assistant" else each for each in messages]
        chat = [*earlier, {"role": "assistant", "content": _TURN}]
        before = self._render(earlier, add_generation_prompt=True)
        closing = self._render(chat, add_generation_prompt=False).rpartition(_TURN)[2]
        opened = self._render([*chat, *observed], add_generation_prompt=True)
        # The opened turn may go on where a finished one has its text: DeepSeek-R1's opens with `<think>`.
        start = opened.rfind(_TURN, 0, len(before) + len(_TURN))
        cut = start + len(_TURN)
        if start < 0 or not before.startswith(opened[:start]) or not opened[cut:].startswith(closing):
            raise EpisodeError("the chat template rewrites earlier turns when the chat goes on")
        if ended:
            ends = [self.tokenizer.decode([token]) for token in self.stop_token_ids]
            cut += min((closing.index(end) + len(end) for end in ends if end in closing), default=0)
        # Encoded in place: some tokenizers put a space before whatever text comes first.
        head, whole = self._encode(opened[:cut]), self._encode(opened)
        ids = whole[len(head) :] if np.array_equal(whole[: len(head)], head) else self._encode(opened[cut:])
        return self._expanded(ids, self.images(observed) if images is None else images)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template shows messages of the role `tool`; else they are shown as the user's."""
        chat = [("user", "a"), ("assistant", "b"), ("tool", _TURN)]
        try:
            return _TURN in self._apply([{"role": role, "content": text} for role, text in chat], True)
        except (TemplateError, TypeError, LookupError, ValueError):  # how templates refuse a role, or want more of it
            return False

    def text(self, ids: np.ndarray) -> str:
        """Returns sampled ids as text, special tokens left out."""
        return self.tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

    def raw_text(self, ids: np.ndarray) -> str:
        """Returns ids as text with every special token visible."""
        return self.tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def _ids(self, messages: Sequence[Message], add_generation_prompt: bool) -> np.ndarray:
        return self._encode(self._render(messages, add_generation_prompt))

    def _expanded(self, ids: np.ndarray, images: Images | None) -> np.ndarray:
        return ids if self.vision is None else self.vision.expanded(ids, images)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        if any(message.get("role") == "tool" for message in messages) and not self.shows_tools:
            messages = [{**each, "role": "user"} if each["role"] == "tool" else each for each in messages]
        return self._apply(messages, add_generation_prompt)

    def _apply(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        tools = {"tools": self.tools} if self.tools else {}
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **tools
        )

    def _encode(self, text: str) -> np.ndarray:
        # The template's text already holds every special token the model wants.
        encoded = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        return np.array(encoded["input_ids"], dtype=np.int32)


def as_text(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[Message]:
    """Returns messages with their text alone, special tokens spelled out in it taken apart by a space.

    Text that a model wrote and another reads must not end its turn there, or open one of another role.
    """
    special = sorted({text for text in tokenizer.all_special_tokens if text} | _added(tokenizer), key=len, reverse=True)
    taken: list[Message] = []
    for message in messages:
        text = text_of(message) if message["content"] is not None else ""
        for token in special:
            text = text.replace(token, f"{token[0]} {token[1:]}" if len(token) > 1 else " ")
        taken.append({**message, "content": text})
    return taken


def _added(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    return {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """Returns a finished chat as its template writes it.

    Raises:
        ConfigError: the template does not take it, for its roles for example.
    """
    import jinja2

    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=False)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ConfigError(f"the chat template does not take the conversation: {str(error)[:200]}") from error


def template_text(template: str) -> str:
    """Returns the Jinja text that `model.chat_template` stands for: `plain`, a text, or a file's path.

    Raises:
        ConfigError: the file cannot be read.
    """
    if template == "plain":
        return PLAIN
    if "{" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"`model.chat_template`: cannot read `{template}`: {error.strerror}", hint="give the path of a Jinja file"
        ) from error
