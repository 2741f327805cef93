"""The verbs that change something, and how it is restored."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.preloaded import Program
from tests.support import (
    TIMEOUT_S,
    RunningDaemon,
    configuration,
    public_directory,
    running_daemon,
    wait_for,
    zeusctl_line,
)
from tests.zeusctl.conftest import Ctl, as_nobody_says, limits, spawn
from zeus.optimizer.power_limit.profile import ProfileFile
from zeus_common.simulation import SimulatedNode, SimulatedWork
from zeus_ipc.errors import LeaseExpired
from zeusctl.exits import CommandError, Exit
from zeusctl.recording import read

WORK = "nsdi23/v100/imagenet/resnet50/adadelta/32"


def locked(daemon: RunningDaemon, gpu: int) -> list[int] | None:
    with daemon.client() as client:
        uuid = client.node().gpus[gpu].uuid
        return client.state(uuid)[uuid].locked_gpu_clocks_mhz


def said_json(text: str) -> Any:
    return json.loads(text.splitlines()[0])


# ------------------------------------------------------------------------------------ set, release


def test_a_setting_lasts_as_long_as_its_command(ctl: Ctl, daemon: RunningDaemon) -> None:
    look = ("sh", "-c", zeusctl_line(), "sh", "leases", "--json")
    said = ctl("set", "0-1", "-p", "150W", "-g", "600,900", "--", *look)
    assert said.code == 0
    leases = said_json(said.out)["leases"]
    assert [(one["gpu"], one["value"]) for one in leases] == [
        (0, 150.0),
        (0, [600.0, 900.0]),
        (1, 150.0),
        (1, [600.0, 900.0]),
    ]
    assert "GPU 0: power_limit 150 W (was 250 W)" in said.err
    assert limits(daemon)[:2] == [250, 250]
    assert locked(daemon, 0) is None


def test_a_command_is_listed_with_the_lease_that_it_runs_under(
    ctl: Ctl, daemon: RunningDaemon
) -> None:
    with daemon.client() as client:
        node = client.node()
    works = (
        "import time; from zeus_common.simulation import SimulatedWork as Work; "
        f"work = Work({node.simulated!r}, [{node.gpus[1].uuid!r}], 'model/compute'); "
        "work.launch(1e6); time.sleep(100)"
    )
    with spawn(daemon, "set", "1", "-p", "150", "--", sys.executable, "-c", works) as setter:
        held = f"power_limit 150 W (pid {setter.pid})"
        wait_for(lambda: held in ctl("processes").out, "the process and its lease")
        assert f" {setter.pid} (" in ctl("leases").out


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("sh", "-c", "exit 7"), 7),
        (("sh", "-c", "kill -TERM $$"), 143),
        (("no-such-command",), Exit.NOT_FOUND),
        (("/etc/passwd",), Exit.NOT_EXECUTABLE),
    ],
)
def test_the_exit_code_is_the_commands(ctl: Ctl, command: tuple[str, ...], code: int) -> None:
    for verb in (("set", "0", "-p", "150"), ("measure",)):
        assert ctl(*verb, "--", *command).code == code


def test_a_folder_in_the_path_that_cannot_be_searched_is_passed_over(tmp_path: Path) -> None:
    """As a shell has it; to `subprocess` no command is found there for want of permission."""
    with public_directory() as directory:
        closed, open_to_all = directory / "closed", directory / "open"
        closed.mkdir(mode=0)
        open_to_all.mkdir(mode=0o755)
        (open_to_all / "not-executable").touch(mode=0o644)
        arguments = ("--simulate", "1xv100-pcie", "--socket-mode", "0666", *configuration(tmp_path))
        verbs = (("set", "0", "-p", "150"), ("measure",))
        names = ("no-such-command", "not-executable")
        lines = [(*verb, "--", name) for verb in verbs for name in names]
        with running_daemon(*arguments, gpus=1) as node:
            said = as_nobody_says(node, *lines, PATH=f"{closed}:{open_to_all}")
    for one, (*_, name) in zip(said, lines, strict=True):
        missing = name == "no-such-command"
        assert one.code == (Exit.NOT_FOUND if missing else Exit.NOT_EXECUTABLE), one
        assert ("command not found" if missing else "Permission denied") in one.err


def test_a_command_is_not_run_without_its_setting(ctl: Ctl, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    said = ctl("set", "0", "-p", "5", "--", "touch", str(ran))
    assert said.code == Exit.NOT_RUN
    assert "outside 100 to 250 W" in said.err
    said = ctl("--socket", str(tmp_path / "none"), "measure", "--", "touch", str(ran))
    assert said.code == Exit.NOT_RUN
    assert not ran.exists()


def test_a_command_runs_even_if_zeusd_refuses_or_is_down(
    ctl: Ctl, daemon: RunningDaemon, tmp_path: Path
) -> None:
    command = ("--best-effort", "--", "sh", "-c", "exit 7")
    said = ctl("set", "0,3", "-p", "200", "-g", "900", *command)
    assert said.code == 7
    assert said.err.startswith("zeusctl: warning: no limit set (")
    assert said.err.endswith("; running the command anyway\n")
    assert limits(daemon) == [250, 250, 400, 250]
    said = ctl("--socket", str(tmp_path / "none.sock"), "set", "0", "-p", "200", *command)
    assert said.code == 7
    assert "start zeusd" in said.err
    assert ctl("set", "0", "-p", "200", "--best-effort").code == Exit.USAGE
    said = ctl("--socket", str(tmp_path / "none.sock"), "measure", *command)
    assert said.code == 7
    assert said.err.startswith("zeusctl: warning: nothing is measured (")


def test_all_or_nothing(ctl: Ctl, daemon: RunningDaemon) -> None:
    """GPU 3 has no locked clocks: what was set before on it is restored, too."""
    said = ctl("set", "0,3", "-p", "200", "-g", "900")
    assert said.code == Exit.NOT_SUPPORTED
    wait_for(lambda: limits(daemon) == [250, 250, 400, 250], "everything to be back")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_setting_without_a_command_ends_with_zeusctl(
    daemon: RunningDaemon, number: signal.Signals
) -> None:
    with spawn(daemon, "set", "1", "-p", "150") as setter:
        assert "power_limit 150 W" in setter.stdout.readline()
        assert limits(daemon)[1] == 150
        setter.send_signal(number)
        codes = {signal.SIGINT: 130, signal.SIGTERM: 0, signal.SIGKILL: -9}
        assert setter.wait(TIMEOUT_S) == codes[number]
    wait_for(lambda: limits(daemon)[1] == 250, "the limit to be back")


JOB = """
import os, signal, sys
file = open(sys.argv[1], "a", buffering=1)
caught = [number for number in signal.valid_signals() if number not in map(int, sys.argv[2:])]
for number in caught:
    signal.signal(number, lambda *_: None)  # not ignored
signal.pthread_sigmask(signal.SIG_BLOCK, caught)  # none is lost between two waits
file.write(f"{os.getpid()}\\n")
while True:
    file.write(f"{signal.sigwait(caught)}\\n")
"""
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""What a process gets for its own mistakes."""

NOT_CAUGHT = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, *FAULTS)
OF_TERMINAL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT)
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""What Python ignores."""


@contextlib.contextmanager
def wrapped(
    daemon: RunningDaemon, verb: tuple[str, ...], got: Path, *before: str
) -> Iterator[tuple[Program, int]]:
    """A command that notes its signals in a file, in its wrapper. Returns that, and its pid."""
    job = (sys.executable, "-c", JOB, str(got), *(f"{number:d}" for number in NOT_CAUGHT))
    with spawn(daemon, *verb, "--", *before, *job) as wrapper:
        wait_for(lambda: got.exists() and got.read_text().endswith("\n"), "the command to run")
        pid = int(got.read_text())
        yield wrapper, pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert wrapper.wait(TIMEOUT_S) == 128 + signal.SIGKILL


@pytest.mark.parametrize("verb", [("set", "1", "-p", "150"), ("measure",)])
def test_every_signal_reaches_the_command_once(
    daemon: RunningDaemon, verb: tuple[str, ...], tmp_path: Path
) -> None:
    """Sent to zeusctl alone, or to the group, as by a terminal, timeout(1) or a service manager."""
    got = tmp_path / "got"
    others = {*NOT_CAUGHT, *OF_TERMINAL, *IGNORED}
    numbers = sorted(signal.valid_signals() - others)
    assert {signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM} < {*numbers}
    with wrapped(daemon, verb, got) as (wrapper, _):
        for number in numbers:
            for times, send in enumerate((os.kill, os.killpg), 1):
                send(wrapper.pid, number)
                wait_for(
                    lambda: got.read_text().split()[1:].count(str(number)) >= times, f"{number}"
                )
    noted = [int(line) for line in got.read_text().split()[1:]]
    assert noted == [number for number in numbers for _ in range(2)]
    wait_for(lambda: limits(daemon)[1] == 250, "the limit to be back")


def test_a_command_in_another_group_gets_the_groups_signals(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    got = tmp_path / "got"
    with wrapped(daemon, ("measure",), got, "setsid") as (wrapper, pid):
        assert os.getpgid(pid) != wrapper.pid
        for send in (os.kill, os.killpg):
            send(wrapper.pid, signal.SIGTERM)
            wait_for(lambda: got.read_text().split()[1:] == ["15"], "the signal")
            got.write_text(f"{pid}\n")


def test_a_command_inherits_what_zeusctl_has_inherited(daemon: RunningDaemon) -> None:
    """Ignored signals, as after nohup, and files, as of a shell's <(...)."""
    look = "import os, signal, sys; print(os.read(int(sys.argv[1]), 9).decode(), "
    look += "*(int(signal.getsignal(n)) for n in (signal.SIGHUP, signal.SIGUSR1)))"
    reads, writes = os.pipe()
    os.write(writes, b"inherited")
    line = f"{shlex.quote(sys.executable)} -m zeusctl measure -o /dev/null -- "
    line += f"{shlex.quote(sys.executable)} -c {shlex.quote(look)} {reads}"
    ran = subprocess.run(
        ["sh", "-c", f"trap '' HUP; exec {line}"],
        pass_fds=[reads],
        env={**os.environ, "ZEUSD_SOCK_PATH": daemon.socket},
        capture_output=True,
        text=True,
    )
    os.close(reads)
    os.close(writes)
    ignored, default = int(signal.SIG_IGN), int(signal.SIG_DFL)
    assert (ran.stdout, ran.stderr) == (f"inherited {ignored} {default}\n", "")


@pytest.mark.parametrize("verb", [("set", "0,1", "-p", "150"), ("measure",)])
def test_a_command_outlives_a_zeusd_that_is_stopped(
    verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says at once that its limits are gone, and no request is waited for."""
    monkeypatch.setenv("ZEUSCTL_TIMEOUT", f"{10 * TIMEOUT_S:g}")
    simulated = ("--simulate", "2xv100-pcie", *configuration(tmp_path))
    with running_daemon(*simulated, gpus=2) as node:
        with wrapped(node, verb, tmp_path / "got") as (wrapper, pid):
            node.stop()
            if verb[0] == "set":
                said = [wrapper.stderr.readline() for _ in range(3)]
                assert "the lease on power_limit of GPUs 0, 1 is lost" in said[2]
            os.kill(pid, signal.SIGKILL)
            _, rest = wrapper.communicate(timeout=TIMEOUT_S)
            assert ("no zeusd listens" in rest) is (verb[0] == "measure"), rest
        node.start_again()


def test_the_holder_is_informed_when_it_loses_a_setting(daemon: RunningDaemon) -> None:
    with spawn(daemon, "set", "1", "-p", "150", "--", "sleep", "100") as setter:
        wait_for(lambda: limits(daemon)[1] == 150, "the limit")
        with daemon.client() as client:
            client.restore()
        lines = [setter.stderr.readline(), setter.stderr.readline()]
        assert "the lease on power_limit of GPU 1 is lost" in lines[1]
        setter.terminate()


def test_held_by_someone_else(ctl: Ctl, daemon: RunningDaemon) -> None:
    with daemon.client() as client:
        client.set_power_limit(client.node().gpus[0].uuid, 200_000)
        with spawn(daemon, "set", "0", "-p", "150", "--json") as other:
            out, err = other.communicate(timeout=TIMEOUT_S)
        assert other.returncode == Exit.HELD
        assert f"is held by process {os.getpid()}" in err
        assert said_json(out)["code"] == "lease_held"


@pytest.mark.parametrize(
    ("answer", "kept"),
    [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), (None, False)],
)
def test_a_setting_that_nobody_confirms_is_restored(
    ctl: Ctl,
    daemon: RunningDaemon,
    monkeypatch: pytest.MonkeyPatch,
    answer: str | None,
    kept: bool,
) -> None:
    within = "60s" if answer is not None else "200ms"
    to_read, to_write = os.pipe()
    with open(to_read) as stdin, open(to_write, "w") as typed, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(sys, "stdin", stdin)

        def answered() -> None:
            if answer is not None:
                wait_for(lambda: limits(daemon)[0] == 150, "the limit to be set")
                typed.write(answer)
                typed.flush()

        typing = pool.submit(answered)
        code, _, err = ctl("set", "0", "-p", "150", "--persist", "--confirm-within", within)
        typing.result()
    assert (code == 0) is kept, err
    wait_for(lambda: limits(daemon)[0] == (150 if kept else 250), "the outcome")
    if not kept:
        assert "; restored (answer y to keep)" in err
    with daemon.client() as client:
        client.restore()
    assert limits(daemon)[0] == 250


def test_a_persisted_value_lasts_until_a_reset(ctl: Ctl, daemon: RunningDaemon) -> None:
    said = ctl("set", "all", "-p", "200", "--persist", "--json")
    assert said_json(said.out)["kept"] == "persisted"
    assert limits(daemon) == [200, 200, 200, 200]
    shown = ctl("status").out
    assert "GPU 0: persistent power_limit; `zeusctl reset 0` removes it" in shown
    assert ctl("reset", "0,1").code == 0
    assert limits(daemon) == [250, 250, 200, 200]
    assert "16 controls" not in ctl("reset", "all").out
    assert limits(daemon) == [250, 250, 400, 250]
    assert ctl("set", "0", "-p", "200", "--persist", "--", "true").code == Exit.USAGE


def test_a_reset_ends_leases_and_outside_changes(
    ctl: Ctl, daemon: RunningDaemon, node: SimulatedNode
) -> None:
    node.set_outside(1, 120_000)
    with daemon.client() as client:
        uuid = client.node().gpus[0].uuid
        client.set_power_limit(uuid, 150_000)
        said = ctl("reset", "all", "-c", "power_limit", "--json")
        report = said_json(said.out)
        assert [one["pid"] for one in report["revoked"]] == [os.getpid()]
        assert [one["ok"] for one in report["outcomes"]] == [True] * 4
        assert limits(daemon) == [250, 250, 400, 250]
        with pytest.raises(LeaseExpired, match="reset the GPU"):
            client.set_power_limit(uuid, 150_000)


def test_a_reset_of_a_gpu_that_has_not_all_of_its_controls(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper's driver refuses memory clocks; that must not fail every prolog."""
    with running_daemon("--simulate", "2xh100-sxm", gpus=2) as hopper:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", hopper.socket)
        said = ctl("reset", "all")
        assert (said.code, said.err) == (0, "")
        assert said.out == ("reset 6 controls on 2 GPUs\n")
        outcomes = said_json(ctl("reset", "0", "--json").out)["outcomes"]
        assert {one["control"]: (one["ok"], one["trouble"]) for one in outcomes} == {
            "power_limit": (True, None),
            "gpu_clocks": (True, None),
            "persistence_mode": (True, None),
        }


def test_release_by_pid_and_of_nothing(ctl: Ctl, daemon: RunningDaemon) -> None:
    with daemon.client() as client:
        client.set_power_limit(client.node().gpus[0].uuid, 150_000)
        assert said_json(ctl("release", "--pid", "1", "--json").out)["released"] == 0
        said = ctl("release", "--job", "4711")
        assert (said.code, said.out) == (0, "nothing to release: job 4711 holds no lease\n")
        assert limits(daemon)[0] == 150
        assert ctl("release", "--pid", str(os.getpid())).out == "1 lease released\n"
        assert limits(daemon)[0] == 250
    assert ctl("release").code == 0
    assert ctl("release", "--all").code == 0


# ------------------------------------------------------------------------- measure, record, plot


def test_measuring_a_command(ctl: Ctl, daemon: RunningDaemon, node: SimulatedNode) -> None:
    with daemon.client() as client:
        info = client.node()
    assert info.simulated is not None
    with SimulatedWork(info.simulated, [info.gpus[0].uuid], WORK) as work:
        work.launch(1000)
        before_j = node.true_energy_j(0)
        said = ctl("measure", "--json", "0-1", "--", "sleep", "0.4")
        drawn_j = node.true_energy_j(0) - before_j
    assert said.out == "", "standard output is the command's"
    report = said_json(said.err)
    busy, idle = (one for one in report["sources"] if one["source"].startswith("gpu:"))
    assert report["time_s"] >= 0.4
    assert busy["energy_j"] == pytest.approx(busy["average_power_w"] * report["time_s"], rel=1e-5)
    assert 0 < busy["energy_j"] <= 1.05 * drawn_j + busy["uncertainty_j"]
    assert busy["average_power_w"] > 2 * idle["average_power_w"]
    assert report["gpu_energy_j"] == pytest.approx(busy["energy_j"] + idle["energy_j"])


def test_nothing_is_measured_while_quiesced(ctl: Ctl, tmp_path: Path) -> None:
    ctl("quiesce")
    mark = tmp_path / "ran"
    said = ctl("measure", "--", "touch", str(mark))
    assert said.code == Exit.NOT_RUN
    assert "run `zeusctl resume` first" in said.err
    assert not mark.exists()


def test_a_measurement_in_a_file(ctl: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "energy"
    said = ctl("measure", "-o", str(path), "--", "echo", "mine")
    assert (said.out, said.err) == ("mine\n", "")
    assert "gpu:3" in path.read_text()
    assert "all GPUs: " in path.read_text()


@pytest.mark.parametrize("name", ["samples.csv", "samples.parquet"])
def test_a_recording_has_every_tick_and_is_read_back(ctl: Ctl, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    said = ctl("record", "0,2", "-o", str(path), "-d", "1s", "--json")
    assert said.code == 0, said.err
    assert said_json(said.out)["rows"] > 10
    first, second = read(path)
    assert (first.gpu, second.gpu) == (0, 2)
    times = [t for t in first.columns["time"] if t is not None]
    assert times == sorted(times)
    assert abs(times[-1] - time.time()) < 60
    energies = [one for one in first.columns["energy_j"] if one is not None]
    assert energies == sorted(energies)
    assert set(first.columns["power_limit_w"]) == {250.0}
    assert sum(one or 0 for one in first.columns["lost"]) == 0


@pytest.mark.parametrize("verb", ["record", "energy"])
def test_parquet_replaces_no_device(ctl: Ctl, tmp_path: Path, verb: str) -> None:
    fifo = tmp_path / "fifo"  # /dev/null would be replaced by a file, as root
    os.mkfifo(fifo)
    said = ctl(verb, "--format", "parquet", "-o", str(fifo))
    assert said.code == Exit.FAILED
    assert f"{fifo} is not a file; name one for Parquet" in said.err
    assert fifo.is_fifo()


def test_a_recording_to_standard_output_ends_in_order(daemon: RunningDaemon) -> None:
    with spawn(daemon, "record", "0", "--every", "100ms") as recorder:
        rows = [recorder.stdout.readline() for _ in range(4)]
        recorder.send_signal(signal.SIGINT)
        assert recorder.wait(TIMEOUT_S) == 130
    found = list(csv.DictReader(rows))
    times = [float(row["time"]) for row in found]
    assert times[1] - times[0] > 0.09


def test_a_dash_is_standard_output(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in (("record", "0", "-d", "1s"), ("energy", "--format", "csv")):
        said = ctl(*verb, "-o", "-")
        assert (said.code, said.out.count("\n") > 1) == (0, True), said
    assert ctl("measure", "-o", "-", "true").code == 2
    assert not list(tmp_path.iterdir())


def test_a_recording_that_zeusd_leaves_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    with running_daemon("--simulate", "1xv100-pcie") as node:
        with spawn(node, "record", "-o", str(path)) as recorder:
            wait_for(lambda: path.exists() and len(path.read_text().splitlines()) > 5, "rows")
            node.stop()
            recorder.send_signal(signal.SIGINT)
            assert recorder.wait(TIMEOUT_S) == 130
    assert len(read(path)[0].columns["time"]) > 4


def test_an_invalid_recording_is_reported_with_its_line(ctl: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    ctl("record", "0", "-o", str(path), "-d", "1s")
    rows = path.read_text().splitlines()
    rows[2] = rows[2].replace(",", ",x", 1)
    path.write_text("\n".join(rows))
    said = ctl("plot", "-o", str(tmp_path / "p.png"), "--recording", str(path))
    assert said.code == Exit.FAILED
    assert "line 3" in said.err
    path.write_text("a,b\n1,2\n")
    said = ctl("plot", "-o", str(tmp_path / "p.png"), "--recording", str(path))
    assert "are missing; the table needs time,gpu,uuid" in said.err
    assert not (tmp_path / "p.png").exists()


@pytest.mark.parametrize("data", [b"time,gpu\xff\n1,2\n", b"gpu\x00\n", b"", b"\n\n"])
def test_a_binary_file_is_no_recording(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "r.csv"
    path.write_bytes(data)
    with pytest.raises(CommandError, match="is not a zeusctl recording"):
        read(path)


def test_pictures_of_recordings(ctl: Ctl, tmp_path: Path) -> None:
    svg = tmp_path / "recording.svg"
    recording = tmp_path / "r.csv"
    ctl("record", "0,2", "-o", str(recording), "-d", "1s")
    said = ctl("plot", "2", "-o", str(svg), "--recording", str(recording), "--json")
    assert said_json(said.out)["rows"] > 5
    text = svg.read_text()
    assert "GPU 2" in text
    assert "GPU 0" not in text
    assert {"power", "limit", "graphics clock"} <= set(_words(text))
    said = ctl("plot", "1", "-o", str(svg), "--recording", str(recording))
    assert "only has samples of GPUs 0, 2" in said.err
    said = ctl("plot", "-o", "/no/such/p.png")
    assert (said.code, said.out, said.err.count("\n")) == (Exit.FAILED, "", 1)
    assert "/no/such/p.png: No such file or directory; check the path" in said.err


def test_the_incident_pages_plots_can_be_drawn(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs/operate/incident.md"
    monkeypatch.chdir(tmp_path)
    commands = set(re.findall(r"zeusctl (plot [^`\n]+)", page.read_text()))
    assert len(commands) == 2
    for command in commands:
        assert ctl(*command.split()).code == 0, command
        assert Path(command.split()[-1]).read_bytes().startswith(b"\x89PNG")


def _words(svg: str) -> list[str]:
    """matplotlib writes each text beside its outlines, as a comment."""
    return [part.split("-->")[0].strip() for part in svg.split("<!--")[1:]]


def test_a_picture_of_a_profile(ctl: Ctl, tmp_path: Path) -> None:
    profile, svg = tmp_path / "profile.json", tmp_path / "p.svg"
    measurements = [
        {"power_limit": 175, "energy": 1800.0, "time": 11.0},
        {"power_limit": 250, "energy": 2300.0, "time": 10.0},
        {"power_limit": 250, "energy": 2000.0, "time": 10.5, "graphics_clock": 1200},
        {"power_limit": 100, "energy": 1700.0, "time": 17.0},
    ]
    profile.write_text(json.dumps({"measurements": measurements}))
    assert ctl("plot", "-o", str(svg), "--profile", str(profile)).code == 0
    words = {
        "250 W",
        "250 W with clocks up to 1200 MHz",
        "175 W",
        "100 W",
        "energy saved per step (%)",
    }
    words |= {"time per step against 250 W (%)"}
    assert words <= set(_words(svg.read_text()))
    for one in ProfileFile(profile).load(profile).estimates():  # what the file does not say
        assert math.isnan(one.time_error)
        assert math.isnan(one.energy_error)
    profile.write_text("{}")
    said = ctl("plot", "-o", str(svg), "--profile", str(profile))
    assert (said.code, "is not a power limit profile" in said.err) == (Exit.FAILED, True)


# ------------------------------------------------------------------------------- quiesce and resume


def test_quiesce_and_resume(ctl: Ctl, daemon: RunningDaemon) -> None:
    with daemon.client() as client:
        uuid = client.node().gpus[0].uuid
        client.set_power_limit(uuid, 150_000)
        report = said_json(ctl("quiesce", "--json").out)
        assert (report["quiesced"], report["open"], report["pending_restores"]) == (True, [], [])
        assert "zeusd closed the driver" in ctl("status").out
        said = ctl("set", "0", "-p", "150")
        assert said.code == Exit.PENDING
        assert "`zeusctl resume`" in said.err
        assert "fault  GPUs" in ctl("doctor").out
        assert len(said_json(ctl("resume", "--json").out)["gpus"]) == 4
        assert ctl("resume").out == "zeusd was not quiesced; nothing changed: 4 GPUs\n"
        assert limits(daemon)[0] == 250
        with pytest.raises(LeaseExpired, match="close the driver"):
            client.set_power_limit(uuid, 150_000)
    before = time.monotonic_ns()
    with daemon.client() as client:  # the sampler continues where it was
        window = (before, before + 10_000_000, False)
        assert client.windows(uuid, [window])[uuid].energy_uj[0] is not None


def test_all_limits_and_leases_are_restored_at_the_end(daemon: RunningDaemon) -> None:
    wait_for(lambda: limits(daemon) == [250, 250, 400, 250], "all limits to be back")
    with daemon.client() as client:
        wait_for(lambda: client.leases() == [], "all leases to have ended")
    assert daemon.process.poll() is None
