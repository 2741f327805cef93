"""Reads what comes from outside: files, and JSON and MessagePack values, within bounds.

Nothing in such data may stop zeusd, make it wait, or exhaust its memory, and nothing that is parsed
may fail later when it is compared, added, logged or encoded. Standard library only.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

MAX_BYTES = 1 << 20
"""Largest text that is parsed, unless its reader allows more or less."""

MAX_DEPTH = 16
"""Most levels of maps and lists in each other; no message or file of ours has more than 6."""


class Malformed(ValueError):
    """Data from outside that cannot be used; the text is a clause that says why."""


_PLAIN = re.compile(r"-?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})")


def plain_number(text: str) -> float:
    """Parses a number that a person wrote: decimal digits, and nothing else that Python accepts.

    Raises:
        Malformed: It is something else, such as `1_5_0`, `nan` or `1e400`.
    """
    if _PLAIN.fullmatch(text) is None:
        raise Malformed(f"{text:.40} is not a finite number in decimal digits")
    return float(text)


def host_and_port(text: str) -> tuple[str, int] | None:
    """Splits `HOST:PORT`; None: it is not one. The host may be empty, or in brackets."""
    host, _, port = text.rpartition(":")
    return (host, int(port)) if port.isdecimal() and int(port) <= 65535 else None


def _integer(text: str) -> int:
    # A message has no others. The length first: thousands of digits take long to convert.
    if len(text) > 20 or not -(2**63) <= (number := int(text)) < 2**64:
        raise Malformed("an integer has more digits than fit in 64 bits")
    return number


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Malformed(f"{text:.20} is not a finite number")
    return number


_decode = json.JSONDecoder(parse_int=_integer, parse_float=_number, parse_constant=_number).decode


any_number = json.JSONDecoder(parse_int=_integer).decode
"""Decodes JSON whose reader refuses numbers that are not finite, or has a use for them."""

_CONTAINERS = (dict, list)


def bounded(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Returns a value that has at most this many levels of maps and lists.

    Raises:
        Malformed: It has more.
    """
    level: list[Any] = [value] if type(value) in _CONTAINERS else []
    for _ in range(depth):
        if not level:
            return value
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in _CONTAINERS
        ]
    if not level:
        return value
    raise Malformed(f"it has more than {depth} levels")


def parse(data: bytes | str, most: int = MAX_BYTES, decode: Callable[[str], Any] = _decode) -> Any:
    """Parses a text: JSON, or another format by its decoder.

    Args:
        data: The text; UTF-8.
        most: Its largest size, bytes.
        decode: The decoder; may raise ValueError or RecursionError.

    Raises:
        Malformed: It is too large or not valid, or has a number or nesting beyond the bounds.
    """
    if len(data) > most:
        raise Malformed(f"it has more than {most} bytes")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = bounded(decode(text))
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # no lone surrogates
    except Malformed:
        raise
    except UnicodeEncodeError:
        raise Malformed("it has lone surrogates, which are no characters") from None
    except RecursionError:
        raise Malformed(f"it has more than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise Malformed(f"it is not valid: {error!s:.200}") from None
    return value


def parse_toml(data: bytes | str) -> dict[str, Any]:
    """Parses TOML, which may have numbers that are not finite.

    Raises:
        Malformed: See `parse`.
    """
    library = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    table: dict[str, Any] = parse(data, decode=library.loads)
    return table


def read_file(
    path: str | os.PathLike[str],
    most: int = MAX_BYTES,
    trust: Callable[[os.stat_result], bool] | None = None,
) -> bytes:
    """Reads a regular file, and nothing else: a FIFO or device may never answer.

    Args:
        path: The file.
        most: Its largest size, bytes.
        trust: Whether its owner and mode may be trusted, and links are not followed; None: anyone's
            file is read.

    Raises:
        OSError: It cannot be opened or read.
        Malformed: It is no regular file, too large, or not trusted.
    """
    follow = 0 if trust is None else os.O_NOFOLLOW
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | follow)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Malformed("it is not a regular file; save a pipe's output in one")
        if trust is not None and not trust(status):
            raise Malformed("it is not a file that only this user may write")
        data = file.read(most + 1)
    if len(data) > most:
        raise Malformed(f"it has more than {most} bytes")
    return data
