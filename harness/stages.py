"""The stages of a compile at which :mod:`harness.xray` stops a thread, and programs that get there.

A stage is a small program and a place in it. Where torch lets user code run (a backend, a
compiled graph, a custom operator's backward), the program calls ``stop`` itself; elsewhere a hook
point does. Not covered: stages inside C++, Triton and CUDA graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Stop = Callable[[], None]
Program = Callable[[Stop], Callable[[], object]]


class StageAbsent(Exception):
    """This torch has no such stage; one line says what it lacks."""


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: short; a column of the table.
        what: where the thread stands while the others look.
        program: is given ``stop``, prepares what is not part of the stage, and returns the rest;
            raises :class:`StageAbsent` where torch has not got it.
        point: the hook point that stops the thread, or "" where the program stops itself.
        slow: takes tens of seconds, so it is optional.
        leaves: states that it leaves behind by design, as torch does in one thread alone.
    """

    name: str
    what: str
    program: Program
    point: str = ""
    slow: bool = False
    leaves: tuple[str, ...] = ()


def _pointwise(x: Any) -> Any:
    return (x * 2).sin().sum()


def _leaf() -> Any:
    import torch

    return torch.ones(3, requires_grad=True)


def _first_call(_stop: Stop) -> Callable[[], object]:
    """The first call of a compiled function, with gradients."""
    import torch

    compiled = torch.compile(_pointwise, backend="aot_eager")
    x = _leaf()
    return lambda: compiled(x)


def _inference(_stop: Stop) -> Callable[[], object]:
    import torch

    compiled = torch.compile(_pointwise, backend="aot_eager")
    x = torch.ones(3)
    return lambda: compiled(x)


def _joint_backward(stop: Stop) -> Callable[[], object]:
    """A custom operator's backward formula is traced within the joint graph."""
    import torch

    schema = "(Tensor x) -> Tensor"

    @torch.library.custom_op("harness_xray::doubled", mutates_args=(), schema=schema)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)

    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        stop()
        return grad * 2

    doubled.register_autograd(backward)
    compiled = torch.compile(lambda x: doubled(x).sum(), backend="aot_eager")
    x = _leaf()
    return lambda: compiled(x)


def _backend(forward: Callable[[], None], backward: Callable[[], None]) -> Any:
    """AOTAutograd with compilers that tell when they are called, and run the graph as it is."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def compiler(tell: Callable[[], None]) -> Callable[..., Any]:
        def compile_graph(graph: Any, _inputs: Any) -> Any:
            tell()
            return make_boxed_func(graph.forward)

        return compile_graph

    return aot_autograd(fw_compiler=compiler(forward), bw_compiler=compiler(backward))


def _nothing() -> None:
    return None


def _backend_forward(stop: Stop) -> Callable[[], object]:
    import torch

    compiled = torch.compile(_pointwise, backend=_backend(stop, _nothing))
    x = _leaf()
    return lambda: compiled(x)


def _lazy_backward(stop: Stop) -> Callable[[], object]:
    import torch

    compiled = torch.compile(_pointwise, backend=_backend(_nothing, stop))
    loss = compiled(_leaf())
    return lambda: loss.backward()


def _wrapper(_stop: Stop) -> Callable[[], object]:
    """A warm call with every option that the wrapper keeps in a global of the process."""
    import torch

    compile_: Any = torch.compile
    try:
        compiled = compile_(_pointwise, backend="eager", fullgraph=True, isolate_recompiles=True)
    except TypeError:  # before 2.13
        compiled = compile_(_pointwise, backend="eager", fullgraph=True)
    x = torch.ones(3)
    compiled(x)
    return lambda: compiled(x)


def _warm(stop: Stop) -> Callable[[], object]:
    """A warm call stands inside its graph."""
    import torch

    warm = False

    def backend(graph: Any, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            if warm:
                stop()
            return graph.forward(*args)

        return run

    compiled = torch.compile(_pointwise, backend=backend)
    x = torch.ones(3)
    compiled(x)
    warm = True
    return lambda: compiled(x)


def _make_fx(_stop: Stop) -> Callable[[], object]:
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    return lambda: make_fx(_pointwise)(torch.ones(3))


def _symbolic_trace(_stop: Stop) -> Callable[[], object]:
    import torch

    return lambda: torch.fx.symbolic_trace(_pointwise)


def _export(stop: Stop) -> Callable[[], object]:
    import torch

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            stop()
            return x + 1

    return lambda: torch.export.export(Module(), (torch.ones(3),), strict=False)


def _annotate(_stop: Stop) -> Callable[[], object]:
    import torch.fx.traceback as fx_traceback

    if not hasattr(fx_traceback, "annotate"):
        raise StageAbsent("this torch has no torch.fx.traceback.annotate")

    def annotate() -> None:
        with fx_traceback.annotate({"harness": 1}):
            pass

    return annotate


def _eager_flex(_stop: Stop) -> Callable[[], object]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.ones(1, 1, 16, 16)

    def call() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flex_attention(q, q, q)

    return call


def _inductor(_stop: Stop) -> Callable[[], object]:
    import torch

    compiled = torch.compile(_pointwise, backend="inductor")
    x = torch.ones(3)
    return lambda: compiled(x)


STAGES: tuple[Stage, ...] = (
    Stage("wrapper", "a warm call has passed the wrapper's checks", _wrapper, "call.checked"),
    Stage("entry", "dynamo's lock has been taken for a first call", _first_call, "lock.held"),
    Stage(
        "dynamo",
        "dynamo is about to trace the frame's bytecode",
        _first_call,
        "torch._dynamo.symbolic_convert:InstructionTranslatorBase.run@entry",
    ),
    Stage("aot", "AOTAutograd has been given the graph", _first_call, "aot.begin"),
    Stage("forward", "inside Tracer.trace, of a graph without gradients", _inference, "trace.body"),
    Stage("joint", "inside Tracer.trace, of the joint graph", _first_call, "trace.body"),
    Stage("bwd-trace", "the joint trace has come to the backward", _joint_backward),
    Stage("backend", "the backend compiles the forward graph", _backend_forward),
    Stage("warm", "a warm call runs its graph", _warm),
    Stage("bwd-lazy", "the first backward() compiles its graph", _lazy_backward),
    Stage("make_fx", "inside a make_fx, outside any compile", _make_fx, "trace.body"),
    Stage("fx", "inside torch.fx.symbolic_trace", _symbolic_trace, "trace.body"),
    Stage("annotate", "the block under torch.fx.traceback.annotate", _annotate, "annotate.body"),
    Stage(
        "eager-flex",
        "flex_attention, called uncompiled, asks dynamo for its helper",
        _eager_flex,
        "lock.held",
        leaves=("eager-flex-warning",),
    ),
    Stage("export", "torch.export runs the module, not strict", _export),
    Stage(
        "inductor",
        "Inductor is about to generate code",
        _inductor,
        "torch._inductor.graph:GraphLowering.codegen@entry",
        slow=True,
    ),
)


def by_name(name: str) -> Stage:
    """The stage with that name; KeyError when there is none."""
    return {stage.name: stage for stage in STAGES}[name]
