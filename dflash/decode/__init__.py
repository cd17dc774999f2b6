"""Speculative decoding with a DFlash drafter, one prompt at a time, and plain decoding beside it.

Lossless: whatever the drafter proposes, every token that leaves is distributed as the target's own
next token (at temperature 0: is the target's own). Two exceptions lie in the target: kernels that
round differently for one token and for a block can turn a tie, and a target whose state cannot be
rolled back is refused. Not covered: batches, sampling filters (top-k, top-p), logits processors.
"""

from dflash.decode.accept import RULES, Rule, accept_rejection, longest_match
from dflash.decode.loop import Decoded, plain_decode, speculative_decode
from dflash.decode.proposer import BlockProposer, Proposer, embed_block
from dflash.decode.stats import DecodeStats
from dflash.decode.target import DecodeError, TargetSession

__all__ = [
    "RULES",
    "BlockProposer",
    "DecodeError",
    "DecodeStats",
    "Decoded",
    "Proposer",
    "Rule",
    "TargetSession",
    "accept_rejection",
    "embed_block",
    "longest_match",
    "plain_decode",
    "speculative_decode",
]
