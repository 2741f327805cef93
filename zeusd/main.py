"""Where the daemon's parts are put together."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from typing import Any

from zeus_ipc import __version__
from zeusd.config import Config
from zeusd.core.core import Core
from zeusd.nodes import Node, open_node
from zeusd.ring.engine import Engine
from zeusd.ring.front import FrontSupervisor
from zeusd.ring.journal import EMBEDDED_STATE_DIR, Journal, JournalError, boot_id
from zeusd.ring.listener import Listener, ListenError
from zeusd.ring.reactor import Reactor

log = logging.getLogger(__name__)

JOURNAL_NAME = "journal"


class Daemon:
    """zeusd: an engine, and a front that brings it requests.

    Args:
        config: What the command line and `zeusd.toml` say.
        front_seed: See `FrontOptions.seed`.

    Raises:
        ListenError, JournalError, ValueError: It cannot start; the message says what to do.
    """

    def __init__(self, config: Config, front_seed: int | None = None) -> None:
        self._config = config
        self._stopping = False
        boot = boot_id()
        with contextlib.ExitStack() as opened:
            settings = config.daemon
            mode = int(settings.socket_mode, 8)
            self._listener = Listener(settings.socket, mode, settings.socket_group)
            opened.callback(self._listener.close)
            self._reactor = Reactor()
            self._node: Node = open_node(
                config.nvml.library, config.nvml.simulate, f"{settings.socket}.devices"
            )
            opened.callback(self._node.close)
            self._front = FrontSupervisor(
                self._reactor, self._listener.socket, config.front_options(front_seed)
            )
            self._engine = Engine(
                core=Core(
                    config.policy(),
                    daemon_version=__version__,
                    simulated=self._node.device_socket,
                ),
                reactor=self._reactor,
                nvml=self._node.nvml,
                journal=Journal(settings.state_dir, JOURNAL_NAME, boot),
                reply=self._front.reply,
                boot=boot,
                orphan_directories=(settings.state_dir, EMBEDDED_STATE_DIR),
                retry_s=config.nvml.retry_s,
            )
            self._front.attach(self._engine)
            self._engine.start()
            opened.callback(self._engine.close)
            self._front.start()
            opened.callback(self._front.stop)
            self._opened = opened.pop_all()

    def run(self) -> None:
        """Serves until SIGTERM, SIGINT or SIGHUP, then puts everything back and returns."""
        # The interpreter runs handlers between instructions, and the loop sleeps in epoll_wait:
        # the wakeup descriptor ends that sleep whenever the signal comes.
        woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        self._reactor.add_reader(woken, lambda: _empty(woken))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        log.info(
            "serving at %s",
            self._config.daemon.socket,
            extra={"event": "serving", "pid": os.getpid(), "version": __version__},
        )
        with self._opened:
            self._engine.run()
        log.info("stopped", extra={"event": "stopped"})

    def _on_signal(self, number: int, frame: Any) -> None:
        self._reactor.post(self._stop)

    def _stop(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        log.info("stopping: putting everything back", extra={"event": "stopping"})
        self._engine.stop(self._config.daemon.stop_timeout_s, then=self._reactor.stop)


def _empty(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 4096)


def serve(config: Config, front_seed: int | None = None) -> int:
    """Runs the daemon in this process. Returns the exit code."""
    try:
        daemon = Daemon(config, front_seed)
    except (ListenError, JournalError, ValueError) as error:
        print(f"zeusd: {error}", file=sys.stderr)
        return 1
    daemon.run()
    return 0
