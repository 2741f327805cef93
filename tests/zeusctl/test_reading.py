"""The output of the reading verbs: as text, as JSON, and for errors."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.support import (
    TIMEOUT_S,
    RunningDaemon,
    configuration,
    running_daemon,
    wait_for,
)
from tests.zeusctl.conftest import READINGS, Ctl, as_nobody_says, python, shows, spawn
from zeus_common.simulation import SimulatedNode, SimulatedWork
from zeus_ipc.client import Client
from zeus_ipc.replies import AuditRecords
from zeusctl.checks import UNITS, _systemd
from zeusctl.cli import VERBS, main
from zeusctl.commands import audit
from zeusctl.exits import MEANINGS, Exit
from zeusctl.exporter.collector import ZeusdCollector
from zeusctl.recording import CsvWriter
from zeusctl.reports import REPORTS
from zeusd.runtime.processes import command_of


def parse(text: str) -> dict[str, Any]:
    (line,) = text.splitlines()
    found: dict[str, Any] = json.loads(line)
    name, _, version = found["schema"].removeprefix("zeusctl.").partition("/")
    TypeAdapter(REPORTS[name]).validate_json(line)
    assert version == "1"
    return found


def test_status_shows_the_node_at_one_glance(
    ctl: Ctl, daemon: RunningDaemon, node: SimulatedNode
) -> None:
    with daemon.client() as client:
        uuid = client.node().gpus[1].uuid
        client.set_power_limit(uuid, 150_000)
        client.set_gpu_clocks(uuid, 600, 900)
        said = ctl("status")
        found = parse(ctl("status", "--json").out)
    assert (said.code, said.err) == (0, "")
    assert re.search(r"^ +1 .* 150 .*\*", said.out, re.MULTILINE)
    assert f"{command_of(os.getpid())} {os.getpid()} (" in said.out
    gpu = found["gpus"][1]
    assert gpu["power_limit_w"]["requested"] == 150.0
    assert gpu["power_limit_w"]["site"] == 250.0
    assert gpu["locked_gpu_clocks_mhz"] == [600, 900]
    assert [(one["gpu"], one["control"], one["value"]) for one in found["leases"]] == [
        (1, "power_limit", 150.0),
        (1, "gpu_clocks", [600.0, 900.0]),
    ]
    assert [one["unit"] for one in found["leases"]] == ["W", "MHz"]


def test_a_gpu_that_cannot_be_read_does_not_hide_the_others(
    ctl: Ctl, node: SimulatedNode, daemon: RunningDaemon, tmp_path: Path
) -> None:
    """Readings that fail are dashes; what everybody needs is still there."""
    node.inject(2, "temperature_c", 999)

    def rows() -> dict[str, str]:
        said = ctl("status")
        assert said.code == 0
        return {row.split()[0]: row for row in said.out.splitlines()[2:6]}

    # A state may be two update periods old.
    wait_for(lambda: " - " in rows()["2"], "the reading that fails to be a dash")
    assert " 250 " in rows()["1"]
    for call in READINGS:
        node.inject(2, call, 15)
    nothing = "GPU 2: it does not answer any request"
    assert shows(ctl, "status", part=nothing).code == 0
    gpus = parse(ctl("status", "--json").out)["gpus"]
    assert [gpu["error"] is None for gpu in gpus] == [True, True, False, True]
    pages = [ctl("show", gpu).out for gpu in ("2", "3")]
    assert ["throttled by        nothing" in one for one in pages] == [False, True]
    with daemon.client() as client:
        uuid = client.node().gpus[2].uuid
        wait_for(
            lambda: any(one.source == uuid and one.code for one in client.node().problems),
            "zeusd to miss its samples",
        )
    ran = tmp_path / "ran"
    said = ctl("measure", "2", "--", "touch", str(ran))
    assert (said.code, ran.exists()) == (Exit.NOT_RUN, False)
    assert "no new samples of GPU 2" in said.err
    assert ctl("measure", "1,2", "--", "touch", str(ran)).code == 0
    node.inject(2, "processes", 15)
    failed = "reading processes on GPU 2 failed: the GPU has fallen off the bus (NVML 15)"
    assert "no process" not in shows(ctl, "processes", "2", part=failed).out


def test_a_file_is_closed_even_if_the_rest_cannot_be_written() -> None:
    writer = CsvWriter(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    open_files = {file.resolve() for file in Path("/proc/self/fd").iterdir()}
    assert Path("/dev/full") not in open_files


def test_leases_of_a_gpu_that_is_missing_since_a_restart_are_shown(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_daemon("--simulate", "2xv100-pcie", gpus=2) as daemon:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)

        def said(*arguments: str) -> str:
            return ctl(*arguments).out

        def restart(node: str, gpus: int) -> None:
            daemon.kill()
            daemon.arguments = ("--simulate", node)
            daemon.start_again()
            daemon.wait_until_serving(gpus)

        with daemon.client() as client:
            uuid = client.node().gpus[1].uuid
        with spawn(daemon, "set", "1", "-p", "150") as holder:
            assert "150 W" in holder.stdout.readline()
            restart("1xv100-pcie", 1)
            assert re.search(rf"{uuid} +power_limit +150 W +250 W +held", said("leases"))
            assert "no restore is pending" in said("doctor")
            assert "holds a lease" in said("show", "0"), "of GPU 0"
        for command in ("leases", "status"):
            wait_for(
                lambda: re.search(
                    rf"{uuid} +power_limit +150 W +250 W +pending restore .*does not find",
                    said(command),
                ),
                "the holder to be gone",
            )
        assert f"power_limit of {uuid} to 250 W: zeusd does not find" in said("doctor")
        for gpus in ("all", uuid):
            assert ctl("reset", gpus).code == Exit.PENDING
        for command in ("leases", "audit"):  # which know GPUs that are gone
            assert uuid in said(command, uuid[:12])
            assert f"there is no GPU '{uuid}x' here; name one of 0," in ctl(command, f"{uuid}x").err
        restart("2xv100-pcie", 2)
        wait_for(lambda: "no leases" in said("leases"), "the restore")


def test_a_pending_restore_is_shown_with_its_reason(
    ctl: Ctl, node: SimulatedNode, daemon: RunningDaemon
) -> None:
    with daemon.client() as client:
        client.set_power_limit(client.node().gpus[0].uuid, 150_000)
        node.inject(0, "set_power_limit", 999)
    said = shows(ctl, "status", part="1 pending restore")
    assert "an internal driver error occurred (NVML 999)" in said.out
    assert "GPU-" not in said.out
    assert "could not be restored; the first: power_limit of GPU 0" in ctl("doctor").out
    said = ctl("reset", "0")
    assert said.code == Exit.PENDING
    assert "revoked" not in said.out  # its holder has gone
    node.clear_faults()
    assert ctl("reset", "0").code == 0
    assert "pending restore" not in ctl("status").out


def test_leases_are_listed_or_reported_as_none(ctl: Ctl, daemon: RunningDaemon) -> None:
    assert ctl("leases").out == "no leases\n"
    with daemon.client() as client:
        client.acquire(client.node().gpus[3].uuid, ["power_limit"])
        (lease,) = parse(ctl("leases", "--mine", "--json").out)["leases"]
    assert lease["pid"] == os.getpid()
    assert lease["value"] is None
    assert (lease["restore_target"], lease["unit"]) == (250.0, "W")
    assert 0 < lease["expires_in_s"] <= 15


def test_audit_shows_who_changed_what(ctl: Ctl, daemon: RunningDaemon) -> None:
    with daemon.client() as client:
        for watts in (150, 160, 170):
            client.set_power_limit(client.node().gpus[0].uuid, watts * 1000)
    events = parse(ctl("audit", "-n", "3", "--json").out)["events"]
    sets, back, ended = events
    assert (sets["event"], sets["count"], sets["new"]) == ("set", 3, "170 W")
    assert (back["event"], back["old"], back["new"]) == ("restore", "170 W", "250 W")
    assert ended["pid"] == os.getpid()
    said = ctl("audit", "0")
    assert "set x3" in said.out
    assert "WHEN" in said.out.splitlines()[0]
    about = parse(ctl("audit", "-i", "2", "--json").out)["events"]
    assert {event["gpu"] for event in about} == {2}


def test_processes_are_shown_with_users_and_leases(ctl: Ctl, daemon: RunningDaemon) -> None:
    with daemon.client() as client:
        node = client.node()
        client.set_power_limit(node.gpus[1].uuid, 200_000)
        work = SimulatedWork(node.simulated or "", [node.gpus[1].uuid], "model/compute")
        work.launch(1e6)

        def listed() -> list[dict[str, Any]]:
            return list(parse(ctl("processes", "-i", "1", "--json").out)["processes"])

        def busy() -> list[dict[str, str]] | None:
            rows = list(csv.DictReader(io.StringIO(ctl("status", "--format", "csv").out)))
            return rows if rows[1]["utilization_percent"] == "100" else None

        (process,) = wait_for(listed, "the process to be listed")
        rows = wait_for(busy, "its use to be shown")
        shown = ctl("show", "1").out
        said = ctl("status", "-p", "1").out
        work.close()
    assert (process["pid"], process["type"]) == (os.getpid(), "C")
    assert process["leases"] == ["power_limit 200 W"]
    assert process["memory_mib"] > 1000
    assert [row["processes"] for row in rows] == ["0", "1", "0", "0"]
    assert int(rows[1]["memory_used_mib"]) > process["memory_mib"]
    for text in (shown, said):
        assert re.search(rf"1 +{os.getpid()} +\S+ +9\.6 GiB +C ", text)


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        (("gpus", "--columns", "index,memory_mib"), "INDEX  MEMORY_MIB\n    0       16384\n"),
        (("gpus", "-i", "2-3", "--columns", "index", "--format", "csv"), "index\n2\n3\n"),
        (
            ("gpus", "--id", "3", "--columns", "name,site_limit_w", "--format", "csv"),
            "P100-PCIE-16GB,250\n",
        ),
        (("status", "2", "--columns", "index,error", "--format", "csv"), "index,error\n2,\n"),
        (("show", "3", "--columns", "energy_j"), "ENERGY_J\n-\n"),
    ],
)
def test_columns_by_name(ctl: Ctl, arguments: tuple[str, ...], out: str) -> None:
    said = ctl(*arguments)
    assert (said.code, said.err) == (0, "")
    assert out in said.out


def test_rows_as_json_and_what_is_no_column(ctl: Ctl) -> None:
    found = json.loads(ctl("status", "1", "--columns", "index,leases", "--format", "json").out)
    assert (found["schema"], found["rows"]) == ("zeusctl.rows/1", [{"index": 1, "leases": 0}])
    said = ctl("status", "--columns", "index,watts")
    assert said.code == Exit.USAGE
    assert "there is no column 'watts'; there are: index, name, uuid" in said.err


def test_watching_prints_again_until_ctrl_c(daemon: RunningDaemon) -> None:
    arguments = ("status", "0", "--columns", "index,name", "--format", "csv", "--watch", "0.1")
    with spawn(daemon, *arguments) as watcher:
        lines = [watcher.stdout.readline() for _ in range(4)]
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(TIMEOUT_S) == Exit.INTERRUPTED
    assert lines == ["index,name\n", *["0,Tesla V100-PCIE-16GB\n"] * 3]


def test_audit_has_one_heading_however_long_nothing_happens(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = iter([None, None])

    def pause(_: float) -> None:
        if next(pauses, "over") == "over":
            raise KeyboardInterrupt

    nothing = AuditRecords(records=[], dropped=0)
    monkeypatch.setattr(Client, "audit", lambda *_, **__: nothing)
    monkeypatch.setattr(audit, "time", SimpleNamespace(sleep=pause, monotonic_ns=lambda: 0))
    said = ctl("audit", "-f")
    assert said.code == Exit.INTERRUPTED
    assert len(said.out.splitlines()) == 1


def test_audit_follows(daemon: RunningDaemon) -> None:
    with spawn(daemon, "audit", "--follow", "--json", "-n", "1") as follower:
        first = json.loads(follower.stdout.readline())
        with daemon.client() as client:
            client.set_power_limit(client.node().gpus[1].uuid, 155_000)
        second = json.loads(follower.stdout.readline())
        follower.terminate()
    assert first["events"][0]["number"] < second["events"][0]["number"]
    assert "155 W" in [event["new"] for event in second["events"]]


# ------------------------------------------------------------------------------------------- doctor


HEALTHY = {
    "GPUs": "zeusd sees 4 GPUs, simulated",
    "sampling": "4 devices sampled",
    "restores": "no restore is pending",
    "limits": "no GPU is above its site limit",
}


def test_a_healthy_node_has_nothing_to_do(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # The faults of a test before are seen for a while.
    found = parse(shows(ctl, "doctor", "--json", part='"healthy":true').out)
    by_name = {check["name"]: check for check in found["checks"]}
    assert "a program's GPU 0 is GPU 3 here" in by_name["visible"]["found"]
    assert by_name["policy"]["state"] == "ok"
    told = {name: by_name[name]["found"] for name in HEALTHY}
    assert told == HEALTHY
    assert re.fullmatch(r"[\d.]+ [kM]?J charged, 0 GPUs allocated", by_name["ledger"]["found"])
    limits = "power_limit of GPUs 0, 1, 2, 3; gpu_clocks of GPUs 0, 1, 2; "
    others = "persistence_mode of GPUs 0, 1, 2, 3; memory_clocks of GPU 2"
    every = Client.policy
    for admin, said in (
        (True, "you administer this node's GPUs"),
        (False, f"you may change {limits}{others}"),
    ):
        monkeypatch.setattr(
            Client,
            "policy",
            lambda client, admin=admin: every(client).model_copy(update={"admin": admin}),
        )
        assert f"ok     policy     {said}\n" in ctl("doctor").out


@pytest.mark.parametrize("visible", ["7", "0,0", "MIG-1"])
def test_the_doctor_sees_what_programs_would_not(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = ctl("doctor")
    assert said.code == Exit.FAILED
    assert "fault  visible" in said.out
    assert "->" in said.out


def test_the_doctor_sees_another_zeus_over_the_library(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "package" not in ctl("doctor").out
    said = "both are installed: `import zeus` gets zeusd's; keep one: pip uninstall zeus"
    monkeypatch.setattr("zeusctl.checks.overlap", lambda folder: said)
    found = ctl("doctor")
    assert "fault  package" in found.out
    assert "-> keep one: pip uninstall zeus" in found.out


def test_the_doctor_finds_what_keeps_a_client_away(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ctl("--socket", str(tmp_path / "no" / "z.sock"), "doctor")
    assert missing.code == Exit.FAILED
    assert "mount the host's folder" in missing.out
    (tmp_path / "file").touch()
    assert "is not a socket" in ctl("--socket", str(tmp_path / "file"), "doctor").out
    import socket

    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "dead"))
    dead.close()
    assert "-> start zeusd" in ctl("--socket", str(tmp_path / "dead"), "doctor").out


def test_the_doctor_sees_a_device_that_is_not_sampled(ctl: Ctl, node: SimulatedNode) -> None:
    node.inject(1, "sensors", 15)
    said = shows(ctl, "doctor", part="fault  sampling")
    assert "no new samples of GPU 1: the GPU has fallen off the bus (NVML 15), for " in said.out
    assert "ok     sampling   3 devices sampled" in said.out
    assert said.code == Exit.FAILED


# ------------------------------------------------------------------------------- what always counts


def test_without_a_daemon_every_verb_reports_it_in_one_sentence(ctl: Ctl, tmp_path: Path) -> None:
    socket = ("--socket", str(tmp_path / "none.sock"))
    for verb in ("status", "gpus", "leases", "audit", "release", "resume", "quiesce"):
        said = ctl(*socket, verb)
        assert said.code == Exit.UNAVAILABLE, verb
        (sentence,) = said.err.splitlines()
        assert sentence.startswith("zeusctl: ")
        assert "start zeusd" in sentence or "ZEUSD_SOCK_PATH" in sentence, sentence
        assert said.out == ""
    failed = parse(ctl(*socket, "status", "--json").out)
    assert (failed["code"], failed["exit_code"]) == ("unavailable", 3)


REFUSED: dict[Exit, dict[str, str]] = {
    Exit.UNKNOWN: {
        "show 9": "there is no GPU '9' here",
        "probe --simulate 1xv100 --gpus 9": "there is no GPU 9",
        "energy --job 555": "the ledger has no such job",
        "allocate 9 --job 1": "there is no GPU '9'",
        "receipt 0 --since 1m --job 987654": "job 987654 used no GPU in that time",
        "receipt 0 --since 1m --pid 1": "process 1 used no GPU in that time",
        "receipt 0 --job 987654": "the energy ledger has no job 987654",
    },
    Exit.OUT_OF_RANGE: {
        "set 0 -p 1": "outside 100 to 250 W",
        "set 2 -g 3000": "has no graphics clock of 3000 MHz; choose from 210 to 1410 MHz",
        "set 0 -g 900,600": "the minimum is above the maximum",
        "set 0 -p 900": "900 W on GPU 0 is outside 100 to 250 W",
        "set 2 -m 1000": (
            "(NVIDIA A100-SXM4-80GB) has no memory clock of 1000 MHz; choose from 1593 MHz"
        ),
        "set 0 -p 9000 --ceiling fleet": "9000 W is outside 100 to 250 W",
    },
    Exit.USAGE: {
        "set 0": "nothing to set",
        "set 0 -g 1410 MHz": "unit as one word: 1410MHz",
        "set 0 -p 200 python train.py -g 1": (
            "write -- before the command: zeusctl set 0 -p 200 -- python train.py -g 1"
        ),
        "measure train.py --epochs 3": (
            "write -- before the command: zeusctl measure -- train.py --epochs 3"
        ),
        "set 0 -p 200 --": "nothing follows --",
        "set '' -p 200 -- true": "GPUS is empty",
        "measure '' -- true": "GPUS is empty",
        "measure -- ''": "nothing follows --",
        "energy --job \udcff": "a name given is not UTF-8",
        "--socket '' status": "'' names no path",
        "status --socket ''": "'' names no path",
        "release ''": "GPUS is empty",
        "release -i ''": "GPUS is empty",
        "-i 0 status": "write it after a command: zeusctl status -i",
        "status 0 -i 1": "GPUs are named twice, 0 and 1",
        "status -n 1": "there is no -n here; write --watch SECONDS",
        "audit -d 1": "No such option",
        "show 0-1": "show is about one GPU; name one",
        "set 0 -p 200000": "did you mean 200 W",
        "set 0 -p 200 --for 3s": "--for has no effect without",
        "set 0 -p 200 --then 150": "--then has no effect without",
        "set 0 -p 200 --ceiling fleet --persist --together": (
            "--persist, --together have no effect with --ceiling"
        ),
        "reset 0 --ceiling fleet -c gpu_clocks": "--control has no effect with --ceiling",
        "release --all --pid 1": "--pid has no effect with --all",
        "allocate 0 --slurm": "GPUS has no effect with --slurm",
        "plot -o p.png --profile /etc/passwd --last 1h": "--last has no effect with --profile",
        "energy --html x.html --format csv": "--format has no effect with --html",
        "set 0 -p much": "write watts, such as 250",
        "set 0 -p 1_5_0": "write watts, such as 250",
        "set 0 -p \uff11\uff15\uff10": "write watts, such as 250",
        "set 0 -g 1e3": "write MHz: 1200",
        "audit -n 1_0": "1_0 is not a finite number",
        "set 0 -g fast": "write MHz",
        "plot -o x.txt": "name a file that ends in",
        "record -d soon": "write 30s",
        "set 0 -g 999999": "a graphics clock is 0 to 100000 MHz",
        "set 0 -p 0": "a power limit is 1 to 100000 W",
        "stauts": "there is no command 'stauts'; did you mean 'status'?",
        "set": "Missing argument GPUS: name them (0,2 or 0-3), or all",
        "show": "name a GPU: zeusctl show 0",
        "release --job ''": "--job is empty",
        f"set 0 -p 200 --confirm-within {'9' * 16}d": "write 30s",
        "set 0 -p 200 --ceiling fleet --for 31d": "--for is at most 30d",
        "nonsense": "run `zeusctl` to list all commands",
        "status --nonsense": "zeusctl status --help",
        "schema nonsense": "there are: status",
        "energy --since soon": "'soon' is not a time",
        "energy --since 99999999999d": "is not a time",
        "energy --until 9999-12-31T23:59": "is not a time",
        "allocate 0 --job 1 --user \xb2": "there is no user '\xb2'",
        "energy --user 4294967295": "there is no user '4294967295'",
        f"energy --user {'9' * 5000}": "there is no user '999",
        "forget --user \u0661": "there is no user '\u0661'",
        "energy --job ''": "--job is empty",
        "energy --pod ''": "--pod is empty",
        "energy --tz Mars/Olympus": "is not a time zone",
        "energy --since 1h --until 2h": "end must be after the beginning",
        "energy --since 2000-01-01 --daily": "over 400 days",
        "energy --user nobody-at-all": "there is no user",
        "energy --job 1 --pod a/b": "--pod has no effect with --job",
        "allocate 0": "give one of --job, --pod and --slurm",
        "allocate --job 1": "name the GPUs",
        "allocate 0 --job 1 --weight 1000001": "not in the range",
        "allocate 0 --job 1 --weight 2 --parts 1": "more than the GPU's",
        "deallocate --job 1 --pod a/b": "give one of",
        "deallocate --slurm": "SLURM_JOB_ID is not set",
        "set 0 -p 100 --ceiling site": "'site' is not a ceiling; choose fleet, persisted or job:",
        "set 0 -g 300 --ceiling fleet": "a ceiling bounds the power limit",
        "set 0 -p 200 --ceiling fleet --then 150": "--then needs --for",
        "receipt 0 --since 1m --until 2999-01-01": "ends in the future",
        "receipt 0 --since 1m --until 2m": "the end must be after the beginning",
        "receipt 0 --since 1m --job ''": "--job is empty",
        "receipt 0 --since soon": "'soon' is not a time",
        "receipt 0": "give --since",
    },
    Exit.NOT_SUPPORTED: {
        "set 3 -g 900": "",
    },
    Exit.FAILED: {
        f"release --job {'x' * 300}": "at most 64 characters",
        f"release --pid {'9' * 25}": "a number is too large for a request",
        "exercise 0 -o /no/such/p": "/no/such/p: No such",
        "probe --simulate 1xv100 -o /no/such/p": "/no/such/p: No such",
        "record -o /no/such/p.csv -d 1s": "/no/such/p.csv: No such",
        "record -o /dev/full -d 1s": (
            "/dev/full: No space left on device; make room, or write elsewhere"
        ),
        "set 0 -p 200 --ceiling fleet --for 9s --then 210": (
            "--then must not be higher than the ceiling"
        ),
        "receipt --compare /proc/self/mem /dev/null": "/proc/self/mem cannot be read: ",
    },
    Exit.NOT_RUN: {
        "measure -o /no/such/p -- echo x": "/no/such/p: No such",
    },
}
"""By exit code: what the command lines say that cannot be carried out."""


@pytest.mark.parametrize(
    ("code", "line", "sentence"),
    [(code, line, said) for code, lines in REFUSED.items() for line, said in lines.items()],
)
def test_errors_are_one_sentence_with_their_code(
    ctl: Ctl, code: Exit, line: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    said = ctl(*shlex.split(line))
    assert (said.code, said.out) == (code, "")
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1
    assert "Traceback" not in said.err


def test_options_of_all_verbs_stand_on_either_side(ctl: Ctl, daemon: RunningDaemon) -> None:
    assert parse(ctl("--json", "leases").out)["leases"] == []
    assert ctl("--socket", "/no/such.sock", "leases").code == Exit.UNAVAILABLE
    assert ctl("leases", "--socket", "/no/such.sock").code == Exit.UNAVAILABLE
    assert ctl("--socket", "/no/such.sock", "leases", "--socket", daemon.socket).code == 0


def test_alone_it_says_what_it_can_do(ctl: Ctl) -> None:
    said = ctl()
    assert (said.code, said.err) == (0, "")
    assert said.out == ctl("--help").out


@pytest.mark.parametrize("how", ["2>&-", "0<&- 2>&-", "2>/dev/full", "--json >/dev/full"])
def test_what_is_said_to_nobody_changes_no_exit_code(daemon: RunningDaemon, how: str) -> None:
    # What has imported clients has files of its own, and gives them where none are open.
    line = ["sh", "-c", f'"$@" {how}', "sh", sys.executable if "&-" in how else python()]
    line += ["-m", "zeusctl", "--socket", daemon.socket]
    seven = ["--", "sh", "-c", "echo lost >&2; exit 7"]
    assert subprocess.run([*line, "set", "0", "-p", "5"]).returncode == Exit.OUT_OF_RANGE
    verb = ["set", "99", "-p", "200", "--best-effort"]
    assert subprocess.run([*line, *verb, *seven]).returncode == 7
    if how == "2>&-":
        line_of_status = ["sh", "-c", '"$@" >&-', *line[3:], "status"]
        ran = subprocess.run(line_of_status, capture_output=True, text=True)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert subprocess.run([*line, "nonsense"]).returncode == Exit.USAGE
        for verb in (["measure"], ["set", "0", "-p", "200"]):
            assert subprocess.run([*line, *verb, *seven]).returncode == 7


def test_a_full_disk_is_reported_in_one_sentence(daemon: RunningDaemon) -> None:
    """Standard output; files are in the table above."""
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [python(), "-m", "zeusctl", "--json", "leases"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "ZEUSD_SOCK_PATH": daemon.socket},
        )
    assert ran.returncode == Exit.FAILED
    assert ran.stderr == (
        "zeusctl: standard output cannot be written: No space left on device; make room, or write "
        "elsewhere\n"
    )


def test_the_doctor_reads_the_configuration(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "zeusd.toml"
    monkeypatch.setattr("zeusctl.checks.CONFIGURATION", str(path))
    nowhere = ("--socket", str(tmp_path / "none.sock"), "doctor", "--json")

    def found(text: str) -> tuple[str, str]:
        path.write_text(text)
        checks = parse(ctl(*nowhere).out)["checks"]
        (one,) = [check for check in checks if check["name"] == "config"]
        return one["state"], one["found"]

    state, text = found("[lease]\nttl = 3\n")
    assert state == "fault"
    assert "line 2: lease.ttl: zeusd has no such setting" in text
    state, text = found('[[allow]]\ngroups = ["no-such-group"]\n')
    assert state == "note"
    assert "there is no group no-such-group here" in text
    assert found("[lease]\nttl_s = 3\n")[0] == "ok"


def test_the_doctor_repeats_the_last_error_of_a_zeusd_that_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = {"systemctl": "LoadState=loaded\nActiveState=failed", "journalctl": "line 2: no [demon]"}
    for name, text in says.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("zeusctl.checks.SYSTEMD", str(tmp_path))
    (check,) = _systemd(simulated=False)
    assert (check.state, check.found) == (
        "fault",
        f"{UNITS[0]} is failed; it said: line 2: no [demon]",
    )


def test_ctrl_c_ends_with_130(daemon: RunningDaemon) -> None:
    """`record`, `set`, `status --watch` and `top` have tests of their own."""
    # Not in a shell: it may get the signal before it starts the program that it waits for.
    sleeper = (sys.executable, "-c", "import time; print('on', flush=True); time.sleep(100)")
    for arguments in (("audit", "--follow"), ("measure", "--", *sleeper)):
        with spawn(daemon, *arguments) as running:
            assert running.stdout.readline()
            os.killpg(running.pid, signal.SIGINT)  # as a terminal does
            assert running.wait(TIMEOUT_S) == Exit.INTERRUPTED, arguments


def test_a_bug_is_reported_without_a_traceback(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("zeusctl.commands.status.read", fail)
    said = ctl("status", "--json")
    assert said.code == Exit.FAILED
    assert "this is a bug in zeusctl (ZeroDivisionError: oops)" in said.err
    assert parse(said.out)["code"] == "internal"


def test_every_verb_has_help_that_says_enough_and_every_exit_code_a_meaning(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(MEANINGS) == set(Exit)
    overview = ctl("--help").out
    for verb in VERBS:
        said = ctl(verb, "--help")
        assert said.code == 0
        assert f"Usage: zeusctl {verb}" in said.out
        summary = next(line for line in overview.splitlines() if line.startswith(f"  {verb} "))
        assert not summary.endswith("..."), f"{summary!r} is cut short on a terminal of 80 columns"
        assert summary.split(None, 1)[1] in " ".join(said.out.split())
    viewer = tmp_path / "man"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for source, part in (('cat "$2"', ".SH SYNOPSIS"), ("exit 3", "Usage: zeusctl set")):
        viewer.write_text(f"#!/bin/sh\n{source}\n")
        viewer.chmod(0o755)
        assert part in ctl("man", "set").out


def test_help_and_completion_import_nothing_heavy(daemon: RunningDaemon) -> None:
    source = (
        "import sys; from zeusctl.cli import main\n"
        "try: main(['status', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'zmq', 'pydantic', 'rich', 'matplotlib', 'pyarrow', 'torch', 'zeus'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert ran.stderr.strip() == "[]"


def test_a_reader_that_has_enough_is_no_error(daemon: RunningDaemon) -> None:
    with spawn(daemon, "record", "-d", "2s") as recorder:
        assert recorder.stdout.readline().startswith("time,gpu")
        recorder.stdout.close()
        assert recorder.wait(TIMEOUT_S) == 0
        assert recorder.stderr.read() == ""


@pytest.mark.needs("two users")  # the user that zeusd runs as is an administrator
def test_an_ordinary_user_reads_and_learns_what_is_denied(tmp_path: Path) -> None:
    rule = '[[allow]]\nusers = ["root"]\n'
    with running_daemon(
        "--simulate", "1xv100-pcie", "--socket-mode", "0666", *configuration(tmp_path, rule)
    ) as node:
        with node.client() as client:
            uuid = client.node().gpus[0].uuid
            client.set_power_limit(uuid, 150_000)
            blocked, held = as_nobody_says(node, ("reset", "all"), ("leases", "--json"))
            assert blocked.code == Exit.DENIED
            assert "is held by user root" in blocked.err
            assert client.state(uuid)[uuid].power_limit_mw == 150_000
            assert [lease["pid"] for lease in json.loads(held.out)["leases"]] == [None]
            (other,) = as_nobody_says(node, ("release", "--pid", str(os.getpid())))
            assert other.code == Exit.DENIED
            assert f"nothing released: process {os.getpid()} belongs to root" in other.err
            client.persist(uuid, ["power_limit"])
            clocks = ("reset", "0", "-c", "gpu_clocks")
            persistent, other_control = as_nobody_says(node, ("reset", "0"), clocks)
            assert (other_control.code, persistent.out) == (0, "")
            assert persistent.code == Exit.DENIED
            assert persistent.err == (
                "zeusctl: GPU 0: power_limit is persistent; only administrators may reset others' "
                f"settings: sudo zeusctl --socket {node.socket} reset 0\n"
            )
            client.restore()
            SimulatedNode(client.node().simulated or "").set_outside(0, 120_000)
            (outside,) = as_nobody_says(node, ("reset", "0"))
            assert "its power limit of 120 W was set by someone else" in outside.err
            client.restore()
        set_ = ("set", "0", "-p", "150")
        status, *refused, with_command, show, nothing, own, of_job, doctor = as_nobody_says(
            node,
            ("status",),
            *(set_, ("quiesce",), ("release", "--all")),
            (*set_, "--", "true"),
            ("show", "0", "--json"),
            *(("reset", "all"), ("release",), ("release", "--job", "7")),
            ("doctor",),
        )
    assert status.code == 0
    for one in refused:
        assert one.code == Exit.DENIED, one.err
        assert "administrator" in one.err
    assert refused[1].err.endswith(f"GPUs: sudo zeusctl --socket {node.socket} quiesce\n")
    assert "user nobody may not change power_limit of GPU 0; ask the" in with_command.err
    may = json.loads(show.out)["you_may"]
    assert may
    assert all("user nobody may not change" in one["why"] for one in may)
    assert nothing.out == "nothing to reset: your processes hold no lease there\n"
    assert (own.code, of_job.code) == (0, 0)
    assert "read-only for you" in doctor.out


def test_a_superchip_is_shown_once_and_its_gpus_are_part_of_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_daemon("--simulate", "4xgb200,v100", gpus=5) as daemon:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
        with daemon.client() as client:
            wait_for(lambda: len(client.metrics().sources) == 7, "all sources")
            families = {one.name: one for one in ZeusdCollector(client).collect()}
        said = {}
        for arguments in (["status"], ["--json", "status"], ["status", "4"]):
            with pytest.raises(SystemExit) as ended:
                main(arguments)
            assert ended.value.code == 0
            said[arguments[-1]] = capfd.readouterr().out
    report = json.loads(said["status"].splitlines()[-1])
    assert "MODULE" not in said["4"]
    modules = report["modules"]
    assert [(one["module"], one["gpus"]) for one in modules] == [(0, [0, 1]), (1, [2, 3])]
    powers = [gpu["power_w"] for gpu in report["gpus"]]
    assert powers[:4] == pytest.approx([166] * 4, abs=3)
    assert [one["power_w"] for one in modules] == pytest.approx([464] * 2, abs=6)
    assert [one["gpu_power_w"] for one in modules] == pytest.approx([332] * 2, abs=6)
    assert [gpu["module"] for gpu in report["gpus"]] == [0, 0, 1, 1, None]
    assert report["gpus"][0]["memory_power_w"] == pytest.approx(31.5, abs=2)
    scopes = families["zeusd_gpu_energy_scope"].samples
    assert [one.labels["gpu"] for one in scopes] == ["0", "1", "2", "3", "4"]
