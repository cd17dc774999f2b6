"""The torch versions that the guard has been run on; it refuses any other.

What the guard does depends on torch's private names. On an untested version it might install
without a word and intercept nothing, so it does not try.
"""

from __future__ import annotations

import torch

OLDEST, NEWEST = (2, 9), (2, 15)


class UnsupportedTorch(RuntimeError):
    """The installed torch is outside the supported range; the message says what to do."""


def supported_range() -> str:
    """``2.9 to 2.15``."""
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def require_supported(version: str | None = None) -> None:
    """Raises :class:`UnsupportedTorch` unless ``version`` (default: the installed torch's) fits."""
    version = str(torch.__version__) if version is None else version
    major, minor = (int(part) for part in version.split("+")[0].split(".")[:2])
    if not OLDEST <= (major, minor) <= NEWEST:
        raise UnsupportedTorch(
            f"torch {version} is not supported by the compile guard: "
            f"install one from {supported_range()} (2.13.0 is the tested default)"
        )
