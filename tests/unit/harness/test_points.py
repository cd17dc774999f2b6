"""The points that are installed on demand: all resolve, are reached, and leave nothing behind."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import places
from harness.hooks import HookError, Hooks
from harness.isolate import Isolation
from harness.points import PLACES, POINTS, is_point, to_install

HAS_TRITON = importlib.util.find_spec("triton") is not None
OF_TORCH = [name for name in PLACES if not name.startswith("triton.")]
OF_TRITON = [name for name in PLACES if name.startswith("triton.")]


def first_place(name: str) -> places.Place:
    return Hooks._place(name)


@pytest.mark.parametrize("name", OF_TORCH)
def test_every_point_resolves_on_this_torch(name: str) -> None:
    places.resolve([first_place(name)])


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize("name", OF_TRITON)
def test_every_point_resolves_on_this_triton(name: str) -> None:
    places.resolve([first_place(name)])


def test_names_of_points_are_their_own() -> None:
    assert not PLACES.keys() & POINTS.keys()
    assert is_point("patch.install") and is_point("m:f@entry") and not is_point("patch.never")


def test_patterns_choose_among_points_and_a_name_without_any_is_refused() -> None:
    assert to_install(["trace.*", "patch.left", "m:f@exit", "x.py:*"]) == ["patch.left", "m:f@exit"]
    assert set(to_install(["patch.*"])) == {name for name in PLACES if name.startswith("patch.")}
    with pytest.raises(ValueError, match=r"no point is called 'pacth\.\*'"):
        to_install(["pacth.*"])


def test_a_point_that_this_torch_lacks_is_an_error_that_names_the_version() -> None:
    import torch

    with pytest.raises(HookError, match="does not exist in torch") as caught:
        with Hooks(points=["torch._dynamo.eval_frame:innermost_fn@line:/no such line/"]):
            pass
    assert torch.__version__.split("+")[0] in str(caught.value)


def codes() -> dict[str, types.CodeType]:
    return {name: places.find(first_place(name))[0].__code__ for name in OF_TORCH}


def test_all_code_is_back_afterwards_also_after_an_error() -> None:
    before = codes()
    during = {}
    with pytest.raises(LookupError), Hooks(points=OF_TORCH):  # noqa: PT012
        during |= codes()
        raise LookupError
    after = codes()
    assert all(before[name] is not during[name] for name in OF_TORCH), "control"
    assert all(before[name] is after[name] for name in OF_TORCH)


def test_if_one_cannot_be_resolved_none_stays() -> None:
    before = codes()
    with pytest.raises(HookError), Hooks(points=[*OF_TORCH, "torch.nn:absent@entry"]):
        pass
    assert all(before[name] is code for name, code in codes().items())


def reach(backend: str) -> list[str]:
    """Runs in its own process: compiles, runs backward twice, and says what was passed."""
    import torch
    from torch.fx.traceback import preserve_node_meta

    torch.set_num_threads(1)
    torch._dynamo.config.suppress_errors  # noqa: B018 (read, not written)
    passed: list[str] = []
    with Hooks(lambda event: passed.append(event.point), points=OF_TORCH):
        compiled = torch.compile(lambda x: (x.sin() * 2).sum(), backend=backend)
        x = torch.ones(3, requires_grad=True)
        for _ in range(2):
            compiled(x).backward()
        with preserve_node_meta():
            torch.fx.Interpreter(torch.fx.symbolic_trace(lambda x: x + 1)).run(x)
        torch._dynamo.config.recompile_limit = 8
    return passed


def test_a_compile_passes_the_phases_in_their_order(isolation: Isolation) -> None:
    passed = isolation.run(reach, {"backend": "aot_eager"}).value
    assert passed is not None
    want = [
        "call.arrive",
        "dynamo.begin",
        "aot.begin",
        "trace.begin",
        "patch.install",
        "patch.enter",
        "trace.body",
        "trace.end",
        "patch.revert",
        "patch.left",
        "trace.left",
        "aot.end",
        "dynamo.end",
        "call.exit",
        "backward.begin",
        "backward.first",
    ]
    phases = [point for point in passed if point in want]
    assert phases[: len(want)] == want
    assert passed.index("lock.held") < passed.index("dynamo.begin")
    assert passed.index("dynamo.end") < passed.index("lock.released")
    assert passed.count("backward.begin") == 2 and passed.count("backward.first") == 1
    for point in ("config.write", "meta.preserve", "meta.restored", "meta.node"):
        assert point in passed, point


class FakeTriton:
    """A package of triton's shape; the points are what is tested, not triton."""

    compiler = "def compile(src):\n    return src\n"
    autotuner = "class Autotuner:\n    def run(self, *args):\n        return args\n"


@pytest.mark.skipif(HAS_TRITON, reason="the real one is installed")
def test_triton_has_points_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, text in {
        "triton/__init__.py": "",
        "triton/compiler/__init__.py": "",
        "triton/compiler/compiler.py": FakeTriton.compiler,
        "triton/runtime/__init__.py": "",
        "triton/runtime/autotuner.py": FakeTriton.autotuner,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    with pytest.raises(HookError, match="cannot import triton"), Hooks(points=["triton.*"]):
        pass
    monkeypatch.syspath_prepend(tmp_path)
    passed: list[str] = []
    try:
        with Hooks(lambda event: passed.append(event.point), points=["triton.*"]):
            call("triton.compiler.compiler", lambda module: module.compile("kernel"))
            call("triton.runtime.autotuner", lambda module: module.Autotuner().run(1))
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            del sys.modules[name]
    assert passed == ["triton.compile", "triton.compiled", "triton.autotune", "triton.autotuned"]


def call(module: str, function: Callable[[Any], object]) -> None:
    function(importlib.import_module(module))


def test_nested_traces_carry_their_depth() -> None:
    import torch

    depths: list[tuple[str, int]] = []

    def note(event: Any) -> None:
        if event.point in ("trace.body", "trace.left"):
            depths.append((event.point, event.depth))

    def outer(x: torch.Tensor) -> torch.Tensor:
        torch.fx.symbolic_trace(lambda y: y + 1)
        return x + 1

    with Hooks(note):
        torch.fx.symbolic_trace(outer)
    assert depths == [("trace.body", 1), ("trace.body", 2), ("trace.left", 2), ("trace.left", 1)]
