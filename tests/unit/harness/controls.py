"""One broken program per detector, each run in a process of its own; see the tests beside it.

Every function returns a trial's record. What each of them shows, and by which detector, stands
in ``test_detectors_are_needed.py``.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

from harness.crew import Member
from harness.schedule import Script
from harness.trial import Trial

DEADLINE = 60.0
_GATE = """
import threading

both = threading.Barrier(2)
met = set()

def meet(name):
    if name not in met:  # a module that failed is imported again, by one thread alone
        met.add(name)
        both.wait(20)
"""


def _nothing(_: Member) -> None:
    return None


def completed() -> dict[str, Any]:
    """Nothing is wrong: no detector may see anything."""
    with Trial(interval=0) as trial:
        trial.run(2, _nothing, deadline=DEADLINE)
        trial.expect_compiles({"f": 0}, {"f": 0})
        trial.number("output", 0.0, 0.0)
    return trial.record()


def segfault() -> dict[str, Any]:
    ctypes.string_at(0)
    return {}


def hang() -> dict[str, Any]:
    threading.Event().wait()
    return {}


def lock_order() -> dict[str, Any]:
    """One thread holds dynamo's lock and wants the user's; the other the other way round."""
    import torch
    from torch._dynamo import convert_frame

    users = threading.Lock()
    both = threading.Barrier(2)
    with Trial(interval=0) as trial:
        compiled = torch.compile(lambda x: x + 1, backend="eager")

        def work(member: Member) -> None:
            if member.index == 0:
                with convert_frame.compile_lock:
                    both.wait(20)
                    users.acquire()
            else:
                with users:
                    both.wait(20)
                    compiled(torch.ones(2))

        trial.run(2, work, start="together", deadline=3)
    return trial.record()


def half_imported(*, folder: str) -> dict[str, Any]:
    """Two modules that import each other, each begun by another thread."""
    from harness.first_touch import first_touch

    for name, other in (("ping", "pong"), ("pong", "ping")):
        text = f"import race_gate\nrace_gate.meet({name!r})\nimport {other}\n"
        Path(folder, f"{name}.py").write_text(text + f"X = 1\nY = {other}.X\n")
    Path(folder, "race_gate.py").write_text(_GATE)
    sys.path.insert(0, folder)
    return first_touch(
        before="race_gate", touches=["ping", "pong"], threads=2, deadline=30, canaries=False
    )


def missed_entry() -> dict[str, Any]:
    """A guarded value is another thread's for the time of the lookup, and right again after it."""
    import torch

    checks = "torch._dynamo.convert_frame:has_tensor_in_frame@entry"
    analysis = "torch._dynamo.guards:get_and_maybe_log_recompilation_reasons@entry"
    script = Script(
        [
            "drafter-0 step.end step=0",
            "drafter-1 step.begin step=0",
            "drafter-1 step.end step=0",
            "drafter-0 step.begin step=1",
            f"drafter-0 {checks} step=1",
            "drafter-1 step.begin step=1",
            "drafter-1 step.end step=1",
            f"drafter-0 {analysis} step=1",
        ],
        patience=20,
    )
    shared = {"by": 1}

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + shared["by"]

    with Trial(script=script, interval=0) as trial:
        compiled = torch.compile(program, backend="eager")

        def work(member: Member) -> None:
            for step, by in ((0, 2), (1, 1)):
                with member.step(step):
                    if member.index == 1:
                        shared["by"] = by
                        continue
                    if step == 1:
                        torch.compiler.set_stance("fail_on_recompile")
                    try:
                        compiled(torch.ones(2))
                    finally:
                        torch.compiler.set_stance("default")

        trial.run(2, work, start="together", deadline=DEADLINE)
    return trial.record()


def false_message() -> dict[str, Any]:
    """The process has one count of compiled frames, and each fullgraph call ends it twice.

    A is between its two ends; B begins and runs its frame; A ends B's count and begins its own;
    B reads that, finds no frame, and is told that nothing was compiled.
    """
    import torch
    from torch._dynamo import eval_frame

    a_leaves, b_inside, a_again, b_left = (threading.Event() for _ in range(4))
    armed = False
    exchanges = 0
    exchange = eval_frame.set_fullgraph_error_on_nested_compile

    def exchange_and_stop(value: bool) -> bool:
        nonlocal exchanges
        prior: bool = exchange(value)
        if armed and threading.current_thread().name == "drafter-0":
            exchanges += 1
            if exchanges == 2:  # the first is at the call's begin
                a_leaves.set()
                b_inside.wait(20)
        return prior

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            if armed and threading.current_thread().name == "drafter-1":
                b_inside.set()
                a_again.wait(20)
            return graph.forward(*args)

        return run

    def stop(event: Any) -> None:
        if event.point == "call.checked" and event.thread == "drafter-0" and a_leaves.is_set():
            a_again.set()
            b_left.wait(20)

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with Trial(interval=0) as trial:
        trial.hooks._listeners += (stop,)
        eval_frame.set_fullgraph_error_on_nested_compile = exchange_and_stop
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        for _ in range(2):
            compiled(torch.ones(2))
        armed = True

        def work(member: Member) -> None:
            if member.index == 0:
                compiled(torch.ones(2))
                compiled(torch.ones(2))
                return
            a_leaves.wait(20)
            try:
                compiled(torch.ones(2))
            finally:
                b_left.set()

        trial.run(2, work, start="together", deadline=DEADLINE)
        trial.expect_compiles({"program": 1}, {"program": 1})
    return trial.record()


def case_raises() -> dict[str, Any]:
    raise ZeroDivisionError("in the case, not in a thread")


def thread_dies(*, patience: float = 20.0) -> dict[str, Any]:
    """pytorch#126024: a warm call beside a trace."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    script = Script(
        [
            "drafter-0 step.end step=0",
            "tracer trace.begin",
            "tracer trace.body",
            "drafter-0 call.arrive step=1",
            "drafter-0 call.settled step=1",
            "tracer trace.end",
        ],
        patience=patience,
    )
    with Trial(unfix=["fx-tracing-flag"], script=script, interval=0) as trial:
        compiled = torch.compile(lambda x: x * 2, backend="eager")
        trial.add_thread("tracer", lambda _: make_fx(torch.sin)(torch.ones(2)))

        def work(member: Member) -> None:
            for step in range(2):
                with member.step(step):
                    compiled(torch.ones(2))

        trial.run(1, work, deadline=DEADLINE)
    return trial.record()


def eager_flex() -> dict[str, Any]:
    import torch
    from torch.nn.attention import flex_attention as flex

    q = torch.ones(1, 1, 16, 16)
    with Trial(interval=0) as trial, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial.run(1, lambda _: flex.flex_attention(q, q, q), deadline=DEADLINE)
    flex._WARNINGS_SHOWN.clear()
    return trial.record()


def limit_hit() -> dict[str, Any]:
    """pytorch#186537: the limit that the main thread has raised is not the drafter's."""
    import torch

    torch._dynamo.config.recompile_limit = 64
    with Trial(interval=0) as trial:
        compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)

        def work(_: Member) -> None:
            torch._dynamo.config.recompile_limit = 2
            for length in range(1, 5):
                compiled(torch.ones(length))

        trial.run(1, work, deadline=DEADLINE)
    return trial.record()


def no_graphs() -> dict[str, Any]:
    """Two threads change the stance for a while, A in, B in, A out, B out: B puts A's back."""
    import torch

    a_in, b_in, a_out = threading.Event(), threading.Event(), threading.Event()
    with Trial(interval=0) as trial:

        def work(member: Member) -> None:
            if member.index == 0:
                with torch.compiler.set_stance("force_eager"):
                    a_in.set()
                    b_in.wait(20)
                a_out.set()
            else:
                a_in.wait(20)
                with torch.compiler.set_stance("force_eager"):
                    b_in.set()
                    a_out.wait(20)

        trial.run(2, work, start="together", deadline=DEADLINE)
    return trial.record()


def one_more_compile() -> dict[str, Any]:
    """Each thread makes its own function object of one code: a second compile for each shape."""
    import torch

    compiles = {"program": 0}

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        compiles["program"] += 1
        return graph.forward

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with Trial(interval=0) as trial:

        def work(member: Member) -> None:
            compiled = torch.compile(program, backend=lambda graph, inputs: backend(graph, inputs))
            with member.step(0):
                compiled(torch.ones(2))

        trial.run(2, work, after_step=0, deadline=DEADLINE)
        trial.expect_compiles({"program": 1}, compiles)
    return trial.record()


def left_patched() -> dict[str, Any]:
    """pytorch#168042: two traces that do not nest, A in, B in, A out, B out."""
    import torch

    script = Script(
        [
            "drafter-0 trace.body",
            "drafter-1 trace.begin",  # or it could have patched first: then the two do nest
            "drafter-1 trace.body",
            *(
                f"drafter-{index} {point}"
                for index in (0, 1)
                for point in ("trace.end", "trace.left")
            ),
        ],
        patience=20,
    )
    with Trial(script=script, interval=0) as trial:

        def work(_: Member) -> None:
            try:
                torch.fx.symbolic_trace(lambda x: x + 1)
            except AssertionError:  # loud on some versions; what stays is the finding here
                return

        trial.run(2, work, start="together", deadline=DEADLINE)
    return trial.record(canaries=False)


def broken_linear() -> dict[str, Any]:
    """Damage that no probe shows."""
    import torch

    with Trial(interval=0) as trial:

        def work(_: Member) -> None:
            torch.nn.Linear.forward = lambda self, x: x * 3  # type: ignore[method-assign]

        trial.run(1, work, deadline=DEADLINE)
    return trial.record()


def open_trace() -> dict[str, Any]:
    """A thread that ends inside a trace, as one does that is killed there by its debugger."""
    with Trial(interval=0) as trial:
        trial.run(1, lambda _: trial.hooks.emit("trace.begin"), deadline=DEADLINE)
    return trial.record()


def other_numbers(*, beside: bool = True) -> dict[str, Any]:
    """An eager AdamW step beside a compile takes the branch of compiled code: other numbers."""
    import torch

    from harness.reference import snapshot

    compiling, stepped = threading.Event(), threading.Event()

    def training() -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.randn(4, 8)
        output = model(x)
        for _ in range(20):
            output = model(x)
            output.square().mean().backward()
            optimizer.step()
        return snapshot(output, model, optimizer)

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        compiling.set()
        stepped.wait(30)
        return graph.forward

    reference = training()
    taken: dict[str, Any] = {}
    with Trial(interval=0) as trial:
        compiled = torch.compile(lambda x: x + 1, backend=backend)

        def work(member: Member) -> None:
            if member.index == 0 and beside:
                compiled(torch.ones(2))
            elif member.index == 1:
                if beside:
                    compiling.wait(30)
                try:
                    taken.update(training())
                finally:
                    stepped.set()

        trial.run(2, work, start="together", deadline=DEADLINE)
        trial.compare("drafter-1", taken, reference, 0.0)
    return trial.record()
