"""`python -m zeus.serving clocks` and `tune`: clock control and tuning beside the engine."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import Field, TypeAdapter

from zeus.serving.clock_control import ClockControl
from zeus.serving.clock_requests import ClockPasses, RequestFeed
from zeus.serving.gpus import chosen
from zeus.serving.receiver import Receiver
from zeus_common.atomic import write_text
from zeus_common.http_guard import WebServer
from zeus_common.options import FILE, Number, Whole, one_sentence, option
from zeus_common.tables import distinct
from zeus_ipc.client import Client
from zeus_ipc.parsing import parse, read_file

log = logging.getLogger(__name__)

Stretch = Annotated[float, Field(gt=0, allow_inf_nan=False)]
RECEIVE_S = 0.02
"""How often messages are taken: far more often than clocks change."""


def _writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuses a file that cannot be written now, not when there is something to write."""
    if path is not None and not os.access(path.parent, os.W_OK):
        raise click.BadParameter(f"{path.parent} is not a folder that you may write to")
    return path


_AT_END: dict[str, Any] = {"callback": _writable}
"""Of the option of a file that is written at the end."""


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """The options of both commands."""
    options = (
        option("--slo-ttft", "Time to first token, s.", float, required=True),
        option("--slo-tpot", "Mean time per output token, s.", float, required=True),
        option(
            "--feed",
            "Source of steps: the address of the engine's forward-pass metrics, such as "
            "tcp://127.0.0.1:20380, or a socket of ZEUS_SERVING_SOCKET, such as "
            "/run/zeus-clocks.sock.",
            required=True,
        ),
        option("--gpu gpus", "Index or UUID; once for each GPU.", multiple=True, required=True),
        option("--rank", "Data parallel rank to listen to. [default: the first]", Whole(0, 65535)),
    )
    for one in reversed(options):
        command = one(command)
    return command


@click.command()
@_common
@option("--floor", "Lowest clock, MHz. [default: found by itself]", float)
@option("--dry-run", "Change nothing; log what it would do.", bool)
@option("--state", "Store learned step times in this file, and start from it.", FILE, **_AT_END)
@option("--metrics-port", "Serve Prometheus metrics on 127.0.0.1.", Whole(0, 65535))
@option("--model", "Label model_name of the metrics.", default="")
@option("--engine", "Label engine of the metrics.", default="0")
def clocks(
    slo_ttft: float,
    slo_tpot: float,
    feed: str,
    gpus: tuple[str, ...],
    rank: int | None,
    floor: float | None,
    dry_run: bool,
    state: Path | None,
    metrics_port: int | None,
    model: str,
    engine: str,
) -> None:
    """Hold the lowest clock that meets the latency objectives, until Ctrl-C."""
    show_log()
    with one_sentence():
        uuids = find_gpus(gpus)
        stretch = load_stretch(state)
        control = ClockControl(
            uuids, slo_ttft, slo_tpot, floor_mhz=floor, dry_run=dry_run, stretch=stretch
        )
    if metrics_port is not None:
        serve_metrics(control, metrics_port, model, engine)
    try:
        listen(feed, control, rank, threading.Event())
    finally:
        learned = control.stretch
        control.close()
        if state is not None and learned and not dry_run:
            save_stretch(state, learned)


@click.command()
@_common
@option("--minutes", "How long to tune.", Number(0, 1e6, min_open=True), 60.0)
@option("--window", "Length of a window, s.", float, 20.0)
@option("--requests", "Number of requests before a clock is judged.", int, 200)
@option(
    "--out",
    "Where to write the profile; `clocks --state` starts from it.",
    FILE,
    "clocks.json",
    **_AT_END,
)
@option(
    "--picture", "Where to draw J per token, TTFT and TPOT, such as clocks.svg.", FILE, **_AT_END
)
def tune(
    slo_ttft: float,
    slo_tpot: float,
    feed: str,
    gpus: tuple[str, ...],
    rank: int | None,
    minutes: float,
    window: float,
    requests: int,
    out: Path,
    picture: Path | None,
) -> None:
    """Find the lowest static clock that holds at each load, under live load.

    Requests are real: a clock that misses an objective is abandoned at once. Stop early with
    Ctrl-C; results so far are kept.
    """
    from zeus.serving.clock_tune import Tuner, plot, table

    show_log()
    made: list[Tuner] = []

    def make(*arguments: Any) -> Tuner:
        made[:] = [Tuner(*arguments, window_s=window, requests=requests, tell=log.info)]
        return made[0]

    with one_sentence():
        distinct((), (out, picture))
        Tuner([1], slo_ttft, slo_tpot, window_s=window, requests=requests)
        control = ClockControl(find_gpus(gpus), slo_ttft, slo_tpot, policy=make)
    ended = threading.Event()
    timer = threading.Timer(60.0 * minutes, ended.set)
    timer.daemon = True
    timer.start()
    try:
        listen(feed, control, rank, ended)
    finally:
        timer.cancel()
        trouble = control.status().trouble
        control.close()
    tuner = made[0] if made else None
    rows = list(tuner.rows()) if tuner is not None else []
    if tuner is None or not rows:
        trouble = trouble or "no request ended; check --feed and that there is load"
        raise click.ClickException(f"no step times were learned: {trouble}")
    click.echo(table(rows))
    if not tuner.done():
        click.echo("Not complete: clocks below those listed were not judged. Run it for longer.")
    with one_sentence():
        write_text(out, json.dumps(tuner.profile(), indent=1) + "\n")
        if picture is not None:
            plot(rows, picture, slo_ttft, slo_tpot)


def show_log() -> None:
    """Prints the log, from what is normal, with times."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")


def listen(feed: str, control: ClockControl, rank: int | None, ended: threading.Event) -> None:
    """Feeds control until Ctrl-C, SIGTERM or the event.

    Raises:
        ClickException: The address cannot be used.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    engine = None if rank is None else str(rank)
    if "://" in feed:
        from zeus.serving import forward_pass

        with one_sentence():
            subscription = forward_pass.subscribe(feed)
        forward_pass.listen(subscription, ClockPasses(control, engine), ended)
        return
    with one_sentence():
        receiver = Receiver(feed, RequestFeed(control, engine).take)
    try:
        while not ended.wait(RECEIVE_S):
            receiver.receive()
    finally:
        receiver.close()


def find_gpus(names: tuple[str, ...]) -> list[str]:
    """UUIDs of GPUs that are given by index or UUID; raises as `chosen` and `Client.node` do."""
    with Client() as client:
        return chosen(client.node().gpus, names)


def load_stretch(path: Path | None) -> dict[int, float] | None:
    """Step times learned before, by clock, MHz; None: none.

    Raises:
        ValueError: The file has other contents.
    """
    if path is None or not path.exists():
        return None
    try:
        return TypeAdapter(dict[int, Stretch]).validate_python(parse(read_file(path))["stretch"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} has no learned step times; delete it, or choose another file"
        ) from None


def save_stretch(path: Path, stretch: dict[int, float]) -> None:
    """Stores learned step times, and keeps the rest of a tuner's profile."""
    try:
        stored = parse(read_file(path)) if path.exists() else {}
        stored["stretch"] = {str(mhz): value for mhz, value in stretch.items()}
        write_text(path, json.dumps(stored, indent=1) + "\n")
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(f"cannot keep step times in {path}: {error}") from None


def serve_metrics(control: ClockControl, port: int, model: str, engine: str) -> None:
    """Serves metrics from threads.

    Raises:
        ClickException: prometheus_client is missing, or the port is taken.
    """
    from zeus.serving.metrics import CLOCKS, Collector

    with one_sentence():
        app = Collector(model, CLOCKS, lambda: {engine: control.status()}).app
        try:
            WebServer("127.0.0.1", port, app)
        except OSError as error:
            raise ValueError(
                f"cannot listen on port {port} ({error.strerror}); choose another --metrics-port"
            ) from None
