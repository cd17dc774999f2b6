"""A page in the browser, and what the browser has to say about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DESKTOP, PHONE = (1280, 900), (375, 667)


def console(driver: Any) -> list[str]:
    """Everything that was written to the console since the last call."""
    return [entry["message"] for entry in driver.get_log("browser")]


def requests(driver: Any) -> list[str]:
    """Requests to anything but files and data since the last call."""
    messages = [line["message"] for line in driver.get_log("performance")]
    return [m for m in messages if "Network.requestWillBeSent" in m and '"url":"http' in m]


class Tab:
    """One page in the browser, in a given size and theme."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def all(self, what: str) -> list[Any]:
        """The visible elements of a CSS selector."""
        from selenium.webdriver.common.by import By

        found = self.driver.find_elements(By.CSS_SELECTOR, what)
        return [element for element in found if element.is_displayed()]

    def one(self, what: str) -> Any:
        """The only visible one."""
        (element,) = self.all(what)
        return element

    def click(self, what: str) -> None:
        self.one(what).click()

    def press(self, *keys: str) -> None:
        """Keys to whatever has the focus."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Waits until it is true, at most ten seconds."""
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.driver, 10, 0.05).until(lambda _: condition())

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.js("return document.documentElement.scrollWidth - innerWidth"))
