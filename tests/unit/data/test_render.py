"""Rendering: token ids as the model sees them, and a mask of exactly what it would have said."""

from __future__ import annotations

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dflash.data import BadLine, DataError, Sample, render_sample

CHAT = [
    ("system", "be brief"),
    ("user", "hé?"),
    ("assistant", "oné"),
    ("user", "more"),
    ("assistant", "two\n"),
]


def chat(*turns):
    return Sample("f:1", messages=tuple({"role": r, "content": c} for r, c in turns or CHAT))


def learnt(document, tokenizer):
    """The supervised stretches of a document as strings."""
    runs, current = [], []
    ids, mask = document.input_ids.tolist(), document.loss_mask.tolist()
    for token, counts in zip([*ids, None], [*mask, False], strict=True):
        if counts:
            current.append(token)
        elif current:
            runs.append(spell(current, tokenizer))
            current = []
    return runs


def spell(ids, tokenizer):
    """Token ids as text; ordinary tokens are bytes in disguise."""
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return b"".join(t.encode() if len(t) > 1 else bytes([byte_of[t]]) for t in tokens).decode()


def test_all_tokens_of_a_text_are_learnt_and_eos_ends_it(make_tokenizer):
    tokenizer = make_tokenizer()
    document = render_sample(Sample("f:1", text="héy"), tokenizer)
    assert spell(document.input_ids.tolist(), tokenizer) == "héy<|im_end|>"
    assert document.loss_mask.all() and len(document.loss_mask) == 5
    assert document.where == "f:1"
    bare = render_sample(Sample("f:1", text="héy"), make_tokenizer(eos=False))
    assert len(bare.input_ids) == 4


@pytest.mark.parametrize("template", ["plain", "markers", "thinking", "strict"])
def test_assistant_turns_are_learnt_with_their_end_token_and_nothing_else(make_tokenizer, template):
    """Not the role header, which serving gives; not the template's newline after the end token."""
    tokenizer = make_tokenizer(template)
    turns = CHAT[1:] if template == "strict" else CHAT
    document = render_sample(chat(*turns), tokenizer)
    think = "<think>\n\n</think>\n\n" if template == "thinking" else ""
    assert learnt(document, tokenizer) == ["oné<|im_end|>", f"{think}two\n<|im_end|>"]
    whole = tokenizer.apply_chat_template(list(chat(*turns).messages), return_dict=False)
    assert document.input_ids.tolist() == whole


@pytest.mark.parametrize("template", ["plain", "markers"])
def test_last_turn_is_the_last_assistant_turn_only(make_tokenizer, template):
    """Also where a user has the last word, and where there is a single turn."""
    tokenizer = make_tokenizer(template)
    for turns, last in [(CHAT, "two\n"), ([*CHAT, ("user", "bye")], "two\n"), (CHAT[1:3], "oné")]:
        document = render_sample(chat(*turns), tokenizer, "last_turn")
        assert learnt(document, tokenizer) == [f"{last}<|im_end|>"]


def test_all_learns_the_questions_too(make_tokenizer):
    tokenizer = make_tokenizer("markers")
    everything = render_sample(chat(), tokenizer, "all")
    assert everything.loss_mask.all()
    assert everything.input_ids.equal(render_sample(chat(), tokenizer).input_ids)


def test_markers_and_rendered_prefixes_agree(make_tokenizer):
    """The two ways of finding a turn, on the same text."""
    marked = render_sample(chat(), make_tokenizer("markers"))
    found = render_sample(chat(), make_tokenizer("plain"))
    assert marked.input_ids.equal(found.input_ids)
    assert marked.loss_mask.equal(found.loss_mask)


def test_assistant_messages_in_a_row_are_one_turn(make_tokenizer):
    """A template may close the first only when the second is there; the run has one beginning."""
    tokenizer = make_tokenizer("thinking")
    document = render_sample(chat(("user", "q"), ("assistant", "a"), ("assistant", "b")), tokenizer)
    assert learnt(document, tokenizer) == [
        "a<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>"
    ]


def test_without_an_assistant_turn_nothing_is_learnt(make_tokenizer):
    """An opening assistant message answers nothing."""
    tokenizer = make_tokenizer()
    for turns in [[("user", "q")], [("assistant", "a"), ("user", "q")]]:
        for supervise in ("assistant", "last_turn"):
            assert not render_sample(chat(*turns), tokenizer, supervise).loss_mask.any()


def test_a_text_that_repeats_the_answer_does_not_move_the_mask(make_tokenizer):
    """Turns are found by place; the same words in the question or a later turn mislead nobody."""
    tokenizer = make_tokenizer()
    turns = [("user", "yes"), ("assistant", "yes"), ("user", "yes"), ("assistant", "yes")]
    document = render_sample(chat(*turns), tokenizer)
    text = spell(document.input_ids.tolist(), tokenizer)
    assert learnt(document, tokenizer) == ["yes<|im_end|>"] * 2
    begins = [
        place
        for place, counts in enumerate(document.loss_mask.tolist())
        if counts and not document.loss_mask[place - 1]
    ]
    first = tokenizer(text[: text.index("assistant\n") + 10])["input_ids"]
    assert begins[0] == len(first)


def test_a_template_that_is_not_built_turn_by_turn_is_refused(make_tokenizer):
    with pytest.raises(DataError, match=r"f:1: the chat template changes .* message 3 .*all$"):
        render_sample(chat(), make_tokenizer("counting"))
    assert render_sample(chat(), make_tokenizer("counting"), "all").loss_mask.all()


def test_a_conversation_without_a_chat_template_is_one_line(make_tokenizer):
    with pytest.raises(DataError, match="f:1: a conversation, but the tokenizer has no chat tem"):
        render_sample(chat(), make_tokenizer("none"))


def test_a_conversation_that_the_template_refuses_is_a_bad_line(make_tokenizer):
    """One odd conversation is the data's fault, not the template's."""
    bad = render_sample(chat(), make_tokenizer("strict"))
    assert bad == BadLine("f:1", "the chat template refuses it (roles must alternate)")


@pytest.mark.parametrize("template", ["plain", "markers", "thinking", "strict"])
def test_a_conversation_without_an_answer_asks_for_one_and_has_nothing_to_learn(
    make_tokenizer, template
):
    tokenizer = make_tokenizer(template)
    document = render_sample(chat(("user", "hi")), tokenizer)
    said = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert spell(document.input_ids.tolist(), tokenizer) == said
    assert not document.loss_mask.any()
    whole = render_sample(chat(("user", "hi")), tokenizer, "all")
    assert spell(whole.input_ids.tolist(), tokenizer) == said.removesuffix(
        "<|im_start|>assistant\n"
    )


def test_a_value_that_the_template_chokes_on_is_a_bad_line(make_tokenizer):
    """As templates with tools do over a call that is none."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls | length }}{% endfor %}"
    )
    message = {"role": "user", "content": "a", "tool_calls": 7}
    refused = render_sample(Sample("f:1", messages=(message,)), tokenizer)
    assert isinstance(refused, BadLine)
    assert str(refused).startswith("f:1: the chat template refuses it (") and "\n" not in str(
        refused
    )
