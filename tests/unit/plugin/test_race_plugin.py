"""The pytest plugin as another project meets it: loaded by its entry point, or switched off."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

CASES = """
import os

def completed(**facts):
    return {"outcomes": [outcome("drafter-0"), outcome("drafter-1")], **facts}

def outcome(name, state="completed", error=None):
    return {"thread": name, "state": state, "error": error, "stack": []}

def raises():
    frame = {"file": "/x/site-packages/torch/_dynamo/eval_frame.py", "line": 7,
             "function": "compile_wrapper", "source": "", "role": "raised here", "central": True}
    error = {"type": "RuntimeError", "message": "Detected", "frames": [frame]}
    return {"outcomes": [outcome("drafter-0", "raised", error), outcome("drafter-1")]}

def crashes():
    os.kill(os.getpid(), 11)

def hangs():
    import threading
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def where():
    return {"inductor": os.environ["TORCHINDUCTOR_CACHE_DIR"],
            "triton": os.environ["TRITON_CACHE_DIR"], **completed()}
"""

# The server of these tests imports nothing: what is tested is the plugin, not torch.
CONFTEST = """
import pytest
import harness.plugin

harness.plugin.PRELOAD = ()
"""

HEADER = """
import pytest, cases
from harness import Expectation, Verdict
pytestmark = pytest.mark.race
OK = Expectation(Verdict.COMPLETED)
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(cases=CASES)
    pytester.makeconftest(CONFTEST)
    return pytester


def run(project: pytest.Pytester, test: str, *arguments: str) -> pytest.RunResult:
    project.makepyfile(test_it=HEADER + test)
    return project.runpytest_subprocess("-p", "no:cacheprovider", *arguments, timeout=120)


def test_importing_the_plugin_imports_no_torch(pytester):
    script = pytester.makepyfile("import sys, harness.plugin; print('torch' in sys.modules)")
    assert pytester.runpython(script).stdout.str().strip() == "False"


def test_a_completed_case_passes_and_stands_in_the_table(project):
    result = run(project, "def test_a(race_trial): race_trial(cases.completed, expect=OK)")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*compile races*", "a *2/2*completed*yes*", "guarded: 1 of 1*"])


def test_a_case_that_is_not_as_expected_fails_and_says_why(project):
    result = run(project, "def test_a(race_trial): race_trial(cases.raises, expect=OK)")
    assert result.ret == 1
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*verdict is raised, expected completed*",
            "*eval_frame.py:7 compile_wrapper*",
            "guarded: 0 of 1 completed",
        ]
    )


def test_an_uncaught_control_fails(project):
    test = """
def test_a(race_trial):
    race_trial(cases.completed, kind="control",
               expect=Expectation(Verdict.RAISED, exception="RuntimeError"))
"""
    result = run(project, test)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*verdict is completed, expected raised*", "control: 0 of 1 caught"]
    )


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("crashes", "*verdict is native crash*SIGSEGV*"),
        ("hangs", "*verdict is deadlock*had not ended after its deadline of 2 s*"),
    ],
)
def test_a_dying_case_is_a_verdict_and_not_the_end_of_the_run(project, case, said):
    test = f"""
@pytest.mark.race(deadline={2 if case == "hangs" else 60})
def test_a(race_trial): race_trial(cases.{case}, expect=OK)
def test_b(race_trial): race_trial(cases.completed, expect=OK)
"""
    result = run(project, test)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([said])


def test_repeats_are_run_and_reported_as_a_rate(project):
    test = "def test_a(race_trial): race_trial(cases.completed, expect=OK)"
    result = run(project, test, "--race-repeat=3")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["a *3/3*"])


def test_a_test_without_the_mark_is_not_repeated(project):
    project.makepyfile(test_plain="def test_plain(): pass")
    result = run(project, "def test_a(): pass", "--race-repeat=2")
    result.assert_outcomes(passed=3)


def test_under_xdist_the_table_and_report_are_whole_and_workers_have_own_caches(project):
    test = """
@pytest.mark.parametrize("n", range(4))
def test_a(race_trial, race_isolated, n):
    race_trial(cases.where, expect=OK)
    value = race_isolated(cases.where).value
    print("CACHE", value["inductor"])
"""
    result = run(project, test, "-n", "2", "--race-report=out", "-rP")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["guarded: 4 of 4 completed"])
    report = json.loads((project.path / "out" / "report.json").read_text())
    assert len(report["cases"]) == 4 and report["met"] == 4
    assert len(list((project.path / "out" / "cases").glob("*.trace.json"))) == 4
    assert len({case["file"] for case in report["cases"]}) == 4
    caches = [line for line in result.outlines if line.startswith("CACHE")]
    assert len(set(caches)) == 4


SCHEDULED = """
import json, os

def scheduled():
    given = json.loads(os.environ.get("RACE_CONTROL", "null"))
    text = "schedule v1\\nhow: HOW\\ndrafter-0 trace.body\\ndrafter-1 end\\n"
    record = completed() if given else raises()
    return {**record, "schedule": {"text": text}, "notes": {"given": given}}
"""


def test_a_run_that_a_script_forced_is_repeated_by_that_script(project):
    project.makepyfile(cases=CASES + SCHEDULED.replace("HOW", "scripted"))
    test = "def test_a(race_trial): race_trial(cases.scheduled, expect=OK)"
    run(project, test, "--race-report=out").assert_outcomes(failed=1)
    (file,) = (project.path / "out" / "schedules").glob("*")
    run(project, test, f"--race-replay={file}").assert_outcomes(failed=1)  # no control was given


def test_a_failing_test_prints_a_replay_that_runs_it_again_under_its_schedule(project):
    project.makepyfile(cases=CASES + SCHEDULED.replace("HOW", "free"))
    test = """
def test_other(race_trial): race_trial(cases.completed, expect=OK)
@pytest.mark.parametrize("n", [1, 2])
def test_a(race_trial, n): race_trial(cases.scheduled, expect=OK)
"""
    result = run(project, test, "--race-report=out")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["replay: *pytest*test_a?1?*--race-replay=out/schedules/test_a_1_*.schedule*"]
    )
    (file,) = (project.path / "out" / "schedules").glob("test_a_1_*")
    assert "test: test_it.py::test_a[1]" in file.read_text()
    kept = project.path / "kept.schedule"
    file.rename(kept)
    again = run(project, test, f"--race-replay={kept}", "--race-report=again")
    again.assert_outcomes(passed=1, deselected=2)
    case = project.path / "again" / "cases" / "test_a[1].json"
    spec = json.loads(case.read_text())["record"]["notes"]["given"]
    assert spec["strategy"] == "follow" and "drafter-0 trace.body" in spec["schedule"]


def test_a_repeated_test_is_replayed_by_its_own_name(project):
    """The number of the repetition is no part of it, whatever stands beside it; ``run1`` is."""
    project.makepyfile(cases=CASES + SCHEDULED.replace("HOW", "free"))
    test = """
@pytest.mark.parametrize("n", ["run1", "run10"])
@pytest.mark.parametrize("m", ["x"])
def test_a(race_trial, n, m): race_trial(cases.scheduled, expect=OK)
"""
    result = run(project, test, "--race-report=out", "--race-repeat=2")
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(["a?x-run1? *", "a?x-run10? *"])
    first, _ = sorted((project.path / "out" / "schedules").glob("test_a*-run1_-*"))
    assert "test: test_it.py::test_a[x-run1]" in first.read_text()
    for again, passed in (((), 1), (("--race-repeat=2",), 2)):
        result = run(project, test, f"--race-replay={first}", *again)
        result.assert_outcomes(passed=passed, deselected=passed)


def test_report_and_kept_folders_are_where_pytest_was_started(project):
    test = """
def test_a(race_trial, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    race_trial(cases.raises, expect=OK)
"""
    run(project, test, "--race-report=out", "--race-keep=kept").assert_outcomes(failed=1)
    assert len(list((project.path / "out" / "cases").glob("test_a.json"))) == 1
    assert len(list((project.path / "out" / "crashes").glob("*"))) == 1
    # Below the worker's name: "main", or that of the worker that runs this very test.
    assert len(list((project.path / "kept").glob("*/001-test_a/answer.json"))) == 1


def test_tests_of_one_name_in_two_files_have_a_schedule_each(project):
    project.makepyfile(cases=CASES + SCHEDULED.replace("HOW", "free"))
    test = "def test_a(race_trial): race_trial(cases.scheduled, expect=OK)"
    project.makepyfile(test_other=HEADER + test)
    run(project, test, "--race-report=out").assert_outcomes(failed=2)
    files = sorted((project.path / "out" / "schedules").glob("*"))
    names = {line for file in files for line in file.read_text().splitlines() if "test: " in line}
    assert names == {"test: test_it.py::test_a", "test: test_other.py::test_a"}


def test_a_replay_that_never_comes_to_its_case_is_no_pass(project):
    project.makepyfile(cases=CASES + SCHEDULED.replace("HOW", "free"))
    twice = """
def test_a(race_trial):
    race_trial(cases.completed, expect=OK)
    race_trial(cases.scheduled, expect=OK)
"""
    run(project, twice, "--race-report=out").assert_outcomes(failed=1)
    (file,) = (project.path / "out" / "schedules").glob("*")
    once = "def test_a(race_trial): race_trial(cases.completed, expect=OK)"
    run(project, twice, f"--race-replay={file}").assert_outcomes(passed=1)
    result = run(project, once, f"--race-replay={file}")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the schedule is that of the test's case 2, and it ran 1*"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("nonsense", "its first line must be 'schedule v1'"),
        ("schedule v1\na end\n", "names no test"),
        ("schedule v1\ntest: test_it.py::test_gone\na end\n", "no test here is called"),
    ],
)
def test_a_replay_that_cannot_be_is_refused(project, text, said):
    if text is not None:
        (project.path / "x.schedule").write_text(text)
    result = run(project, "def test_a(): pass", "--race-replay=x.schedule")
    assert result.ret == 2
    assert said in result.stdout.str() + result.stderr.str()


def test_junit_carries_verdict_frame_and_holder(project):
    run(project, "def test_a(race_trial): race_trial(cases.raises, expect=OK)", "--junitxml=j.xml")
    properties = {
        p.get("name"): p.get("value") for p in ET.parse(project.path / "j.xml").iter("property")
    }
    assert properties["race_verdict"] == "raised"
    assert properties["race_frame"] == "torch/_dynamo/eval_frame.py:7 compile_wrapper"
    assert properties["race_kind"] == "guarded"
    assert properties["race_replay"] == "python -m pytest test_it.py::test_a"
    assert float(properties["race_seconds"]) > 0
    assert "race_torch" in properties


def test_in_ci_a_failure_stands_on_the_line_of_its_test_and_in_the_summary(project, monkeypatch):
    test = """
def test_good(race_trial): race_trial(cases.completed, expect=OK)
def test_bad(race_trial):
    helper(race_trial)
def helper(race_trial):
    race_trial(
        cases.raises, expect=OK)
"""
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project.path))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "summary.md"))
    for asked in ("true", ""):
        monkeypatch.setenv("GITHUB_ACTIONS", asked)
        result = run(project, test)
        said = [line for line in result.outlines if line.startswith("::")]
        source = (project.path / "test_it.py").read_text().splitlines()
        line = 1 + source.index("    helper(race_trial)")
        start = f"::error file=test_it.py,line={line},title=bad%3A raised%2C expected completed::"
        assert [one.startswith(start) for one in said] == ([True] if asked else [])
    summary = (project.path / "summary.md").read_text()
    assert summary.count("<code>bad</code>") == 4, "reason and table row, of both runs"
    assert "python -m pytest test\\_it.py::test\\_bad" in summary


def test_the_page_is_written_with_the_report_and_gone_with_the_next_run(project):
    result = run(project, RAISING, "--race-report=out")
    result.stdout.fnmatch_lines(["report: out/index.html"])
    page = (project.path / "out" / "index.html").read_text()
    assert "python -m pytest test_it.py::test_a" in page
    run(project, "def test_a(): pass", "--race-report=out")
    assert not (project.path / "out" / "index.html").exists()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--race-repeat=0", "*--race-repeat must be at least 1, not 0*"),
        ("--race-deadline=0", "*--race-deadline must be positive, not 0*"),
        ("--race-device=cuda:99", "*there is no cuda:99 here*"),
        ("--race-device=tpu", "*'tpu' is not a device*"),
        ("--race-baseline=none.toml", "*none.toml: cannot be read*"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(project, option, said):
    result = run(project, "def test_a(): pass", option)
    assert result.ret == 2
    result.stderr.fnmatch_lines([said])


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("race(60)", "test_a: the mark 'race' takes deadline=SECONDS and nothing else"),
        ("race(dedline=60)", "test_a: the mark 'race' takes deadline=SECONDS and nothing else"),
        ("race(deadline=-1)", "test_a: the mark's deadline must be positive, not -1"),
        ("race(deadline='60')", "test_a: the mark's deadline must be positive, not '60'"),
    ],
)
def test_a_mark_that_would_be_ignored_is_refused(project, mark, said):
    result = run(project, f"@pytest.mark.{mark}\ndef test_a(): pass")
    assert result.ret == 2
    assert said in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize("value", ["soon", "0", "nan"])
def test_a_deadline_of_the_ini_file_that_cannot_be_is_refused(project, value):
    project.makeini(f"[pytest]\nrace_deadline = {value}\n")
    result = run(project, "def test_a(): pass")
    assert result.ret == 2
    result.stderr.fnmatch_lines([f"*ini race_deadline must be positive seconds, not '{value}'*"])


def entry(expires: str) -> str:
    return f"""
[[finding]]
case = "a"
verdict = "raised"
owner = "somebody"
report = "a report"
expires = {expires}
"""


RAISING = "def test_a(race_trial): race_trial(cases.raises, expect=OK)"
COMPLETING = "def test_a(race_trial): race_trial(cases.completed, expect=OK)"


@pytest.mark.parametrize(
    ("expires", "test", "code", "said"),
    [
        ("2999-01-01", RAISING, 0, "*known: somebody, a report*"),
        ("2001-01-01", RAISING, 1, "*its entry in the baseline expired on 2001-01-01*"),
        ("2999-01-01", COMPLETING, 0, "gone: a no longer shows 'raised'*"),
    ],
)
def test_baseline_excuses_expires_and_says_what_is_gone(project, expires, test, code, said):
    (project.path / "known.toml").write_text(entry(expires))
    result = run(project, test, "--race-baseline=known.toml")
    assert result.ret == code
    result.stdout.fnmatch_lines([said])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[finding]]\ncase = 'a'", "*'verdict' is missing*"),
        (entry("'soon'"), "*'expires' must be a date*"),
        (entry("2999-01-01").replace("raised", "odd"), "*unknown verdict 'odd'*"),
        ("[[findings]]\n", "*unknown table 'findings'*"),
        ("oops", "*known.toml:*"),
    ],
)
def test_a_wrong_baseline_is_refused(project, text, said):
    (project.path / "known.toml").write_text(text)
    result = run(project, COMPLETING, "--race-baseline=known.toml")
    assert result.ret == 2
    result.stderr.fnmatch_lines([said])


def test_switched_off_a_suite_still_runs(project):
    """``-p no:race``: the fixtures are gone, what does not use them is untouched."""
    project.makepyfile(test_plain="def test_plain(): pass")
    result = project.runpytest_subprocess("-p", "no:race", "--noconftest", "test_plain.py")
    result.assert_outcomes(passed=1)
    assert "compile races" not in result.stdout.str()


def test_crew_fixture_runs_threads_and_refuses_survivors(project):
    test = """
import threading
def test_good(race_crew):
    outcomes = race_crew(3, start="together", deadline=20).run(lambda member: member.name)
    assert [o.result for o in outcomes] == ["drafter-0", "drafter-1", "drafter-2"]
def test_bad(race_crew):
    never = threading.Event()
    race_crew(1, deadline=0.2).run(lambda member: never.wait())
"""
    result = run(project, test)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*threads of the crew are still alive: drafter-0*"])


def test_tracebacks_fixture_fails_a_test_whose_thread_died(project):
    test = """
import threading
def die(): raise ValueError("inside")
def start():
    t = threading.Thread(target=die, name="worker-7"); t.start(); t.join()
def test_bad(race_tracebacks): start()
def test_good(race_tracebacks):
    start()
    assert race_tracebacks.errors.pop("worker-7").raising.function == "die"
"""
    result = run(project, test)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*worker-7 died by ValueError*"])


def test_fx_state_fixture_sees_entries_and_what_is_left_behind(pytester):
    """With torch: entries into compiled code are counted; a flag left up fails the test."""
    test = """
import torch
import torch.fx._symbolic_trace as st
def test_good(race_fx_state):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert race_fx_state.summary()["entries"] == {"MainThread": 1}
def test_bad(race_fx_state):
    st.CURRENT_PATCHER = object()
@__import__("pytest").fixture(autouse=True)
def clean():
    yield
    st.CURRENT_PATCHER = None
"""
    pytester.makepyfile(test_it=test)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=120)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*fx-patcher is 'installed', at rest None*"])


@pytest.mark.parametrize(
    ("folder", "said"),
    [("theirs", "holds other files; name a new folder"), ("file", "cannot be used")],
)
def test_a_report_never_takes_the_place_of_other_files(project, folder, said):
    project.makepyfile(
        test_it=HEADER + "def test_a(race_trial): race_trial(cases.completed, expect=OK)"
    )
    kept = project.mkdir("theirs").joinpath("cases", "data.json")
    kept.parent.mkdir()
    kept.write_text("{}")
    project.path.joinpath("file").write_text("")
    result = project.runpytest_subprocess("-p", "no:cacheprovider", f"--race-report={folder}")
    assert result.ret == 2
    assert len([line for line in result.errlines + result.outlines if said in line]) == 1
    assert kept.read_text() == "{}"


def test_a_step_summary_that_cannot_be_written_hides_no_result(project, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "none" / "summary.md"))
    project.makepyfile(
        test_it=HEADER + "def test_a(race_trial): race_trial(cases.completed, expect=OK)"
    )
    result = project.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["guarded: 1 of 1 completed", "the step summary cannot be written:*"]
    )
