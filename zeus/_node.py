"""The connection of this process to its node's GPUs: zeusd if there is one, else NVML in
process."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zeus.exceptions import ZeusGPUInitError, from_ipc
from zeus_ipc.errors import DaemonUnavailable, ZeusIpcError
from zeus_ipc.sockets import DEFAULT_SOCKET_PATH, SOCKET_ENV

if TYPE_CHECKING:
    from zeus_ipc.client import Client

STALL_TIMEOUT_ENV = "ZEUS_STALL_TIMEOUT_S"
"""Seconds without a training step or a window after which this process lets its leases end."""

_guard = threading.RLock()
_client: Client | None = None


def get_client() -> Client:
    """Returns this process's connection, opened on first use. If a daemon is configured
    (`$ZEUSD_SOCK_PATH`) or listens at the default socket, it is used, or its failure is raised: a
    silent fallback could measure other GPUs, or none.

    Raises:
        ZeusGPUInitError: The GPUs cannot be reached; the message says why and what to do.
    """
    global _client
    with _guard:
        if _client is None:
            try:
                _client = _connect()
            except DaemonUnavailable as error:
                raise ZeusGPUInitError(error.message, error.device_code) from error
            except ZeusIpcError as error:
                raise from_ipc(error) from error
        return _client


def _connect() -> Client:
    if os.environ.get(SOCKET_ENV) or _is_served(DEFAULT_SOCKET_PATH):
        from zeus_ipc.client import Client

        client = Client(stall_timeout_s=stall_timeout_s())
        client.node()
        return client
    from zeusd.embed import connect

    return connect()


def _is_served(path: str) -> bool:
    """Whether there is a socket that a zeusd has not left behind when it ended."""
    if not os.path.exists(path):
        return False
    import socket  # where no zeusd is installed, nothing needs it

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:  # the client says why it cannot connect
            return True
    return True


def progress() -> None:
    """Reports progress of training; see `STALL_TIMEOUT_ENV`."""
    if _client is not None:
        _client.progress()


def answers() -> bool:
    """Whether zeusd answered the last request; takes no time."""
    return _client is None or _client.answers


def leases_lost() -> int:
    """How often this process lost a lease that it did not release; takes no time."""
    return 0 if _client is None else _client.leases_lost


def stall_timeout_s() -> float | None:
    """Returns the value of `STALL_TIMEOUT_ENV`, s; None if it is not set.

    Raises:
        ZeusGPUInitError: It is not a number of seconds.
    """
    value = os.environ.get(STALL_TIMEOUT_ENV)
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ZeusGPUInitError(f"{STALL_TIMEOUT_ENV} must be a number of seconds, not {value!r}")
    return seconds


@contextlib.contextmanager
def use(client: Client | None) -> Iterator[None]:
    """Makes everything in this process use another connection for a while, None: a new one.

    For tests.
    """
    global _client
    with _guard:
        before, _client = _client, client
    try:
        yield
    finally:
        with _guard:
            _client = before
