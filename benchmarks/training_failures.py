"""Measures what a failure of the driver or of zeusd costs a training loop: `training_cost.py`."""

from __future__ import annotations

import argparse
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from itertools import product

from benchmarks.training_rows import Node, Row, node, run

Event = Callable[[Node], None]
TIMES = ("longest", "between", "first", "after", "end", "exit")


def _driver(code: int = 0, delay_ms: int = 0) -> Event:
    return lambda node: node.double.inject(0, "*", code, delay_ms=delay_ms)


def _sends(number: int) -> Event:
    return lambda node: node.send(number)


def _nothing(node: Node) -> None: ...


def _cannot_write(node: Node) -> None:
    resource.prlimit(node.daemon.pid, resource.RLIMIT_FSIZE, (0, 0))


DRIVER: dict[str, tuple[Event, Event]] = {
    "nothing": (_nothing, _nothing),
    "driver gone for good": (_driver(999), _nothing),
    "lost GPU": (_driver(15), _nothing),
    "calls take 0.3 s": (_driver(delay_ms=300), _nothing),
    "errors for 1 s": (_driver(999), lambda node: node.double.clear_faults()),
    "driver hangs": (_driver(delay_ms=60_000), _nothing),
}
EVENTS = DRIVER | {
    "zeusd killed": (_sends(signal.SIGKILL), _nothing),
    "zeusd restarted": (_sends(signal.SIGTERM), Node.start),
    "zeusd frozen": (_sends(signal.SIGSTOP), _nothing),
    "frozen for 1 s": (_sends(signal.SIGSTOP), _sends(signal.SIGCONT)),
    "zeusd's disk full": (_cannot_write, _nothing),
    "socket deleted": (lambda node: os.unlink(node.socket), _nothing),
}


def failures(options: argparse.Namespace) -> None:
    """Prints what each event costs each front."""
    times = " ".join(f"{name:>10}" for name in TIMES)
    print(f"{'node':8} {'event':20} {'front':13} {times} warnings  exception")
    for kind, (name, pair), front in product(options.node, EVENTS.items(), options.front):
        if name not in options.event or (kind != "zeusd" and name not in DRIVER):
            continue
        with node(kind, 1) as opened:
            seen = run(Row(front, fails=True), opened.env, *(partial(one, opened) for one in pair))
        row = f"{kind:8} {name:20} {front:13}"
        if not seen:
            print(f"{row} does not run here", flush=True)
            continue
        ms = [seen[name] * 1000 for name in TIMES]
        figures = " ".join(f"{one:7.1f} ms" for one in ms)
        print(f"{row} {figures} {seen['warnings']:8}  {seen['error']}", flush=True)
