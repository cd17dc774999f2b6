"""What decoding counted, as sums that add up over prompts; means are made when they are read."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class DecodeStats:
    """Counts of one or more decoded prompts. B is the block size (1 for plain decoding).

    tokens: new tokens, the one from prefill included.
    committed [B]: committed[c-1] verify passes committed c tokens, **the bonus included**; cut by
        the budget or a stop token where that came first. tokens = prompts + sum(c * passes).
    proposed [B-1], accepted [B-1]: passes that proposed a token in slot k, and those that accepted
        slots 1..k; before any cut.
    prefill_seconds, decode_seconds: the prompt's pass with its first token, and all after it.
    """

    prompts: int
    prompt_tokens: int
    tokens: int
    committed: tuple[int, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float

    def __add__(self, other: DecodeStats) -> DecodeStats:
        if len(self.committed) != len(other.committed):
            raise ValueError(
                f"DecodeStats: block sizes {len(self.committed)} and {len(other.committed)} do not "
                f"add up"
            )
        sums: dict[str, object] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            tuples = isinstance(mine, tuple)
            sums[field.name] = (
                tuple(a + b for a, b in zip(mine, theirs, strict=True)) if tuples else mine + theirs
            )
        return DecodeStats(**sums)  # type: ignore[arg-type]

    @property
    def block_size(self) -> int:
        """B."""
        return len(self.committed)

    @property
    def passes(self) -> int:
        """Verify passes (plain decoding: passes after the prompt's)."""
        return sum(self.committed)

    @property
    def tau(self) -> float:
        """Mean tokens committed per verify pass, **bonus included**; NaN without a pass."""
        passes = self.passes
        total = sum(c * count for c, count in enumerate(self.committed, start=1))
        return total / passes if passes else float("nan")

    @property
    def slot_rates(self) -> tuple[float, ...]:
        """[B-1]: share of the passes that proposed slot k in which slots 1..k were accepted."""
        pairs = zip(self.accepted, self.proposed, strict=True)
        return tuple(a / n if n else float("nan") for a, n in pairs)

    @property
    def seconds(self) -> float:
        """Prefill and decoding."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def seconds_per_token(self) -> float:
        """Wall clock per new token, prefill included; NaN without tokens."""
        return self.seconds / self.tokens if self.tokens else float("nan")
