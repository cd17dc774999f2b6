"""Module globals made thread-local: what is rewritten, what stays, what is put back."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import sys
import textwrap
import threading
import traceback
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.compile import thread_state
from dflash.compile.thread_state import StateError, ThreadLocalGlobals, held_elsewhere

_numbers = itertools.count()
REST = {"FLAG": lambda: 0, "META": dict}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("modules")


@pytest.fixture
def load(folder):
    """``load(text)``: a module made of that text, imported from a file of its own."""
    names = []

    def load(text: str, **values: object) -> types.ModuleType:
        name = f"generated_{next(_numbers)}"
        path = folder / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        vars(module).update(values)
        sys.modules[name] = module
        names.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in names:
        del sys.modules[name]


@contextlib.contextmanager
def thread_local(module, watched=frozenset(), **rest):
    """The module with ``rest`` (default: those of REST that it has) per thread."""
    rest = rest or {name: make for name, make in REST.items() if name in vars(module)}
    state = ThreadLocalGlobals(module, rest, watched)
    state.install()
    try:
        yield state
    finally:
        state.remove()


def in_thread(function):
    """What the function returns in another thread."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


SIMPLE = """
    import contextlib, functools

    FLAG = 0
    META = {}

    def get():
        return FLAG

    def put(value):
        global FLAG
        FLAG = value

    def bystander():
        return META_LIKE()

    def META_LIKE():
        return "not a use"

    def attribute(thing):
        return thing.FLAG

    @contextlib.contextmanager
    def raised(value):
        global FLAG
        old = FLAG
        FLAG = value
        try:
            yield FLAG
        finally:
            FLAG = old

    @functools.lru_cache
    def cached(key):
        return (key, FLAG)

    def closure(start):
        def inner():
            return start + FLAG
        return inner

    class Box:
        held = FLAG

        def read(self):
            return FLAG

        @staticmethod
        def static():
            return FLAG

        @property
        def prop(self):
            return (__class__.__name__, FLAG)

    def boom():
        FLAG
        return 1 / FLAG
"""


# -- what is rewritten -----------------------------------------------------------------------------


def test_each_thread_has_its_own_value(load):
    """A value put by one thread is seen by it alone; another one begins with the value at rest."""
    module = load(SIMPLE)
    with thread_local(module):
        module.put(7)
        assert module.get() == 7
        assert in_thread(module.get) == 0
        in_thread(lambda: module.put(9))
        assert module.get() == 7


def test_functions_that_use_no_name_keep_their_code(load):
    """An attribute or a longer name that looks like the global is not a use of it."""
    module = load(SIMPLE)
    kept = [module.bystander, module.META_LIKE, module.attribute]
    before = [function.__code__ for function in kept]
    with thread_local(module):
        assert [function.__code__ for function in kept] == before
        assert all(f.__code__ is code for f, code in zip(kept, before, strict=True))
        assert module.attribute(types.SimpleNamespace(FLAG="its own")) == "its own"


def test_every_kind_of_function_is_exchanged(load):
    """Closures, decorated functions, methods and references taken before run the new code."""
    module = load(SIMPLE)
    get, inner, box, raised = module.get, module.closure(100), module.Box(), module.raised
    with thread_local(module):
        with raised(5) as value:
            assert (value, get(), inner(), box.read(), module.Box.static()) == (5, 5, 105, 5, 5)
            assert box.prop == ("Box", 5)
            assert module.cached("k") == ("k", 5)
            assert in_thread(lambda: (get(), inner(), box.read())) == (0, 100, 0)
        assert get() == 0
    assert module.Box.held == 0


def test_identity_lines_and_tracebacks_stay(load):
    """The function object is the same, and an error in it shows the same lines of the same file."""
    module = load(SIMPLE)
    boom = module.boom

    def shown():
        with pytest.raises(ZeroDivisionError) as caught:
            module.boom()
        return traceback.format_exception(caught.value)[2:]

    before, lines = shown(), list(boom.__code__.co_lines())
    with thread_local(module):
        assert module.boom is boom
        assert shown() == before
        assert boom.__code__.co_firstlineno == lines[0][2]
        assert boom.__code__.co_filename == module.__file__


def test_module_attribute_is_this_threads_value(load):
    """``module.FLAG`` from elsewhere reads and writes the calling thread's value."""
    module = load(SIMPLE)
    with thread_local(module):
        module.FLAG = 3
        assert module.get() == 3
        assert in_thread(lambda: module.FLAG) == 0
        module.put(4)
        assert module.FLAG == 4
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "FLAG", 5)
            assert module.get() == 5
        assert module.get() == 4


def test_aliases_of_a_mutable_value_follow(load):
    """``from m import META as THEIRS`` elsewhere sees the calling thread's dictionary."""
    module = load(SIMPLE)
    other = load("def read():\n    return THEIRS\n", THEIRS=module.META)
    with thread_local(module):
        module.META["who"] = "main"
        assert other.read() is module.META is other.THEIRS
        assert in_thread(lambda: other.read() is module.META)
        assert in_thread(lambda: dict(other.read())) == {}
    assert other.THEIRS is other.read() is module.META


def test_two_lambdas_on_one_line_are_not_confused(load):
    """The functions have the same name and line; each gets its own new code, or keeps its own."""
    module = load("FLAG = 0\na, b, c = lambda: FLAG, lambda: 1, lambda: (lambda: FLAG)\n")
    with thread_local(module):
        module.FLAG = 6
        assert (module.a(), module.b(), module.c()()) == (6, 1, 6)


SCOPES = {
    "default of a nested function": (
        "def f():\n    def g(a=FLAG):\n        return a\n    return g()"
    ),
    "decorator of a nested function": (
        "def f():\n    @(lambda g, x=FLAG: lambda: x)\n    def g(): pass\n    return g()"
    ),
    "default of a nested lambda": "def f():\n    return (lambda a=FLAG: a)()",
    "comprehension that binds the name": (
        "def f():\n    bound = [FLAG for FLAG in (1, 2)]\n    return bound, FLAG"
    ),
    "walrus in a comprehension": (
        "def f():\n    [0 for i in (5,) if (FLAG := i)]\n    return FLAG, g()\n"
        "def g():\n    return (other := FLAG), other"
    ),
    "local of the enclosing function": (
        "def f():\n    FLAG = 3\n    def g():\n        return FLAG\n    return g()"
    ),
    "global in a nested function only": (
        "def f():\n    FLAG = 3\n    def g():\n        global FLAG\n        FLAG = 8\n"
        "    g()\n    return FLAG, globals_flag()\ndef globals_flag():\n    return FLAG"
    ),
    "class body in a function": (
        "def f():\n    class C:\n        x = FLAG\n        def m(self, d=FLAG):\n"
        "            return d, FLAG\n    return C.x, C().m()"
    ),
    "class attribute of that name": (
        "def f():\n    class C:\n        FLAG = 3\n        def m(self):\n            return FLAG\n"
        "    return C.FLAG, C().m()"
    ),
    "annotations of a nested function": (
        "from __future__ import annotations\n"
        "def f():\n    def g(a: FLAG) -> FLAG:\n        return FLAG\n    return g.__annotations__"
    ),
    "annotations without the future import": (
        "def f():\n    def g(a: FLAG):\n        return FLAG\n    return g.__annotations__"
    ),
    "f-string": "def f():\n    return f'{FLAG}{FLAG!r:>4}' f'''\n{FLAG}'''",
    "generator": (
        "def f():\n    def g():\n        yield FLAG\n    return [*g(), *(FLAG for _ in 'a')]"
    ),
    "for, with, augmented": (
        "import contextlib\ndef f():\n    global FLAG\n    for FLAG in (1, 2): pass\n"
        "    with contextlib.nullcontext(9) as FLAG: pass\n    FLAG += 1\n    return FLAG"
    ),
    "starred and unpacked": (
        "def f():\n    global FLAG\n    (FLAG, *rest), a = (4, 5), 6\n    return FLAG, rest, a"
    ),
    "async": (
        "async def g():\n    return [FLAG async for _ in h()]\nasync def h():\n    yield FLAG\n"
        "def f():\n    try:\n        g().send(None)\n    except StopIteration as end:\n"
        "        return end.value"
    ),
}


@pytest.mark.parametrize("text", SCOPES.values(), ids=SCOPES)
def test_scopes_mean_what_they_meant(load, text):
    """Each way in which Python binds or reads a name gives the same result as unchanged code."""
    text = text if text.startswith("from __future__") else f"FLAG = 0\n{text}"
    text += "" if "FLAG = 0" in text else "\nFLAG = 0\n"
    plain, changed = load(text), load(text)
    expected = plain.f()
    with thread_local(changed):
        assert changed.f() == expected
        assert changed.FLAG == plain.FLAG


STATEMENTS = (
    "out.append(FLAG)",
    "FLAG = {k}",
    "FLAG += {k}",
    "META = {{'k': {k}}}",
    "META['k'] = META.get('k', 0) + FLAG",
    "out.append(dict(META))",
    "out.append([FLAG for FLAG in (1, {k})])",
    "out.append([FLAG + i for i in (1, {k})])",
    "out.append([i for i in (1, {k}) if (FLAG := i)])",
    "out.append((lambda a=FLAG: (a, FLAG))())",
    "out.append((lambda FLAG: FLAG)({k}))",
    "out.extend(FLAG for _ in (1,))",
    "out.append(f'{{FLAG}}-{{FLAG!r:>5}}')",
    "for FLAG in ({k},):\n    out.append(FLAG)",
    "class C:\n    x = FLAG\n    def m(self, d=FLAG):\n        return d, FLAG\nout.append(C().m())",
    "class C:\n    FLAG = {k}\n    def m(self):\n        return FLAG\n"
    "out.append((C.FLAG, C().m()))",
)


@st.composite
def blocks(draw, depth=2):
    """Lines of a function body: uses of the names in every scope, nested functions."""
    lines = [draw(st.sampled_from(["", "global FLAG", "global FLAG, META"]))]
    for _ in range(draw(st.integers(1, 4))):
        if depth and draw(st.integers(0, 3)) == 0:
            default = draw(st.sampled_from(["", "a=FLAG", "FLAG=3"]))
            inner = draw(blocks(depth - 1))
            if default == "FLAG=3":
                inner = [line for line in inner if not line.startswith("global")]
            body = textwrap.indent("\n".join(["pass", *inner]), "    ")
            lines.append(f"def g({default}):\n{body}\ng()")
        else:
            lines.append(draw(st.sampled_from(STATEMENTS)).format(k=draw(st.integers(2, 5))))
    if lines[0]:  # a walrus with a global target is refused
        lines = [line for line in lines if ":=" not in line or line.startswith("def")]
    return [line for line in lines if line]


def function(name, lines):
    """``lines`` as a function whose errors are results; ``global`` must stand before the try."""
    head = [line for line in lines if line.startswith("global")]
    body = ["pass", *(line for line in lines if not line.startswith("global"))]
    return (
        f"def {name}(out):\n    pass\n{textwrap.indent(chr(10).join(head), '    ')}\n    try:\n"
        + textwrap.indent("\n".join(body), "        ")
        + "\n    except Exception as error:\n        out.append(type(error).__name__)"
        + "\n    return out\n"
    )


def test_programs_run_as_before(load):
    """Random functions in one thread: same results, same errors, same values afterwards."""

    def results(module):
        functions = [value for name, value in sorted(vars(module).items()) if name[:2] == "f_"]
        return [(f([]), f([]), module.FLAG, dict(module.META)) for f in functions]

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.lists(blocks(), min_size=8, max_size=8))
    def same(bodies):
        functions = [function(f"f_{n}", lines) for n, lines in enumerate(bodies)]
        text = "\n".join(["FLAG = 1", "META = {}", *functions])
        plain, changed = load(text), load(text)
        expected = results(plain)
        with thread_local(changed, FLAG=lambda: 1, META=dict):
            assert results(changed) == expected, text

    same()


# -- what cannot be done ---------------------------------------------------------------------------


def snapshot(module):
    functions = [f for f in vars(module).values() if isinstance(f, types.FunctionType)]
    return module.__class__, dict(vars(module)), [(f, f.__code__) for f in functions]


def assert_unchanged(module, before):
    after = snapshot(module)
    assert after[0] is before[0]
    assert after[1].keys() == before[1].keys()
    assert all(after[1][name] is value for name, value in before[1].items())
    assert all(f.__code__ is code for f, code in before[2])


REFUSED = {
    "missing name": ("def f():\n    return 1\n", "has no global FLAG"),
    "import as": ("FLAG = 0\ndef f():\n    global FLAG\n    import os as FLAG\n", "cannot be"),
    "walrus": ("FLAG = 0\ndef f():\n    global FLAG\n    return (FLAG := 1)\n", "cannot be"),
    "except as": (
        "FLAG = 0\ndef f():\n    global FLAG\n    try: pass\n    except OSError as FLAG: pass\n",
        "cannot be",
    ),
    "class or module": (
        "FLAG = 0\ndef f(x):\n    class C:\n        if x: FLAG = 1\n        y = FLAG\n",
        "only known when it runs",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_and_nothing_changed(load, text, message):
    """A use that cannot be exchanged is an error before anything is exchanged."""
    module = load(text)
    before = snapshot(module)
    with pytest.raises(StateError, match=message):
        ThreadLocalGlobals(module, {"FLAG": int}).install()
    assert_unchanged(module, before)


def test_module_without_source_is_refused():
    """No file, no source, no exchange; the message names the module."""
    module = types.ModuleType("sourceless")
    exec("FLAG = 0\ndef f():\n    return FLAG\n", vars(module))
    before = snapshot(module)
    with pytest.raises(StateError, match="sourceless: its source cannot be read"):
        ThreadLocalGlobals(module, {"FLAG": int}).install()
    assert_unchanged(module, before)


def test_source_that_is_not_what_runs_is_refused(load):
    """A function that was replaced since the import would be exchanged for another one."""
    module = load(SIMPLE)
    exec("def get():\n    return FLAG, 'another'\n", vars(module))
    before = snapshot(module)
    with pytest.raises(StateError, match="get is not what is in the module's source"):
        ThreadLocalGlobals(module, {"FLAG": int}).install()
    assert_unchanged(module, before)


def test_second_install_on_a_module_is_refused(load):
    """Two stores cannot share a module; the first one goes on working."""
    module = load(SIMPLE)
    with thread_local(module, FLAG=int) as first:
        module.put(2)
        for state in (first, ThreadLocalGlobals(module, {"META": dict})):
            with pytest.raises(StateError, match="already thread-local"):
                state.install()
        assert module.get() == 2


def test_failure_half_way_is_undone(load, monkeypatch):
    """An error between two exchanges leaves nothing exchanged."""
    module = load(SIMPLE)
    before = snapshot(module)
    real, calls = thread_state._set_code, []

    def fails_at_the_third(function, code):
        calls.append(function)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(function, code)

    monkeypatch.setattr(thread_state, "_set_code", fails_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        ThreadLocalGlobals(module, REST).install()
    assert_unchanged(module, before)
    assert module.get() == 0


# -- what is put back ------------------------------------------------------------------------------


def test_remove_restores_every_object(load):
    """Class, dictionary, code objects and the alias: the same objects, whatever happened."""
    module = load(SIMPLE)
    module.META["left"] = "from before"
    other = load("def read():\n    return THEIRS\n", THEIRS=module.META)
    before = snapshot(module), snapshot(other)
    for _ in range(2):
        with thread_local(module):
            module.put(3)
            module.META = {"new": 1}
            other.read()["x"] = 1
        assert_unchanged(module, before[0])
        assert_unchanged(other, before[1])
    assert module.META == {"left": "from before"}


def test_check_changes_nothing_and_tells_the_same(load):
    module = load(SIMPLE)
    before = snapshot(module)
    ThreadLocalGlobals(module, REST).check()
    assert_unchanged(module, before)
    with pytest.raises(StateError, match="no global NONE"):
        ThreadLocalGlobals(module, {"NONE": int}).check()


def test_frozen_functions_are_found(load):
    """A process that called ``gc.freeze()`` (a fork server does) hides its functions from gc."""
    module = load(SIMPLE)
    inner = module.closure(1)
    gc.freeze()
    try:
        with thread_local(module):
            module.put(2)
            assert inner() == 3
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


# -- who holds a flag ------------------------------------------------------------------------------


def test_held_elsewhere_is_about_other_threads(load):
    """One's own hold does not count; another's does, until it lets go."""
    module = load(SIMPLE)
    inside, go_on = threading.Event(), threading.Event()

    def hold():
        with module.raised(True):
            inside.set()
            go_on.wait(20)

    with thread_local(module, watched=frozenset({"FLAG"})):
        assert not held_elsewhere("FLAG")
        with module.raised(True):
            assert not held_elsewhere("FLAG")
            assert in_thread(lambda: held_elsewhere("FLAG"))
        thread = threading.Thread(target=hold)
        thread.start()
        assert inside.wait(20)
        assert held_elsewhere("FLAG")
        with module.raised(True):
            assert held_elsewhere("FLAG")
        go_on.set()
        thread.join()
        assert not held_elsewhere("FLAG")


def test_a_dead_thread_holds_nothing(load):
    """A thread that died with its flag up is gone, also when its id is given out again."""
    module = load(SIMPLE)
    with thread_local(module, watched=frozenset({"FLAG"})):
        in_thread(lambda: module.put(True))
        assert not held_elsewhere("FLAG")
        assert in_thread(lambda: held_elsewhere("FLAG")) is False


def test_a_removed_state_is_held_by_nobody(load):
    """What was up when the state was removed does not count for the next one."""
    module = load(SIMPLE)
    with thread_local(module, watched=frozenset({"FLAG"})):
        module.put(True)
    assert not in_thread(lambda: held_elsewhere("FLAG"))
