"""Error codes and exit codes."""

from __future__ import annotations

from zeus.exceptions import ZeusBaseError, from_ipc
from zeus_ipc import errors
from zeus_ipc.errors import ErrorCode, ZeusIpcError
from zeusctl.exits import MEANINGS, exit_for

from .markdown import code, heading, prose, table
from .sources import attribute_docs

_ERRORS = """# Error codes

The meaning of each error, and what to do about it. A code is never renamed. Its message says what
failed, on which GPU, why, and what to do; where NVML refused, its return code is there, too.

Programs that use `zeus_ipc` get the first class in the second column, those that use `zeus` the
second.

"""

_EXITS = """# Exit codes

Exit codes of the commands.
"""

_OTHERS = {
    "zeusd serve": {
        0: "stopped as asked",
        1: "it could not start, crashed, or could not restore everything when it stopped",
    },
    "zeusd check-config": {0: "zeusd accepts the file", 1: "zeusd rejects it; the line is named"},
    "zeusd restore": {0: "no restore is pending", 1: "a restore is still pending"},
    "zeusd-exporter": {
        0: "stopped as asked",
        1: "it cannot listen, or prometheus_client is missing",
    },
    "zeusd-kubernetes": {
        0: "stopped as asked",
        1: "there is no API server, or the extra `kubernetes` is not installed",
    },
    "zeus-fleet": {0: "done", 1: "failed; the sentence says why"},
    "bso": {
        0: "done",
        1: "failed",
        2: "wrong usage",
        3: "the database or server cannot be used",
        4: "not allowed (token)",
        6: "no such job",
    },
    "python -m zeus.monitor": {0: "ended by Ctrl-C", 1: "the GPUs cannot be measured"},
    "python -m zeus.show_env": {0: "always"},
    "python -m zeus.simulate": {0: "done", 1: "failed; the sentence says why"},
    "python -m zeus.serving": {
        0: "done",
        1: "failed; the sentence says why. `bench` returns the benchmark's own status",
    },
    "python -m zeus.optimizer.pipeline_frequency": {0: "done", 1: "failed; the sentence says why"},
}
"""Every command returns 2 for a command line that is wrong."""


def codes() -> dict[str, str]:
    """Each code and the name of its constant."""
    return {value: name for name, value in vars(ErrorCode).items() if name.isupper()}


def classes() -> dict[str, type[ZeusIpcError]]:
    """The class of each code that has its own class."""
    found = {
        one.__dict__["code"]: one
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, ZeusIpcError) and "code" in one.__dict__
    }
    found.pop(ZeusIpcError.code, None)  # the base class's code is for errors without one
    return found


def error_codes() -> str:
    """The page of the error codes."""
    docs, own = attribute_docs(ErrorCode), classes()
    rows = []
    for value, constant in codes().items():
        first, _, rest = docs[constant].partition("\n\n")
        cls = own.get(value, ZeusIpcError)
        meaning = first if rest else (cls.__doc__ or "").partition("\n\n")[0]
        rows.append(
            (
                code(value),
                f"[`{cls.__name__}`][zeus_ipc.errors.{cls.__name__}]<br>{_in_zeus(value)}",
                prose(meaning),
                prose(rest or first),
            )
        )
    head = ("code", "classes", "meaning", "what to do")
    return _ERRORS + table(head, rows)


def _in_zeus(value: str) -> str:
    """The exceptions that a program sees when it measures and optimizes."""
    if value == ErrorCode.DEVICE_ERROR:
        return "by the device's code"
    if value == ErrorCode.SEVERAL_GPUS:
        return "that of the first GPU"
    cls: type[BaseException] = type(from_ipc(ZeusIpcError("", code=value)))
    module = cls.__module__
    assert issubclass(cls, ZeusBaseError)
    return f"[`{cls.__name__}`][{module}.{cls.__name__}]"


def exit_codes() -> str:
    """The page of the exit codes."""
    rows = []
    for number, meaning in MEANINGS.items():
        of = [code(value) for value in codes() if exit_for(value) == number]
        rows.append((str(int(number)), prose(meaning), ", ".join(of)))
    found = _EXITS + heading(2, "zeusctl")
    found += table(("code", "meaning", "[error codes](errors.md)"), rows)
    found += heading(2, "Others")
    rows = [
        (code(command) if number == min(meanings) else "", str(number), prose(meaning))
        for command, meanings in _OTHERS.items()
        for number, meaning in meanings.items()
    ]
    found += table(("command", "code", "meaning"), rows)
    return found + "\nA wrong command line is 2 for all commands.\n"
