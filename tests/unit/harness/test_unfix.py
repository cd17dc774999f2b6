"""Taking a repair out brings the old failure back, and is refused where there is none."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.fx._symbolic_trace as st
from torch.utils._python_dispatch import TorchDispatchMode

from harness.isolate import Isolation
from harness.unfix import CATALOGUE, UnfixError, unfix

HAS_SESSION = hasattr(torch.compiler, "_compile_session_context")
HAS_THREAD_LOCAL_FLAG = hasattr(st, "_is_fx_tracing_tls")


def _copies_backward_context() -> bool:
    from torch._functorch._aot_autograd import runtime_wrappers

    return "_cc.copy().run" in inspect.getsource(runtime_wrappers)


def _has(module: str, name: str) -> Callable[[], bool]:
    def ask() -> bool:
        import importlib

        return hasattr(importlib.import_module(module), name)

    return ask


REPAIRS: dict[str, Callable[[], bool]] = {
    "session-flag": lambda: HAS_SESSION,
    "fx-flag-thread-local": lambda: HAS_THREAD_LOCAL_FLAG,
    "fx-tracing-flag": lambda: HAS_SESSION or HAS_THREAD_LOCAL_FLAG,
    "metrics-context": _has("torch._dynamo.utils", "_metrics_context_tls"),
    "thread-config": _has("torch.utils._config_module", "ContextVar"),
    "cudagraph-tls": _has("torch._inductor.cudagraph_trees", "graph_capture_lock"),
    "backward-context": _copies_backward_context,
    "dispatch-mode-stack": _has("torch._dynamo.config", "inline_torch_dispatch_torch_compile"),
    "default-device": lambda: True,
}


def _in_another_thread(question: Callable[[], Any]) -> Any:
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(question())
        except BaseException as error:
            answers.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return answers[0]


# -- what another thread meets: the failure that each repair is about ----------------------------


def sees_compiling() -> Any:
    """Is a compile of this thread visible in another one?"""
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        seen.append(_in_another_thread(torch.compiler.is_compiling))
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    return seen[0]


def sees_tracing() -> Any:
    """Is a trace of this thread visible in another one?"""
    seen: list[Any] = []

    def traced(x: Any) -> Any:
        seen.append(_in_another_thread(st.is_fx_tracing))
        return x + 1

    torch.fx.symbolic_trace(traced)
    return [*seen, st.is_fx_tracing()]


def dies_beside_compile() -> Any:
    """pytorch#126024: a warm call beside a compile that traces."""
    warm = torch.compile(lambda x: x * 2, backend="eager")
    warm(torch.ones(2))
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        def traced(*args: Any) -> Any:
            seen.append(_in_another_thread(lambda: warm(torch.ones(2)).tolist()))
            return graph.forward(*args)

        make_fx(traced)(*inputs)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    return seen[0]


def metrics_collide() -> Any:
    """pytorch#170605: two threads are inside a compile's metrics at once."""
    from torch._dynamo.utils import get_metrics_context

    def other() -> Any:
        with get_metrics_context() as context:
            context.set("is_forward", True)
            return "its own"

    with get_metrics_context() as context:
        context.set("is_forward", True)
        return _in_another_thread(other)


def config_is_seen() -> Any:
    """pytorch#118260: a setting that one thread patches is what every thread compiles with."""
    config = torch._dynamo.config
    with config.patch(recompile_limit=1234):
        during = _in_another_thread(lambda: config.recompile_limit)
    return [during, _in_another_thread(lambda: config.recompile_limit) == config.recompile_limit]


def trees_of_a_new_thread() -> Any:
    """pytorch#123177: CUDA graph trees in a thread that did not import the module."""
    from torch._inductor import cudagraph_trees as trees

    return _in_another_thread(lambda: len(trees.get_obj(trees.local, "tree_manager_containers")))


def backward_text(out: bool) -> list[str]:
    """pytorch#185372: the generated backward enters its caller's context, or a copy of it."""
    from torch._functorch._aot_autograd import codegen

    texts: list[str] = []
    compile_text = codegen._compile_and_exec_source

    def keep(source: str, *rest: Any, **more: Any) -> Any:
        texts.append(source)
        return compile_text(source, *rest, **more)

    codegen._compile_and_exec_source = keep  # first, so that it sees what the unfix hands on
    if out:
        unfix(["backward-context"], required=True)
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend="aot_eager")(x).backward()
    return [word for text in texts for word in text.split() if "_cc" in word and "run" in word]


def skipped_beside_mode() -> Any:
    """A mode of another thread: graphs after a call beside it, and after a call without it.

    To 2.13 the frame is never compiled then, not even after the mode has left.
    """
    graphs: list[int] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return function(*args, **(kwargs or {}))

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        graphs.append(1)
        return graph.forward

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(program, backend=backend)
    with Mode():
        _in_another_thread(lambda: compiled(torch.ones(2)).tolist())
        beside = len(graphs)
    _in_another_thread(lambda: compiled(torch.ones(2)).tolist())
    return [beside, len(graphs)]


def device_of_a_new_thread() -> Any:
    """pytorch#115917: another thread is told a default device that it does not have."""
    torch.set_default_device("meta:0")  # with an index, or torch asks a tensor
    try:
        return _in_another_thread(
            lambda: [str(torch.get_default_device()), str(torch.empty(1).device)]
        )
    finally:
        torch.set_default_device(None)


FAILURES: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    # unfix -> the program, its result on a repaired torch, and with the repair taken out
    "session-flag": (sees_compiling, True, False),
    "fx-flag-thread-local": (sees_tracing, [False, False], [True, False]),
    "metrics-context": (metrics_collide, "its own", "already been set"),
    "thread-config": (config_is_seen, [8, True], [1234, True]),
    "cudagraph-tls": (trees_of_a_new_thread, 0, "AssertionError"),
    "dispatch-mode-stack": (skipped_beside_mode, [1, 1], [0, int(HAS_THREAD_LOCAL_FLAG)]),
    "default-device": (device_of_a_new_thread, ["cpu", "cpu"], ["meta:0", "cpu"]),
    "fx-tracing-flag": (dies_beside_compile, [2.0, 2.0], "using FX to symbolically trace"),
}


def failure(*, name: str, out: bool) -> Any:
    """Runs in its own process: the program of one row, with its repair or without."""
    if out:
        unfix([name], required=True)
    return FAILURES[name][0]()


@pytest.mark.parametrize("name", FAILURES)
def test_the_old_failure_comes_back_when_the_repair_is_taken_out(
    isolation: Isolation, name: str
) -> None:
    _, repaired, broken = FAILURES[name]
    if not REPAIRS[name]():
        pytest.skip(f"torch {torch.__version__} has not this repair: see the refusal below")
    result = isolation.run(failure, {"name": name, "out": False}, deadline=60)
    assert result.ended == "returned", result.error
    assert result.value == repaired
    result = isolation.run(failure, {"name": name, "out": True}, deadline=60)
    assert result.ended == "returned", result.error
    if isinstance(broken, str):
        assert broken in result.value
    else:
        assert result.value == broken


def refused(*, name: str) -> str:
    """Runs in its own process: the refusal's text, or that there was none."""
    try:
        unfix([name], required=True)
    except UnfixError as error:
        return str(error)
    return "taken out"


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_repair_that_is_not_there_is_refused_when_it_is_required(
    isolation: Isolation, name: str
) -> None:
    answer = isolation.run(refused, {"name": name}, deadline=60).value
    if REPAIRS[name]():
        assert answer == "taken out"
    else:
        version, since = torch.__version__, CATALOGUE[name].since
        assert answer.startswith(f"unfix {name}: torch {version} does not have the repair")
        assert f"(since {since}), so there is nothing to take out" in answer


def context_of_backward(*, out: bool) -> list[str]:
    """Runs in its own process."""
    return backward_text(out)


@pytest.mark.skipif(not _copies_backward_context(), reason="repaired since torch 2.14")
def test_a_backward_enters_its_callers_context_itself_again(isolation: Isolation) -> None:
    with_repair = isolation.run(context_of_backward, {"out": False}, deadline=60).value
    assert any("_cc.copy().run" in word for word in with_repair)
    without = isolation.run(context_of_backward, {"out": True}, deadline=60).value
    assert without and not any("copy" in word for word in without)


def test_without_the_repair_the_copy_is_not_in_the_text() -> None:
    """The text that the row for 2.14 replaces; on 2.13 it must be the entered one."""
    if _copies_backward_context():
        pytest.skip("this torch has the repair: it is taken out above")
    from torch._functorch._aot_autograd import runtime_wrappers

    text = inspect.getsource(runtime_wrappers)
    if "_get_obj_in_tls('context')" not in text:
        pytest.skip("this torch enters no context in a backward: nothing to copy")
    assert "_cc.run" in text


def others(*, name: str) -> dict[str, Any]:
    """Runs in its own process: takes one repair out and looks at the two FX rows."""
    done = unfix([name])
    return {"compiling": sees_compiling(), "tracing": sees_tracing(), "done": done}


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_unfix_takes_out_its_repair_and_no_other(isolation: Isolation, name: str) -> None:
    result = isolation.run(others, {"name": name}, deadline=60)
    assert result.ended == "returned", result.error
    session_out = name in ("session-flag", "fx-tracing-flag")
    flag_out = name in ("fx-flag-thread-local", "fx-tracing-flag")
    assert result.value == {
        "compiling": HAS_SESSION and not session_out,
        "tracing": [flag_out or not HAS_THREAD_LOCAL_FLAG, False],
        "done": {name: REPAIRS[name]()},
    }


def test_every_row_has_its_control() -> None:
    assert unfix([]) == {}
    assert set(REPAIRS) == set(CATALOGUE)
    assert set(FAILURES) | {"backward-context"} == set(CATALOGUE)


def test_an_unknown_unfix_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnfixError, match="unknown unfix 'everything': there are session-flag, "):
        unfix(["everything"])
