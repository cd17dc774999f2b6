"""Measured acceptance and speed of a drafter, and its simulated acceptance beside them.

Everything on the same prompts: speculative decoding (tau, histogram, per-slot rates), plain
decoding in the same loop (wall clock), and the drafter's training forward over the target's own
greedy output (simulated acceptance), which needs no decoding and is what training watches. Every
acceptance length here **includes the bonus token**, as the paper's tau does (arXiv 2602.06036).

Not covered: quality of the text, other engines, more than one prompt at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from dflash.decode import DecodeStats, plain_decode, speculative_decode
from dflash.decode.proposer import apply_head, device_of, embed_block
from dflash.model import Drafter, sdpa_attend
from dflash.objective import Anchors, block_labels, block_token_ids, dense_mask, positions
from dflash.target import capture_features

_BLOCKS_AT_ONCE = 32
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class SimulatedSums:
    """Teacher-forced acceptance as sums; lengths include the bonus and stop at the output's end.

    boundary_*: anchors where greedy decoding would start its blocks: equal to the measured tau at
        temperature 0 by construction, so a difference is a fault of the serving path.
    every_*: an anchor at every token of the output that has another one after it, which is what
        training samples from; easy stretches, which decoding leaves with few blocks, count in full.
    """

    boundary_committed: int = 0
    boundary_blocks: int = 0
    every_committed: int = 0
    every_blocks: int = 0

    def __add__(self, other: SimulatedSums) -> SimulatedSums:
        return SimulatedSums(
            self.boundary_committed + other.boundary_committed,
            self.boundary_blocks + other.boundary_blocks,
            self.every_committed + other.every_committed,
            self.every_blocks + other.every_blocks,
        )

    @property
    def at_boundaries(self) -> float:
        """Mean length over the boundary anchors; NaN without any."""
        return _ratio(self.boundary_committed, self.boundary_blocks)

    @property
    def at_every_position(self) -> float:
        """Mean length over all anchors; NaN without any."""
        return _ratio(self.every_committed, self.every_blocks)


@dataclass(frozen=True)
class EvalReport:
    """What `evaluate` found. identical: prompts whose two outputs are equal, None above T = 0."""

    temperature: float
    rule: str
    max_new_tokens: int
    speculative: DecodeStats
    plain: DecodeStats
    simulated: SimulatedSums
    identical: int | None

    @property
    def speedup(self) -> float:
        """Plain seconds per token / speculative seconds per token, prefill included in both."""
        return _ratio(self.plain.seconds_per_token, self.speculative.seconds_per_token)

    def lines(self) -> list[str]:
        """For a terminal."""
        s, p = self.speculative, self.plain
        total = max(s.passes, 1)
        lines = [
            f"{s.prompts} prompts, block {s.block_size}, temperature {self.temperature:g}, "
            f"rule {self.rule}, at most {self.max_new_tokens} new tokens",
            f"tau (measured, bonus included)              {s.tau:7.3f}   "
            f"({s.tokens - s.prompts} tokens in {s.passes} passes)",
            f"simulated on greedy output, block starts    {self.simulated.at_boundaries:7.3f}",
            f"simulated on greedy output, every position  {self.simulated.at_every_position:7.3f}",
            f"wall clock against plain decoding           {self.speedup:7.3f} x "
            f"({1 / p.seconds_per_token:.1f} -> {1 / s.seconds_per_token:.1f} tokens/s)",
            "tokens committed per pass (bonus included): share of passes",
        ]
        lines += [
            f"  {c:3d}  {count / total:6.1%}  {'#' * round(40 * count / total)}".rstrip()
            for c, count in enumerate(s.committed, start=1)
        ]
        rates = "  ".join(
            f"{k}:{'-' if math.isnan(rate) else f'{rate:.1%}'}"
            for k, rate in enumerate(s.slot_rates, start=1)
        )
        lines.append(f"accepted up to slot  {rates}")
        if self.identical is not None:
            lines.append(f"identical to plain greedy: {self.identical} of {s.prompts} prompts")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Sums, and the means made from them; NaN becomes None."""
        return {
            "temperature": self.temperature,
            "rule": self.rule,
            "max_new_tokens": self.max_new_tokens,
            "block_size": self.speculative.block_size,
            "bonus_included": True,
            "tau": _finite(self.speculative.tau),
            "slot_rates": [_finite(rate) for rate in self.speculative.slot_rates],
            "simulated_at_boundaries": _finite(self.simulated.at_boundaries),
            "simulated_at_every_position": _finite(self.simulated.at_every_position),
            "speedup": _finite(self.speedup),
            "identical": self.identical,
            "sums": {
                "speculative": asdict(self.speculative),
                "plain": asdict(self.plain),
                "simulated": asdict(self.simulated),
            },
        }

    def card_metrics(self) -> dict[str, str]:
        """Rows of the model card's table, for `dflash.export`."""
        at = f"temperature {self.temperature:g}, {self.rule}"
        return {
            f"tau, measured ({at})": f"{self.speculative.tau:.3f}",
            "simulated acceptance length, greedy output": f"{self.simulated.at_boundaries:.3f}",
            f"wall clock against plain decoding ({at})": f"{self.speedup:.2f} x",
            "prompts": str(self.speculative.prompts),
            "new tokens": str(self.speculative.tokens),
        }


def evaluate(
    target: nn.Module,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    rule: str = "match",
    stop_token_ids: Sequence[int] = (),
    seed: int = 0,
) -> EvalReport:
    """Decode every prompt (token ids) both ways in turn, and simulate on the greedy output.

    Above temperature 0 the simulation decodes greedily once more, outside the measured time. A
    short decode of the first prompt before the clock starts takes the first calls' costs.
    Raises ValueError without prompts, DecodeError for what cannot be decoded.
    """
    if not prompts:
        raise ValueError("evaluate: no prompts")
    device = next(target.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    common: dict[str, Any] = {"stop_token_ids": stop_token_ids, "generator": generator}
    drafts: dict[str, Any] = {"temperature": temperature, "rule": rule}
    warm_up = min(_WARM_UP_TOKENS, max_new_tokens)
    plain_decode(target, prompts[0], max_new_tokens=warm_up)
    speculative_decode(target, drafter, prompts[0], max_new_tokens=warm_up, rule=rule)

    fast: list[DecodeStats] = []
    slow: list[DecodeStats] = []
    simulated = SimulatedSums()
    identical = 0
    for prompt in prompts:
        plain = plain_decode(
            target, prompt, max_new_tokens=max_new_tokens, temperature=temperature, **common
        )
        spec = speculative_decode(
            target, drafter, prompt, max_new_tokens=max_new_tokens, **drafts, **common
        )
        slow.append(plain.stats)
        fast.append(spec.stats)
        identical += plain.tokens == spec.tokens
        greedy = plain
        if temperature > 0:
            greedy = plain_decode(target, prompt, max_new_tokens=max_new_tokens, **common)
        simulated += simulate_acceptance(target, drafter, prompt, greedy.tokens)
    return EvalReport(
        temperature=temperature,
        rule=rule,
        max_new_tokens=max_new_tokens,
        speculative=sum(fast[1:], fast[0]),
        plain=sum(slow[1:], slow[0]),
        simulated=simulated,
        identical=identical if temperature == 0 else None,
    )


def simulate_acceptance(
    target: nn.Module, drafter: Drafter, prompt: Sequence[int], output: Sequence[int]
) -> SimulatedSums:
    """Acceptance of `output`, the target's greedy continuation of `prompt`, without decoding.

    The drafter's training forward, with an anchor at every token of the output but the last.
    """
    lengths = _committed_lengths(target, drafter, prompt, output)
    boundary, blocks, at = 0, 0, 0
    while at < len(lengths):
        boundary, blocks = boundary + lengths[at], blocks + 1
        at += lengths[at]
    return SimulatedSums(boundary, blocks, sum(lengths), len(lengths))


@torch.no_grad()
def _committed_lengths(
    target: nn.Module, drafter: Drafter, prompt: Sequence[int], output: Sequence[int]
) -> list[int]:
    """Tokens committed by a block anchored at output[i], for every i but the last."""
    model: Any = target
    embedding: nn.Module = model.get_input_embeddings()
    head: nn.Module = model.get_output_embeddings()
    config, like = drafter.config, drafter.fc.weight
    ids = torch.tensor([*prompt, *output], device=device_of(embedding))  # [S]
    features = capture_features(target, ids[None], config.target_layer_ids)
    features = features.to(device=like.device, dtype=like.dtype)
    ids = ids.to(like.device)
    one_document, all_supervised = torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)
    where = torch.arange(ids.shape[0], device=ids.device)
    last = ids.shape[0] - 1
    lengths: list[int] = []
    for first in range(len(prompt), last, _BLOCKS_AT_ONCE):
        at = where[first : min(first + _BLOCKS_AT_ONCE, last)]  # [N]
        anchors = Anchors(at, torch.ones_like(at, dtype=torch.bool))
        blocks = block_token_ids(ids, anchors, config.block_size, config.mask_token_id)
        hidden = drafter(
            features,
            embed_block(blocks, embedding, like)[None],
            positions(where, anchors, config.block_size)[None],
            dense_mask(anchors, one_document, config.block_size)[None, None],
            sdpa_attend,
        )
        hidden = hidden.view(anchors.slots, config.block_size, -1)[:, 1:]
        drafts = apply_head(hidden, head).argmax(-1).to(ids.device)  # [N, B-1]
        labels, counts = block_labels(ids, all_supervised, one_document, anchors, config.block_size)
        hits = (drafts == labels[:, 1:]) & counts[:, 1:]
        run = hits.to(torch.int64).cumprod(1).sum(1)
        lengths += torch.minimum(run + 1, last - at).tolist()
    return lengths


def _ratio(above: float, below: float) -> float:
    return above / below if below else float("nan")


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
