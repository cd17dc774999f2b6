"""``prove()`` succeeds for every guard, and fails for each thing that only looks like one."""

from __future__ import annotations

import pytest
import torch

from dflash.compile import GuardError, compile_guard
from dflash.compile.base import CompileGuard
from dflash.compile.guard import ForceCompileGuard, LockGuard, SerialGuard, ThreadLocalGuard
from harness.unfix import unfix

FORCE = hasattr(torch._dynamo.config, "force_compile_during_fx_trace")
needs_force = pytest.mark.skipif(
    not FORCE, reason="this torch has no force_compile_during_fx_trace"
)
NAMES = ["thread-local", pytest.param("force-compile", marks=needs_force), "serial", "lock"]


def prove(guard, repairs_out):
    """``proved: ...`` or the GuardError's text, and the counts that the proof left."""
    unfix(["fx-tracing-flag"] if repairs_out else [])
    with guard:
        try:
            return [guard.prove(), dict(guard.compiles), guard.intercepted]
        except GuardError as error:
            return [str(error), dict(guard.compiles), guard.intercepted]


def prove_by_name(name, repairs_out):
    return prove(compile_guard(name), repairs_out)


@pytest.mark.parametrize("repairs_out", [False, True], ids=["native", "repairs-out"])
@pytest.mark.parametrize("name", NAMES)
def test_every_guard_proves_itself(isolated, name, repairs_out):
    """On torch as it is and with torch's own repairs taken out; the counts stay clean."""
    text, compiles, intercepted = isolated(prove_by_name, name=name, repairs_out=repairs_out)
    assert text.startswith("proved: ") and "\n" not in text
    assert (compiles, intercepted) == ({}, 0)


# -- negative controls -----------------------------------------------------------------------------


class Nothing(ThreadLocalGuard):
    """Says thread-local and makes nothing so."""

    needs = ()


class FallsToEager(Nothing):
    """Switches torch's message off, and so lets the other thread's call run eager."""

    def _config(self):
        return super()._config() | {"error_on_nested_fx_trace": False}


class Hides(ForceCompileGuard):
    """Forces also where this thread traces."""

    _call = CompileGuard._call


class Unlocked(LockGuard):
    """Has a lock that never keeps anybody out."""

    class Open:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def acquire(self, blocking=True):
            return True

        release = __exit__

    def __init__(self, **keywords):
        super().__init__(**keywords)
        self.lock = self.Open()


class Bypassed(LockGuard):
    """Has a good lock and does not take it."""

    _call = CompileGuard._call


class Unsealed(SerialGuard):
    """Compiles after the warm-up as before."""

    def _counting(self, label, backend):
        return backend


BROKEN = {cls.__name__: cls for cls in (Nothing, FallsToEager, Hides, Unlocked, Bypassed, Unsealed)}


def prove_broken(name):
    return prove(BROKEN[name](recompile_limit=8), repairs_out=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nothing", "does not intercept: a compiled call raised while another thread was tracing"),
        ("FallsToEager", "does not intercept: a compiled call ran eager"),
        pytest.param("Hides", "genuine FX trace", marks=needs_force),
        ("Unlocked", "is not held while another thread compiles"),
        ("Bypassed", "is not held while another thread compiles"),
        ("Unsealed", "let something compile after the warm-up"),
    ],
)
def test_what_only_looks_like_a_guard_fails(isolated, name, message):
    """A proof that cannot fail is none; each control dies of what it is about."""
    text, *_ = isolated(prove_broken, name=name)
    assert message in text
    assert not text.startswith("proved")


def prove_outside():
    try:
        return compile_guard("thread-local").prove()
    except GuardError as error:
        return str(error)


def test_a_guard_that_was_not_entered_proves_nothing(isolated):
    """Nothing is installed then."""
    assert "is not in force" in isolated(prove_outside)


def prove_without_danger():
    """The foreign trace dies before it holds anything: the call beside it shows nothing."""

    def trace(*_, **__):
        raise ValueError("no trace today")

    torch.fx.Tracer.trace = trace
    return prove(compile_guard("thread-local"), repairs_out=False)


def test_a_proof_without_the_danger_does_not_count(isolated):
    """A guarded call counts only if another thread was really tracing."""
    text, *_ = isolated(prove_without_danger)
    assert text.startswith("the proof's own trace failed") and "no trace today" in text
