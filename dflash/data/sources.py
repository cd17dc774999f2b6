"""Sources: files and folders as a stream of samples, in a fixed order.

Covers JSON lines (chat, text or token ids), plain text (one document per file), folders of them,
and names such as ``stdlib:train``. A file kind is one row of `READERS`, a record shape one row of
`SHAPES`. What cannot be used comes out as a `BadLine` in its place, so that whoever reads the
stream decides whether it is fatal. Not covered:
tool definitions beside a conversation, contents that are not text, compressed files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash.data.errors import DataError
from dflash.data.stdlib import stdlib_sources

Format = Literal["auto", "chat", "text"]
Message = dict[str, Any]  # "role" and "content" (str), and what else the chat template may know


_HALF_PAIR = re.compile(r"[\ud800-\udfff]")  # JSON can escape what UTF-8 cannot hold


@dataclass(frozen=True)
class Sample:
    """One document: a text, a conversation, or token ids of which the first are a prompt.

    where: "file:line", for messages to people. prompt_length: tokens that are not learnt.
    """

    where: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_length: int = 0

    def __post_init__(self) -> None:
        if sum(form is not None for form in (self.text, self.messages, self.token_ids)) != 1:
            raise ValueError(f"{self.where}: a sample is a text, messages or token ids")


@dataclass(frozen=True)
class BadLine:
    """A line, or a whole file, that is no sample. where: "file:line"; what: why not."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def read_samples(
    paths: Sequence[str | Path], format: Format = "auto"
) -> Iterator[Sample | BadLine]:
    """Samples of all files, in the order of `paths`, folders walked in sorted order.

    format: "chat" and "text" refuse records of the other kind; "auto" takes both.
    Raises DataError if a path is missing or cannot be read.
    """
    for path in data_files(paths):
        reader = next(r for r in READERS if not r.suffixes or path.suffix.lower() in r.suffixes)
        try:
            yield from reader.read(path, format)
        except OSError as error:
            raise _unreadable(path, error) from error


def data_files(paths: Sequence[str | Path]) -> Iterator[Path]:
    """The files that `paths` name; hidden names and `__pycache__` inside folders are left out.

    Links to folders are not followed. Raises DataError for what is missing or unreadable.
    """
    for path in map(Path, _named(paths)):
        if not path.is_dir():
            if not path.exists():
                known = ", ".join(NAMED_SOURCES)
                raise DataError(f"{path}: no such file or folder, and not one of {known}")
            yield path
            continue
        for folder, folders, names in os.walk(path, onerror=_raise_unreadable):
            folders[:] = sorted(name for name in folders if _wanted(name))
            for file in (Path(folder, name) for name in sorted(names) if _wanted(name)):
                # Sockets and pipes would block; a dangling link is an error when it is opened.
                if file.is_file() or file.is_symlink():
                    yield file


def _named(paths: Sequence[str | Path]) -> Iterator[str | Path]:
    """Names such as ``stdlib:train`` replaced by the files that they stand for."""
    for path in paths:
        if str(path) in NAMED_SOURCES:
            yield from NAMED_SOURCES[str(path)]()
        else:
            yield path


# Names that may stand where a path does.
NAMED_SOURCES: dict[str, Callable[[], tuple[Path, ...]]] = {
    "stdlib:train": lambda: stdlib_sources().train,
    "stdlib:held_out": lambda: stdlib_sources().held_out,
}


def _wanted(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _raise_unreadable(error: OSError) -> None:
    raise _unreadable(error.filename, error) from error


def _unreadable(path: str | Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror}); make it readable or leave it out")


def _read_lines(path: Path, format: Format) -> Iterator[Sample | BadLine]:
    """One JSON record per line; blank lines are nothing."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if line:
                    yield _sample(where, line, format)
            except UnicodeDecodeError:
                yield BadLine(where, "not UTF-8")
            except json.JSONDecodeError as error:
                yield BadLine(where, f"not JSON ({error.msg} at column {error.colno})")
            except (ValueError, RecursionError) as error:
                yield BadLine(where, str(error))


def _read_json(path: Path, format: Format) -> Iterator[Sample | BadLine]:
    """Refused: as plain text it would train on braces and quotes."""
    yield BadLine(f"{path}:1", "a JSON file; write one record per line and name it .jsonl")


def _read_text(path: Path, format: Format) -> Iterator[Sample | BadLine]:
    """The whole file is one document."""
    where = f"{path}:1"
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        yield BadLine(f"{path}:{line}", "not UTF-8 text")
        return
    if format == "chat":
        yield BadLine(where, "plain text, but data.format is chat")
    elif "\0" in text:
        yield BadLine(where, "holds NUL bytes, so it is no text")
    else:
        yield Sample(where, text=text)


@dataclass(frozen=True)
class Reader:
    """A kind of file: its suffixes (none: every other file) and how it is read."""

    name: str
    suffixes: tuple[str, ...]
    read: Callable[[Path, Format], Iterator[Sample | BadLine]]


READERS = (  # the first that fits
    Reader("JSON lines", (".jsonl", ".ndjson"), _read_lines),
    Reader("JSON", (".json",), _read_json),
    Reader("plain text", (), _read_text),
)


def _sample(where: str, line: str, format: Format) -> Sample:
    record = json.loads(line)
    shapes = [shape for shape in SHAPES if format in ("auto", shape.kind) or not shape.kind]
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    shape = next((shape for shape in shapes if shape.key in record), None)
    if shape is None:
        keys = " or ".join(repr(shape.key) for shape in shapes)
        raise ValueError(f"no {keys} in the record")
    sample = shape.make(where, record)
    texts = [sample.text or "", *(message["content"] for message in sample.messages or ())]
    if any(map(_HALF_PAIR.search, texts)):
        raise ValueError("holds half a surrogate pair, which is no character")
    return sample


def _text(where: str, record: Mapping[str, Any]) -> Sample:
    value = record["text"]
    if not isinstance(value, str):
        raise ValueError("'text' is not a string")
    return Sample(where, text=value)


def _tokens(where: str, record: Mapping[str, Any]) -> Sample:
    ids, prompt = record["input_ids"], record.get("prompt_length", 0)
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError("'input_ids' is not a list of token ids")
    if type(prompt) is not int or not 0 <= prompt <= len(ids):
        raise ValueError(f"'prompt_length' is not a number from 0 to {len(ids)}")
    return Sample(where, token_ids=tuple(ids), prompt_length=prompt)


def _conversation(where: str, record: Mapping[str, Any]) -> Sample:
    value = record["messages"] if "messages" in record else record["conversations"]
    if not isinstance(value, list) or not value:
        raise ValueError("the conversation is not a list of messages")
    return Sample(where, messages=tuple(_message(n, turn) for n, turn in enumerate(value, 1)))


def _message(number: int, turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"message {number} is not an object")
    rest = dict(turn)
    said = rest.pop("role", None) or rest.pop("from", None)
    content = rest.pop("content") if "content" in rest else rest.pop("value", None)
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise ValueError(f"message {number}: role {said!r} is none of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"message {number}: content is not a string")
    return {"role": role, "content": content, **rest}


ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True)
class Shape:
    """A kind of JSON record: the key that tells it, the formats that take it (None: all)."""

    key: str
    kind: Literal["chat", "text"] | None
    make: Callable[[str, Mapping[str, Any]], Sample]  # raises ValueError: what is wrong


SHAPES = (  # the first whose key is there
    Shape("messages", "chat", _conversation),  # [{"role", "content"}, ...]
    Shape("conversations", "chat", _conversation),  # [{"from", "value"}, ...]
    Shape("text", "text", _text),
    Shape("input_ids", None, _tokens),  # and "prompt_length": what `dflash regenerate` writes
)
