"""Seeds from names: the same draw in every process and thread, and after a resume."""

from __future__ import annotations

from hashlib import blake2b


def stable_seed(*name: int | str) -> int:
    """Mix the name of a draw into 63 bits; `hash()` would differ from process to process.

    The kind of each part counts: 7 and "7" name different draws.
    """
    parts = [f"s{len(part)}:{part}" if isinstance(part, str) else f"i{int(part)}" for part in name]
    # torch's CPU generator uses the low 32 bits only; a hash spreads the name over those as well.
    digest = blake2b("/".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
