"""`python -m zeusctl.probe`: the probe where nothing but the vendor's binding is installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from zeus_ipc import __version__
from zeusctl.exits import CommandError
from zeusctl.probe import ABOUT, OPTIONS
from zeusctl.probe.main import finish, run


def command_line() -> argparse.ArgumentParser:
    """The parser."""
    parser = argparse.ArgumentParser(
        prog="python -m zeusctl.probe",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    for option in OPTIONS:
        more: dict[str, Any] = {"action": "store_true"}
        if option.kind is not None:
            more = {"type": option.kind, "metavar": option.metavar, "default": option.default}
        shown = "" if option.default is None else f"  [default: {option.default}]"
        parser.add_argument(option.name, help=option.help + shown, **more)
    parser.add_argument("--json", action="store_true", help="Print the report as JSON.")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Probes, prints the page or the JSON, and writes the report."""
    options = vars(command_line().parse_args(arguments))
    try:
        report = run(options, lambda text: print(text, file=sys.stderr, flush=True))
        finish(report, options, options["json"], print)
    except CommandError as error:
        print(f"zeusctl.probe: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"zeusctl.probe: {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
