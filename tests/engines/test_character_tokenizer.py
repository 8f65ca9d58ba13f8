import json
from pathlib import Path

import rollcli
from rollcli.engines.character_tokenizer import CHARACTERS, character_tokenizer
from rollcli.engines.loading import load_tokenizer

EMBEDDED = Path(rollcli.__file__).parent / "assets" / "sums"


def test_embedded_files_are_what_the_builder_writes(tmp_path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    built, shipped = (json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, EMBEDDED))
    assert built == shipped
    assert (tmp_path / "chat_template.jinja").read_text() == (EMBEDDED / "chat_template.jinja").read_text()


def test_text_comes_back_exactly() -> None:
    tokenizer = load_tokenizer(str(EMBEDDED))
    for text in ("347 + 285", "  a  b\n\n##  #### 632 ", "don't , stop . I 'm", "".join(CHARACTERS)):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text


def test_chat_template() -> None:
    tokenizer = load_tokenizer(str(EMBEDDED))
    chat = [{"role": "user", "content": "347 + 285"}]
    opened = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert opened == "<|user|>347 + 285<|end|><|assistant|>"
    assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token != tokenizer.eos_token
