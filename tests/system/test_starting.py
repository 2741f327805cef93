"""zeusd starts anywhere, or explains why not; clients explain what is wrong."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import preloaded
from tests.support import (
    IMPORTED,
    PACKAGES,
    TIMEOUT_S,
    RunningDaemon,
    as_nobody,
    ending,
    public_directory,
    running_daemon,
    script,
    wait_for,
)
from tests.system.sites import Site
from zeus_ipc import Client, errors

REPOSITORY = Path(__file__).resolve().parents[2]
SIMULATED = ("--simulate", "1xv100-pcie:setter_ms=0")


def served(*options: str) -> subprocess.CompletedProcess[str]:
    """`zeusd serve`, which ends by itself; its process has imported zeusd before."""
    return preloaded(*IMPORTED).run("-m", "zeusd", "serve", *options)


def test_a_killed_zeusd_is_started_again_at_once_every_time() -> None:
    """Its lock and its journal's are free only when the kernel has ended all its threads."""
    with running_daemon(*SIMULATED, gpus=1) as daemon:
        for _ in range(15):
            daemon.process.send_signal(signal.SIGKILL)
            daemon.start_again()  # without waiting for the end of the first
            daemon.wait_until_serving(1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--socket", "/" + "x" * 120), "write a path of 1 to 98 bytes"),
        (("--socket-group", "nobody-has-this"), "the group nobody-has-this does not exist"),
        (("--simulate", "4xabacus"), "cannot simulate '4xabacus': write 4xv100-pcie or"),
    ],
)
def test_a_failure_to_start_is_explained_in_one_sentence(
    options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    usual = ["--socket", str(tmp_path / "s"), "--state-dir", str(tmp_path / "state"), *SIMULATED]
    ran = served(*usual, *options)
    assert ran.returncode == 1
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1
    assert ran.stderr.startswith("zeusd: ")


def test_of_two_that_start_at_the_same_moment_one_serves(tmp_path: Path) -> None:
    command = ["-m", "zeusd", "serve", "--socket", str(tmp_path / "s"), *SIMULATED]
    command += ["--state-dir", str(tmp_path / "state")]
    start = preloaded(*IMPORTED).start
    both = [start(*command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        wait_for(lambda: any(one.poll() is not None for one in both), "one to give up")
        (loser,) = (one for one in both if one.poll() is not None)
        assert loser.returncode == 1
        assert f"another daemon listens at {tmp_path / 's'}" in loser.communicate()[1]
        wait_for(lambda: serves(tmp_path / "s"), "the other to serve")
    finally:
        for one in both:
            one.terminate()
            one.communicate(timeout=TIMEOUT_S)


def serves(path: Path) -> bool:
    with contextlib.suppress(errors.DaemonUnavailable), Client(path) as client:
        return len(client.node().gpus) == 1
    return False


SIGNALLED = """
import os, sys
from zeusd import cli, main
where, number, *arguments = sys.argv[1:]
owner, name = (main, where) if where in ("open_node", "AuditFile") else (main.Daemon, where)
real = getattr(owner, name)
def signalled(*args, **kwargs):
    os.kill(os.getpid(), int(number))
    return real(*args, **kwargs)
setattr(owner, name, signalled)
sys.argv = ["zeusd", *arguments]
cli.main()
"""


@pytest.mark.parametrize("where", ["_listen", "open_node", "AuditFile", "_await_gpus"])
def test_a_stop_at_any_moment_of_the_start_restores_what_running_jobs_hold(
    where: str, site: Site
) -> None:
    """Before the first of these places nothing is open; the second comes before the journal."""
    with ending(site.holder()):
        site.daemon.kill()
        for number, restored in ((signal.SIGUSR1, False), (signal.SIGTERM, True)):
            program = ("-c", SIGNALLED, where, str(int(number)))
            site.daemon.start_again(program)
            assert site.daemon.process.wait(TIMEOUT_S) == 0, site.daemon.log_path.read_text()
            assert site.restored() == restored
            assert not Path(site.daemon.socket).exists()


@pytest.mark.needs("root")
def test_root_starts_it_from_a_folder_that_nobody_else_may_enter() -> None:
    """As in /root: users who may connect are served, though they may not read the code."""
    with public_directory() as directory:
        private = directory / "private"
        private.mkdir(mode=0o700)
        for package in PACKAGES:
            shutil.copytree(
                REPOSITORY / package, private / package, ignore=shutil.ignore_patterns("*.pyc")
            )
        run = (
            f"import sys; sys.path.insert(0, {str(private)!r}); from zeusd.cli import main; main()"
        )
        options = [*SIMULATED, "--socket-mode", "0666"]
        daemon = RunningDaemon(directory, *options, program=("-c", run), imported=())
        try:
            daemon.wait_until_serving(1)
            asking = (
                "import sys; from zeus_ipc import Client\n"
                "print(len(Client(sys.argv[1]).node().gpus))"
            )
            asker = script(asking, daemon.socket, cwd=REPOSITORY, **as_nobody())
            assert asker.communicate(timeout=TIMEOUT_S)[0] == "1\n"
        finally:
            daemon.stop()


def test_it_runs_without_standard_output_and_error(tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-m", "zeusd", "serve"]
    command += ["--socket", str(tmp_path / "s"), "--state-dir", str(tmp_path / "state"), *SIMULATED]
    daemon = subprocess.Popen(command)
    try:
        wait_for(lambda: serves(tmp_path / "s"), "zeusd to serve")
    finally:
        daemon.terminate()
        assert daemon.wait(TIMEOUT_S) == 0


def test_it_is_one_process_and_does_not_load_libzmq() -> None:
    with running_daemon(*SIMULATED, gpus=1) as daemon:
        pid = daemon.process.pid
        assert Path(f"/proc/{pid}/task/{pid}/children").read_text() == ""
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "zmq" not in mapped
        assert "python" in mapped


def test_a_client_names_a_stopped_zeusd_and_its_log() -> None:
    with running_daemon(*SIMULATED, gpus=1) as daemon:
        pid = daemon.process.pid
        with daemon.client() as client, daemon.client(timeout_s=0.2) as hasty:
            assert client.leases() == []
            daemon.process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(errors.RequestTimeout, match=rf"kill -CONT {pid}"):
                    hasty.leases()
            finally:
                daemon.process.send_signal(signal.SIGCONT)
            assert client.leases() == []


@pytest.mark.needs("root", "util-linux", "time namespaces")
def test_a_client_in_another_time_namespace_gets_an_error() -> None:
    """Its deadlines and windows would mean other times than zeusd's."""
    with running_daemon(*SIMULATED, gpus=1) as daemon:
        asking = (
            "import sys; from zeus_ipc import Client\n"
            "try: Client(sys.argv[1], timeout_s=5).node()\n"
            "except Exception as error: print(type(error).__name__, error)"
        )
        command = ["unshare", "--time", "--fork", "--monotonic", "1000", "--boottime", "1000"]
        command += [sys.executable, "-c", asking, daemon.socket]
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=REPOSITORY
        )
        assert ran.stdout.startswith("DaemonUnavailable"), ran
        assert "1000 s ahead of zeusd's" in ran.stdout
        assert "time namespace" in ran.stdout
