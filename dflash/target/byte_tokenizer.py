"""A byte-level tokenizer: token i is byte i of the UTF-8 text, and nothing is ever unknown.

The one exception: ``<|endoftext|>`` in a text is the end-of-text token.

Covers writing one that ``AutoTokenizer.from_pretrained(folder)`` reads without network. Not
covered: merges (there are none) and chat markers.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 256
# Embedding rows of the tiny target: 256 bytes, the end of text, and seven rows that no text uses;
# the first of them is the drafter's mask token.
EMBEDDING_ROWS = 264


def byte_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """A tokenizer of 257 tokens: the byte values, then ``<|endoftext|>`` (id 256, the EOS)."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )


def save_byte_tokenizer(folder: Path, max_tokens: int) -> None:
    """Writes the tokenizer's files into ``folder``; ``max_tokens`` is the model's row limit."""
    byte_tokenizer(max_tokens).save_pretrained(folder)


def _byte_characters() -> list[str]:
    """The character that ``tokenizers`` writes for each byte, by byte value.

    Bytes that print in Latin-1 are written as themselves, the others as U+0100, U+0101, ...
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]
