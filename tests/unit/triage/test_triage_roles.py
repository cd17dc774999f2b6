"""What a frame of torch does on its line, and which torch it is: facts of the sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.triage import roles, triage_text
from harness.triage.events import Frame
from harness.triage.roles import TorchVersion, infer, role
from harness.triage.source import Act, FileFacts, checksum, facts_of

WRAPPER = "torch/_dynamo/eval_frame.py"

SOURCE = """\
def wrapper(fn):
    def inner(*args, **kwargs):
        with some_lock:
            pass
        lock.acquire()
        if is_fx_symbolic_tracing():
            if config.strict:
                raise RuntimeError(
                    "x"
                )
        assert args
        try:
            return fn(*args, **kwargs)
        except KeyError as e:
            raise e
        del table["custom"]
    return inner
"""


def test_what_the_lines_of_a_source_do():
    known = facts_of(SOURCE)
    assert {line: act for line, (act, _) in known.acts.items()} == {
        3: Act.LOCK, 5: Act.LOCK, 6: Act.CALL, 8: Act.FX_CHECK, 11: Act.ASSERT, 13: Act.THROUGH,
        15: Act.RAISE, 16: Act.OTHER,
    }  # fmt: skip
    assert known.function_at(13) == "inner" and known.function_at(17) == "wrapper"
    assert known.function_at(99) is None
    assert known.acts[13][1] == checksum("   return fn(*args, **kwargs)")


def test_facts_survive_their_file_form():
    known = facts_of(SOURCE)
    again = FileFacts.from_json(known.to_json())
    assert again.acts == known.acts and again.functions == known.functions


# The lines of reference part 2.2, measured on the wheels.
@pytest.mark.parametrize(
    ("version", "raises", "passes", "again"),
    [
        ("2.9.1", 797, 832, 845), ("2.11.0", 989, 1024, 1038), ("2.13.0", 1120, 1166, 1183),
        ("2.14.1", 1209, 1261, 1278), ("2.15.0", 1213, 1265, 1282),
    ],
)  # fmt: skip
def test_the_roles_of_compile_wrapper(version, raises, passes, again):
    torch = TorchVersion(version, "stated")
    acts = [
        role(Frame(WRAPPER, line, "compile_wrapper"), torch).act for line in (raises, passes, again)
    ]
    assert acts == [Act.FX_CHECK, Act.THROUGH, Act.RAISE]
    assert "passed through" in role(Frame(WRAPPER, passes, "compile_wrapper"), torch).words
    assert "raises here" in role(Frame(WRAPPER, raises, "compile_wrapper"), torch).words


def test_tables_cover_every_release_from_2_8_to_2_15():
    minors = {roles.numbers(name)[:2] for name in roles.tabled()}
    assert minors == {(2, minor) for minor in range(8, 16)}
    assert roles._table("2.12.1") is roles._table("2.12.0")
    size = sum(path.stat().st_size for path in roles.FOLDER.glob("*.json"))
    assert size < 1_600_000


def test_the_table_is_what_the_installed_source_says():
    here = roles.installed()
    if here is None or here[0] not in roles.tabled():
        pytest.skip(f"no table for the installed torch ({here})")
    name, folder = here
    table = roles._table(name)
    for file in (WRAPPER, "torch/fx/traceback.py", "torch/fx/_symbolic_trace.py"):
        assert table.facts(file) == facts_of((folder.parent / file).read_text())


def test_the_original_three_lines():
    text = (Path(__file__).parents[2] / "triage" / "open" / "original_excerpt.log").read_text()
    diagnosis = triage_text(text)
    assert (diagnosis.torch.version, diagnosis.torch.how) == ("2.11.0", "inferred")
    (group,) = diagnosis.failures
    assert group.count == 3 and (group.first.line, group.last.line) == (1, 3)
    ((_, what),) = diagnosis.frames_of(group.event)
    assert what.act is Act.THROUGH
    assert any("none of them raised" in text for text in diagnosis.unsaid)
    assert diagnosis.causes[0].id == "fx-flag-other-thread"
    assert diagnosis.causes[0].confidence == "low"
    assert any("grep" in text for text in diagnosis.next)


def test_a_line_that_raises_is_told_from_one_that_passes():
    """The conclusion that began the project, drawn from the other line, is the other one."""
    path = "/v/lib/python3.12/site-packages/torch/_dynamo/eval_frame.py"
    raising = triage_text(f'  File "{path}", line 989, in compile_wrapper\n' * 3)
    assert raising.torch.version == "2.11.0"
    ((_, what),) = raising.frames_of(raising.failures[0].event)
    assert what.act is Act.FX_CHECK and raising.causes[0].confidence == "medium"


def test_a_source_line_decides_between_versions():
    line = "return fn(*args, **kwargs)"
    assert infer([Frame(WRAPPER, 1024, "compile_wrapper", line)]).version == "2.11.0"
    assert infer([Frame(WRAPPER, 1024, "compile_wrapper", "return 1")]).version is None


def test_nothing_is_inferred_from_other_files_or_older_versions():
    assert infer([]).version is None
    assert infer([Frame("/opt/train.py", 1024, "compile_wrapper")]).how is None
    assert infer([Frame(WRAPPER, 544, "_fn", "raise RuntimeError(")]).version is None


def test_a_version_that_the_frames_contradict_is_said():
    frame = Frame(WRAPPER, 1120, "compile_wrapper", "raise RuntimeError(")
    told = infer([frame], ["2.9.1"])
    assert (told.version, told.how) == ("2.9.1", "stated")
    assert "2.13.0" in told.conflict
    assert infer([frame], ["2.13.0"]).conflict == ""


@pytest.mark.parametrize(
    ("stated", "version"),
    [
        (["2.11.0", "2.13.0", "2.12.0"], "2.13.0"),  # the one that the frames fit
        (["2.9.1", "2.10.0"], "2.10.0"),  # else the last one: a package was exchanged
        (["2.9.1", "2.14"], "2.9.1"),
    ],
)
def test_of_several_stated_versions_the_likeliest_counts(stated, version):
    frame = Frame(WRAPPER, 1120, "compile_wrapper", "raise RuntimeError(")
    assert infer([frame], stated).version == version


def test_equal_tables_are_named_together():
    frame = Frame(WRAPPER, 1209, "compile_wrapper", "raise RuntimeError(")
    told = infer([frame])
    assert told.candidates == ("2.14.0", "2.14.1") and told.version == "2.14.1"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("torch 2.13.0+cpu, 3 drafters", "2.13.0"), ("torch.__version__ 2.11.0+cu129", "2.11.0"),
        ("PyTorch version: 2.9.1", "2.9.1"), ("torch==2.10.0", "2.10.0"),
        ("'torch': '2.14.1'", "2.14.1"), ("torch 2 steps", None), ("torchvision 0.20", None),
        ("UserWarning: after Pytorch 2.9 this will be an error", None),
        ("deprecated since torch 2.12.0, gone in torch 2.16", None),
        ("Successfully uninstalled torch-2.8.0\nSuccessfully installed torch-2.9.1", "2.9.1"),
    ],
)  # fmt: skip
def test_a_stated_version(text, version):
    assert triage_text(text).torch.version == version
