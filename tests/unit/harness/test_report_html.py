"""The page: everything is in it, nothing is loaded, nothing from a record becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from report_records import HOSTILE, completed, failing_run, passing_run, raised, write_run

from harness.report import html
from harness.report.row import Row
from harness.verdict import Expectation, Verdict

VOID = {"meta", "link", "input", "br"}


class Page(HTMLParser):
    """Tags with their attributes; fails on tags that do not close in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def failing(tmp_path):
    return failing_run(tmp_path).read_text()


def test_the_page_is_whole_and_loads_nothing(tmp_path, failing):
    for text in (failing, passing_run(tmp_path / "good").read_text()):
        page = Page(text)
        loading = {"src", "srcset", "data", "action", "poster"}
        assert not [tag for tag, attrs in page.tags if loading & attrs.keys()]
        links = [attrs["href"] for tag, attrs in page.tags if "href" in attrs]
        assert all(re.match(r"#|cases/|data:,", link) for link in links)
        assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|WebSocket", text)
        assert "default-src 'none'" in text


def test_a_hostile_name_is_text_everywhere(failing):
    assert "<script>alert" not in failing
    assert failing.count("<script>") == 2, "the page's own"
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in failing
    for tag, attrs in Page(failing).tags:
        assert not [name for name in attrs if name.startswith("on")], f"{tag} with a handler"


def test_each_case_shows_verdict_lanes_stacks_and_replay_line(failing):
    section = failing[failing.index("<h2>guard[none]</h2>") :]
    section = section[: section.index("</section>")]
    for part in (
        "not as expected",
        "drafter-0 raised RuntimeError",
        "drafter-1 held fx-tracing-flag",
        "torch/_dynamo/eval_frame.py:1120",
        "raised here",
        "3 frames inside torch",
        "drafter-0 failed; drafter-1 held fx-tracing-flag",
        "trace with the flag up",
        "fx-tracing-flag is True",
        "python -m pytest &#39;tests/test_it.py::test_guard[none]&#39;",
        "7 more events were not recorded",
        "timeline as trace events",
        "fx-tracing-flag was written last by drafter-1",
    ):
        assert part in section, part


def test_a_native_crash_and_a_hang_have_their_sections(failing):
    assert "Fatal Python error: Segmentation fault" in failing
    assert "drafter-1 had not ended at the deadline" in failing
    assert "the compile lock was held by drafter-1" in failing


def test_a_crash_folder_is_named_where_there_is_one(tmp_path, failing):
    assert "harness explain" not in failing
    (tmp_path / "crashes" / "hang").mkdir(parents=True)
    text = html.write_index(tmp_path).read_text()
    assert text.count(f"harness explain {tmp_path}/crashes/hang") == 1
    (tmp_path / "crashes" / "guard[none]").mkdir()  # brackets are a pattern to a shell
    quoted = f"harness explain &#39;{tmp_path}/crashes/guard[none]&#39;"
    assert quoted in html.write_index(tmp_path).read_text()


def test_what_is_not_as_expected_stands_first(failing):
    order = re.findall(r'data-status="([^"]+)"', failing)
    assert order == ["not as expected"] * 4 + ["as expected"] * 2


def test_repeats_are_one_entry_that_shows_a_failure(tmp_path):
    ok = Expectation(Verdict.COMPLETED)
    text = write_run(tmp_path, {"a": (completed(), ok, "guarded")}).read_text()
    rows = [
        Row.from_dict(vars(Row("a", "guarded", 2, 2, "completed", "completed")) | {"unmet": unmet})
        for unmet in ((), ("first",), ("second",))
    ]
    text = html.render(rows, {}, tmp_path)
    assert text.count("<section class=") == 1
    assert "1/3" in text and "first" in text


def test_a_record_that_is_gone_or_torn_leaves_the_table_standing(tmp_path):
    failing_run(tmp_path)
    for path in (tmp_path / "cases").glob("*.json"):
        path.write_text("{")
    text = html.write_index(tmp_path).read_text()
    assert "The record of this case is not here" in text and "guard[auto]" in text


def test_many_cases_and_spans_are_cut_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "MOST_SECTIONS", 1)
    monkeypatch.setattr(html, "MOST_SPANS", 4)
    ok = Expectation(Verdict.COMPLETED)
    cases = {name: (raised(), ok, "guarded") for name in ("a", "b")}
    text = write_run(tmp_path, cases).read_text()
    assert "the page holds 1 cases" in text
    assert "5 more spans, the shortest, are not drawn" in text


def test_the_name_in_these_tests_is_really_hostile():
    assert set("<>\"'&|`[") <= set(HOSTILE)
