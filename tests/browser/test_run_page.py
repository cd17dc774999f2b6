"""The page of a training run: values under the pointer and by keys, phone, both themes, a crash."""

from __future__ import annotations

import pytest
from runs import crashed_run, whole_run
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from tab import PHONE

from dflash.run_report import write_run_report


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_run_report(whole_run(tmp_path_factory.mktemp("whole") / "run"))


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    return write_run_report(crashed_run(tmp_path_factory.mktemp("crashed") / "run"))


def test_the_pointer_reads_the_values_of_a_chart(open_page, whole):
    tab = open_page(whole)
    area = tab.one("#chart-1 .area")
    ActionChains(tab.driver).move_to_element(area).perform()
    step = tab.one("#chart-1 [data-at]").text
    assert step.startswith("step ") and 290 <= int(step.removeprefix("step ")) <= 310
    training, held_out = (value.text for value in tab.all("#chart-1 [data-value]"))
    assert training == "1.167" and held_out.startswith("1.167")
    assert tab.all("#chart-1 .cursor")
    ActionChains(tab.driver).move_to_element(tab.one("h1")).perform()
    assert not tab.all("#chart-1 .cursor")


def test_keys_read_the_values_of_a_chart(open_page, whole):
    tab = open_page(whole)
    tab.js("arguments[0].focus()", tab.one("#chart-2 .area"))
    tab.press(Keys.ARROW_RIGHT)
    assert tab.one("#chart-2 [data-at]").text == "step 3"
    tab.press(Keys.PAGE_DOWN, Keys.ARROW_LEFT)
    assert tab.one("#chart-2 [data-at]").text == "step 30"


def test_bars_say_what_they_are(open_page, whole):
    tab = open_page(whole)
    tab.all(".barred .bars i")[1].click()
    assert tab.all(".barred .said")[0].text == "1: 50.0%, held-out, step 600"


def test_theme_help_and_recipe(open_page, whole):
    tab = open_page(whole, theme="dark")
    assert tab.js("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    tab.click("[data-do=theme]")
    assert tab.js("return getComputedStyle(document.body).backgroundColor") == "rgb(251, 251, 250)"
    tab.press("?")
    assert "read the values" in tab.one("#help").text
    tab.click("#help button")
    assert not tab.all("#help")
    tab.click("details.card > summary")
    assert "<script>" in tab.one("details.card pre").text


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(open_page, whole, crashed, theme):
    for path in (whole, crashed):
        assert open_page(path, size=PHONE, theme=theme).overflow() <= 0


def test_a_crash_is_the_first_thing_that_is_seen(open_page, crashed):
    tab = open_page(crashed)
    notice = tab.one("#crash")
    assert notice.rect["y"] < 200 and "drafter-1 died" in notice.text
    assert tab.one("header .badge").text == "crashed"
