"""Two threads build a BlockMask; one dies of KeyError: 'custom'."""

from __future__ import annotations

from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="none found (pytorch#184917 is about the same dictionary)",
    state="traceback-meta",
    symptom="KeyError: 'custom' out of torch.fx.traceback.annotate",
    expect={"2.13": Shows("raised", raises={"thread-1": "KeyError: 'custom'"})},
    schedule=(
        "thread-0 annotate.tested",
        "thread-1 annotate.body",
        "thread-0 end",
        "thread-1 end",
    ),
)


def program(compile):
    from torch.nn.attention.flex_attention import create_block_mask

    def build():
        create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")

    return [build, build]
