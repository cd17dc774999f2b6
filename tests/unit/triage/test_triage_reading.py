"""Bytes in, the right lines out: packed, piped, growing, endless; bounded memory, linear work."""

from __future__ import annotations

import gzip
import io
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading

import pytest

from harness.triage import reader, scan, search, triage_paths, triage_text
from harness.triage.reader import Block, BrokenOff, Unreadable, blocks
from harness.triage.scan import lines

CALM = "2026-01-01 10:00:00,000 INFO step 1 loss 2.0\n"
FAILURE = (
    'Traceback (most recent call last):\n  File "/opt/a.py", line 3, in f\n    g()\n'
    "ValueError: no\n"
)


def answer(diagnosis):
    return [(g.event.type, g.count, g.first.line, g.last.line) for g in diagnosis.failures]


@pytest.mark.parametrize("block", [64, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("head", [0, 100, 1 << 20])
def test_the_answer_does_not_depend_on_blocks(tmp_path, monkeypatch, block, head):
    """Also with the tracebacks across the ends of blocks, and numbers of lines stay right."""
    text = (CALM * 50 + FAILURE) * 7 + CALM * 9
    path = tmp_path / "train.log"
    path.write_text(text)
    monkeypatch.setattr(reader, "BLOCK", block)
    monkeypatch.setattr(scan, "HEAD", head)
    monkeypatch.setattr(scan, "TAIL", 200)
    monkeypatch.setattr(scan, "SAMPLE", 100)
    assert answer(triage_paths([path])) == [("ValueError", 7, 51, 51 + 6 * 54)]


def test_only_what_lies_round_a_hit_is_parsed(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(CALM * 150_000 + FAILURE + CALM * 50_000)
    diagnosis = triage_paths([path])
    assert answer(diagnosis) == [("ValueError", 1, 150_001, 150_001)]
    assert diagnosis.lines < 60_000


def test_packed_logs(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    data = (CALM * 10 + FAILURE).encode()
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(data))
    (tmp_path / "a.log.zst").write_bytes(zstandard.compress(data) + zstandard.compress(data))
    assert answer(triage_paths([tmp_path / "a.log.gz"])) == [("ValueError", 1, 11, 11)]
    assert answer(triage_paths([tmp_path / "a.log.zst"])) == [("ValueError", 2, 11, 25)]


def test_zst_without_its_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(Unreadable, match="needs the package zstandard"):
        triage_paths([tmp_path / "a.zst"])


@pytest.mark.parametrize("name", ["missing.log", "bad.gz", "bad.zst", "a.xz", "folder"])
def test_what_cannot_be_read_is_named(tmp_path, name):
    (tmp_path / "bad.gz").write_bytes(b"\x1f\x8bno gzip")
    (tmp_path / "bad.zst").write_bytes(b"\x28\xb5\x2f\xfdno zstandard")
    (tmp_path / "a.xz").write_bytes(b"\xfd7zXZ\0")
    (tmp_path / "folder").mkdir()
    with pytest.raises(Unreadable, match=name) as caught:
        triage_paths([tmp_path / name])
    assert "\n" not in str(caught.value)


def test_several_logs_are_one_run(tmp_path):
    for rank in (0, 3):
        (tmp_path / f"rank{rank}.log").write_text(CALM + FAILURE)
    diagnosis = triage_paths(sorted(tmp_path.glob("*.log")))
    (group,) = diagnosis.failures
    assert group.count == 2 and group.threads == ["rank0", "rank3"]
    assert {group.first.name, group.last.name} == set(diagnosis.inputs)


def test_each_log_s_head_states_its_torch(tmp_path):
    (tmp_path / "a.log").write_text(CALM * 5000)
    (tmp_path / "b.log").write_text("torch 2.12.1\n" + CALM)
    assert triage_paths(sorted(tmp_path.glob("*.log"))).torch.version == "2.12.1"


def test_a_command_to_run_next_names_the_log_as_a_shell_needs_it(tmp_path):
    path = tmp_path / "my log.txt"
    path.write_text('  File "/opt/a.py", line 3, in f\n')
    (command,) = [text for text in triage_paths([path]).next if text.startswith("grep ")]
    assert shlex.split(command, comments=True)[-1] == str(path)


def test_a_growing_log_is_followed_until_it_is_quiet(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(CALM)
    seen = threading.Event()

    def grow():
        with path.open("a") as log:
            log.write(FAILURE + CALM)
            log.flush()
            assert seen.wait(60)  # the first failure is told while the log still grows
            log.write(FAILURE.replace("ValueError", "KeyError") + CALM)

    thread = threading.Thread(target=grow)
    thread.start()
    diagnosis = triage_paths([path], follow=True, idle=2.0, on_new=lambda group: seen.set())
    thread.join(60)
    assert [g.event.type for g in diagnosis.failures] == ["ValueError", "KeyError"]


def test_a_followed_log_may_be_cut_and_replaced(tmp_path):
    """As log rotation does it, with and without a copy; a line does not go on in the new file."""
    path = tmp_path / "train.log"
    path.write_text(CALM + FAILURE + CALM + "a line without its e")

    def rotate(group):
        if group.event.type == "ValueError":  # copied, then cut
            path.write_text(FAILURE.replace("ValueError", "KeyError") + CALM)
        if group.event.type == "KeyError":  # renamed, then written anew
            path.rename(tmp_path / "train.log.1")
            path.write_text(FAILURE.replace("ValueError", "TypeError") + CALM)

    diagnosis = triage_paths([path], follow=True, idle=2.0, on_new=rotate)
    assert [g.event.type for g in diagnosis.failures] == ["ValueError", "KeyError", "TypeError"]


def test_an_interrupt_ends_the_following_with_what_was_read(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(CALM + FAILURE + FAILURE.replace("ValueError: no\n", "KeyError: 1"))
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", "triage", str(path), "--follow"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert b"ValueError: no" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1 and b"Traceback" not in err
    assert b"ValueError: no" in out and b"KeyError: 1" in out  # also a last line without its end


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("code", ["utf-16", "utf-16-be"])
def test_utf_16_with_its_mark(tmp_path, code, follow):
    mark = b"\xfe\xff" if code == "utf-16-be" else b""
    path = tmp_path / "a.log"
    path.write_bytes(mark + (CALM * 3 + FAILURE + CALM).replace("no", "n\u00f6").encode(code))
    diagnosis = triage_paths([path], follow=follow, idle=0.1 if follow else None)
    assert answer(diagnosis) == [("ValueError", 1, 4, 4)]
    assert diagnosis.failures[0].event.message == "n\u00f6"


def packed(kind, data):
    if kind == "gz":
        return gzip.compress(data)
    return pytest.importorskip("zstandard").compress(data)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_packed_log_that_breaks_off(tmp_path, kind):
    """What was read counts; where nothing failed in it, nobody can say that nothing failed."""
    rng = random.Random(5)
    calm = "".join(f"step {n} loss {rng.random()}\n" for n in range(60_000))
    path = tmp_path / "a.log"
    whole = packed(kind, (FAILURE + calm).encode())
    path.write_bytes(whole[: len(whole) // 2])
    diagnosis = triage_paths([path])
    assert answer(diagnosis) == [("ValueError", 1, 1, 1)]
    assert re.fullmatch(
        r".*a\.log: cannot be read beyond byte [1-9]\d+ \(.*\)", diagnosis.unsaid[0]
    )
    whole = packed(kind, (calm + FAILURE).encode())
    for broken in (whole[: len(whole) // 2], whole[:-3]):
        path.write_bytes(broken)
        if len(broken) == len(whole) - 3 and kind == "gz":  # only the checksum is missing
            assert answer(triage_paths([path])) == [("ValueError", 1, 60_001, 60_001)]
            continue
        with pytest.raises(BrokenOff, match="cannot be read beyond byte") as caught:
            triage_paths([path])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_few_packed_bytes_do_not_make_large_blocks(tmp_path, kind):
    data = b"x" * (50 << 20) + b"\n" + FAILURE.encode()
    (tmp_path / "a.log").write_bytes(packed(kind, data))
    got = list(blocks(str(tmp_path / "a.log")))
    assert sum(len(block.data) for block in got) == len(data)
    assert max(len(block.data) for block in got) <= 2 * reader.BLOCK


def test_memory_where_every_word_is_a_hit(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"Killed" * 1_000_000 + b"\n" + FAILURE.encode())
    code = (  # getrusage would count the memory of the process that started this one
        "import sys; from harness.triage import triage_paths; triage_paths(sys.argv[1:]);"
        "print(*[line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 200 << 10  # KiB, as docs/triage.md promises


def test_packed_logs_are_known_by_their_bytes(tmp_path):
    """Not by their names: rotation renames them. With padding, and frames for other programs."""
    zstandard = pytest.importorskip("zstandard")
    data = (CALM + FAILURE).encode()
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    for name, packed_data in {
        "a.log.1": gzip.compress(data) + gzip.compress(data) + b"\0" * 100,
        "b.log.1": skipped + zstandard.compress(data) + skipped + zstandard.compress(data),
        "plain.gz": data + data,
    }.items():
        (tmp_path / name).write_bytes(packed_data)
        assert answer(triage_paths([tmp_path / name])) == [("ValueError", 2, 2, 7)]


def test_a_packed_log_is_not_followed(tmp_path):
    (tmp_path / "a.log").write_bytes(gzip.compress(FAILURE.encode()))
    with pytest.raises(Unreadable, match=r"a\.log: a packed log cannot be followed"):
        triage_paths([tmp_path / "a.log"], follow=True, idle=1.0)


def test_a_log_that_is_named_twice_is_read_once(tmp_path):
    (tmp_path / "a.log").write_text(FAILURE)
    assert answer(triage_paths([tmp_path / "a.log"] * 2)) == [("ValueError", 1, 1, 1)]


def test_standard_input_that_is_closed_is_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "harness", "triage", "-"], capture_output=True, timeout=60,
        check=False, preexec_fn=lambda: os.close(0),
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
    assert b"standard input is closed" in done.stderr


def test_standard_input(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "harness", "triage", "-"],
        input=(CALM + FAILURE).encode(), capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and b"ValueError" in done.stdout


def test_a_pipe_that_stays_open_is_followed():
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", "triage", "-", "--follow", "--idle", "1"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        process.stdin.write((CALM + FAILURE + CALM).encode())
        process.stdin.flush()
        first = process.stderr.readline()  # while the pipe is open
        out = process.stdout.read()
        assert process.wait(60) == 1
    finally:
        process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
    assert b"ValueError: no" in first and b"failures, in order" in out


def test_a_line_without_an_end_takes_bounded_memory(monkeypatch):
    monkeypatch.setattr(reader, "BLOCK", 1 << 16)
    source = io.BytesIO(b"x" * (1 << 20) + b"Error" + b"y" * (1 << 20))
    got = list(reader._whole_lines(iter(lambda: source.read(1 << 16), b"")))
    assert max(len(block.data) for block in got) <= 1 << 17
    assert sum(len(block.data) for block in got) == (2 << 20) + 5
    taken = list(lines(got, search()))
    assert any(raw.hit and b"Error" in raw.data for raw in taken)
    assert sum(len(raw.data) for raw in taken) < 1 << 20


def test_a_line_of_progress_bars_is_cut_at_one_of_them(monkeypatch):
    monkeypatch.setattr(reader, "BLOCK", 1000)
    text = "".join(f"\r{n}% Error rate" for n in range(500)).encode()
    got = list(reader._whole_lines(iter([text[at : at + 700] for at in range(0, len(text), 700)])))
    assert b"".join(block.data for block in got) == text and len(got) > 3
    assert all(block.data.endswith(b"\r") for block in got[:-1])


def test_hits_of_a_long_line_are_cut_out():
    data = b"a" * 50_000 + b" ValueError: no " + b"b" * 50_000 + b"\n"
    taken = [raw for raw in lines([Block(0, data, True)], search()) if raw.hit]
    assert taken and all(len(raw.data) <= 4096 for raw in taken)
    assert any(b"ValueError: no" in raw.data for raw in taken)


def test_carriage_returns_divide_a_line():
    text = "10%|#  |\r20%|## |\rTraceback (most recent call last):\r\n" + FAILURE.partition("\n")[2]
    assert answer(triage_text(text)) == [("ValueError", 1, 1, 1)]


def test_grep_with_the_printed_pattern_finds_the_hits(tmp_path):
    """The literals and the expression that is printed are the same search."""
    rng = random.Random(3)
    words = [*search().literals, *["step", "loss", "[rank0]: ", "x.y", "(idle"] * 60]
    path = tmp_path / "a.log"
    path.write_text("".join(" ".join(rng.choices(words, k=3)) + "\n" for _ in range(400)))
    hit = {raw.number for raw in lines(blocks(str(path)), search()) if raw.hit}
    done = subprocess.run(
        ["grep", "-nE", search().grep(), str(path)], capture_output=True, text=True, check=False,
        env=os.environ | {"LC_ALL": "C"},
    )  # fmt: skip
    found = {int(line.partition(":")[0]) for line in done.stdout.splitlines()}
    assert hit == found and 0 < len(found) < 400
