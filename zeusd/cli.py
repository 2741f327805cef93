"""The command `zeusd`."""

from __future__ import annotations

import errno
import sys
from typing import TYPE_CHECKING, Any

import click

from zeus_common.options import SOCKET
from zeus_common.processes import discard_output
from zeus_ipc import __version__

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo
    from zeusd.config import Config


class _Program(click.Group):
    """Commands that report a full disk in one sentence."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().main(*arguments, **options)
        except OSError as error:
            if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO):
                raise
            discard_output()
            raise SystemExit(
                f"zeusd: standard output cannot be written: {error.strerror}; make room, or write "
                "elsewhere"
            ) from None


@click.group(cls=_Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zeusd")
def main() -> None:
    """Node daemon: sets power limits and clocks for unprivileged training jobs, and restores them
    when a job ends.
    """


@main.command()
@click.option("--config", "config_path", metavar="FILE", help="Configuration, TOML.")
@click.option(
    "--socket", type=SOCKET, metavar="PATH", help="Socket.  [default: /run/zeusd/zeusd.sock]"
)
@click.option("--socket-mode", metavar="OCTAL", help="Permissions of the socket.  [default: 0660]")
@click.option("--socket-group", metavar="GROUP", help="Group that owns the socket.")
@click.option("--state-dir", metavar="DIR", help="Journal.  [default: /run/zeusd/state]")
@click.option(
    "--simulate",
    metavar="SPEC",
    help="Simulate GPUs: 4xv100-pcie, or a100-sxm-80,a40, or report:FILE from `zeusctl probe`.",
)
@click.option("--nvml-library", metavar="PATH", help="Path of libnvidia-ml.")
@click.option("--amd-library", metavar="PATH", help="Path of libamd_smi, for AMD GPUs.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Lowest level of records to write.  [default: info]",
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "json", "text", "journal"]),
    help="auto: journal fields under systemd, text on a terminal, else JSON.  [default: auto]",
)
def serve(config_path: str | None, **options: str | None) -> None:
    """Run the daemon in the foreground. SIGTERM and SIGINT restore everything and end it.

    SIGUSR1 ends it and keeps all leases for the next zeusd; SIGHUP reloads the configuration.
    Options override the configuration file. Without a driver, zeusd starts anyway, reports no GPUs,
    and retries every few seconds.
    """
    from pydantic import ValidationError

    from zeus_common.text import explain
    from zeusd import logs
    from zeusd.config import Config, ConfigError, load
    from zeusd.main import serve as run

    def read() -> Config:
        config = load(config_path) if config_path is not None else Config()
        return _override(config, options)

    try:
        config = read()
    except ConfigError as error:
        raise SystemExit(f"zeusd: {error}") from None
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        name = str(fault["loc"][-1]).replace("_", "-")
        raise SystemExit(f"zeusd: --{name}: {explain(fault, *fault['loc'])}") from None
    logs.configure(config.log.level, config.log.format)
    sys.exit(run(config, read))


@main.command("check-config")
@click.argument("file")
@click.option("--node", is_flag=True, help="Also compare FILE with the GPUs of the running zeusd.")
@click.option(
    "--socket", type=SOCKET, metavar="PATH", help="With --node: the socket of that zeusd."
)
@click.option("--strict", is_flag=True, help="Also fail if a rule has no effect.")
def check_config(file: str, node: bool, socket: str | None, strict: bool) -> None:
    """Check whether zeusd accepts FILE, and report wrong lines.

    Users and groups that do not exist are warnings; with --node, so are rules that match no GPU of
    this node, and values that its GPUs do not accept.
    """
    from zeusd.config import ConfigError, load
    from zeusd.config_check import findings

    try:
        config = load(file)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    sentences = findings(config, _gpus_of_node(socket) if node or socket else None)
    for sentence in sentences:
        click.echo(f"{file}: warning: {sentence}")
    if strict and sentences:
        sys.exit(1)
    click.echo(f"{file}: ok")


def _gpus_of_node(socket: str | None) -> list[GpuInfo]:
    """Return the GPUs of the running zeusd."""
    from zeus_ipc.client import Client
    from zeus_ipc.errors import ZeusIpcError
    from zeus_ipc.sockets import socket_path

    try:
        with Client(socket_path(socket), timeout_s=2.0) as client:
            return client.node().gpus
    except ZeusIpcError as error:
        raise SystemExit(f"zeusd: {error}") from None


@main.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def restore(arguments: tuple[str, ...]) -> None:
    """Finish pending restores of a zeusd that no longer runs (see `zeusd restore --help`)."""
    from zeusd import restore as helper

    sys.exit(helper.main(list(arguments)))


_PLACES = {
    "socket": ("daemon", "socket"),
    "socket_mode": ("daemon", "socket_mode"),
    "socket_group": ("daemon", "socket_group"),
    "state_dir": ("daemon", "state_dir"),
    "simulate": ("nvml", "simulate"),
    "nvml_library": ("nvml", "library"),
    "amd_library": ("amd", "library"),
    "log_level": ("log", "level"),
    "log_format": ("log", "format"),
}


def _override(config: Config, options: dict[str, str | None]) -> Config:
    """Return the configuration with the overrides of the command line."""
    data = config.model_dump(exclude_unset=True)
    for name, value in options.items():
        if value is not None:
            section, key = _PLACES[name]
            data.setdefault(section, {})[key] = value
    return type(config).model_validate(data)


if __name__ == "__main__":
    main()
