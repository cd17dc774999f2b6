"""What `test_places.py` puts points into: every shape of function that has one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator


def plain(x: int) -> int:
    """Has a docstring, which stays."""
    y = x + 1
    if y > 10:
        y = 0
    return y


def kept(f: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(f)
    def around(*args: int) -> int:
        return f(*args)

    return around


@kept
def decorated(x: int) -> int:
    return x * 2


@contextlib.contextmanager
def managed(log: list[str]) -> Iterator[None]:
    log.append("in")
    yield
    log.append("out")


class Base:
    def name(self) -> str:
        return "base"


class Thing(Base):
    __secret = "private"

    def name(self) -> str:
        return super().name() + self.__secret

    @staticmethod
    def still(x: int) -> int:
        return x if Thing is not None else 0

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__


def outer(n: int) -> Callable[[int], int]:
    step = n * 10

    def inner(x: int) -> int:
        return x + step

    return inner


counting = outer(3)


def twice(x: int) -> int:
    x += 1
    x += 1
    return x


def raises() -> None:
    raise LookupError("from inside")
