"""Makes compile races in threaded ``torch.compile`` programs happen, sees them, names them.

The public names are re-exported here without importing torch: the pytest plugin loads this
package in projects whose collection must stay cheap. Modules that need torch import it when
they are used.
"""

from harness.crew import Crew, Member, Outcome
from harness.isolate import CaseResult, Isolation
from harness.schedule import Script, ScriptError, Step
from harness.trial import Trial
from harness.verdict import Expectation, Verdict, judge

__version__ = "0.1.0"

__all__ = [
    "CaseResult",
    "Crew",
    "Expectation",
    "Isolation",
    "Member",
    "Outcome",
    "Script",
    "ScriptError",
    "Step",
    "Trial",
    "Verdict",
    "judge",
]
