"""Python imports this at start-up: it starts the harness's agent, then the user's sitecustomize.

It must be cheap and must not break a program: it imports what the interpreter has loaded anyway,
and a failure of the agent is one line on standard error.
"""

import os
import sys


def _start(here: str) -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    inject = os.path.dirname(here)
    spec = spec_from_file_location("_race_alias", os.path.join(inject, "alias.py"))
    assert spec is not None and spec.loader is not None
    alias = module_from_spec(spec)
    spec.loader.exec_module(alias)
    alias.load(os.path.dirname(inject), "inject.agent").start(os.environ["HARNESS_RUN"])


def _chain() -> None:
    """Runs the sitecustomize that Python would have found, in our place."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)  # an error of it is told by Python, as without us


_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _here]
if "HARNESS_RUN" in os.environ:
    try:
        _start(_here)
    except Exception as error:
        sys.stderr.write(f"harness: cannot watch {sys.executable}: {error!r}\n")
_chain()
