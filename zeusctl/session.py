"""One run of a verb: its connection, its view of the node, and its output."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zeus_common.options import SOCKET, option
from zeus_common.text import named
from zeus_ipc import __version__
from zeus_ipc.controls import CEILING_NAME
from zeus_ipc.errors import ErrorCode
from zeus_ipc.sockets import SOCKET_ENV, socket_path
from zeusctl.exits import USAGE, CommandError
from zeusctl.text import indices

if TYPE_CHECKING:
    from zeus_ipc import Client
    from zeus_ipc.replies import GpuInfo, NodeInfo
    from zeusctl.parts import GpuPart
    from zeusctl.reports import ReportHeader

TIMEOUT_S = 10.0

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class PastGpu:
    """A GPU that zeusd does not find, but that a history has."""

    uuid: str
    index: int = -1
    pci_address: str = ""


G = TypeVar("G", bound="GpuInfo | PastGpu")


def select(text: str, gpus: Sequence[G]) -> list[G]:
    """Returns the GPUs that a text names, in the node's order, each once.

    Raises:
        CommandError: It names a GPU that does not exist, or none.
    """
    chosen: list[G] = []
    for part in text.split(","):
        part = part.strip()
        matches = _find(part, gpus)
        if not matches:
            there = ", ".join(str(gpu.index) for gpu in gpus if gpu.index >= 0) or "none"
            raise CommandError(
                f"there is no GPU {part!r} here; name one of {there}, a range such as "
                "0-3, a UUID, or all",
                ErrorCode.UNKNOWN_GPU,
            )
        chosen += matches
    return [gpu for gpu in gpus if gpu in chosen]


def _find(part: str, gpus: Sequence[G]) -> list[G]:
    if part == "all":
        return list(gpus)
    wanted = indices(part)
    if wanted is not None:
        matches = [gpu for gpu in gpus if gpu.index in wanted]
        return matches if len(matches) == len(wanted) else []
    if part.upper().startswith("GPU-"):
        matching = [gpu for gpu in gpus if gpu.uuid.lower().startswith(part.lower())]
        return matching if len(matching) == 1 else []
    at = [gpu for gpu in gpus if part and gpu.pci_address.lower().endswith(part.lower())]
    return at if len({gpu.pci_address for gpu in at}) == 1 else []


class Session:
    """The options before the verb, and the connection that they select."""

    def __init__(
        self,
        socket: str | None,
        json_wanted: bool = False,
        timeout_s: float = TIMEOUT_S,
        arguments: Sequence[str] = (),
    ) -> None:
        self._socket = socket
        self.json = json_wanted
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._client: Client | None = None

    def move(self, socket: str) -> None:
        """Uses another socket from now on; before the first connection."""
        self._socket = socket

    @property
    def socket(self) -> str:
        """The path of the daemon's socket."""
        return socket_path(self._socket)

    @property
    def client(self) -> Client:
        """The connection, made when it is first needed."""
        if self._client is None:
            import logging

            from zeus_ipc.client import Client

            # The client's warnings are for programs; verbs report what matters themselves.
            logging.getLogger("zeus_ipc").addHandler(logging.NullHandler())
            logging.getLogger("zeus_ipc").propagate = False
            self._client = Client(self.socket, timeout_s=self._timeout_s)
        return self._client

    @cached_property
    def node(self) -> NodeInfo:
        """The daemon and its GPUs, as of the first request."""
        return self.client.node()

    def gpus(self, selection: str = "all") -> list[GpuInfo]:
        """Returns the GPUs that the user names.

        Raises:
            CommandError: One of them does not exist, or the node has none.
        """
        if not self.node.gpus:
            if self.node.quiesced_ns is not None:
                message = "zeusd is quiesced; run `zeusctl resume`"
                raise CommandError(message, ErrorCode.QUIESCED)
            message = "zeusd sees no GPUs; `zeusctl doctor` says why"
            raise CommandError(message, ErrorCode.UNKNOWN_GPU)
        if selection != "slurm":
            return select(selection, self.node.gpus)
        by_uuid = {gpu.uuid: gpu for gpu in self.node.gpus}
        chosen = [by_uuid[part.gpu] for part in self.slurm_parts(shares=False)]
        if not chosen:
            raise CommandError(
                "SLURM_JOB_GPUS names no GPU; `slurm` is for Slurm's Prolog and Epilog of a job "
                "that has some",
                USAGE,
            )
        return chosen

    def listed(self, selection: str) -> list[GpuInfo]:
        """The same for verbs that only read: all GPUs may be none."""
        return list(self.node.gpus) if selection == "all" else self.gpus(selection)

    def uuids(self, selection: str, past: Iterable[str | None] = ()) -> list[str]:
        """UUIDs of the GPUs that the user names, also of those that only a history has, if it is
        given; empty: all.
        """
        if selection == "all":
            return []
        gone = {*past} - {gpu.uuid for gpu in self.node.gpus}
        if selection == "slurm" or not gone:
            return [gpu.uuid for gpu in self.gpus(selection)]
        there: list[GpuInfo | PastGpu] = [*self.node.gpus]
        there += [PastGpu(uuid) for uuid in gone if uuid is not None]
        return [gpu.uuid for gpu in select(selection, there)]

    def slurm_parts(self, shares: bool = True) -> list[GpuPart]:
        """Returns what the Slurm job of this Prolog or Epilog has of the node's GPUs.

        Raises:
            CommandError: It cannot be known which GPUs the job has.
        """
        from zeusctl.parts import Devices, mig_devices
        from zeusctl.slurm import parts_of

        split = mig_devices(self.client, self.node.gpus)
        devices, host = Devices(self.node.gpus, split), socket.gethostname()
        return parts_of(os.environ, devices, host, shares=shares)

    def readable(self, text: str) -> str:
        """Replaces user ids and UUIDs in a message of zeusd by names and indices, if known."""
        gpus = self.node.gpus if "node" in self.__dict__ else []
        return named(text, {gpu.uuid: gpu.index for gpu in gpus})

    def as_root(self) -> str:
        """This command line, for an administrator."""
        elsewhere = os.environ.get(SOCKET_ENV) and not any(
            argument.startswith("--socket") for argument in self._arguments
        )
        place = ["--socket", self.socket] if elsewhere else []
        return shlex.join(["sudo", "zeusctl", *place, *self._arguments])

    def denied(self, what: str, act: str) -> CommandError:
        """What an ordinary user's command did not do, with the command that would.

        Args:
            what: What is in the way.
            act: What only administrators may do.
        """
        text = f"{what}; only administrators may {act}: {self.as_root()}"
        return CommandError(text, ErrorCode.PERMISSION_DENIED)

    def look_again(self) -> None:
        """Discards what is known about the node: it may have changed."""
        self.__dict__.pop("node", None)

    def close(self) -> None:
        """Ends the connection, and the leases taken through it; without zeusd, at once."""
        if self._client is not None:
            from zeus_ipc.circuit import bounded

            with bounded(self._timeout_s):
                self._client.close(patient=False)
            self._client = None

    def answer(
        self,
        report: ReportHeader,
        lines: Iterable[str] | Callable[[], Iterable[str]],
        *,
        err: bool = False,
    ) -> None:
        """Prints a report: as JSON if requested, else these lines."""
        if self.json:
            click.echo(report.json(), err=err)
            return
        for line in lines() if callable(lines) else lines:
            click.echo(line, err=err)

    def done(self, path: object, rows: int, *lines: str, err: bool = False) -> None:
        """Reports what was written to a file or folder: as JSON if requested, else these lines."""
        from zeusctl.reports import FileWritten

        self.answer(FileWritten(at=now(), path=str(path), rows=rows), lines, err=err)


def now() -> datetime:
    """The present time with its zone."""
    return datetime.now(timezone.utc).astimezone()


def ceiling_option(text: str) -> Callable[[F], F]:
    """`--ceiling NAME`, with this help."""

    def checked(_: click.Context, __: click.Parameter, name: str | None) -> str | None:
        if name is not None and re.fullmatch(CEILING_NAME, name) is None:
            raise click.BadParameter(
                f"{name!r} is not a ceiling; choose fleet, persisted or job:ID (the site limit is "
                "in zeusd.toml)"
            )
        return name

    return option("--ceiling", text, metavar="NAME", callback=checked)


def verb(name: str | None = None, **more: Any) -> Callable[[Callable[..., None]], click.Command]:
    """A verb, which gets the `Session`; it takes `--json` and `--socket`, as `zeusctl` does."""

    def chosen(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            context.find_root().obj.json = True

    def elsewhere(context: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None:
            context.find_root().obj.move(value)

    def add(function: Callable[..., None]) -> click.Command:
        make: Any = click.command(name, **more)
        command: click.Command = make(pass_session(function))
        own: dict[str, Any] = {"expose_value": False, "is_eager": True}
        text = "Answer as one JSON object (see `zeusctl schema`)."
        option("--json", text, bool, callback=chosen, **own)(command)
        click.version_option(__version__, prog_name="zeusctl", hidden=True)(command)
        click.option("--socket", type=SOCKET, callback=elsewhere, hidden=True, **own)(command)
        return command

    return add


pass_session = click.make_pass_decorator(Session)
