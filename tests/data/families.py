"""Chat templates of well-known families, each cut to what an episode meets, on small tokenizers with their tokens.

What is kept of each: special tokens, line breaks, default system messages, trimming, how tool messages are shown, and
what becomes of thinking. Only calls written as `tool_calls` and documents are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollcli.config.schema import ModelConfig
from rollcli.data.templates import ChatFormat
from rollcli.engines.models import load_chat_format

LLAMA3 = """{{- bos_token }}
{%- set told = messages[0].content | trim if messages[0].role == 'system' else '' %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n' + told + '<|eot_id|>' }}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

_TOOLS = """{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"""

QWEN25 = (
    """{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        """
    + _TOOLS
    + """
    {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)

SMOLLM2 = """{%- for m in messages %}
    {%- if loop.first and messages[0].role != 'system' %}
        {{- '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

QWEN3 = (
    """{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for m in messages[::-1] %}
    {%- if ns.searching and m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}{%- set ns.last_query = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content.split('</think>')[-1].lstrip('\n') %}
        {%- set thought = '' %}
        {%- if '</think>' in m.content %}
            {%- set thought = m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        """
    + _TOOLS
    + """
    {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)

DEEPSEEK_R1 = """{%- set ns = namespace(tool=false, first=true) %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- m.content }}{%- endif %}
    {%- if m.role == 'user' %}{%- set ns.tool = false %}{{- '<｜User｜>' + m.content }}{%- endif %}
    {%- if m.role == 'assistant' %}
        {{- '<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>' }}
        {{- m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
        {%- set ns.tool = false %}{%- set ns.first = true %}
    {%- endif %}
    {%- if m.role == 'tool' %}
        {%- set ns.tool = true %}
        {{- '<｜tool▁outputs▁begin｜>' if ns.first else '\n' }}{%- set ns.first = false %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}"""

MISTRAL = """{{- bos_token }}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
    {%- elif m.role == 'assistant' %}{{- m.content + '</s>' }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Family:
    """A template with its tokens: `ends` end a turn, the first of them the tokenizer's own."""

    template: str
    ends: tuple[str, ...]
    special: tuple[str, ...] = ()
    bos: str | None = None


FAMILIES = {
    "llama3": Family(
        LLAMA3,
        ("<|eot_id|>", "<|end_of_text|>"),
        ("<|start_header_id|>", "<|end_header_id|>"),
        "<|begin_of_text|>",
    ),
    "qwen2.5": Family(QWEN25, ("<|im_end|>", "<|endoftext|>"), ("<|im_start|>",)),
    "smollm2": Family(SMOLLM2, ("<|im_end|>",), ("<|im_start|>",)),
    "qwen3": Family(QWEN3, ("<|im_end|>", "<|endoftext|>"), ("<|im_start|>",)),
    "deepseek-r1": Family(
        DEEPSEEK_R1,
        ("<｜end▁of▁sentence｜>",),
        ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
         "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        "<｜begin▁of▁sentence｜>",
    ),
    "mistral": Family(MISTRAL, ("</s>",), (), "<s>"),
}  # fmt: skip
CORPUS = [
    "the answer is 42\n\n  so the answer is:\n",
    "<think>\nadd them\n</think>\n\nthe sum is 7",
    "seen 1\nseen 2\n",
]


@cache
def chat_format(name: str) -> ChatFormat:
    """Returns the format of a family, or of a model that ships or is installed (`embedded:…`)."""
    if name.startswith("embedded:"):
        return load_chat_format(ModelConfig(name))
    family = FAMILIES[name]
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    tokens = [*family.ends, *family.special, *([family.bos] if family.bos else [])]
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=family.ends[0], bos_token=family.bos, extra_special_tokens=tokens
    )
    made.chat_template = family.template
    return ChatFormat(made, stop_token_ids=[made.convert_tokens_to_ids(token) for token in family.ends])
