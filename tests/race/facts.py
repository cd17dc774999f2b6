"""What the installed torch has, asked once: which races it shows natively, which guards it knows.

Only versions and capabilities are looked at, so that collection is the same in every process.
"""

from __future__ import annotations

from importlib.metadata import version

from dflash.compile import GUARDS

TORCH = version("torch")
_MAJOR_MINOR = tuple(int(part) for part in TORCH.split("+")[0].split(".")[:2])

# torch 2.13 hides the FX flag while anybody compiles, 2.14 makes it thread-local: from there on
# the original failure needs the repair taken out.
FX_FLAG_NEEDS_UNFIX = _MAJOR_MINOR >= (2, 13)
UNFIX = ["fx-tracing-flag"] if FX_FLAG_NEEDS_UNFIX else []

# Building a BlockMask annotates since 2.12 or 2.13; scripts.masks_annotate() asks torch itself.
FORCE_COMPILE_EXISTS = _MAJOR_MINOR >= (2, 11)


def guards_here() -> list[str]:
    """The guards that this torch can have."""
    return [name for name in GUARDS if name != "force-compile" or FORCE_COMPILE_EXISTS]


def describe() -> str:
    """One line for the header."""
    how = "with its repair taken out" if FX_FLAG_NEEDS_UNFIX else "as it is"
    return f"race suite: torch {TORCH} {how}; guards {', '.join(guards_here())}"
