"""Acceptance rules: how drafts are drawn, and how many of them the target's verdict keeps.

Each rule is exact: accepted drafts and the token after them are distributed as the target's own
samples at the same temperature. A rule is a row of `RULES`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

COLDEST = 1e-30  # 0 / T would be no number where T is 0 in fp32


class Rule(Protocol):
    """Drafting and verifying of one block with s proposed tokens."""

    def draft(
        self, logits: Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Drafter logits [s, V] -> drafts [s] int64, and what `verify` has to know of q."""
        ...

    def verify(
        self,
        drafts: Tensor,
        q: Tensor | None,
        logits: Tensor,
        temperature: float,
        generator: torch.Generator | None,
    ) -> tuple[int, int]:
        """Target logits [s+1, V] after the anchor and after each draft -> (accepted, next token).

        accepted: 0 .. s leading drafts are kept. next token: what follows them (the bonus).
        """
        ...


class Match:
    """The most likely draft; the target samples at each place; kept while the two are equal.

    A proposal that is certain is accepted with the target's probability of it, which is what makes
    this exact; at temperature 0 it is plain greedy verification (DFlash, arXiv 2602.06036).
    """

    def draft(
        self, logits: Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        return logits.argmax(-1), None

    def verify(
        self,
        drafts: Tensor,
        q: Tensor | None,
        logits: Tensor,
        temperature: float,
        generator: torch.Generator | None,
    ) -> tuple[int, int]:
        if temperature == 0:
            own = logits.argmax(-1)  # [s+1]
        else:
            own = torch.multinomial(probabilities(logits, temperature), 1, generator=generator)[
                :, 0
            ]
        return longest_match(drafts, own)


class Rejection:
    """Drafts sampled from q = softmax(drafter / T), kept with probability min(1, p/q).

    Speculative sampling: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al.,
    arXiv 2302.01318. At temperature 0 it is `Match`.
    """

    def draft(
        self, logits: Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        if temperature == 0:
            return logits.argmax(-1), None
        q = probabilities(logits, temperature)
        return torch.multinomial(q, 1, generator=generator)[:, 0], q

    def verify(
        self,
        drafts: Tensor,
        q: Tensor | None,
        logits: Tensor,
        temperature: float,
        generator: torch.Generator | None,
    ) -> tuple[int, int]:
        if q is None:  # temperature 0, or nothing was proposed: then one plain sample is left
            return Match().verify(drafts, None, logits, temperature, generator)
        return accept_rejection(drafts, q, probabilities(logits, temperature), generator)


RULES: dict[str, Rule] = {"match": Match(), "rejection": Rejection()}


def probabilities(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """softmax(logits / T) over the last dimension, in fp32 or wider; T > 0.

    temperature: one, or one for each row, [..., 1]. Below `COLDEST` it is that.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wide = wide - wide.amax(dim=-1, keepdim=True)  # first: else a T near 0 makes infinities
    if isinstance(temperature, Tensor):
        return torch.softmax(wide / temperature.clamp_min(COLDEST), dim=-1)
    return torch.softmax(wide / max(temperature, COLDEST), dim=-1)


def longest_match(drafts: Tensor, own: Tensor) -> tuple[int, int]:
    """Drafts [s] against the target's own tokens [s+1]: how many agree, what follows them."""
    s = drafts.shape[0]
    both = torch.cat((drafts, own)).tolist()  # one copy from the device for all
    accepted = 0
    while accepted < s and both[accepted] == both[s + accepted]:
        accepted += 1
    return accepted, both[s + accepted]


def accept_rejection(
    drafts: Tensor, q: Tensor, p: Tensor, generator: torch.Generator | None
) -> tuple[int, int]:
    """Keep draft k with probability min(1, p_k/q_k) until one is refused.

    drafts [s] drawn from q [s, V]; p [s+1, V]. The token after the kept ones comes from
    max(p - q, 0) at the refused place, normalised, or from p[s] where all are kept.
    """
    s = drafts.shape[0]
    at = drafts[:, None]
    p_drafts, q_drafts = p[:s].gather(1, at)[:, 0], q.gather(1, at)[:, 0]
    u = torch.rand(s, dtype=p.dtype, device=p.device, generator=generator)
    kept = u * q_drafts < p_drafts  # [s]
    accepted = int(kept.to(torch.int64).cumprod(0).sum())
    rest = p[accepted]
    if accepted < s:
        difference = (p[accepted] - q[accepted]).clamp_min(0)
        # All zero only by rounding, where p and q are equal: then either is right.
        rest = torch.where(difference.sum() > 0, difference, rest)
    return accepted, int(torch.multinomial(rest, 1, generator=generator))
