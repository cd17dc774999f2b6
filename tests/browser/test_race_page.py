"""The page of a race run, as a person uses it: clicks, keys, phone, both themes."""

from __future__ import annotations

import pytest
from report_records import HOSTILE, failing_run, passing_run
from selenium.webdriver.common.keys import Keys
from tab import PHONE, console, requests


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    return failing_run(tmp_path_factory.mktemp("failing"))


@pytest.fixture(scope="module")
def passing(tmp_path_factory):
    return passing_run(tmp_path_factory.mktemp("passing"))


def names(tab):
    return [cell.text for cell in tab.all("#cases tbody td.case")]


def test_filter_by_words_by_kind_and_by_status(open_page, failing):
    tab = open_page(failing)
    assert len(names(tab)) == 6
    tab.one("#filter").send_keys("guard RAISED")
    assert set(names(tab)) == {"fx_flag[no-guard]", "guard[none]", HOSTILE}
    assert tab.one("#count").text == "3 of 6 cases"
    tab.click("button[data-kind=control]")
    assert names(tab) == ["fx_flag[no-guard]"]
    tab.click("button[data-unmet]")
    assert names(tab) == [] and "No case" in tab.one("#nothing").text
    tab.one("#filter").send_keys(Keys.ESCAPE)
    tab.click("button[data-kind=control]")
    assert len(names(tab)) == 4


def test_sort_by_click_and_by_keyboard(open_page, failing):
    tab = open_page(failing)
    tab.click("#cases th:nth-child(1) button")
    up = names(tab)
    assert up == sorted(up, key=str.lower)
    tab.js("document.activeElement.blur()")
    button = tab.one("#cases th:nth-child(1) button")
    tab.js("arguments[0].focus()", button)
    tab.press(Keys.ENTER)
    assert names(tab) == up[::-1]
    assert tab.one("#cases th:nth-child(1)").get_attribute("aria-sort") == "descending"
    tab.click("#cases th:last-child button")
    seconds = [float(cell.text) for cell in tab.all("#cases tbody td:last-child")]
    assert seconds == sorted(seconds)


def test_open_a_case_by_click_and_go_back(open_page, failing):
    tab = open_page(failing)
    (row,) = [row for row in tab.all("#cases tbody tr") if "guard[none]" in row.text]
    row.click()
    tab.until(lambda: tab.all("section.case"))
    assert tab.one("section.case h2").text == "guard[none]"
    assert not tab.all("#list")
    assert "drafter-1 held fx-tracing-flag" in tab.one("section.case .pair").text
    tab.click("section.case > .bar a")
    tab.until(lambda: tab.all("#list"))
    assert not tab.all("section.case")


def test_keys_move_open_close_and_help(open_page, failing):
    tab = open_page(failing)
    order = names(tab)
    tab.press("j", "j", "k")
    assert tab.one("tr.here td.case").text == order[0]
    tab.press("j", Keys.ENTER)
    tab.until(lambda: tab.all("section.case"))
    assert tab.one("section.case h2").text == order[1]
    tab.press("j")
    tab.until(lambda: tab.one("section.case h2").text == order[2])
    tab.press(Keys.ARROW_LEFT)
    tab.until(lambda: tab.one("section.case h2").text == order[1])
    tab.press(Keys.ESCAPE)
    tab.until(lambda: tab.all("#list"))
    tab.press("/")
    tab.press("hang")
    assert names(tab) == ["hang"]
    tab.press(Keys.ESCAPE, "?")
    assert "next case" in tab.one("#help").text
    tab.press(Keys.ESCAPE)
    assert not tab.all("#help")
    tab.press("u")
    assert len(names(tab)) == 4


def test_slash_goes_from_a_case_to_the_filter(open_page, failing):
    tab = open_page(failing, at="#case-1")
    tab.press("/")
    tab.until(lambda: tab.all("#list"))
    tab.until(lambda: tab.js("return document.activeElement.id") == "filter")
    tab.press("hang")
    assert names(tab) == ["hang"]


def test_the_filter_takes_letters_that_are_keys_elsewhere(open_page, failing):
    tab = open_page(failing)
    tab.one("#filter").send_keys("jtu?")
    assert tab.one("#filter").get_attribute("value") == "jtu?"
    assert not tab.all("#help")
    assert tab.js("return document.documentElement.dataset.theme") == "light"


def test_theme_follows_the_system_and_the_button(open_page, failing):
    tab = open_page(failing, theme="dark")
    dark = tab.js("return getComputedStyle(document.body).backgroundColor")
    tab.click("[data-do=theme]")
    light = tab.js("return getComputedStyle(document.body).backgroundColor")
    assert dark == "rgb(20, 23, 26)" and light == "rgb(251, 251, 250)"
    tab.driver.refresh()
    assert tab.js("return document.documentElement.dataset.theme") == "light", "it was chosen"
    tab.press("t")
    assert tab.js("return document.documentElement.dataset.theme") == "dark"


def test_copy_gives_the_replay_line(open_page, failing, chromium):
    chromium.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]},
    )
    tab = open_page(failing, at="#case-2")
    line = tab.one("section.case .replay pre").text
    assert line.startswith("python -m pytest ")
    tab.click("section.case [data-do=copy]")
    tab.until(lambda: tab.one("section.case [data-do=copy]").text == "Copied")
    script = "navigator.clipboard.readText().then(arguments[0], e => arguments[0](String(e)))"
    assert tab.driver.execute_async_script(script) == line


def test_copy_works_where_the_clipboard_is_refused(open_page, failing):
    tab = open_page(failing, at="#case-2")
    tab.js(
        "navigator.clipboard.writeText = () => Promise.reject(new Error('no'));"
        "document.addEventListener('copy', () => { window.copied = getSelection().toString()"
        " || document.activeElement.value; })"
    )
    tab.click("section.case [data-do=copy]")
    tab.until(lambda: tab.one("section.case [data-do=copy]").text == "Copied")
    assert tab.js("return window.copied") == tab.one("section.case .replay pre").text


def test_the_timeline_zooms_to_the_failure_and_says_what_is_pointed_at(open_page, failing):
    tab = open_page(failing, at="#case-2")
    width = "return document.querySelector('section.shown .canvas').clientWidth"
    before = tab.js(width)
    assert len(tab.all("section.case .axis span")) >= 3
    tab.click("section.case [data-zoom=moment]")
    assert tab.js(width) > 5 * before
    tracks, moment = tab.one("section.case .tracks"), tab.all("section.case .moment")[0]
    assert tracks.rect["x"] < moment.rect["x"] < tracks.rect["x"] + tracks.rect["width"]
    assert tab.overflow() <= 0, "the timeline scrolls, the page does not"
    tab.click("section.case [data-zoom=fit]")
    assert tab.js(width) == before
    tab.all("section.case rect.s-flag")[0].click()
    assert "trace with the flag up, step 0" in tab.one("section.case .said").text


def test_a_hostile_name_does_nothing(open_page, failing):
    tab = open_page(failing)
    (row,) = [row for row in tab.all("#cases tbody tr") if HOSTILE in row.text]
    row.click()
    tab.until(lambda: tab.all("section.case"))
    assert tab.one("section.case h2").text == HOSTILE


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(open_page, failing, passing, theme):
    for path in (failing, passing):
        tab = open_page(path, size=PHONE, theme=theme)
        cases = len(tab.all("#cases tbody tr"))
        assert tab.overflow() <= 0
        for number in range(cases):
            tab = open_page(path, size=PHONE, theme=theme, at=f"#case-{number}")
            assert tab.all("section.case h2")
            assert tab.overflow() <= 0, f"case {number}"


@pytest.mark.parametrize("width", [660, 880, 1040, 1220])
def test_in_between_the_list_fits_and_its_names_can_be_read(open_page, failing, width):
    tab = open_page(failing, size=(width, 900))
    right = "return document.querySelector(arguments[0]).getBoundingClientRect().right"
    assert tab.js(right, "#cases") <= tab.js(right, "#list")
    assert all(name.rect["width"] >= 100 for name in tab.all("#cases td.case"))


def test_a_passing_run_shows_nothing_amiss(open_page, passing):
    tab = open_page(passing)
    assert [badge.text for badge in tab.all("#cases .badge")] == ["✓ as expected"] * 2
    tab.press("j", Keys.ENTER)
    tab.until(lambda: tab.all("section.case"))
    assert not tab.all("section.case .notice")


def test_without_scripts_everything_is_there(chromium, open_page, failing):
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        tab = open_page(failing)
        assert len(tab.all("#cases tbody tr")) == 6 and len(tab.all("section.case")) == 6
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_an_error_in_the_console_and_a_request_would_be_seen(chromium, tmp_path):
    """The control of what every other test ends with."""
    console(chromium), requests(chromium)
    page = tmp_path / "bad.html"
    page.write_text("<img src='http://localhost:9/x.png'><script>missing()</script>")
    chromium.get(page.as_uri())
    said = "\n".join(console(chromium))
    assert "missing is not defined" in said and "localhost:9" in said
    assert len(requests(chromium)) == 1
