"""Nothing from outside stops a reader, makes it wait, or fails after it was parsed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgpack
import pytest

from zeus_ipc.codec import decode_request
from zeus_ipc.parsing import MAX_DEPTH, Malformed, parse, parse_toml, read_file


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not valid"),
        ("{", "not valid"),
        (b"\xff", "not valid"),
        ("Infinity", "finite"),
        ("-Infinity", "finite"),
        ("NaN", "finite"),
        ("1e999", "finite"),
        ('{"a": [-1e999]}', "finite"),
        ("9" * 400, "digits"),
        (str(2**64), "64 bits"),
        (str(-(2**63) - 1), "64 bits"),
        ("-" + "9" * 5000, "digits"),
        (nested(MAX_DEPTH + 1), "levels"),
        (nested(1000), "levels"),
        ("[" * 3_000_000, "levels"),
        ('{"a":' * 100_000, "levels"),
        ('"' + "x" * 4_000_000 + '"', "bytes"),
        (r'{"a": "\ud800"}', "surrogates"),
        (r'{"\udfff": 1}', "surrogates"),
    ],
)
def test_text_beyond_a_bound_is_one_error(text: str | bytes, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        parse(text, 3_500_000)


@pytest.mark.parametrize(
    "value", [0, -(2**63), 2**64 - 1, 0.5, None, True, "é\U0001f600", [], {"a": [{"b": [1, 2.5]}]}]
)
def test_other_values_are_as_written(value: object) -> None:
    assert parse(json.dumps(value)) == value
    assert parse(json.dumps(value).encode()) == value
    assert parse(nested(MAX_DEPTH)) == json.loads(nested(MAX_DEPTH))


@pytest.mark.parametrize(
    "text", ["a = ", "a = " + "[" * 5000, "a = " + nested(40), "a.b = 1\na = 2"]
)
def test_toml_has_the_same_bounds(text: str) -> None:
    with pytest.raises(Malformed):
        parse_toml(text)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 980, 1000, 1023, 5000])
def test_a_message_has_the_same_depth(depth: int) -> None:
    start, end = b"\x83\xa1v\x01\xa2id\x07\xa2op", b"\xc0"
    for level in (b"\x91", b"\x81\xa0", b"\xdc\x00\x01", b"\xdf\x00\x00\x00\x01\xa0"):
        with pytest.raises(Malformed):
            decode_request(start + level * depth + end)
        deepest = memoryview(start + level * (MAX_DEPTH - 1) + end)  # one level is the message
        assert decode_request(deepest)["id"] == 7
    assert decode_request(msgpack.packb({"op": [[]]})) == {"op": [[]]}


@pytest.mark.parametrize("trusted", [False, True])
def test_only_a_regular_file_of_a_bounded_size_is_read(tmp_path: Path, trusted: bool) -> None:
    trust = (lambda found: found.st_size < 10) if trusted else None
    file, fifo, link = tmp_path / "file", tmp_path / "fifo", tmp_path / "link"
    file.write_bytes(b"12345")
    os.mkfifo(fifo)
    link.symlink_to(file)
    assert read_file(file, 5, trust) == b"12345"
    for path in (fifo, Path("/dev/zero"), Path("/dev/tty")):
        with pytest.raises((Malformed, OSError)):
            read_file(path, 5, trust)
    with pytest.raises(Malformed, match="more than 4 bytes"):
        read_file(file, 4, trust)
    with pytest.raises((IsADirectoryError, Malformed)):
        read_file(tmp_path, 5, trust)
    if trust is None:
        assert read_file(link) == b"12345"
        return
    with pytest.raises(OSError, match="symbolic links"):
        read_file(link, 5, trust)
    file.write_bytes(b"x" * 20)
    with pytest.raises(Malformed, match="only this user"):
        read_file(file, 50, trust)
