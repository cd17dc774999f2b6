"""Random and mutated logs: no crash, and no more than linear time.

    python tests/unit/triage/fuzz.py --seconds 600

`nox -s fuzz` runs this for ten minutes. Each input is made from a seed; what fails is printed with
it, and `--seed N` makes the same input again. A text is read twice, once and fourfold as long: the
longer one may take `TIMES` as long. The open half of the corpus is the material; the held-out half
is not touched.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from pathlib import Path

from harness.triage import search, triage_text
from harness.triage.output import as_github, as_sarif
from harness.triage.show import markdown, terminal

OPEN = Path(__file__).parents[2] / "triage" / "open"
TIMES = 12  # four times the text; quadratic would be sixteen
MEASURABLE_SECONDS = 0.3
LONG = 60_000

_ALPHABETS = (
    "ab \n", ' \t\n"()[]{}|+-~^:.,', "\x1b[]0;m\x07\r\n", "01234: -/.\n",
    "é€𝄞\x00\xff\n",
)  # fmt: skip
_PIECES = (
    "Traceback (most recent call last):\n", '  File "/a.py", line 3, in f\n', "    f()\n",
    "ValueError: x\n", "[rank3]: ", "Exception in thread w-1:\n", "  | ", "  + ", "\r", "\x1b[31m",
    "Thread 0x0001 (most recent call first):\n", "2026-01-01 10:00:00,123 ERROR ",
    "During handling of the above exception, another exception occurred:\n", "terminate called\n",
    "Root Cause (first observed failure):\n", "from user code:\n", "raised:\n", "\n",
    'Thread 5 (idle): "x"\n', "    f (a.py:3)\n", "Fatal Python error: Aborted\n",
    "W0314 09:12:33.123000 12 torch/_dynamo/x.py:10] [0/8] ", "Original Traceback (most recent",
)  # fmt: skip


def material() -> list[str]:
    """The texts that are mutated."""
    paths = sorted(OPEN.glob("*.log"))
    return [path.read_bytes().decode("utf-8", "replace") for path in paths]


def make(seed: int, texts: list[str]) -> str:
    """One input; the same for the same seed."""
    rng = random.Random(seed)
    kind = rng.randrange(5)
    if kind == 0:
        return "".join(rng.choices(rng.choice(_ALPHABETS), k=rng.randrange(3000)))
    if kind == 1:
        words = [*_PIECES, *search().literals]
        return "".join(rng.choices(words, k=rng.randrange(300)))
    lines = rng.choice(texts).splitlines(keepends=True)
    if kind == 2:  # lines of two logs mixed, as of two threads
        others = rng.choice(texts).splitlines(keepends=True)
        while others:
            lines.insert(rng.randrange(len(lines) + 1), others.pop(0))
        return "".join(lines)
    text = "".join(lines)
    for _ in range(rng.randrange(1, 12)):
        at, size = rng.randrange(len(text) + 1), rng.randrange(1, 200)
        what = rng.randrange(5)
        if what == 0:
            text = text[:at] + text[at + size :]
        elif what == 1:
            text = text[:at] + text[at : at + size] * rng.randrange(2, 30) + text[at + size :]
        elif what == 2:
            text = text[:at] + rng.choice(_PIECES) + text[at:]
        elif what == 3:
            text = text[:at] + "".join(rng.choices(rng.choice(_ALPHABETS), k=size)) + text[at:]
        else:
            text = text[:at]
    return text


def read(text: str) -> None:
    """Everything that triage does with a text; raises what it raises."""
    diagnosis = triage_text(text)
    json.dumps(diagnosis.to_json())
    json.dumps(as_sarif(diagnosis))
    list(as_github(diagnosis))
    terminal(diagnosis)
    markdown(diagnosis)
    if diagnosis.exit_code not in (0, 1):
        raise AssertionError(f"exit code {diagnosis.exit_code}")


def seconds(text: str, tries: int = 3) -> float:
    """The least CPU time of some readings."""
    taken = []
    for _ in range(tries):
        begun = time.process_time()
        triage_text(text)
        taken.append(time.process_time() - begun)
    return min(taken)


def superlinear(text: str) -> str | None:
    """What is wrong when four times the text takes much more than four times as long."""
    if not text:
        return None
    unit = text * max(1, LONG // len(text))
    long = seconds(unit * 4, tries=1)
    if long < MEASURABLE_SECONDS:
        return None
    short = seconds(unit)
    long = min(long, seconds(unit * 4, tries=2))
    if long > TIMES * max(short, MEASURABLE_SECONDS / TIMES):
        return f"{len(unit)} characters take {short:.2f} s, four times as many {long:.2f} s"
    return None


def run(budget: float, first: int = 0, count: int | None = None) -> tuple[int, list[str]]:
    """Reads inputs for ``budget`` seconds; (how many, what went wrong)."""
    texts, wrong, seed = material(), [], first
    deadline = time.monotonic() + budget
    while time.monotonic() < deadline and (count is None or seed - first < count):
        text = make(seed, texts)
        try:
            read(text)
            slow = superlinear(text) if seed % 8 == 0 else None
        except Exception:
            wrong.append(f"seed {seed}: {traceback.format_exc()}")
        else:
            if slow:
                wrong.append(f"seed {seed}: {slow}")
        seed += 1
    return seed - first, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this seed alone")
    options = parser.parse_args()
    first = options.first if options.seed is None else options.seed
    done, wrong = run(options.seconds, first, None if options.seed is None else 1)
    for text in wrong:
        print(text, file=sys.stderr)
    print(f"{done} inputs from seed {first} on, {len(wrong)} wrong")
    return 1 if wrong or not done else 0


if __name__ == "__main__":
    sys.exit(main())
