"""Makes compile races in threaded ``torch.compile`` programs happen, sees them, names them.

The public names are re-exported here without importing torch: the pytest plugin loads this
package in projects whose collection must stay cheap. Modules that need torch import it when
they are used.
"""

from harness.control import Control
from harness.crew import Crew, Member, Outcome
from harness.explore import Exploration, Runner, Target, explore
from harness.isolate import CaseResult, Isolation
from harness.replay import Schedule, ScheduleError
from harness.schedule import Script, ScriptError, Step
from harness.strategies import Follow, Preemptions, Priorities
from harness.trial import Trial
from harness.verdict import Expectation, Verdict, judge

__version__ = "0.1.0"

__all__ = [
    "CaseResult",
    "Control",
    "Crew",
    "Expectation",
    "Exploration",
    "Follow",
    "Isolation",
    "Member",
    "Outcome",
    "Preemptions",
    "Priorities",
    "Runner",
    "Schedule",
    "ScheduleError",
    "Script",
    "ScriptError",
    "Step",
    "Target",
    "Trial",
    "Verdict",
    "explore",
    "judge",
]
