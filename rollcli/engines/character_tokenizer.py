"""The embedded model's tokenizer: one token a character, and five special tokens for the chat.

python -m rollcli.engines.character_tokenizer FOLDER
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CHARACTERS = ("\n", *map(chr, range(32, 127)))
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the tokenizer: line break and printable ASCII, decoded to exactly the text that was encoded."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
        padding_side="left",
    )


if __name__ == "__main__":
    character_tokenizer().save_pretrained(sys.argv[1])
