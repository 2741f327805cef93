"""The journal's records: how they are written, and how a damaged file is read.

zeusd and `zeusd restore` both read the journal with this module. It does no I/O and uses only
Python's standard library, because the helper must work when nothing else does.

A journal is an append-only file of lines. The first one names the boot; each of the others sets or
deletes the entry of one key:

    2 CRC {"boot": BOOT, "format": 2}
    2 CRC ["key", {...}]
    2 CRC ["key"]

CRC is a CRC-32 of the JSON text, in hexadecimal. In all lines but the first it also covers the name
of the boot, so no record counts in another boot even if the first line is lost. Each record is
written with a newline before and after it, so a damaged byte or an incomplete record does not
affect another record.

Lines of unknown formats are reported, never dropped silently.

A key names the kind of its entry, and what it is about:

    pending/GPU/CONTROL             what zeusd may have left in force, and what is to be restored
    loss/GPU/CONTROL/PID.COOKIE     a running process that lost its lease and does not know it yet
    ceiling/GPU/CONTROL/NAME        an upper bound
    observed, initial, resting/...  one value of a control
    gpu/GPU, driver, stopping, quiesced
"""

from __future__ import annotations

import json
import re
from binascii import crc32
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from zeus_ipc.parsing import Malformed, parse

FORMAT = 2

Entry = dict[str, Any]
"""The value of a key: a JSON object."""

_LINE = re.compile(rb"([0-9]{1,4}) ([0-9a-f]{8}) (.*)")
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def header(boot: str) -> bytes:
    """The first line of a journal."""
    return _line("", {"boot": boot, "format": FORMAT}) + b"\n"


def record(boot: str, key: str, entry: Entry | None) -> bytes:
    """One record."""
    return b"\n" + _line(boot, [key] if entry is None else [key, entry]) + b"\n"


@dataclass
class Replayed:
    """The contents of a journal.

    Attributes:
        unread: Numbers of lines that could not be read; the others are valid.
        format: Format of its first line; None: that line could not be read.
        torn: Whether its last line is incomplete: zeusd never acted on that record.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    unread: list[int] = field(default_factory=list)
    format: int | None = None
    old_boot: bool = False
    torn: bool = False

    @property
    def trouble(self) -> str | None:
        """The journal's problem, as a clause; None: none."""
        if self.format is not None and self.format != FORMAT:
            return f"is of format {self.format}, which this zeusd does not know"
        if not self.unread:
            return None
        lines = ", ".join(str(number) for number in self.unread[:5])
        if len(self.unread) > 5:
            lines += ", ..."
        return (
            f"has {len(self.unread)} damaged or unknown "
            f"{'line' if len(self.unread) == 1 else 'lines'} ({lines}); the others are valid"
        )


def replay(data: bytes, boot: str) -> Replayed:
    """Reads a journal. Accepts any data."""
    said = Replayed()
    lines = data.split(b"\n")
    said.format, written_in = _read_header(lines[0])
    if written_in is not None and written_in != boot:
        said.old_boot = True
        return said
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and said.format is not None):
            continue
        change = _change(line, boot)
        if change is not None:
            key, entry = change
            if entry is None:
                said.entries.pop(key, None)
            else:
                said.entries[key] = entry
        elif number == len(lines):
            said.torn = True
        else:
            said.unread.append(number)
    return said


def _line(boot: str, content: object) -> bytes:
    text = _to_json(content).encode()
    return b"%d %08x %s" % (FORMAT, _checksum(boot, text), text)


def _checksum(boot: str, text: bytes) -> int:
    return crc32(text, _seed(boot))


@lru_cache(maxsize=8)
def _seed(boot: str) -> int:
    return crc32(boot.encode())


def _read_header(line: bytes) -> tuple[int | None, str | None]:
    """The format, and the boot in which the file was written; None for each that is missing."""
    content = _content(line, "") or _json(line)
    if isinstance(content, dict) and isinstance(content.get("format"), int):
        number, boot = content["format"], content.get("boot")
        return number, boot if number == FORMAT and isinstance(boot, str) else None
    return None, None


def _change(line: bytes, boot: str) -> tuple[str, Entry | None] | None:
    """The key and the entry of a record, or None if the line is not a record."""
    content = _content(line, boot)
    if not isinstance(content, list) or not content or not isinstance(content[0], str):
        return None
    if len(content) == 1:
        return content[0], None
    if len(content) == 2 and isinstance(content[1], dict):
        return content[0], content[1]
    return None


def _content(line: bytes, boot: str) -> object:
    """The JSON of a line of this format; None if the line has another format or is damaged."""
    match = _LINE.fullmatch(line)
    if match is None or int(match[1]) != FORMAT or int(match[2], 16) != _checksum(boot, match[3]):
        return None
    return _json(match[3])


def _json(text: bytes) -> object:
    try:
        return parse(text)
    except Malformed:
        return None
