"""The command `zeusd-exporter`: a page for Prometheus, at http://ADDRESS:PORT/metrics."""

from __future__ import annotations

import logging
import sys

import click

from zeus_common.options import SOCKET, option
from zeus_common.processes import discard_output
from zeus_ipc import __version__
from zeus_ipc.parsing import host_and_port

DEFAULT_LISTEN = "127.0.0.1:9850"


def _address(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, int]:
    address = host_and_port(value)
    if address is None or ":" not in value:
        raise click.BadParameter("write ADDRESS:PORT, such as 127.0.0.1:9850 or [::]:9850")
    return address[0].strip("[]") or "::", address[1]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@option(
    "--listen",
    "Address to listen on; [::]:9850 for all addresses of the machine.",
    default=DEFAULT_LISTEN,
    envvar="ZEUSD_EXPORTER_LISTEN",
    callback=_address,
    metavar="ADDRESS:PORT",
)
@option("--socket", "zeusd's socket.", SOCKET, metavar="PATH")
@option("--once", "Print the metrics and exit, as for node_exporter's text files.", bool)
@option(
    "--workloads",
    "Export the energy of each job and pod while it runs: a series for each of them.",
    bool,
    envvar="ZEUSD_EXPORTER_WORKLOADS",
)
@option(
    "--otel",
    "Also export energy by OpenTelemetry's names, hw_energy_joules.",
    bool,
    envvar="ZEUSD_EXPORTER_OTEL",
)
@click.version_option(__version__, prog_name="zeusd-exporter")
def main(
    listen: tuple[str, int], socket: str | None, once: bool, workloads: bool, otel: bool
) -> None:
    """Serve zeusd's metrics to Prometheus. Needs only access to the socket."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
    except ImportError:
        raise SystemExit(
            'zeusd-exporter: prometheus_client is not installed; pip install "zeusd[metrics]"'
        ) from None
    from zeus_common.http_guard import WebServer
    from zeus_ipc.client import Client
    from zeusctl.exporter.collector import ZeusdCollector
    from zeusctl.running import asked_to_end

    logging.basicConfig(level=logging.INFO, format="zeusd-exporter: %(message)s")
    registry = CollectorRegistry(auto_describe=False)
    # Well within the ten seconds that Prometheus waits.
    with Client(socket, heartbeat=False, timeout_s=3.0) as client:
        registry.register(ZeusdCollector(client, workloads, otel))
        if once:
            try:
                sys.stdout.buffer.write(generate_latest(registry))
                sys.stdout.flush()
            except OSError as error:
                discard_output()
                raise SystemExit(
                    f"zeusd-exporter: standard output cannot be written: {error.strerror}"
                ) from None
            return
        host, port = listen
        with asked_to_end() as ended:
            try:
                server = WebServer(host, port, make_wsgi_app(registry))
            except OSError as error:
                raise SystemExit(
                    f"zeusd-exporter: cannot listen at {host}:{port} ({error.strerror}); choose "
                    "another address with --listen"
                ) from None
            name = f"[{host}]" if ":" in host else host
            logging.info("serving at http://%s:%d/metrics", name, server.server_port)
            ended.wait()
            server.close()


if __name__ == "__main__":
    main()
