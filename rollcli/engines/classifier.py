"""A sequence classifier that scores conversations: a reward model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rollcli.config.schema import ModelConfig
from rollcli.data.templates import as_text, render, template_text
from rollcli.engines import loading
from rollcli.errors import ConfigError
from rollcli.runs.locations import resolve_model

MOST_TOKENS = 16384
"""Of one forward pass, padding included; a longer conversation has one of its own."""
NO_LIMIT = 2**31 - 1


class Classifier:
    """The model with its tokenizer.

    Args:
        config: path, precision and chat template; `plain` joins the messages by line breaks and puts the tokenizer's
            own special tokens around them, for classifiers without a template.
        device: where it computes.
        seed: of random weights, where the configuration asks for such.

    Raises:
        ModelNotFound, EngineError: it does not load; see `loading.load_classifier`.
        ConfigError: it has no chat template.
    """

    def __init__(self, config: ModelConfig, device: torch.device, seed: int) -> None:
        path = resolve_model(config.path)
        options = {"dtype": config.dtype, "device": device, "attention": config.attention}
        if config.initialize is not None:
            self.model = loading.initialize(config.initialize, seed=seed, classifier=True, **options)
        else:
            self.model = loading.load_classifier(path, revision=config.revision, **options)
        self.tokenizer = loading.load_tokenizer(path, config.revision)
        # A template writes every special token; plain text has none.
        self._bare = config.chat_template == "plain"
        if config.chat_template is not None:
            self.tokenizer.chat_template = template_text(config.chat_template)
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer of the classifier `{config.path}` has no chat template",
                hint="set the reward model's `model.chat_template` to a Jinja file, or to `plain`",
            )
        text = self.model.config.get_text_config()
        self.max_context = min(
            getattr(text, "max_position_embeddings", None) or NO_LIMIT, self.tokenizer.model_max_length or NO_LIMIT
        )
        self._padding = text.pad_token_id

    def tokens(self, messages: Sequence[dict[str, Any]]) -> np.ndarray:
        """Returns the ids of a finished conversation, int32 `[T]`, whatever its length.

        Raises:
            ConfigError: the chat template does not take it.
        """
        text = render(self.tokenizer, as_text(messages, self.tokenizer))
        encoded = self.tokenizer(text, add_special_tokens=self._bare, truncation=False)
        return np.array(encoded["input_ids"], dtype=np.int32)

    @torch.inference_mode()
    def logits(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the logits of every label for each conversation's ids, float32 `[N, labels]`."""
        found = np.zeros((len(rows), self.model.config.num_labels), dtype=np.float32)
        for part in _parts([len(row) for row in rows]):
            found[part] = self._pass([rows[number] for number in part])
        return found

    def _pass(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """One forward pass, padded on the right; a decoder's score is at the last token that is no padding."""
        padding, text = self._padding, self.model.config.get_text_config()
        if padding is None and len(rows) == 1:
            text.pad_token_id, padding = None, 0
        elif padding is None:
            # transformers finds a row's end by the padding token's number: one that the rows do not have.
            used = {int(token) for row in rows for token in row}
            padding = next((number for number in range(text.vocab_size) if number not in used), None)
            if padding is None:
                return np.concatenate([self._pass([row]) for row in rows])
            text.pad_token_id = padding
        width = max(map(len, rows))
        ids, mask = np.full((len(rows), width), padding, np.int64), np.zeros((len(rows), width), np.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)], mask[number, : len(row)] = row, 1
        device = self.model.device
        out = self.model(
            input_ids=torch.from_numpy(ids).to(device), attention_mask=torch.from_numpy(mask).to(device)
        )  # fmt: skip
        return out.logits.float().cpu().numpy()


def _parts(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields the numbers of rows that go into one pass, of similar length, so that little is padding."""
    part: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if part and lengths[number] * (len(part) + 1) > MOST_TOKENS:
            yield part
            part = []
        part.append(number)
    if part:
        yield part
