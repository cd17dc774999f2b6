"""What of a program's environment and command line may be written down, and what may not.

Environment variables are allow-listed: only switches that change how torch compiles, which
devices it sees or how many threads it uses. Values that look secret by their name, in the
environment or on the command line, are also struck out wherever else they turn up (a message, a
source line). Not covered: a secret that stands under a harmless name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MASK = "***"

_SWITCHES = frozenset(
    {
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_VISIBLE_DEVICES",
        "LOCAL_RANK",
        "MKL_NUM_THREADS",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PYTHONFAULTHANDLER",
        "PYTHONHASHSEED",
        "PYTHON_GIL",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "RANK",
        "WORLD_SIZE",
    }
)
_PREFIXES = ("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "AOT_", "TRITON_", "PYTORCH_JIT")
_SECRET_NAME = re.compile(
    r"(?:^|[^a-z])(?:tokens?|(?:api|access|private|secret|auth|signing|account)[-_.]?keys?|keys?"
    r"|secrets?|[a-z]*passw(?:or)?ds?|[a-z]+[-_.]pwd|passphrase|credentials?|auth|bearer|cookie|dsn"
    r"|jwt|pat|webhook|connection[-_.]?string)(?:$|[^a-z])",
    re.IGNORECASE,
)
# Not within a word: "sk-" also ends the first half of task-scheduler.
_SECRET_VALUE = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}|xox[abeprs]-[A-Za-z0-9-]{10,}"
    r"|AKIA[A-Z0-9]{12,}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*)"
    r"|(?<=://)[^/@\s]+:[^/@\s]+(?=@)|(?<=\bBearer )[A-Za-z0-9._~+/-]{8,}=*"
)
_SECRET_QUERY = re.compile(  # of an address: ?token=..., a signed address of a bucket
    r"(?<=[?&])([\w.-]*(?:token|key|secret|signature|sig|credential|password)=)[^&\s#\"']+",
    re.IGNORECASE,
)
_SHORTEST = 8  # characters; striking out a shorter value elsewhere would spoil ordinary words


def is_secret_name(name: str) -> bool:
    """Whether ``name`` says that its value is a secret: ``HF_TOKEN``, ``--api-key``, ``keyFile``.

    A count is none: ``max_tokens``, ``num-keys``.
    """
    plain = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    if re.match(r"-*(?:max|min|num|n|total)[-_]", plain):
        return False
    return bool(_SECRET_NAME.search(plain))


def environment(values: Mapping[str, str] | None = None) -> dict[str, str]:
    """The allow-listed switches, sorted by name."""
    values = os.environ if values is None else values
    return {
        name: value
        for name, value in sorted(values.items())
        if (name in _SWITCHES or name.startswith(_PREFIXES)) and not is_secret_name(name)
    }


def arguments(argv: Sequence[str]) -> list[str]:
    """A command line with the values of secret options masked.

    Known forms: ``--token VALUE``, ``--token=VALUE``, ``hub.token=VALUE``, and values that look
    like a token whatever stands before them.
    """
    masked: list[str] = []
    hide_next = False
    for word in argv:
        name, equals, value = word.partition("=")
        is_option = word.startswith("-")
        if hide_next and not is_option:
            masked.append(MASK)
        elif equals and value and is_secret_name(name):
            masked.append(f"{name}={MASK}")
        else:
            masked.append(_without_tokens(word))
        hide_next = is_option and not equals and is_secret_name(word)
    return masked


def _without_tokens(text: str) -> str:
    """``text`` without what looks like a secret by itself."""
    return _SECRET_QUERY.sub(rf"\1{MASK}", _SECRET_VALUE.sub(MASK, text))


class Redactor:
    """Strikes known secret values out of text.

    Args:
        values: an environment; the values under secret names are struck out.
        argv: a command line; what :func:`arguments` masks in it is struck out.
    """

    def __init__(self, values: Mapping[str, str] | None = None, argv: Iterable[str] = ()) -> None:
        values = os.environ if values is None else values
        secrets = {value for name, value in values.items() if is_secret_name(name)}
        argv = list(argv)
        for word, shown in zip(argv, arguments(argv), strict=True):
            if shown == MASK:
                secrets.add(word)
            elif shown != word and shown.endswith(f"={MASK}"):
                secrets.add(word.partition("=")[2])
        found = sorted((s for s in secrets if len(s) >= _SHORTEST), key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, found))) if found else None

    def text(self, text: str) -> str:
        """``text`` without the secrets."""
        if self._known is not None:
            text = self._known.sub(MASK, text)
        return _without_tokens(text)

    def data(self, value: Any) -> Any:
        """The same for every text inside plain data; keys stay, other objects become text."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self.data(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.data(entry) for entry in value]
        return value if value is None or isinstance(value, int | float) else self.text(str(value))
