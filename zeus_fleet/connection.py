"""A connection to one member of etcd, optionally with TLS: aetcd 1.0 opens only plain channels.

The files are read for each connection, so that renewed certificates are used without a restart.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeus_ipc.parsing import host_and_port


@dataclass(frozen=True)
class Tls:
    """TLS files in PEM format.

    Attributes:
        ca: Certificates of the authority that signed etcd's.
        cert: The client certificate; None: etcd requires none. With `--client-cert-auth`, its
            common name is the etcd user.
        key: Its private key.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None


def check(endpoints: Sequence[str], tls: Tls | None) -> None:
    """Checks what connections need.

    Raises:
        ValueError: An endpoint is not valid, or a file cannot be used.
    """
    for endpoint in endpoints:
        _address(endpoint)
    if tls is not None:
        _credentials(tls)


def connect(endpoint: str, tls: Tls | None, timeout_s: float) -> Any:
    """An `aetcd.Client` of one member; it connects with the first request.

    Args:
        endpoint: `host:port`.
        tls: None: without TLS.
        timeout_s: Time limit of each request.

    Raises:
        ValueError: See `check`.
    """
    import aetcd

    host, port = _address(endpoint)
    if tls is None:
        return aetcd.Client(host=host, port=port, timeout=timeout_s)
    return _secure_client(endpoint, tls, timeout_s)


def _address(endpoint: str) -> tuple[str, int]:
    address = host_and_port(endpoint)
    if address is None or not address[0] or "/" in address[0]:
        raise ValueError(f"{endpoint} is not a member of etcd; give HOST:PORT")
    return address


def _secure_client(endpoint: str, tls: Tls, timeout_s: float) -> Any:
    import aetcd
    from aetcd import rpc

    credentials = _credentials(tls)

    class Secure(aetcd.Client):  # type: ignore[misc]  # aetcd has no types
        """Differs from its base only in the channel."""

        channel: Any
        kvstub: Any
        leasestub: Any

        async def connect(self) -> None:
            """Opens the channel."""
            if self.channel is None:
                self.channel = rpc.secure_channel(endpoint, credentials)
                self.kvstub = rpc.KVStub(self.channel)
                self.leasestub = rpc.LeaseStub(self.channel)

    return Secure(timeout=timeout_s)


def _read(file: Path | None) -> bytes | None:
    try:
        return None if file is None else file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None


def _credentials(tls: Tls) -> Any:
    import grpc

    credentials = grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.cert))
    # gRPC writes to standard error what is wrong with a file, and then fails to connect.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(tls.ca)
    except ssl.SSLError:
        raise ValueError(f"{tls.ca} has no certificate in PEM format") from None
    if tls.cert is not None:
        try:
            context.load_cert_chain(tls.cert, tls.key, password="")
        except ssl.SSLError as error:
            raise ValueError(
                f"{tls.cert} and {tls.key or 'no key'} are not a certificate and its unencrypted "
                f"private key in PEM format ({error.reason or error})"
            ) from None
    return credentials
