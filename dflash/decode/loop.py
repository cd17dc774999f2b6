"""The draft-verify loop (DFlash, arXiv 2602.06036, inference), and plain decoding as its one-token
case, so that a comparison of their wall clocks compares nothing else.

At the top of the loop `out[-1]` is the anchor: committed, but not yet run through the target; the
target's cache and the drafter's context end just before it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash.decode.accept import RULES, Rule
from dflash.decode.proposer import BlockProposer, Proposer
from dflash.decode.stats import DecodeStats
from dflash.decode.target import DecodeError, TargetSession
from dflash.model import Drafter


@dataclass(frozen=True)
class Decoded:
    """tokens: the new ones, up to and with the first stop token. stopped: it ended with one."""

    tokens: list[int]
    stopped: bool
    stats: DecodeStats


def speculative_decode(
    target: nn.Module,
    drafter: Drafter | Proposer,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    rule: str = "match",
    stop_token_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Decoded:
    """Decode one prompt with drafts; the tokens are distributed as `plain_decode`'s.

    rule: a name in `RULES`. generator: on the target's device; None = torch's global one.
    Raises DecodeError in one line for what cannot be decoded.
    """
    if rule not in RULES:
        raise DecodeError(f"unknown acceptance rule {rule!r}: one of {', '.join(RULES)}")
    proposer = BlockProposer(drafter, target) if isinstance(drafter, Drafter) else drafter
    return _decode(
        target, proposer, prompt_ids, max_new_tokens, temperature, RULES[rule], stop_token_ids,
        generator,
    )  # fmt: skip


def plain_decode(
    target: nn.Module,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    stop_token_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Decoded:
    """Decode one prompt token by token, with the target's cache, in the same loop."""
    return _decode(
        target, None, prompt_ids, max_new_tokens, temperature, RULES["match"], stop_token_ids,
        generator,
    )  # fmt: skip


@torch.inference_mode()
def _decode(
    target: nn.Module,
    proposer: Proposer | None,
    prompt_ids: Sequence[int] | Tensor,
    budget: int,
    temperature: float,
    rule: Rule,
    stop_token_ids: Sequence[int],
    generator: torch.Generator | None,
) -> Decoded:
    device = next(target.parameters()).device
    prompt = torch.as_tensor(prompt_ids, dtype=torch.int64, device=device).reshape(1, -1)
    _check(prompt, budget, temperature)
    stops = frozenset(stop_token_ids)
    with TargetSession(target, () if proposer is None else proposer.target_layer_ids) as session:
        return _loop(session, proposer, prompt, budget, temperature, rule, stops, generator)


def _loop(
    session: TargetSession,
    proposer: Proposer | None,
    prompt: Tensor,
    budget: int,
    temperature: float,
    rule: Rule,
    stops: frozenset[int],
    generator: torch.Generator | None,
) -> Decoded:
    device = prompt.device
    block = 1 if proposer is None else proposer.block_size
    none = torch.empty(0, dtype=torch.int64, device=device)
    committed, proposed, accepted = [0] * block, [0] * (block - 1), [0] * (block - 1)

    began = _now(device)
    logits, features = session.run(prompt, keep=1)
    if proposer is not None:
        proposer.start()
    out = [rule.verify(none, None, logits.to(device), temperature, generator)[1]]
    prefilled = _now(device)

    stopped = out[-1] in stops
    while len(out) < budget and not stopped:
        # A pass commits up to one token more than it proposes.
        slots = min(block - 1, budget - len(out) - 1)
        drafts, q = none, None
        if proposer is not None and slots > 0 and features is not None:
            draft_logits = proposer.propose(features, out[-1])[:slots].to(device)
            drafts, q = rule.draft(draft_logits, temperature, generator)
        anchor = torch.tensor([out[-1]], device=device)
        start = session.length
        logits, features = session.run(torch.cat((anchor, drafts))[None], keep=slots + 1)
        kept, bonus = rule.verify(drafts, q, logits.to(device), temperature, generator)
        new = [*drafts[:kept].tolist(), bonus]
        for slot in range(slots):
            proposed[slot] += 1
            accepted[slot] += slot < kept
        stop = next((index for index, token in enumerate(new) if token in stops), None)
        if stop is not None:
            new, stopped = new[: stop + 1], True
        out += new
        committed[len(new) - 1] += 1
        session.crop(start + len(new))
        if features is not None:
            features = features[:, : len(new)]
    ended = _now(device)

    stats = DecodeStats(
        prompts=1,
        prompt_tokens=prompt.shape[1],
        tokens=len(out),
        committed=tuple(committed),
        proposed=tuple(proposed),
        accepted=tuple(accepted),
        prefill_seconds=prefilled - began,
        decode_seconds=ended - prefilled,
    )
    return Decoded(out, stopped, stats)


def _check(prompt: Tensor, budget: int, temperature: float) -> None:
    if prompt.shape[1] == 0:
        raise DecodeError("decode: the prompt is empty: give at least one token")
    if budget < 1:
        raise DecodeError(f"decode: max_new_tokens must be at least 1, got {budget}")
    if not 0 <= temperature < float("inf"):
        raise DecodeError(f"decode: temperature must be 0 or more, got {temperature}")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
