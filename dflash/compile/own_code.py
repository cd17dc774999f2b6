"""A code object of its own for each compiled function.

Dynamo keeps compiled entries by code object: every wrapper of one function, and every instance
of one ``nn.Module`` class, in every thread, shares one list and one recompile limit.

Not covered: what is reached over a graph break. A function that is then compiled as a frame of
its own is found by its own code, which it shares.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, cast

from torch._dynamo.eval_frame import innermost_fn


def with_own_code(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    """A callable that does the same, with a code object of its own.

    A plain function is copied. Any other callable (a module, a bound method, a partial) is called
    by a small function, which dynamo inlines. A compiled function is unwrapped first, as
    ``torch.compile`` does.
    """
    if hasattr(function, "_torchdynamo_orig_callable"):
        function = innermost_fn(function)
    if type(function) is types.FunctionType:
        return _copy(function, label)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return _copy(cast(types.FunctionType, call), label)


def _copy(function: types.FunctionType, label: str) -> types.FunctionType:
    safe = "".join(c if c.isalnum() else "_" for c in label)
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}__{safe}")
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    copy.__annotations__ = dict(function.__annotations__)
    copy.__module__ = function.__module__
    copy.__qualname__ = function.__qualname__
    copy.__doc__ = function.__doc__
    copy.__dict__.update(function.__dict__)
    return copy
