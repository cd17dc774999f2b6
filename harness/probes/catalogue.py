"""Every probed state: FX, dynamo, AOTAutograd, Inductor, Triton, CUDA graphs.

A row stands here if another thread can see the state (scope ``process``), or if a thread can
miss what the main thread has set (scope ``thread``). Rest values and versions are written beside
each row; see :class:`harness.probes.probe.Probe`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from harness.probes import readers
from harness.probes.probe import (
    PROCESS,
    SAVED,
    THREAD,
    UNKNOWN,
    Probe,
    at_rest,
    changed,
    read,
    show,
)
from harness.probes.readers import as_is, copied, installed, size

_MODULE_STATE = "pytorch#112775, #187589"
_MODE = "another thread's mode: dynamo skipped the frame for ever; by the thread's stack since 2.13"
_REGION = "pytorch#196637; per thread on 2.15.0"


def _row(
    name: str,
    module: str,
    path: str,
    form: Callable[[Any], Any],
    source: str,
    *,
    scope: str = PROCESS,
    **more: Any,
) -> Probe:
    """A state that is an attribute of a module, or of a class in it."""
    reader = readers.attribute(module, path, form)
    return Probe(name, f"{module}.{path}", reader, scope, source, module=module, **more)


def _own(
    name: str, where: str, reader: Callable[[], Any], source: str, scope: str = PROCESS, **more: Any
) -> Probe:
    """A state with a reader of its own."""
    return Probe(name, where, reader, scope, source, **more)


_ST, _PT = "torch.fx._symbolic_trace", "torch.fx.experimental.proxy_tensor"
_FX = (
    _own(
        "fx-tracing-flag",
        f"{_ST}._is_fx_tracing_flag / _is_fx_tracing_tls",
        readers.fx_flag,
        "pytorch#126024; thread-local since 2.14 (#168999)",
        module=_ST,
        rest=False,
        core=True,
    ),
    _row(
        "fx-patcher",
        _ST,
        "CURRENT_PATCHER",
        installed,
        "pytorch#168042, #187589",
        rest=None,
        core=True,
    ),
    _own(
        "module-call",
        "torch.nn.Module.__call__",
        readers.own_attribute("__call__"),
        _MODULE_STATE,
        by_identity=True,
        core=True,
    ),
    _own(
        "module-getattr",
        "torch.nn.Module.__getattr__",
        readers.own_attribute("__getattr__"),
        _MODULE_STATE,
        by_identity=True,
        core=True,
    ),
    _row(
        "fx-wrapped",
        _ST,
        "_wrapped_fns_to_patch",
        size,
        "user functions that each trace patches in their modules",
        grows=True,
    ),
    _row(
        "traceback-meta",
        "torch.fx.traceback",
        "current_meta",
        copied,
        "pytorch#184917; KeyError: 'custom' in threads",
        rest={},
        core=True,
    ),
    _row(
        "traceback-preserve",
        "torch.fx.traceback",
        "should_preserve_node_meta",
        as_is,
        "pytorch#184917",
        rest=False,
        core=True,
    ),
    _row(
        "traceback-seq",
        "torch.fx.traceback",
        "_should_preserve_node_meta",
        as_is,
        "pytorch#184917",
        versions="2.13+",
        rest=False,
    ),
    _row(
        "traceback-replay",
        "torch.fx.traceback",
        "current_replay_node",
        installed,
        "pytorch#184917",
        rest=None,
    ),
    _row(
        "make-fx-tracer",
        _PT,
        "_CURRENT_MAKE_FX_TRACER",
        installed,
        "higher-order operators re-enter another thread's tracer",
        rest=None,
        core=True,
    ),
    _own(
        "original-aten",
        f"{_PT}.ORIGINAL_ATEN",
        readers.attribute(
            "torch.fx.experimental.proxy_tensor",
            "ORIGINAL_ATEN",
            lambda held: installed(held.get()),
        ),
        "a context variable",
        THREAD,
        module=_PT,
        versions="2.13+",
        rest=None,
    ),
    _row(
        "lazy-graph-module",
        "torch.fx._lazy_graph_module",
        "_use_lazy_graph_module_flag",
        as_is,
        "changes the class of every GraphModule made meanwhile",
        rest=False,
    ),
    _row(
        "sym-repr",
        "torch.fx.graph",
        "CodeGen._sym_repr",
        as_is,
        "how every thread's graph is printed",
        by_identity=True,
    ),
    _row(
        "shape-recording",
        "torch.fx.experimental.recording",
        "NEST",
        as_is,
        "nesting of recorded shape events",
        rest=0,
    ),
    _row(
        "export-hierarchy",
        "torch.export._trace",
        "_EXPORT_MODULE_HIERARCHY",
        installed,
        "two exports at once fail on it",
        rest=None,
    ),
    _row(
        "export-deserializer",
        "torch._export.serde.serialize",
        "_CURRENT_DESERIALIZER",
        installed,
        "pytorch#195099",
        rest=None,
    ),
)

_COMPILER = (
    _row(
        "is-compiling",
        "torch.compiler",
        "_is_compiling_flag",
        as_is,
        "pytorch#184614 (whole session since 2.13)",
        rest=False,
        core=True,
    ),
    _row(
        "is-exporting",
        "torch.compiler",
        "_is_exporting_flag",
        as_is,
        "can stay set after overlapping exports",
        rest=False,
        core=True,
    ),
    _row(
        "is-tracing-non-strict",
        "torch.compiler",
        "_is_non_strict_tracing_flag",
        as_is,
        "make_fx sessions of export",
        versions="2.13+",
        rest=False,
    ),
    _row(
        "dispatch-mode",
        "torch.utils._python_dispatch",
        "_is_in_torch_dispatch_mode",
        as_is,
        _MODE,
        rest=False,
        matters=readers.modes_by_flag,
    ),
    _row(
        "dispatch-mode-outside",
        "torch.utils._python_dispatch",
        "_is_in_non_infra_torch_dispatch_mode",
        as_is,
        _MODE,
        rest=False,
        matters=readers.modes_by_flag,
    ),
    _row(
        "dispatch-mode-compiled",
        "torch.utils._python_dispatch",
        "_is_in_any_mode_without_ignore_compile_internals",
        as_is,
        _MODE,
        versions="2.13+",
        rest=False,
        matters=readers.modes_by_flag,
    ),
)

_EF, _CF, _DU = "torch._dynamo.eval_frame", "torch._dynamo.convert_frame", "torch._dynamo.utils"
_CA = "torch._dynamo.compiled_autograd"
_DYNAMO = (
    _row(
        "stance",
        _EF,
        "_stance.stance",
        str,
        "pytorch#137504, #147983",
        rest="default",
        core=True,
    ),
    _own(
        "region-id",
        "torch._C._dynamo.eval_frame isolate_recompiles_id",
        readers.region_id,
        _REGION,
        versions="2.13+",
        rest=-1,
        core=True,
    ),
    _own(
        "skip-guards",
        "torch._C._dynamo.eval_frame skip_guard_eval_unsafe",
        readers.by_exchange("set_skip_guard_eval_unsafe", False),
        f"{_REGION}: left set, results are silently wrong",
        rest=False,
        sampled=False,
    ),
    _own(
        "fullgraph-frames",
        "torch._C._dynamo.eval_frame fullgraph_compiled_frame_count",
        readers.by_exchange("set_fullgraph_compiled_frame_count", -1),
        f"{_REGION}: a false 'found no compiled frames'",
        versions="2.13+",
        rest=-1,
        sampled=False,
    ),
    _own(
        "fullgraph-nested",
        "torch._C._dynamo.eval_frame fullgraph_error_on_nested_compile",
        readers.by_exchange("set_fullgraph_error_on_nested_compile", False),
        _REGION,
        versions="2.13+",
        rest=False,
        sampled=False,
    ),
    _own(
        "compile-lock",
        f"{_CF}.compile_lock",
        readers.lock_owner,
        "round every frame conversion and lazy backward",
        module=_CF,
        rest=None,
    ),
    _row(
        "graph-break-errors",
        _DU,
        "_error_on_graph_break",
        as_is,
        "another thread's fullgraph policy leaks",
        versions="2.13+",
        rest=False,
    ),
    _row(
        "in-optimized-module",
        _EF,
        "_in_optimized_module",
        as_is,
        "set while any OptimizedModule runs",
        versions="2.13+",
        rest=False,
    ),
    _row(
        "example-inputs",
        _EF,
        "_EXAMPLE_INPUTS",
        installed,
        "of the frame being exported",
        rest=None,
    ),
    _row(
        "bytecode-hooks",
        _CF,
        "_bytecode_hooks",
        size,
        "a hook of one thread runs for all",
    ),
    _own(
        "pending-callbacks",
        "torch._dynamo.callback.callback_handler",
        readers.pending_callbacks,
        "compiles that have told their start only",
        module="torch._dynamo.callback",
        rest=0,
    ),
    _row(
        "compiled-autograd",
        _CA,
        "compiled_autograd_enabled",
        as_is,
        "enabled by one thread, enabled for all",
        rest=False,
    ),
    _row(
        "compiled-autograd-region",
        _CA,
        "in_compiled_autograd_region",
        as_is,
        "pytorch#156868",
        rest=False,
    ),
    _row(
        "compiled-autograd-off",
        _CA,
        "active_disable_ctx",
        as_is,
        "disabled by one thread, disabled for all",
        rest=False,
    ),
    _row("compiled-autograd-depth", _CA, "depth", as_is, "pytorch#135298", rest=0),
    _own(
        "metrics-context",
        f"{_DU}.get_metrics_context()",
        readers.metrics_in_progress,
        "pytorch#170605: per thread since 2.11",
        THREAD,
        module=_DU,
        rest=False,
    ),
    _own(
        "tracing-context",
        "torch._guards.TracingContext",
        readers.tracing_context,
        "per thread: a helper thread has none",
        THREAD,
        module="torch._guards",
        rest=None,
    ),
    _own(
        "hop-compile",
        "torch._higher_order_ops.utils._hop_compile_tls",
        readers.thread_local(
            "torch._higher_order_ops.utils", "_hop_compile_tls", "in_hop_compile", False
        ),
        "per thread: set while eager flex_attention and other operators compile",
        THREAD,
        module="torch._higher_order_ops.utils",
        versions="2.13+",
        rest=False,
    ),
    _own(
        "dynamo-config",
        "torch._dynamo.config (recompile_limit and the FX switches)",
        readers.config(
            "torch._dynamo.config",
            "recompile_limit",
            "error_on_nested_fx_trace",
            "force_compile_during_fx_trace",
            "suppress_errors",
        ),
        "pytorch#186537: per thread since 2.12",
        THREAD,
        module="torch._dynamo.config",
    ),
    _row(
        "function-mode-offset",
        "torch._dynamo.variables.torch_function",
        "TorchFunctionModeStackVariable.offset",
        as_is,
        "a class attribute, reset by every compile",
        grows=True,
    ),
    _row(
        "global-state-guard",
        _CF,
        "initial_global_state",
        installed,
        "pytorch#111569: grad mode and dtype of whoever compiled last",
        grows=True,
    ),
    _row("frame-counter", _CF, "FRAME_COUNTER", as_is, "frame ids interleave", grows=True),
    _row("frame-compiles", _CF, "FRAME_COMPILE_COUNTER", size, "frame ids interleave", grows=True),
    _row("op-count", _DU, "op_count", as_is, "a sum over all threads", grows=True),
    _row("current-frame", _DU, "curr_frame", as_is, "a sum over all threads", grows=True),
    _row(
        "dynamo-counters",
        _DU,
        "counters",
        lambda counters: sum(sum(group.values()) for group in list(counters.values())),
        "sums over all threads",
        grows=True,
    ),
    _row(
        "cached-backends",
        _EF,
        "cached_backends",
        size,
        "pytorch#114674",
        grows=True,
    ),
    _row(
        "specializations",
        "torch._dynamo.symbolic_convert",
        "TensorifyState.force_specializations",
        size,
        "a class attribute",
        grows=True,
    ),
    _row(
        "bytecode-inputs",
        "torch._dynamo.graph_bytecode_inputs",
        "index_to_bytecode_constructor",
        size,
        "read at run time, reset by every compile",
        versions="2.13+",
        grows=True,
    ),
    _row(
        "bytecode-inputs-kept",
        "torch._dynamo.graph_bytecode_inputs",
        "keep_alive",
        size,
        "read at run time, reset by every compile",
        versions="2.13+",
        grows=True,
    ),
    _row(
        "pgo-shapes",
        "torch._dynamo.pgo",
        "_CODE_STATE",
        size,
        "one thread's shapes make another's frame dynamic",
        grows=True,
    ),
    _row(
        "backends",
        "torch._dynamo.backends.registry",
        "_COMPILER_FNS",
        size,
        "filled at first use",
        grows=True,
    ),
)

_AL = "torch._functorch._aot_autograd.logging_utils"
_FT = "torch._subclasses.fake_tensor"
_AOT = (
    _row(
        "aot-graph",
        _AL,
        "graph_being_compiled",
        copied,
        "names of another thread's graph in logs and errors",
        rest=[],
    ),
    _row("aot-graph-number", _AL, "nth_graph", as_is, "as above", grows=True),
    _row("aot-model-name", _AL, "model_name", as_is, "as above"),
    _row(
        "aot-log-callback",
        _AL,
        "callback_set",
        as_is,
        "queued on one engine's backward, asked by all",
        rest=False,
    ),
    _row("aot-counter", "torch._functorch.aot_autograd", "AOT_COUNTER", repr, "ids", grows=True),
    _row(
        "jvp-nesting",
        "torch._functorch.eager_transforms",
        "JVP_NESTING",
        as_is,
        "forward-mode level",
        rest=0,
    ),
    _row(
        "forward-ad-level",
        "torch.autograd.forward_ad",
        "_current_level",
        as_is,
        "forward-mode level",
        rest=-1,
    ),
    _row("fake-cache", _FT, "FakeTensorMode.cache", size, "cleared by any reset", grows=True),
    _own(
        "fake-override",
        f"{_FT}.fake_tensor_tls",
        readers.thread_local(_FT, "fake_tensor_tls", "allow_non_fake_inputs_override", None),
        "per thread",
        THREAD,
        module=_FT,
        rest=None,
    ),
    _own(
        "functorch-stack",
        "torch._C._functorch.get_dynamic_layer_stack_depth()",
        readers.call("_C._functorch.get_dynamic_layer_stack_depth"),
        "per thread, in C++",
        THREAD,
        rest=0,
    ),
    _own(
        "dispatch-stack",
        "torch._C._len_torch_dispatch_stack()",
        readers.call("_C._len_torch_dispatch_stack"),
        "per thread, in C++",
        THREAD,
        rest=0,
    ),
    _own(
        "function-stack",
        "torch._C._len_torch_function_stack()",
        readers.call("_C._len_torch_function_stack"),
        "per thread, in C++",
        THREAD,
        rest=0,
    ),
    _own(
        "grad-mode",
        "torch.is_grad_enabled()",
        readers.call("is_grad_enabled"),
        "per thread, and guarded on",
        THREAD,
    ),
    _own(
        "default-device",
        "torch.get_default_device()",
        readers.default_device,
        "pytorch#115917: per thread",
        THREAD,
    ),
    _row(
        "kernel-table",
        "torch._higher_order_ops.triton_kernel_wrap",
        "KernelSideTable.id_to_kernel",
        size,
        "reset does not stop readers",
        grows=True,
    ),
    _row(
        "leaf-modules",
        "torch._higher_order_ops.invoke_leaf_function",
        "_makefx_module_storage",
        size,
        "reset by any trace",
        versions="2.13+",
        grows=True,
    ),
    _row(
        "saved-tensor-mutation",
        "torch.autograd.graph",
        "_allow_mutation_on_saved_tensors_enabled",
        as_is,
        "a switch of the process",
        rest=False,
    ),
    _row(
        "checkpoint-early-stop",
        "torch.utils.checkpoint",
        "_enable_checkpoint_early_stop",
        as_is,
        "a switch of the process",
    ),
    _row(
        "checkpoint-debug",
        "torch.utils.checkpoint",
        "_checkpoint_debug_enabled",
        as_is,
        "a switch of the process",
        rest=None,
    ),
    _row(
        "eager-flex-warning",
        "torch.nn.attention.flex_attention",
        "_WARNINGS_SHOWN",
        sorted,
        "vllm#27178: the only sign of the uncompiled path, once per process",
        sampled=False,
        rest=[],
    ),
    _own(
        "flex-cache",
        "dynamo's cache of torch.nn.attention.flex_attention.flex_attention",
        readers.flex_cache_entries,
        "vllm#27178: one list for all wrappers in all threads",
        module="torch.nn.attention.flex_attention",
        sampled=False,
        grows=True,
    ),
)

_CC, _IR = "torch._inductor.codegen.common", "torch._inductor.ir"
_CG = "torch._inductor.cudagraph_trees"
_INDUCTOR = (
    _own(
        "inductor-graph",
        "torch._inductor.virtualized.V.graph",
        readers.inductor_graph,
        "per thread: a helper thread has none",
        THREAD,
        module="torch._inductor.virtualized",
        rest=None,
    ),
    _own(
        "inductor-config",
        "torch._inductor.config (caches and threads)",
        readers.config(
            "torch._inductor.config",
            "fx_graph_cache",
            "force_disable_caches",
            "compile_threads",
            "max_autotune",
        ),
        "pytorch#186537: per thread since 2.12",
        THREAD,
        module="torch._inductor.config",
    ),
    _own(
        "functorch-config",
        "torch._functorch.config (cache and donation)",
        readers.config(
            "torch._functorch.config",
            "enable_autograd_cache",
            "donated_buffer",
            "activation_memory_budget",
        ),
        "pytorch#186537: per thread since 2.12",
        THREAD,
        module="torch._functorch.config",
    ),
    _row("lowerings", "torch._inductor.lowering", "lowerings", size, "half filled", grows=True),
    _row("fallbacks", "torch._inductor.lowering", "fallbacks", size, "half filled", grows=True),
    _row("device-codegens", _CC, "device_codegens", size, "KeyError while filled", grows=True),
    _row(
        "device-overrides",
        _CC,
        "device_op_overrides_dict",
        size,
        "pytorch#168042; a lock since 2.14",
        grows=True,
    ),
    _row("ir-origins", _IR, "IRNode._current_origins", size, "a class attribute", rest=0),
    _row(
        "ir-stream",
        _IR,
        "IRNode._current_stream_idx",
        as_is,
        "a class attribute",
        versions="2.13+",
        rest=None,
    ),
    _row(
        "inductor-kernels",
        "torch._inductor.metrics",
        "generated_kernel_count",
        as_is,
        "a sum over all threads",
        grows=True,
    ),
    _row(
        "code-modules",
        "torch._inductor.codecache",
        "PyCodeCache.modules",
        size,
        "cleared by any reset",
        grows=True,
    ),
    _row(
        "compile-pools",
        "torch._inductor.async_compile",
        "_pool_set",
        size,
        "a dead pool is everybody's (pytorch#196972)",
        grows=True,
    ),
    _row(
        "kernel-futures",
        "torch._inductor.async_compile",
        "CompiledTritonKernels._cache",
        size,
        "begun and cleared per compile",
        grows=True,
    ),
    _row(
        "triton-bundle",
        "torch._inductor.triton_bundler",
        "TritonBundler._entries",
        installed,
        "run-time autotuning of another thread can land in it",
        rest=None,
    ),
    _row(
        "triton-calls",
        "torch._inductor.runtime.triton_heuristics",
        "collected_calls",
        size,
        "of a debugging aid",
        grows=True,
    ),
    _own(
        "cudagraph-trees",
        f"{_CG}.local",
        readers.thread_local(_CG, "local", "tree_manager_containers", None),
        "pytorch#123177; made in each thread at first use since 2.13 (#184357)",
        THREAD,
        module=_CG,
        grows=True,
    ),
    _row(
        "cudagraph-step",
        _CG,
        "MarkStepBox.mark_step_counter",
        as_is,
        "mark_step_begin() of one thread counts for all",
        grows=True,
    ),
    _row(
        "cudagraph-capture",
        _CG,
        "graph_capture_lock",
        lambda lock: lock.locked(),
        "pytorch#184357",
        versions="2.13+",
        rest=False,
    ),
    _row(
        "cuda-initialized",
        "torch.cuda",
        "_initialized",
        as_is,
        "under a lock that is not reentrant before 2.15 (#182948)",
        grows=True,
    ),
    _row("cuda-queued", "torch.cuda", "_queued_calls", size, "pytorch#182948", grows=True),
    _own(
        "triton-cache-dir",
        "os.environ['TRITON_CACHE_DIR']",
        readers.environment("TRITON_CACHE_DIR"),
        "set for the process from the first kernel's device",
        grows=True,
    ),
    _own(
        "inductor-cache-dir",
        "os.environ['TORCHINDUCTOR_CACHE_DIR']",
        readers.environment("TORCHINDUCTOR_CACHE_DIR"),
        "shared by all threads and, by default, by all processes of a user",
        grows=True,
    ),
)

CATALOGUE: tuple[Probe, ...] = _FX + _COMPILER + _DYNAMO + _AOT + _INDUCTOR


def by_name(name: str) -> Probe:
    """The row with that name; KeyError when there is none."""
    return {probe.name: probe for probe in CATALOGUE}[name]


def load_all(catalogue: tuple[Probe, ...] = CATALOGUE) -> None:
    """Imports every module that holds a probed state, as far as this torch has it.

    Before threads start it makes the difference between *not loaded* and *unknown*.
    """
    for module in dict.fromkeys(probe.module for probe in catalogue if probe.module):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def rest_values(catalogue: tuple[Probe, ...] = CATALOGUE) -> dict[str, Any]:
    """Every probe's value now. Call it before anything compiles: this is what "at rest" means.

    Imports the modules of the core rows; what else nobody has loaded stays unloaded.
    """
    load_all(tuple(probe for probe in catalogue if probe.core))
    return {probe.name: read(probe) for probe in catalogue}


def audit(
    rest: Mapping[str, Any], catalogue: tuple[Probe, ...] = CATALOGUE
) -> list[dict[str, Any]]:
    """Reads every probe after the threads have stopped: one row per probe, for the report."""
    rows = []
    for probe in catalogue:
        value = read(probe)
        expected = probe.rest if probe.rest is not SAVED else rest[probe.name]
        if rest[probe.name] is UNKNOWN:
            expected = UNKNOWN
        rows.append(
            {
                "probe": probe.name,
                "where": probe.where,
                "scope": probe.scope,
                "rest": show(expected),
                "value": show(value),
                "at_rest": at_rest(probe, value, rest),
                "grows": probe.grows,
                "changed": changed(probe, value, rest),
            }
        )
    return rows
