"""The named points are where they say, are silent elsewhere, and leave nothing behind."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.fx.traceback as fx_traceback
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.variables import torch as dynamo_variables
from torch.fx import Tracer
from torch.nn.attention import flex_attention as flex

from harness.crew import Crew, Member
from harness.hooks import HookError, Hooks
from harness.points import POINTS, Event

annotates = pytest.mark.skipif(
    not hasattr(fx_traceback, "annotate"), reason="this torch has no annotations"
)


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def points(self, *prefixes: str) -> list[str]:
        wanted = prefixes or ("",)
        return [event.point for event in self.events if event.point.startswith(wanted)]

    def at(self, point: str) -> Event:
        (event,) = [event for event in self.events if event.point == point]
        return event


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield Recorder()
    torch._dynamo.reset()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def compiled(function: Callable[..., Any] = double) -> Callable[..., Any]:
    return torch.compile(function, backend="eager")


def fail(_: torch.Tensor) -> torch.Tensor:
    raise LookupError("from inside")


def patched_places() -> dict[str, object]:
    """Everything that the hooks replace, as it is now."""
    places: dict[str, object] = {
        "context": vars(eval_frame._TorchDynamoContext)["__call__"],
        "stance": eval_frame._callback_from_stance,
        "trace": vars(Tracer)["trace"],
        "copy": vars(fx_traceback).get("copy"),
        "setup": flex.setup_compilation_env,
        "lock": convert_frame.compile_lock,
        "known": list(getattr(dynamo_variables, "supported_ctx_manager_classes", ())),
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and "annotate" in vars(module):
            places[f"{name}.annotate"] = vars(module)["annotate"]
    return places


def same(one: dict[str, object], other: dict[str, object]) -> bool:
    plain = ("known",)
    return one.keys() == other.keys() and all(
        one[name] == other[name] if name in plain else one[name] is other[name] for name in one
    )


# -- each point --------------------------------------------------------------------------------


def run_everything(hooks: Hooks) -> None:
    def work(member: Member) -> None:
        with member.step(0):
            compiled()(torch.ones(2))

    Crew(1, deadline=60, hooks=hooks).run(work)
    torch.fx.symbolic_trace(double)
    if hasattr(fx_traceback, "annotate"):
        with fx_traceback.annotate({"tag": 1}):
            pass
    q = torch.ones(1, 1, 16, 16)
    flex.flex_attention(q, q, q)


def test_every_point_is_reached_by_a_program_that_does_it_all(recorder: Recorder) -> None:
    with Hooks(recorder) as hooks:
        run_everything(hooks)
    missing = POINTS.keys() - set(recorder.points())
    if not hasattr(fx_traceback, "annotate"):
        missing -= {point for point in POINTS if point.startswith("annotate.")}
    assert missing == set()


def test_a_program_that_does_nothing_of_it_reaches_no_point(recorder: Recorder) -> None:
    with Hooks(recorder):
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
        threading.Lock().acquire()
        torch.compile(double, backend="eager")  # wrapped, not called
    assert recorder.points() == []


def test_a_call_passes_its_points_in_order(recorder: Recorder) -> None:
    with Hooks(recorder):
        call = compiled()
        assert call(torch.ones(2)).tolist() == [2.0, 2.0]
        first = recorder.points()
        recorder.events.clear()
        call(torch.ones(2))
    warm = ["call.arrive", "call.enter", "call.checked", "call.settled", "call.exit"]
    assert [point for point in first if point.startswith("call.")] == warm
    assert first.index("call.settled") < first.index("lock.wait") < first.index("call.exit")
    assert recorder.points() == warm, "a warm call neither traces nor takes the lock"


def test_the_first_call_takes_the_lock_once_and_gives_it_back(recorder: Recorder) -> None:
    with Hooks(recorder):
        compiled()(torch.ones(2))
    locks = Counter(recorder.points("lock."))
    assert locks["lock.held"] == locks["lock.released"] >= 1
    assert locks["lock.wait"] >= locks["lock.held"]
    assert recorder.points("lock.")[0] == "lock.wait"
    assert recorder.points("lock.")[-1] == "lock.released"


def test_nested_holds_of_the_lock_are_one(recorder: Recorder) -> None:
    with Hooks(recorder):
        with convert_frame.compile_lock, convert_frame.compile_lock:
            assert recorder.points("lock.held", "lock.released") == ["lock.held"]
    assert recorder.points("lock.held", "lock.released") == ["lock.held", "lock.released"]


def test_the_flag_is_up_in_the_body_of_a_trace_and_down_when_it_is_left() -> None:
    up: dict[str, bool] = {}

    def look(event: Event) -> None:
        if event.point.startswith("trace."):
            up[event.point] = torch.fx._symbolic_trace.is_fx_tracing()

    with Hooks(look):
        torch.fx.symbolic_trace(double)
    assert up == {
        "trace.begin": False,
        "trace.body": True,
        "trace.end": True,
        "trace.left": False,
    }


@annotates
def test_annotate_is_tested_then_written_then_runs_then_left(recorder: Recorder) -> None:
    written: dict[str, bool] = {}

    def look(event: Event) -> None:
        if event.point.startswith("annotate."):
            written[event.point] = "custom" in fx_traceback.current_meta

    with Hooks(look, recorder):
        with fx_traceback.annotate({"tag": 1}):
            pass
    assert written == {
        "annotate.arrive": False,
        "annotate.tested": False,
        "annotate.write": False,
        "annotate.body": True,
        "annotate.end": True,
        "annotate.left": False,
    }
    assert recorder.points() == list(written)


def test_each_event_carries_its_thread_and_its_work_step(recorder: Recorder) -> None:
    with Hooks(recorder) as hooks:
        call = compiled()
        call(torch.ones(2))  # outside a crew
        outside = list(recorder.events)
        recorder.events.clear()

        def work(member: Member) -> None:
            for number in (0, 1):
                with member.step(number):
                    call(torch.ones(2))
            call(torch.ones(2))  # after its last step

        Crew(1, deadline=60, hooks=hooks).run(work)
    assert {(event.thread, event.step) for event in outside} == {("MainThread", None)}
    assert {event.thread for event in recorder.events} == {"drafter-0"}
    entries = [event.step for event in recorder.events if event.point == "call.enter"]
    assert entries == [0, 1, None]


# -- nesting, errors, listeners ------------------------------------------------------------------


def test_only_the_outermost_of_nested_compiled_calls_is_announced(recorder: Recorder) -> None:
    with Hooks(recorder):
        inner = compiled()

        @torch._dynamo.disable
        def outside_the_graph(x: torch.Tensor) -> torch.Tensor:
            return inner(x)  # a real second compiled call, not an inlined one

        def outer(x: torch.Tensor) -> torch.Tensor:
            return outside_the_graph(x + 1) + 1

        assert compiled(outer)(torch.ones(1)).tolist() == [5.0]
        nested = recorder.points("call.")
        recorder.events.clear()
        inner(torch.ones(1))
        alone = recorder.points("call.")
    assert nested == alone
    assert Counter(nested) == dict.fromkeys(
        ["call.arrive", "call.enter", "call.checked", "call.settled", "call.exit"], 1
    )


def test_a_compiled_module_is_announced_like_a_function(recorder: Recorder) -> None:
    with Hooks(recorder):
        torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    assert recorder.points("call.enter", "call.exit") == ["call.enter", "call.exit"]


def test_an_error_behind_the_checks_passes_through_exit_only(recorder: Recorder) -> None:
    with Hooks(recorder):
        with pytest.raises(LookupError, match="from inside"):
            compiled(fail)(torch.ones(2))
    assert recorder.at("call.settled").error is None
    assert isinstance(recorder.at("call.exit").error, LookupError)


def test_an_error_of_the_checks_passes_through_settled_and_exit(recorder: Recorder) -> None:
    """pytorch#126024: the wrapper's own check raises, before anything compiled runs."""
    with Hooks(recorder):
        call = compiled()
        with pytest.raises(RuntimeError, match="FX to symbolically trace"):
            torch.fx.symbolic_trace(lambda x: call(x))
    assert "call.checked" not in recorder.points()
    assert isinstance(recorder.at("call.settled").error, RuntimeError)
    assert recorder.at("call.exit").error is recorder.at("call.settled").error
    assert recorder.points("trace.end", "trace.left") == ["trace.end", "trace.left"]


@annotates
def test_an_error_of_annotate_itself_passes_through_left(recorder: Recorder) -> None:
    """``KeyError: 'custom'``: another thread took the annotation away in between."""
    with Hooks(recorder):
        with pytest.raises(KeyError, match="custom"):
            with fx_traceback.annotate({"tag": 1}):
                del fx_traceback.current_meta["custom"]
    assert isinstance(recorder.at("annotate.left").error, KeyError)


def test_what_a_listener_does_is_not_announced() -> None:
    heard: list[str] = []

    def nosy(event: Event) -> None:
        heard.append(event.point)
        torch.fx.symbolic_trace(double)

    with Hooks(nosy):
        torch.fx.symbolic_trace(double)
    assert heard == ["trace.begin", "trace.body", "trace.end", "trace.left"]


def test_listeners_hear_in_their_order(recorder: Recorder) -> None:
    order: list[str] = []
    with Hooks(lambda _: order.append("records"), lambda _: order.append("waits")) as hooks:
        hooks.emit("step.begin")
    assert order == ["records", "waits"]


# -- nothing stays -------------------------------------------------------------------------------


def test_all_patches_are_gone_afterwards(recorder: Recorder) -> None:
    before = patched_places()
    with Hooks(recorder):
        during = patched_places()
    assert same(before, patched_places())
    changed = {name for name in before if before[name] is not during[name]}
    assert {"context", "stance", "trace", "copy", "setup", "lock"} <= changed, "control"
    if hasattr(fx_traceback, "annotate"):
        assert "torch.fx.traceback.annotate" in changed


def test_all_patches_are_gone_after_an_error_inside(recorder: Recorder) -> None:
    before = patched_places()
    with pytest.raises(LookupError):
        with Hooks(recorder):
            raise LookupError
    assert same(before, patched_places())


def test_what_was_compiled_under_the_hooks_falls_silent_with_them(recorder: Recorder) -> None:
    """A thread that is late must not run into a script whose trial is over."""
    with Hooks(recorder):
        call = compiled()
    call(torch.ones(2))
    assert recorder.points() == []


MISSING = [
    (eval_frame._TorchDynamoContext, "__call__", "eval_frame._TorchDynamoContext.__call__"),
    (eval_frame, "_callback_from_stance", "torch._dynamo.eval_frame._callback_from_stance"),
    (Tracer, "trace", "torch.fx._symbolic_trace.Tracer.trace"),
    (flex, "setup_compilation_env", "flex_attention.setup_compilation_env"),
    (convert_frame, "compile_lock", "torch._dynamo.convert_frame.compile_lock"),
]


@pytest.mark.parametrize(("owner", "name", "place"), MISSING, ids=[row[1] for row in MISSING])
def test_a_point_that_this_torch_lacks_is_an_error_that_names_the_version(
    owner: Any, name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        before = patched_places_without(owner, name)
        with pytest.raises(HookError) as caught, Hooks():
            pass
        assert before == patched_places_without(owner, name), "half-installed hooks stayed"
    assert f"torch {torch.__version__} has no " in str(caught.value)
    assert place in str(caught.value)


def patched_places_without(owner: Any, name: str) -> dict[str, int]:
    rows = [(row[0], row[1]) for row in MISSING if (row[0], row[1]) != (owner, name)]
    return {attribute: id(vars(thing)[attribute]) for thing, attribute in rows}
