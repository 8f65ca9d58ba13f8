"""Chats as token ids: the template's own ids, exact masks, and turns that join without a token lost or doubled."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rollcli.data.templates import ChatFormat
from rollcli.errors import ConfigError, EpisodeError, ImageError
from tests.engines import vision_model as small

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = CHATML.replace("m.content", "m.content | trim")
LLAMA3 = (
    "<s>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# As Qwen3's: earlier answers lose their thinking, and the last answer shows an empty one.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{{ m.content.split('</think>')[-1] }}"
    "{% elif m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
WORDS = ["he", "ll", "hell", "Ġw", "Ċ", "ĊĊ"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("Ċ", "Ċ")]
SYSTEM = {"role": "system", "content": "Be brief."}


def tokenizer(template: str | None, eos: str, pad: str = "<pad>") -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *letters, *WORDS])}
    bpe = Tokenizer(models.BPE(vocabulary, MERGES))
    # Line breaks are pieces of their own whatever follows, as in Llama 3 and Qwen.
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos, pad_token=pad, extra_special_tokens=SPECIAL)
    made.chat_template = template
    return made


def chatml(**options) -> ChatFormat:
    return ChatFormat(tokenizer(CHATML, "<|im_end|>", **options))


def llama3() -> ChatFormat:
    return ChatFormat(tokenizer(LLAMA3, "<|eot_id|>"))


def stories() -> ChatFormat:
    root = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
    if not (root / "stories260K").exists():
        pytest.skip(f"no test data `stories260K` in {root}")
    return ChatFormat(AutoTokenizer.from_pretrained(root / "stories260K" / "hf"), "plain")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def own_ids(chat: ChatFormat, messages: list, opened: bool) -> list[int]:
    encoded = chat.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=opened)
    return list(encoded if isinstance(encoded, list) else encoded["input_ids"])


@pytest.mark.parametrize("make", [chatml, llama3, stories, lambda: ChatFormat(tokenizer(None, "<s>"), "plain")])
@pytest.mark.parametrize("messages", [[user("hello w")], [SYSTEM, user("a\n\nb"), assistant("hell"), user("  c  ")]])
def test_prompt_is_the_tokenizers_own(make, messages: list) -> None:
    chat = make()
    ids = chat.prompt(messages)
    assert ids.dtype == np.int32 and ids.tolist() == own_ids(chat, messages, opened=True)


def test_prompt_is_never_truncated_or_padded() -> None:
    chat = chatml()
    chat.tokenizer.model_max_length = 16
    chat.tokenizer.backend_tokenizer.enable_truncation(8, direction="left")
    chat.tokenizer.backend_tokenizer.enable_padding(length=4000)
    long = "hello " * 300
    shown = chat.raw_text(chat.prompt([user(long)]))
    assert shown == f"<|im_start|>user\n{long}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("pad", ["<pad>", "<|im_end|>"])
def test_demonstration_mask_covers_the_answer_and_its_end_token(pad: str) -> None:
    chat = chatml(pad=pad)
    ids, mask = chat.demonstration([SYSTEM, user("1+1?")], "hello w 2")
    assert chat.raw_text(ids[mask]) == "hello w 2<|im_end|>"
    assert chat.raw_text(ids[~mask]) == chat.raw_text(chat.prompt([SYSTEM, user("1+1?")]))
    assert ids[-1] == chat.tokenizer.eos_token_id and mask[-1]
    whole = own_ids(chat, [SYSTEM, user("1+1?"), assistant("hello w 2")], opened=False)
    assert ids.tolist() == whole[: len(ids)]


def test_every_turn_of_a_demonstration_may_be_learned() -> None:
    chat = chatml()
    talk = [SYSTEM, user("1+1?"), assistant("hello w 2"), user("and?"), assistant(" 3 "), user("so?")]
    ids, mask = chat.demonstration(talk, "w", every_turn=True)
    same, last = chat.demonstration(talk, "w")
    assert np.array_equal(ids, same) and chat.raw_text(ids[last]) == "w<|im_end|>"
    assert chat.raw_text(ids[mask]) == "hello w 2<|im_end|> 3 <|im_end|>w<|im_end|>"
    with pytest.raises(EpisodeError, match="rewrites earlier turns"):
        ChatFormat(tokenizer(THINKING, "<|im_end|>")).demonstration(
            [user("a"), assistant("x</think>b"), user("c")], "d", every_turn=True
        )


def test_demonstration_without_an_end_token_gets_the_tokenizers_own() -> None:
    chat = ChatFormat(tokenizer(None, "<|eot_id|>"), "plain", stop_token_ids=[1, 3])
    ids, mask = chat.demonstration([user("1+1?")], "2")
    assert chat.raw_text(ids) == "1+1?\n2\n<|eot_id|>" and chat.raw_text(ids[mask]) == "2\n<|eot_id|>"
    assert chat.stop_token_ids == (1, 3, 6)


def test_demonstration_whose_prompt_is_no_prefix_is_refused() -> None:
    with pytest.raises(EpisodeError, match="not a prefix"):
        ChatFormat(tokenizer(THINKING + "", "<|im_end|>")).demonstration([user("a"), assistant("x</think>b")], "")
    turned = "{% for m in messages | reverse %}{{ m.content }}{% endfor %}"
    with pytest.raises(EpisodeError, match="not a prefix"):
        ChatFormat(tokenizer(turned, "<s>")).demonstration([user("a")], "b")


def play(chat: ChatFormat, responses: list[str], observed: list[str], end: list[int]) -> tuple[list[int], list[dict]]:
    """Ids of an episode put together as the recorder does, and its chat up to the last observation."""
    messages = [SYSTEM, user("start")]
    ids = chat.prompt(messages).tolist()
    for response, text in zip(responses, observed, strict=True):
        ids += [*chat.tokenizer(response, add_special_tokens=False)["input_ids"], *end]
        ids += chat.between(messages, [user(text)]).tolist()
        messages = [*messages, assistant(response), user(text)]
    return ids, messages


@pytest.mark.parametrize("observed", [["go on", "\n\nhello w", "end"], ["<|im_end|> literally", " ", "a"]])
@pytest.mark.parametrize("make", [chatml, llama3])
def test_three_turns_are_the_template_of_the_whole_chat(make, observed: list[str]) -> None:
    chat = make()
    ids, messages = play(chat, ["hello w", "two\n\nlines", "3"], observed, [chat.tokenizer.eos_token_id])
    assert ids == own_ids(chat, messages, opened=True)


def test_three_turns_of_the_plain_template() -> None:
    """It has no end token, so what follows the text of a turn is a line break."""
    chat = ChatFormat(tokenizer(None, "<s>"), "plain")
    ids, messages = play(chat, ["hello w", "two\n\nlines", "3"], ["go on", "hello", "end"], [])
    assert ids == own_ids(chat, messages, opened=True)


def test_a_tokenizer_that_puts_a_space_before_text_puts_none_within_the_chat() -> None:
    chat = stories()
    line, space = chat.tokenizer.convert_tokens_to_ids("<0x0A>"), chat.tokenizer.convert_tokens_to_ids("▁")
    between = chat.between([user("Once")], [user("a cat")])
    assert between[0] == line and space not in between
    assert between.tolist() == chat.prompt([user("upon"), user("a cat")]).tolist()[-len(between) :]


@pytest.mark.parametrize("response", ["", "  padded \n", "hell <|im_start|>", "</think>", "<|im_end|>"])
def test_what_follows_a_turn_does_not_depend_on_its_text(response: str) -> None:
    """An empty answer, one the template trims, and one that repeats the template's words keep the line break."""
    for template in (CHATML, TRIMMED, THINKING):
        chat = ChatFormat(tokenizer(template, "<|im_end|>"))
        ids, _ = play(chat, [response], ["go on"], [chat.tokenizer.eos_token_id])
        assert chat.raw_text(np.array(ids)).endswith(
            f"<|im_start|>assistant\n{response}<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
        )


def test_a_second_stop_token_ends_turns_too() -> None:
    chat = ChatFormat(tokenizer(CHATML, "<s>"), stop_token_ids=[3])
    assert chat.stop_token_ids == (1, 3)
    assert chat.raw_text(chat.between([user("a")], [user("b")])).startswith("\n<|im_start|>user")


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    counting = "{{ messages | length }}:{% for m in messages %}{{ m.content }}<s>{% endfor %}"
    with pytest.raises(EpisodeError, match="rewrites"):
        ChatFormat(tokenizer(counting, "<s>")).between([user("a")], [user("b")])
    dropping = "{% for m in messages if m.role == 'user' %}{{ m.content }}<s>{% endfor %}"
    with pytest.raises(EpisodeError, match="rewrites"):
        ChatFormat(tokenizer(dropping, "<s>")).between([user("a")], [user("b")])


def test_sampled_ids_are_not_tokenized_again() -> None:
    """`he` + `ll` as sampled reads `hell`, which encodes to one token: the episode keeps the two."""
    chat = chatml()
    he, ll, hell = (chat.tokenizer.convert_tokens_to_ids(piece) for piece in ("he", "ll", "hell"))
    sampled = np.array([he, ll, chat.tokenizer.eos_token_id])
    assert chat.text(sampled) == "hell" and chat.tokenizer("hell")["input_ids"] == [hell]
    between = chat.between([user("a")], [user("b")])
    assert not {he, ll, hell} & set(between.tolist())
    assert chat.raw_text(sampled) == "hell<|im_end|>"


def test_template_from_text_and_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(CHATML)
    for template in (CHATML, str(path)):
        chat = ChatFormat(tokenizer(LLAMA3, "<|im_end|>"), template)
        assert chat.prompt([user("a")]).tolist() == chatml().prompt([user("a")]).tolist()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template") as caught:
        ChatFormat(tokenizer(None, "<s>"))
    assert "plain" in caught.value.hint
    with pytest.raises(ConfigError, match=r"cannot read `.*absent.jinja`: No such file"):
        ChatFormat(tokenizer(None, "<s>"), str(tmp_path / "absent.jinja"))
    endless = tokenizer(CHATML, "<s>")
    endless.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        ChatFormat(endless)
    assert ChatFormat(endless, stop_token_ids=[3]).stop_token_ids == (3,)


def test_sixteen_threads_share_a_tokenizer() -> None:
    """The Rust tokenizer is borrowed while its truncation changes, and a second borrower is refused."""
    chat = chatml()
    chat.tokenizer.backend_tokenizer.enable_truncation(8)
    expected = [chat.prompt([user(f"hello {n}")]).tolist() for n in range(16)]

    def encode(number: int) -> list[list[int]]:
        return [chat.prompt([user(f"hello {number}")]).tolist() for _ in range(100)]

    with ThreadPoolExecutor(16) as pool:
        for number, got in enumerate(pool.map(encode, range(16))):
            assert got == [expected[number]] * 100


PICTURE = {"type": "image", "image": np.zeros((8, 16, 3), np.uint8)}


def test_images_take_their_places_in_prompts_answers_and_later_turns() -> None:
    chat = small.chat_format()
    messages = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "which colour?"}]}]
    images = chat.images(messages)
    assert images["image_grid_thw"].tolist() == [[1, 2, 4]]
    opened = "<|user|><|vision|><|image|><|image|><|/vision|>which colour?<|end|><|assistant|>"
    assert chat.raw_text(chat.prompt(messages)) == opened
    assert np.array_equal(chat.prompt(messages, images), chat.prompt(messages))
    ids, mask = chat.demonstration(messages, "red")
    assert chat.raw_text(ids) == opened + "red<|end|>" and chat.raw_text(ids[mask]) == "red<|end|>"
    observed = [{"role": "user", "content": [{"type": "text", "text": "and now?"}, PICTURE]}]
    later = chat.between(messages, observed, chat.images(observed))
    assert chat.raw_text(later) == "<|user|>and now?<|vision|><|image|><|image|><|/vision|><|end|><|assistant|>"
    assert chat.images([{"role": "user", "content": "which?"}]) is None
    assert chat.forbidden == (small.SPECIAL.index("<|image|>"), small.SPECIAL.index("<|video|>"))


def test_images_that_cannot_be_shown() -> None:
    chat, messages = small.chat_format(), [{"role": "user", "content": [PICTURE]}]
    with pytest.raises(ImageError, match="the chat has 1 images, and the model sees none"):
        ChatFormat(small.tokenizer()).prompt(messages)
    with pytest.raises(ImageError, match="places for 2 images, and 1 images"):
        chat.prompt([{"role": "user", "content": [PICTURE, PICTURE | {"image": None}]}])
    with pytest.raises(ImageError, match="the chat has 0 images, and places for 1"):
        chat.prompt([{"role": "user", "content": "which <|image|>"}])
    assert ChatFormat(small.tokenizer()).forbidden == ()


TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_tools_stand_where_the_template_puts_them_and_turns_join() -> None:
    shown = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML
    plain = ChatFormat(tokenizer(shown, "<|im_end|>"))
    chat = plain.with_tools(TOOLS)
    messages, result = [{"role": "user", "content": "hell"}], [{"role": "tool", "content": "2"}]
    assert chat.raw_text(chat.prompt(messages)).startswith("<|im_start|>system\n[{")
    assert "system" not in plain.raw_text(plain.prompt(messages)) and plain.with_tools([]) is plain
    between = chat.raw_text(chat.between(messages, result))
    assert between == "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_without_a_place_for_tools_is_refused() -> None:
    with pytest.raises(EpisodeError, match="no place for tools"):
        ChatFormat(tokenizer(CHATML, "<|im_end|>")).with_tools(TOOLS)
