"""Assembles the daemon's parts."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from zeus_common.processes import sd_notify
from zeus_ipc import __version__
from zeus_ipc.sockets import stream_path
from zeusd import config_check, logs, systemd
from zeusd.config import Config, ConfigError
from zeusd.core.core import Core
from zeusd.identity import EMBEDDED_STATE_DIR, JOURNAL_NAME, boot_id
from zeusd.nodes import OpenedNode, open_node
from zeusd.runtime.accounting import Accounting
from zeusd.runtime.accounts import Retention
from zeusd.runtime.engine import Engine
from zeusd.runtime.journal import Journal, JournalError
from zeusd.runtime.reactor import Reactor
from zeusd.runtime.sampling import Histories, Sampling
from zeusd.runtime.sources import TickReading
from zeusd.runtime.state_files import SAVE_S, AuditFile
from zeusd.server.descriptors import Closer
from zeusd.server.listener import InheritedListener, Listener, ListenError
from zeusd.server.server import Server
from zeusd.server.subuids import SubordinateUids

log = logging.getLogger(__name__)

RESTART = signal.SIGUSR1
"""Requests an exit that keeps all leases: the unit's `RestartKillSignal=`."""


class Daemon:
    """zeusd: an engine, and the server that passes requests to it.

    Raises:
        ListenError, JournalError, ValueError: It cannot start; the message says what to do.
    """

    def __init__(
        self,
        config: Config,
        reload: Callable[[], Config] | None = None,
    ) -> None:
        self._config = self._started = config
        self._reload_config = reload or (lambda: config)
        self._stopping = False
        self._status = ""
        boot = boot_id()
        with contextlib.ExitStack() as opened:
            settings = config.daemon
            self._reactor = Reactor()
            self._handle_signals()  # before anything is changed
            self._listening = self._listen(opened)
            # Open files that are not connections: devices, journal, histories, and files of
            # libraries.
            most = max(16, min(config.server.max_connections, (_open_files() - 128) // 2))
            self._server = Server(self._reactor, config.limits(), most)
            self._node: OpenedNode = open_node(
                config.vendors(), config.nvml.simulate, f"{settings.socket}.devices"
            )
            opened.callback(self._node.close)
            simulated = config.nvml.simulate is not None
            # How long to wait for the journal at start: `zeusd restore` may have it for a moment.
            self._engine = Engine(
                core=Core(
                    config_check.settings(config),
                    daemon_version=__version__,
                    simulated=self._node.device_socket,
                    stream=stream_path(settings.socket),
                    started_ns=time.monotonic_ns(),
                    owner_of=SubordinateUids().owner,
                ),
                reactor=self._reactor,
                node=self._node,
                journal=Journal(settings.state_dir, JOURNAL_NAME, boot, 1.5),
                reply=self._server.reply,
                users=self._server.describe,
                charge=self._server.charge,
                boot=boot,
                orphan_directories=(settings.state_dir, EMBEDDED_STATE_DIR),
                retry_s=config.nvml.retry_s,
                sampling=partial(
                    Sampling,
                    histories=Histories(None if simulated else settings.state_dir, boot),
                    powercap=config.energy.powercap if config.energy.cpu else None,
                    hwmon=config.energy.hwmon if config.energy.cpu else None,
                    publish=self._publish,
                ),
                accounting=self._accounting(boot),
            )
            self._server.attach(self._engine, self._engine.sampling.stream)
            self._engine.start()
            opened.callback(self._engine.close)
            self._audit_file = AuditFile(settings.state_dir, boot)
            core = self._engine.core
            self._audit_file.load(core.audit_log, core.node.started_ns)
            opened.callback(self._save_audit_log)
            opened.callback(self._server.stop)
            self._opened = opened.pop_all()

    def _listen(self, opened: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
        """The sockets for requests and for subscribers: systemd's, or zeusd's own."""
        settings, sockets = self._config.daemon, systemd.listening_sockets()
        listening = []
        for name, path in (
            (systemd.CLIENTS, settings.socket),
            (systemd.STREAM, stream_path(settings.socket)),
        ):
            listener: Listener | InheritedListener
            if name in sockets:
                listener = InheritedListener(sockets[name])
            else:
                mode = int(settings.socket_mode, 8)
                listener = Listener(path, mode, settings.socket_group)
            opened.callback(listener.close)
            listening.append(listener.socket)
        clients, subscribers = listening
        return clients, subscribers

    def _accounting(self, boot: str) -> Callable[[Sampling], Accounting] | None:
        """The energy ledger's service; None: there is no ledger."""
        directory, kept = self._config.ledger_directory(), self._config.accounting
        if directory is None:
            return None
        retention = Retention(kept.keep_rows_days, kept.keep_days, kept.keep_processes_days)

        def make(sampling: Sampling) -> Accounting:
            sampler = sampling.sampler
            units = kept.ignored_units if kept.processes else None
            return Accounting(directory, boot, sampler.names, sampler.find, retention, units)

        return make

    def _publish(self, name: str, sample: TickReading) -> None:
        """Publishes samples. Called on the sampler's thread."""
        self._reactor.post(lambda: self._server.publish(name, sample))

    def run(self) -> int:
        """Serve until a signal requests the end. Return the exit code.

        SIGTERM and SIGINT first restore everything, SIGUSR1 keeps all leases for the next zeusd,
        SIGHUP reloads the configuration.
        """
        # How long clients wait for the first enumeration of the GPUs; a driver may take seconds for
        # each.
        self._give_up_ns = time.monotonic_ns() + round(60.0 * 1e9)
        self._await_gpus()
        self._reactor.every(1.0, self._tell_status)
        self._reactor.every(SAVE_S, self._save_audit_log)
        watchdog_s = systemd.watchdog_s()
        if watchdog_s is not None:  # sent by the loop: if it hangs, systemd restarts zeusd
            self._reactor.every(watchdog_s / 3, lambda: sd_notify("WATCHDOG=1"))
        with self._opened:
            self._engine.run()
        abandoned = len(self._engine.abandoned)
        log.info("stopped", extra={"event": "stopped", "not_restored": abandoned})
        # Exit code of an orderly stop that could not restore everything.
        return 1 if abandoned else 0

    # ------------------------------------------------------------------------------------ signals

    def _handle_signals(self) -> None:
        # The interpreter runs handlers between instructions, and the loop sleeps in epoll_wait:
        # the wakeup descriptor ends that sleep whenever the signal comes.
        woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        self._reactor.add_reader(woken, lambda: _empty(woken))
        Closer.prepare()
        for number in (signal.SIGTERM, signal.SIGINT, RESTART, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            self._reactor.post(self._reload)
        else:
            keep = number == RESTART
            self._reactor.post(lambda: self._stop(keep))

    def _stop(self, keep: bool) -> None:
        if self._stopping:
            return
        self._stopping = True
        restore = not keep and self._config.restore.on_stop == "restore"
        timeout_s = self._config.daemon.stop_timeout_s
        # systemd's own limit is for a zeusd that hangs, whatever the configuration says: 5 s after
        # the longest that a stop may take.
        most_s = timeout_s + self._engine.settle_s + 5.0
        sd_notify(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={most_s * 1e6:.0f}")
        log.info(
            "stopping: %s",
            "restoring everything" if restore else "keeping all leases for the next zeusd",
            extra={"event": "stopping", "restore": restore},
        )
        self._engine.stop(timeout_s, then=self._reactor.stop, restore=restore)

    def _reload(self) -> None:
        """Reloads the configuration. An invalid one changes nothing; names settings that need a
        restart."""
        sd_notify("RELOADING=1")
        try:
            config = self._reload_config()
            settings, limits = config_check.settings(config), config.limits()
        except (ConfigError, ValueError) as error:
            log.error(
                "the configuration was not reloaded, the old one stays in force: %s",
                error,
                extra={"event": "reload_failed"},
            )
        else:
            for section in ("daemon", "nvml", "amd", "energy", "accounting"):
                if config.fixed(section) != self._started.fixed(section):
                    log.warning(
                        "changes under [%s] need `systemctl restart zeusd`",
                        section,
                        extra={"event": "reload_partial", "section": section},
                    )
            if config.server.max_connections != self._started.server.max_connections:
                log.warning(
                    "a change of max_connections under [server] needs `systemctl restart zeusd`",
                    extra={"event": "reload_partial", "section": "server"},
                )
            logs.set_level(config.log.level)
            self._server.configure(limits)
            self._engine.reconfigure(settings)
            self._config = config
            log.info("configuration reloaded", extra={"event": "reloaded"})
        sd_notify("READY=1")

    # ------------------------------------------------------------------------------------ systemd

    def _await_gpus(self) -> None:
        """Starts to serve once the GPUs are known. Until then clients wait in the socket's
        queue."""
        if self._engine.first_look_over or time.monotonic_ns() > self._give_up_ns:
            self._reactor.post(self._begin)  # after the found GPUs are registered
        else:
            self._reactor.call_later(0.005, self._await_gpus)

    def _begin(self) -> None:
        if self._stopping:
            return
        self._server.start(*self._listening)
        log.info(
            "serving at %s",
            self._config.daemon.socket,
            extra={"event": "serving", "pid": os.getpid(), "version": __version__},
        )
        sd_notify("READY=1")

    def _tell_status(self) -> None:
        gpus, leases, pending = self._engine.core.summary()
        status = f"STATUS={gpus} GPUs, {leases} leases, {pending} pending restores"
        if self._engine.core.node.quiesced_ns is not None:
            status = "STATUS=quiesced until `zeusctl resume`"
        if status != self._status:
            self._status = status
            sd_notify(status)

    def _save_audit_log(self) -> None:
        self._audit_file.save(self._engine.core.audit_log)


def _empty(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 4096)


def _open_files() -> int:
    """The limit of open files, after raising it as far as possible."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 1 << 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def serve(config: Config, reload: Callable[[], Config] | None = None) -> int:
    """Runs the daemon in this process. Returns the exit code."""
    # A worker's Python code must not delay the loop by the usual 5 ms.
    sys.setswitchinterval(0.0005)
    try:
        daemon = Daemon(config, reload)
    except (ListenError, JournalError, ValueError) as error:
        print(f"zeusd: {error}", file=sys.stderr)
        return 1
    return daemon.run()
