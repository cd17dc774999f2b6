"""What a person sees of a run: one live display, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text


def say(console: Console, text: str) -> None:
    """One line as it is: a file's name or content in it may look like rich's markup."""
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Progress:
    """Context manager; fed with each step's numbers and each tick's worker states."""

    def __init__(self, steps: int, *, first: int = 0, console: Console | None = None) -> None:
        self.console = console or Console()
        self._steps, self._first, self._done = steps, first, first
        self._begun = time.monotonic()
        self._numbers: dict[str, Any] = {}
        self._held_out: dict[str, Any] = {}
        self._workers: list[dict[str, Any]] = []
        self._live: Live | None = None
        self._last_line = 0.0
        if self.console.is_terminal:
            self._live = Live(
                console=self.console, refresh_per_second=4, get_renderable=self._display
            )

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, tb)

    def step(self, number: int, numbers: dict[str, Any]) -> None:
        """Step ``number`` (counted from 1) is done."""
        self._done, self._numbers = number, numbers
        if self._live is None and (number == self._steps or time.monotonic() - self._last_line > 5):
            self._last_line = time.monotonic()
            say(self.console, self._line())

    def held_out(self, number: int, numbers: dict[str, Any]) -> None:
        """An evaluation is done."""
        self._held_out = numbers
        if self._live is None:
            say(
                self.console,
                f"step {number}: held-out loss {numbers['loss']:.3f}, "
                f"acceptance {numbers['acceptance']:.2f} (simulated, bonus included)",
            )

    def workers(self, states: list[dict[str, Any]]) -> None:
        """One state per worker: name, activity, packets, busy share."""
        self._workers = states

    def say(self, text: str) -> None:
        """One line that stays."""
        say(self.console, text)

    def _eta(self) -> str:
        done = self._done - self._first
        if not done:
            return "?"
        left = (time.monotonic() - self._begun) / done * (self._steps - self._done)
        return f"{int(left // 60)}:{int(left % 60):02d}"

    def _line(self) -> str:
        n = self._numbers
        return (
            f"step {self._done}/{self._steps}  loss {n['loss']:.3f}  "
            f"acceptance {n['acceptance']:.2f}  {n['tokens_per_second']:.0f} tokens/s  "
            f"queues {n['queue_depths']}  eta {self._eta()}"
        )

    def _display(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for name in ("worker", "doing", "packets", "busy"):
            table.add_column(name, justify="right" if name in ("packets", "busy") else "left")
        for state in self._workers:
            table.add_row(
                state["worker"], state["activity"], str(state["packets"]), f"{state['busy']:.0%}"
            )
        above = self._line() if self._numbers else "starting"
        if self._held_out:
            above += (
                f"\nheld-out loss {self._held_out['loss']:.3f}, "
                f"acceptance {self._held_out['acceptance']:.2f} (simulated, bonus included)"
            )
        return Group(Text(above), table)
