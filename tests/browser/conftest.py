"""A headless Chromium that the whole session shares; without one these tests fail, never skip.

Debian packages ``chromium`` and ``chromium-driver``; run by ``nox -s browser``.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tab import DESKTOP, Tab, console, requests

UNIT = Path(__file__).parents[1] / "unit"
sys.path[:0] = [str(UNIT / "harness"), str(UNIT / "report")]  # the records and runs made there

_OFFLINE = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The browser."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.fail(
            "no chromium here: apt-get install chromium chromium-driver (these tests need both)",
            pytrace=False,
        )
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (*_OFFLINE, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    opened.set_page_load_timeout(60)
    opened.set_script_timeout(30)
    try:
        yield opened
    finally:
        opened.quit()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Tab]]:
    """``open_page(path, size=PHONE, theme="dark", at="#case-1")``.

    At the end of the test the console must be empty and nothing may have left the machine.
    """
    console(chromium), requests(chromium)  # what an earlier page left

    def open_(path: Path, *, size=DESKTOP, theme="light", at="") -> Tab:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        chromium.get("about:blank")
        chromium.get(path.as_uri() + at)
        return Tab(chromium)

    yield open_
    if chromium.current_url.startswith("file:"):
        chromium.execute_script("try { localStorage.clear() } catch {}")
    assert not console(chromium), "the console is not empty"
    assert not requests(chromium), "the page asked for something outside"
