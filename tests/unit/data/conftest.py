"""A byte-level tokenizer of 258 tokens and three ways of writing a chat template for it."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

TEMPLATES = {
    "none": None,
    "plain": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}" + _PROMPT,
    "markers": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}" + _PROMPT,
    # As Qwen3's: only the last message shows its (empty) reasoning.
    "thinking": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + _PROMPT,
    # Tells the number of messages first: nothing is a prefix of anything.
    "counting": "{{ messages | length }}: {% for m in messages %}{{ m.role }} {{ m.content }}\n"
    "{% endfor %}" + _PROMPT,
    # As Gemma's: roles must alternate.
    "strict": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + _PROMPT,
}


def make_tokenizer(template: str = "plain", *, eos: bool = True) -> PreTrainedTokenizerFast:
    """One token per byte; <|im_end|> (EOS) and <|im_start|> on top."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        additional_special_tokens=["<|im_start|>"],
        **({"eos_token": "<|im_end|>"} if eos else {}),
    )
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


@pytest.fixture(scope="session", name="make_tokenizer")
def _make_tokenizer():
    return make_tokenizer
