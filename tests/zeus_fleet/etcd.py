"""A member of etcd for tests, with certificates if asked."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import needs
from tests.support import free_port, wait_for


class Certificates:
    """A certificate authority, and its certificates: `NAME.crt` and `NAME.key` per common name.

    Args:
        folder: Where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca = folder / "ca.crt"
        self._openssl("-subj", "/CN=test CA", "-keyout", "ca.key", "-out", "ca.crt")

    def sign(self, name: str) -> tuple[Path, Path]:
        """A certificate and its key, for a server on 127.0.0.1 or a client of this name."""
        self._openssl(
            *("-CA", "ca.crt", "-CAkey", "ca.key", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"),
            *("-keyout", f"{name}.key", "-out", f"{name}.crt"),
        )
        return self._folder / f"{name}.crt", self._folder / f"{name}.key"

    def _openssl(self, *arguments: str) -> None:
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        command = ["openssl", "req", "-x509", *key, "-days", "2", *arguments]
        subprocess.run(command, cwd=self._folder, check=True, capture_output=True)


@contextlib.contextmanager
def running_etcd(
    certificates: Certificates | None = None, options: Sequence[str] = ()
) -> Iterator[str]:
    """One member; yields `host:port`. With certificates it asks clients for theirs."""
    program = needs.tool("etcd")
    secure = () if certificates is None else _secure(certificates)
    scheme = "http" if certificates is None else "https"
    with tempfile.TemporaryDirectory() as name:
        client, peer, log = free_port(), free_port(), Path(name, "log")
        data, more = Path(name, "data"), (*options, *secure)
        process = _start(program, data, client, peer, log, more, scheme)
        try:
            wait_for(lambda: _answers(process, client), "etcd to answer")
            assert process.poll() is None, f"etcd did not start:\n{log.read_text()}"
            yield f"127.0.0.1:{client}"
        finally:
            process.kill()
            process.wait()


def _secure(certificates: Certificates) -> tuple[str, ...]:
    cert, key = certificates.sign("etcd")
    files = ("--cert-file", str(cert), "--key-file", str(key))
    return (*files, "--trusted-ca-file", str(certificates.ca), "--client-cert-auth")


def _start(
    program: str, data: Path, client: int, peer: int, log: Path, options: Sequence[str], scheme: str
) -> subprocess.Popen[bytes]:
    command = [program, "--data-dir", str(data), *options]
    client_url, peer_url = f"{scheme}://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    for what, url in (("client", client_url), ("peer", peer_url)):
        command += [f"--listen-{what}-urls", url]
    command += ["--advertise-client-urls", client_url, "--initial-advertise-peer-urls", peer_url]
    command += ["--initial-cluster", f"default={peer_url}"]
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream)


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Whether it listens, or has ended."""
    with socket.socket() as one:
        return process.poll() is not None or one.connect_ex(("127.0.0.1", port)) == 0
