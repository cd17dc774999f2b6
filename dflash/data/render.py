"""Rendering: a sample as token ids and a mask of the tokens that are learnt.

Covers text, and conversations through the tokenizer's own chat template. Assistant turns are
found by the template's generation markers or, without any, by rendering prefixes of the
conversation; what is found is verified, never guessed. Not covered: masking of reasoning inside
a turn; letting the target write the answers anew, which is `dflash.regenerate`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import torch
from jinja2 import TemplateError
from torch import Tensor

from dflash.data.errors import DataError
from dflash.data.sources import BadLine, Message, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Supervise = Literal["assistant", "last_turn", "all"]

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The template's own words, and what its filters raise over values that it did not expect.
_REFUSALS = (TemplateError, TypeError, ValueError, AttributeError, LookupError)
_STAND_IN = "dflash-stand-in-answer"


@dataclass(frozen=True, eq=False)
class Document:
    """One tokenised sample.

    input_ids: [T] int32. loss_mask: [T] bool. where: "file:line".
    """

    input_ids: Tensor
    loss_mask: Tensor
    where: str


def render_sample(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, supervise: Supervise = "assistant"
) -> Document | BadLine:
    """Token ids and loss mask of one sample; a BadLine if the chat template refuses it.

    Token ids: all after the prompt are supervised. Text: all tokens are supervised, and one EOS
    follows if the tokenizer has one. Conversation:
    supervise "assistant" = every run of assistant messages, from the first token after the
    generation prompt to the end token of the turn; "last_turn" = the last such run (with
    generation markers: the last marked stretch); "all" = every token. An assistant message that
    opens a conversation answers nothing: it is supervised only where the template marks it.
    A conversation without an assistant message has nothing to learn (but under "all"); it ends
    with the generation prompt, so that an answer can go on from it.

    Raises DataError if the tokenizer has no chat template for a conversation, has no offsets
    while they are needed, or its template does not let the assistant turns be found.
    """
    if sample.token_ids is not None:
        beyond = [token for token in sample.token_ids if token >= len(tokenizer)]
        if beyond:
            said = f"token {beyond[0]} is none of the tokenizer's {len(tokenizer)}"
            return BadLine(sample.where, f"{said}; the record is of another model")
        size, prompt = len(sample.token_ids), sample.prompt_length
        return _document(sample.token_ids, [place >= prompt for place in range(size)], sample.where)
    if sample.text is not None:
        ids = tokenizer(sample.text, verbose=False)["input_ids"]
        eos = tokenizer.eos_token_id
        if eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos]
        return _document(ids, [True] * len(ids), sample.where)
    messages = list(sample.messages or ())
    if not tokenizer.chat_template:
        raise DataError(
            f"{sample.where}: a conversation, but the tokenizer has no chat template; "
            "use a chat model's tokenizer or set data.format=text"
        )
    try:
        return _chat(messages, tokenizer, supervise, sample.where)
    except DataError:
        raise
    except _REFUSALS as error:
        said = " ".join(str(error).split())
        return BadLine(sample.where, f"the chat template refuses it ({said})")


def _chat(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, supervise: Supervise, where: str
) -> Document:
    if supervise != "all" and not tokenizer.is_fast:
        raise DataError(
            f"{where}: the loss mask needs a fast tokenizer, this one has no offsets; "
            "convert the tokenizer or set data.supervise=all"
        )
    unanswered = supervise != "all" and all(m["role"] != "assistant" for m in messages)
    if supervise != "all" and _MARKER.search(tokenizer.get_chat_template()):
        out = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=unanswered,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        mask = [bool(value) for value in out["assistant_masks"]]
        return _document(out["input_ids"], _last_run(mask, supervise), where)

    text = _render(messages, tokenizer, prompt=unanswered)
    out = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=supervise != "all",
        verbose=False,
    )
    if supervise == "all":
        return _document(out["input_ids"], [True] * len(out["input_ids"]), where)
    spans = _turns(messages, supervise)
    found = [_turn_span(text, messages, first, last, tokenizer, where) for first, last in spans]
    mask = [
        any(begin <= left < end for begin, end in found) and left < right
        for left, right in out["offset_mapping"]
    ]
    return _document(out["input_ids"], mask, where)


def _document(ids: Sequence[int], mask: Sequence[bool], where: str) -> Document:
    return Document(
        torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.bool), where
    )


def _last_run(mask: list[bool], supervise: Supervise) -> list[bool]:
    if supervise != "last_turn" or True not in mask:
        return mask
    end = len(mask) - mask[::-1].index(True)
    begin = end - mask[:end][::-1].index(False) if False in mask[:end] else 0
    return [begin <= place < end for place in range(len(mask))]


def _turns(messages: list[Message], supervise: Supervise) -> list[tuple[int, int]]:
    """(first, last) message of every run of assistant messages that answers something."""
    runs = groupby(range(len(messages)), key=lambda place: messages[place]["role"])
    places = [list(run) for role, run in runs if role == "assistant"]
    turns = [(run[0], run[-1]) for run in places if run[0] > 0]
    return turns[-1:] if supervise == "last_turn" else turns


def _turn_span(
    text: str,
    messages: list[Message],
    first: int,
    last: int,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
) -> tuple[int, int]:
    """Characters [begin, end) of one assistant turn in `text`, the whole conversation.

    The turn begins where the conversation before it, rendered with the generation prompt, ends.
    Where it ends is told by a stand-in for its last message: what follows the stand-in in the
    conversation that stops there is the turn's closing. (That the conversation up to the turn
    renders to a prefix is not asked for: templates that drop the reasoning of earlier turns,
    such as Qwen3's, break it.)
    """
    befores = (_render(messages[:first], tokenizer, prompt=prompt) for prompt in (True, False))
    begin = next((len(before) for before in befores if text.startswith(before)), None)
    stand_in: Message = {"role": "assistant", "content": _STAND_IN}
    stopped = _render([*messages[:last], stand_in], tokenizer)
    swapped = _render([*messages[:last], stand_in, *messages[last + 1 :]], tokenizer)
    _, met, closing = stopped.rpartition(_STAND_IN)
    _, met_too, rest = swapped.rpartition(_STAND_IN)
    if begin is None or not met or not met_too or not rest.startswith(closing):
        raise _not_found(where, first)
    if not text.endswith(rest) or len(text) - len(rest) < begin:
        raise _not_found(where, first)
    eos = tokenizer.eos_token
    if eos and eos in closing:  # the target stops here; what follows is the template's
        closing = closing[: closing.index(eos) + len(eos)]
    return begin, len(text) - len(rest) + len(closing)


def _not_found(where: str, first: int) -> DataError:
    return DataError(
        f"{where}: the chat template changes what stands before message {first + 1} when that "
        "message is added, so assistant turns cannot be found; add {% generation %} markers to "
        "the template or set data.supervise=all"
    )


def _render(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False
) -> str:
    rendered: Any = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt
    )
    return str(rendered)
