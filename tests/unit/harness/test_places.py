"""A place is where it says, costs nobody else anything, and leaves the function as it was."""

from __future__ import annotations

import inspect
import traceback
import types
from collections.abc import Iterator

import pytest
import subject
from hypothesis import given
from hypothesis import strategies as st

from harness import places
from harness.places import Place, PlaceError

NAMES = st.from_regex(r"[a-z_]\w{0,8}(\.[a-z_]\w{0,8}){0,2}", fullmatch=True)


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []

    def installed(self, *texts: str) -> places.Installed:
        def say(text: str) -> None:
            self.said.append(text)

        rows = {Place.parse(f"subject:{text}"): (lambda text=text: say(text)) for text in texts}
        return places.install(rows)


@pytest.fixture
def log() -> Iterator[Log]:
    before = {
        name: thing.__code__
        for name, thing in vars(subject).items()
        if isinstance(thing, types.FunctionType)
    }
    log = Log()
    yield log
    after = {name: getattr(subject, name).__code__ for name in before}
    assert all(before[name] is after[name] for name in before), "a place stayed"


@given(
    NAMES,
    NAMES,
    st.sampled_from(["entry", "exit"]) | st.from_regex(r"[a-z =.]{1,9}", fullmatch=True),
)
def test_what_a_place_prints_it_reads_back(module: str, function: str, at: str) -> None:
    place = (
        Place(module, function, at)
        if at in ("entry", "exit")
        else Place(module, function, "line", at)
    )
    assert Place.parse(str(place)) == place


@pytest.mark.parametrize(
    "text",
    ["", "f@entry", "m:f", "m:f@middle", "m:f@line", "m:f@line://", "m:f@line:/(/", "m:1@exit"],
)
def test_another_text_is_refused_and_named(text: str) -> None:
    with pytest.raises(PlaceError, match=r"is not a place|regular expression") as caught:
        Place.parse(text)
    assert repr(text) in str(caught.value)


def test_entry_and_exit_come_where_they_say(log: Log) -> None:
    installed = log.installed("plain@entry", "plain@exit", "plain@line:/return y/")
    assert subject.plain(1) == 2
    installed.remove()
    assert log.said == ["plain@entry", "plain@line:/return y/", "plain@exit"]
    log.said.clear()
    assert subject.plain(1) == 2 and log.said == []


def test_a_line_is_passed_only_when_it_runs(log: Log) -> None:
    installed = log.installed("plain@line:/^y = 0$/")
    subject.plain(1)
    assert log.said == []
    assert subject.plain(20) == 0
    assert log.said == ["plain@line:/^y = 0$/"]
    installed.remove()


def test_exit_comes_after_an_exception_too_and_lines_stay_true(log: Log) -> None:
    installed = log.installed("raises@entry", "raises@exit")
    with pytest.raises(LookupError) as caught:
        subject.raises()
    installed.remove()
    assert log.said == ["raises@entry", "raises@exit"]
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.line == 'raise LookupError("from inside")' and last.name == "raises"


@pytest.mark.parametrize(
    ("function", "call", "result"),
    [
        ("decorated", lambda: subject.decorated(4), 8),
        ("Thing.name", lambda: subject.Thing().name(), "baseprivate"),
        ("Thing.still", lambda: subject.Thing.still(5), 5),
        ("Thing.of_class", lambda: subject.Thing.of_class(), "Thing"),
        ("counting", lambda: subject.counting(1), 31),
        ("outer.inner", lambda: subject.outer(1)(2), 12),
    ],
)
def test_every_shape_of_function_can_have_one(log: Log, function, call, result) -> None:
    """Decorated, static, with super() and private names, with free variables, inside another."""
    installed = log.installed(f"{function}@entry", f"{function}@exit")
    assert call() == result
    installed.remove()
    assert log.said == [f"{function}@entry", f"{function}@exit"]
    assert call() == result and len(log.said) == 2


def test_a_context_manager_passes_its_lines_as_it_is_entered_and_left(log: Log) -> None:
    installed = log.installed("managed@entry", "managed@line:/yield/", "managed@exit")
    with subject.managed(log.said):
        log.said.append("body")
    installed.remove()
    assert log.said == [
        "managed@entry",
        "in",
        "managed@line:/yield/",
        "body",
        "out",
        "managed@exit",
    ]


def test_the_function_object_its_name_and_its_documentation_stay(log: Log) -> None:
    holder = subject.plain
    installed = log.installed("plain@entry")
    assert subject.plain is holder and holder.__doc__ == "Has a docstring, which stays."
    assert holder.__code__.co_qualname == "plain"
    assert holder.__code__.co_firstlineno == inspect.getsourcelines(holder)[1]
    holder(1)
    assert log.said == ["plain@entry"], "an old reference reaches the point"
    installed.remove()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("subject:absent@entry", "there is no absent"),
        ("subject:plain.inner@entry", "is defined 0 times"),
        ("subject:plain@line:/nowhere/", "0 of its lines match"),
        ("subject:twice@line:/x \\+= 1/", "2 of its lines match"),
        ("no_such_module:f@entry", "cannot import no_such_module"),
        ("math:sin@entry", "is not a Python function"),
        ("subject:Thing@entry", "is not a Python function"),
    ],
)
def test_what_cannot_be_resolved_is_an_error_and_installs_nothing(log, text, why) -> None:
    before = subject.plain.__code__
    good = Place.parse("subject:plain@entry")
    with pytest.raises(PlaceError, match=why) as caught:
        places.install({good: lambda: None, Place.parse(text): lambda: None})
    assert text in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert subject.plain.__code__ is before


def test_a_missing_place_in_torch_names_the_version() -> None:
    from importlib.metadata import version

    with pytest.raises(PlaceError, match="does not exist in torch") as caught:
        places.resolve([Place.parse("torch.fx._symbolic_trace:no_such@entry")])
    assert version("torch") in str(caught.value)
