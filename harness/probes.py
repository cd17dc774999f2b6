"""The catalogue of compile state that one thread sees of another: what to read, its rest value.

Each row names a piece of state, where it lives, what it is when nothing compiles, and whether
the value belongs to the process or to the reading thread. A probe that this torch does not have
is *unknown*: that is shown, once, and is never taken for "at rest". Values that are compared by
identity are compared with what was saved when :func:`rest_values` was called, before anything
compiled; ``functools.wraps`` makes a patched method look right by name.

Not covered yet: Inductor, Triton and CUDA state, and the flags inside torch's C++ eval frame
except the one that has a Python reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PROCESS, THREAD = "process", "thread"
_SHOWN = 200  # characters of a value in a report


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class Probe:
    """One row.

    Attributes:
        name: short and stable; reports and baselines use it.
        where: dotted place of the state.
        read: returns the value; raises AttributeError where this torch does not have it.
        scope: :data:`PROCESS` or :data:`THREAD` (value of the reading thread).
        source: public report or change that explains the state.
        sampled: cheap and harmless enough to be read by a bystander while threads compile.
        by_identity: rest is the object saved by :func:`rest_values`, not an equal one.
    """

    name: str
    where: str
    read: Callable[[], Any]
    scope: str
    source: str
    sampled: bool = True
    by_identity: bool = False


def _fx_flag() -> bool:
    import torch.fx._symbolic_trace as st

    if hasattr(st, "_is_fx_tracing_flag"):
        return bool(st._is_fx_tracing_flag)
    return bool(st._get_is_fx_tracing())


def _fx_patcher() -> str | None:
    import torch.fx._symbolic_trace as st

    return None if st.CURRENT_PATCHER is None else "installed"


def _module_method(name: str) -> Callable[[], Any]:
    def read() -> Any:
        import torch

        return vars(torch.nn.Module)[name]

    return read


def _compiler_flag(name: str) -> Callable[[], Any]:
    def read() -> Any:
        import torch

        return getattr(torch.compiler, name)

    return read


def _stance() -> str:
    from torch._dynamo import eval_frame

    return str(eval_frame._stance.stance)


def _traceback_state(name: str) -> Callable[[], Any]:
    def read() -> Any:
        import torch.fx.traceback as fx_traceback

        value = getattr(fx_traceback, name)
        return dict(value) if isinstance(value, dict) else value

    return read


def _make_fx_tracer() -> str | None:
    from torch.fx.experimental import proxy_tensor

    return None if proxy_tensor._CURRENT_MAKE_FX_TRACER is None else "tracing"


def _region_id() -> int:
    import torch

    return int(torch._C._dynamo.eval_frame.get_eval_frame_isolate_recompiles_id())


def _dynamo_config() -> dict[str, Any]:
    import torch._dynamo.config as config

    names = (
        "recompile_limit",
        "error_on_nested_fx_trace",
        "force_compile_during_fx_trace",
        "suppress_errors",
    )
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def _eager_flex_warned() -> list[str]:
    from torch.nn.attention import flex_attention as flex

    return sorted(flex._WARNINGS_SHOWN)


CATALOGUE: tuple[Probe, ...] = (
    Probe(
        "fx-tracing-flag",
        "torch.fx._symbolic_trace._is_fx_tracing_flag / _is_fx_tracing_tls",
        _fx_flag,
        PROCESS,
        "pytorch#126024; thread-local since 2.14 (#168999)",
    ),
    Probe(
        "fx-patcher",
        "torch.fx._symbolic_trace.CURRENT_PATCHER",
        _fx_patcher,
        PROCESS,
        "pytorch#168042, #187589",
    ),
    Probe(
        "module-call",
        "torch.nn.Module.__call__",
        _module_method("__call__"),
        PROCESS,
        "pytorch#112775, #187589",
        by_identity=True,
    ),
    Probe(
        "module-getattr",
        "torch.nn.Module.__getattr__",
        _module_method("__getattr__"),
        PROCESS,
        "pytorch#112775, #187589",
        by_identity=True,
    ),
    Probe(
        "is-compiling",
        "torch.compiler._is_compiling_flag",
        _compiler_flag("_is_compiling_flag"),
        PROCESS,
        "pytorch#184614 (whole session since 2.13)",
    ),
    Probe(
        "is-exporting",
        "torch.compiler._is_exporting_flag",
        _compiler_flag("_is_exporting_flag"),
        PROCESS,
        "can stay set after overlapping exports",
    ),
    Probe(
        "stance",
        "torch._dynamo.eval_frame._stance",
        _stance,
        PROCESS,
        "pytorch#137504, #147983",
    ),
    Probe(
        "traceback-meta",
        "torch.fx.traceback.current_meta",
        _traceback_state("current_meta"),
        PROCESS,
        "pytorch#184917; KeyError: 'custom' in threads",
    ),
    Probe(
        "traceback-preserve",
        "torch.fx.traceback.should_preserve_node_meta",
        _traceback_state("should_preserve_node_meta"),
        PROCESS,
        "pytorch#184917",
    ),
    Probe(
        "make-fx-tracer",
        "torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER",
        _make_fx_tracer,
        PROCESS,
        "higher-order operators re-enter another thread's tracer",
    ),
    Probe(
        "region-id",
        "torch._C._dynamo.eval_frame isolate_recompiles_id",
        _region_id,
        PROCESS,
        "pytorch#196637",
    ),
    Probe(
        "dynamo-config",
        "torch._dynamo.config (recompile_limit and the FX switches)",
        _dynamo_config,
        THREAD,
        "pytorch#186537: per thread since 2.12",
    ),
    Probe(
        "eager-flex-warning",
        "torch.nn.attention.flex_attention._WARNINGS_SHOWN",
        _eager_flex_warned,
        PROCESS,
        "vllm#27178: the only sign of the uncompiled path, once per process",
        sampled=False,
    ),
)


def read(probe: Probe) -> Any:
    """The probe's value now, or :data:`UNKNOWN` where this torch does not have the state."""
    try:
        return probe.read()
    except (AttributeError, ImportError, KeyError):
        return UNKNOWN


def rest_values(catalogue: tuple[Probe, ...] = CATALOGUE) -> dict[str, Any]:
    """Every probe's value now. Call it before anything compiles: this is what "at rest" means."""
    return {probe.name: read(probe) for probe in catalogue}


def at_rest(probe: Probe, value: Any, rest: Mapping[str, Any]) -> bool | None:
    """Whether ``value`` is the rest value; None when it is unknown on this torch."""
    expected = rest[probe.name]
    if value is UNKNOWN or expected is UNKNOWN:
        return None
    return bool(value is expected if probe.by_identity else value == expected)


def show(value: Any) -> str:
    """A short form for reports; functions by code object, because names can lie."""
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"{code.co_qualname} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    try:
        text = repr(value)
    except Exception as error:  # another thread's fake tensors, say
        text = f"<repr raised {type(error).__name__}>"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def audit(
    rest: Mapping[str, Any], catalogue: tuple[Probe, ...] = CATALOGUE
) -> list[dict[str, Any]]:
    """Reads every probe after the threads have stopped: one row per probe, for the report."""
    rows = []
    for probe in catalogue:
        value = read(probe)
        rows.append(
            {
                "probe": probe.name,
                "where": probe.where,
                "scope": probe.scope,
                "rest": show(rest[probe.name]),
                "value": show(value),
                "at_rest": at_rest(probe, value, rest),
            }
        )
    return rows


def cache_entries(function: Callable[..., Any]) -> int | None:
    """How many compiled entries dynamo keeps for ``function``'s code; None where unreadable."""
    try:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        return len(_debug_get_cache_entry_list(function.__code__))
    except (AttributeError, ImportError, TypeError):
        return None


# -- canaries ----------------------------------------------------------------------------------


def canary_eager_linear() -> str | None:
    """A plain eager ``nn.Linear`` still works; returns what went wrong, or None.

    After two overlapping FX traces ``nn.Module`` can stay patched, and then this raises
    ``NameError: module is not installed as a submodule`` (pytorch#112775).
    """
    import torch

    try:
        layer = torch.nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.eye(2))
            got = layer(torch.tensor([[1.0, 2.0]]))
        right = got.tolist() == [[1.0, 2.0]]
        return None if right else f"an identity nn.Linear gave {got.tolist()}"
    except Exception as error:
        return f"eager nn.Linear raised {type(error).__name__}: {error}"


def canary_fresh_compile() -> str | None:
    """A fresh ``torch.compile`` of an ``nn.Module`` still captures a graph.

    On torch 2.14.1 and 2.15.0 one overlap of a compile and a ``make_fx`` can leave every later
    compile capturing nothing and running eager, with no exception at all.
    """
    import torch

    graphs = 0

    def counting(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        run: Callable[..., Any] = graph.forward
        return run

    try:
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
        with torch.no_grad():
            torch.compile(module, backend=counting)(torch.ones(1, 2))
    except Exception as error:
        return f"a fresh torch.compile raised {type(error).__name__}: {error}"
    return None if graphs else "a fresh torch.compile of an nn.Module captured 0 graphs"


CANARIES: dict[str, Callable[[], str | None]] = {
    "eager-linear": canary_eager_linear,
    "fresh-compile": canary_fresh_compile,
}


def run_canaries() -> dict[str, str | None]:
    """Name -> what is wrong, or None. Call it only when no other thread compiles."""
    return {name: canary() for name, canary in CANARIES.items()}
