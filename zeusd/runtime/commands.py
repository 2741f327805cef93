"""The command of a process as its user knows it: `python train.py`, not `python`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import basename

from zeusd.devices.port import printable

_INTERPRETER = re.compile(r"(python|pypy|perl|ruby|bash|dash|sh|node|pt_main_thread)[0-9.]*")
"""Names of programs that run scripts; the last is PyTorch's name for a Python that imported it."""

_WRAPPER = "zeusctl"


def command_of(pid: int) -> str:
    """The command of a process: its program, and an interpreter's script or module.

    For `zeusctl set` and `zeusctl measure` it is the command that they run. A process chooses this
    text, so control characters and newlines are removed: it must not affect a terminal or imitate a
    line of a log. Empty: the process has exited.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            # Bytes of a command line that are read.
            text = file.read(4096).decode(errors="replace")
        with open(f"/proc/{pid}/comm", "rb") as file:
            name = file.read().decode(errors="replace").strip()
    except OSError:
        return ""
    # Most characters of a command.
    return printable(describe(text.rstrip("\0").split("\0"), name), 64)


def describe(words: Sequence[str], name: str) -> str:
    """A command line in readable form."""
    if not words or not words[0]:
        return name
    wrapped = _wrapped(words)
    if wrapped:
        return describe(wrapped, basename(wrapped[0]))
    if not _INTERPRETER.fullmatch(name):  # a script, or a process that set its name
        return name
    script = _script(words[1:])
    return f"{basename(words[0])} {script}" if script else name


def _script(words: Sequence[str]) -> str:
    """The script or module that an interpreter runs, without its folder; empty: neither."""
    rest = iter(words)
    for word in rest:
        if word == "-m":
            return f"-m {next(rest, '')}"
        if word == "-c":
            return ""
        if word in ("-W", "-X"):
            next(rest, "")
        elif not word.startswith("-"):
            return basename(word)
    return ""


def _wrapped(words: Sequence[str]) -> Sequence[str]:
    """The command that zeusctl runs; empty: this is not zeusctl, or it runs none."""
    script = _script(words[1:]) if _INTERPRETER.fullmatch(basename(words[0])) else words[0]
    ours = basename(script.removeprefix("-m ")) == _WRAPPER
    if not ours or "--" not in words:
        return ()
    return words[list(words).index("--") + 1 :]
