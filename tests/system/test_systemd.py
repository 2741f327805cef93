"""zeusd under a systemd that booted, installed by `scripts/install`, as its users meet it there."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests import preloaded
from tests.fake_amdsmi.double import AmdSmiDouble
from tests.fake_nvml.double import NvmlDouble
from tests.support import NOBODY, TIMEOUT_S, free_port, wait_for
from tests.system.machine import LIBRARY, SOURCES, STATE, TREE, Machine
from tests.zeus_fleet.etcd import running_etcd

pytestmark = [pytest.mark.needs("systemd"), pytest.mark.timeout(300)]

PYTHON = "/opt/zeusd/bin/python"
LIMIT = 250_000

CLIENT = """
import json, sys
from zeus_ipc import Client, errors
client = Client(timeout_s=30)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        if name == "release":
            result = client.release()
            client.close()
            client = Client(timeout_s=30)
        elif name == "wait_at_most":
            client, result = Client(timeout_s=arguments[0]), 0
        elif name == "follow":
            with client.stream(*arguments) as stream:
                result = sum(next(stream).power_mw > 0 for _ in range(20))
        elif name == "energy_mj":
            gpu, begin_ns, end_ns = arguments
            found = client.windows(gpu, [(begin_ns, end_ns, False)])
            result = found[gpu].energy_uj[0] // 1000
        else:
            result = getattr(client, name)(*arguments)
        answer = ["ok", result if isinstance(result, int) else str(result)]
    except errors.ZeusIpcError as error:
        answer = [error.code, error.message]
    print(json.dumps(answer), flush=True)
"""

TRAINING = """
import json, sys, time
from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import Done, Energy, GlobalPowerLimitOptimizer

monitor = ZeusMonitor(gpu_indices=[0], cpu_indices=[])
search = {"profile_steps": 80, "pl_step": 50, "search": "exhaustive"}
with GlobalPowerLimitOptimizer(monitor, Energy(), **search) as plo:
    shown, since = None, 0
    for step in plo.steps(range(1_000_000)):
        time.sleep(0.012)
        state = plo.state
        name, done = type(state).__name__, isinstance(state, Done)
        limit = state.optimal_power_limit if done else getattr(state, "current_power_limit", 0)
        if (name, limit) != shown:
            shown, since = (name, limit), step
        elif done and step == since + 100:
            name = "Checked"
        else:
            continue
        told = [[one.power_limit, one.energy] for one in plo.measurements]
        said = [time.monotonic(), name, limit, done and state.chosen, told]
        print(json.dumps(said), flush=True)
        if not sys.stdin.readline():
            break
"""
"""Trains in steps of 12 ms, and tries all limits: another search may have seen enough after the
first. Prints each change of its optimizer's state: when, its name, its limit,
whether it is a choice, and what it has measured (W and J); and when the choice is old enough to
have been checked, after 60 steps. Trains on when it may: a line on standard input."""


class Node:
    """The machine, its GPUs, and its users."""

    def __init__(self, machine: Machine, double: NvmlDouble, gpus: int = 2) -> None:
        self.machine = machine
        self.double = double
        self.gpus = gpus
        self.zeus_gid = machine.run("getent", "group", "zeus").stdout.split(":")[2]

    def user(self, *groups: str) -> User:
        return User(self, groups or (self.zeus_gid,))

    def wait_serving(self) -> None:
        count = self.gpus
        wait_for(
            lambda: f"{count} GPUs" in self.machine.show("zeusd", "StatusText"), "zeusd to serve"
        )

    def limits(self) -> list[int]:
        return [self.double.limit_mw(gpu) for gpu in range(self.gpus)]

    def main_pid(self) -> int:
        return int(self.machine.show("zeusd", "MainPID"))

    def records(self, **fields: str) -> list[dict[str, Any]]:
        """Journal records of zeusd with these fields."""
        self.machine.run("journalctl", "--sync")
        matches = [f"{name}={value}" for name, value in fields.items()]
        out = self.machine.run("journalctl", "-o", "json", "-u", "zeusd.service", *matches).stdout
        return [json.loads(line) for line in out.splitlines()]

    def configure(self, text: str) -> None:
        path = Path(f"{self.machine.root}/etc/zeusd/zeusd.toml")
        path.write_text(f'[nvml]\nlibrary = "{LIBRARY}"\n{text}')


class User:
    """A process of an ordinary user inside, which sends zeusd what it is told to."""

    def __init__(self, node: Node, groups: tuple[str, ...]) -> None:
        self.node = node
        self._process = node.machine.popen(
            PYTHON, "-c", CLIENT, user=str(NOBODY), groups=[group for group in groups if group]
        )

    def __call__(self, name: str, *arguments: Any) -> tuple[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the client died"
        code, result = json.loads(line)
        return code, result

    def set(self, gpu: int, watts: int) -> str:
        code, message = self("set_power_limit", self.node.double.uuid(gpu), watts * 1000)
        assert code == "ok" or message
        return code

    def kill(self) -> None:
        # nsenter has forked the client into its pid namespace, and waits for it.
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    yield from boot_node()


def boot_node(gpus: int = 2, watchdog_s: int | None = 2, update: bool = False) -> Iterator[Node]:
    """Boots a machine with zeusd installed on the C library; ends it afterwards.

    Args:
        gpus: How many it has.
        watchdog_s: Instead of the shipped WatchdogSec=; None: as shipped.
        update: Whether the environment that a machine's installation made before will do: pip has
            nothing to install in it.
    """
    shared = os.environ.get(preloaded.SHARED)  # benchmarks boot a machine, too
    made = None if shared is None or TREE != "/" else Path(shared, "installed")
    machine = Machine()
    try:
        machine.start()
        root = machine.root
        double = machine.add_gpus(gpus)
        if watchdog_s is not None:
            (root / "etc/systemd/system/zeusd.service.d/quick.conf").write_text(
                f"[Service]\nWatchdogSec={watchdog_s}\n"
            )
        (root / "etc/zeusd").mkdir()
        (root / "etc/zeusd/zeusd.toml").write_text(f'[nvml]\nlibrary = "{LIBRARY}"\n')
        if update and made is not None and made.exists():
            shutil.copytree(made, root / "opt/zeusd", symlinks=True)
            (root / "opt/zeusd/bin/pip").write_text("#!/bin/sh\n")
        machine.run("bash", f"{SOURCES}/scripts/install")
        node = Node(machine, double, gpus)
        node.wait_serving()
        if made is not None and not update:
            part = made.with_name("installed.part")
            shutil.copytree(root / "opt/zeusd", part, symlinks=True)
            part.rename(made)
        yield node
    finally:
        machine.stop()


@pytest.fixture(scope="module")
def member(node: Node) -> Iterator[User]:
    user = node.user()
    yield user
    user.kill()


@pytest.fixture
def user(node: Node, member: User) -> Iterator[User]:
    """A member of the group zeus; all its changes are restored afterwards."""
    node.machine.systemctl("start", "zeusd")
    node.wait_serving()
    yield member
    assert member("release")[0] == "ok"
    wait_for(lambda: node.limits() == [LIMIT, LIMIT], "the limits to be back")


# ------------------------------------------------------------------------------------ installation


def test_the_units_are_what_systemd_takes_and_hardly_exposed(node: Node) -> None:
    assert_hardly_exposed(node, ["zeusd", "zeusd-restore", "zeusd-exporter"])
    for unit in ("zeusd.service", "zeusd.socket", "zeusd-stream.socket"):
        assert node.machine.systemctl("is-enabled", unit) == "enabled"


def assert_hardly_exposed(node: Node, units: list[str]) -> None:
    """systemd takes these units without a word, and their sandboxes leave little."""
    verified = node.machine.run(
        "systemd-analyze", "verify", *(f"/etc/systemd/system/{unit}.service" for unit in units)
    )
    complaints = [line for line in verified.stderr.splitlines() if "zeus" in line]
    assert complaints == []
    for unit in units:
        last = node.machine.run("systemd-analyze", "security", f"{unit}.service").stdout
        score = float(last.strip().splitlines()[-1].split(": ")[1].split()[0])
        assert score <= 1.5, f"{unit} is exposed by {score}"


def test_zeusd_is_one_process_with_one_capability_and_without_libzmq(node: Node) -> None:
    pid = node.main_pid()
    status = dict(
        line.split(":", 1)
        for line in node.machine.run("cat", f"/proc/{pid}/status").stdout.splitlines()
    )
    assert int(status["CapBnd"], 16) == 1 << 21, "CAP_SYS_ADMIN and nothing else"
    assert status["NoNewPrivs"].strip() == "1"
    assert node.machine.run("cat", f"/proc/{pid}/task/{pid}/children").stdout == ""
    assert "libzmq" not in node.machine.run("cat", f"/proc/{pid}/maps").stdout


def test_everyone_can_run_zeusctl(node: Node) -> None:
    said = node.machine.run("zeusctl", "doctor", "--json", user=str(NOBODY))
    checks = {check["name"]: check for check in json.loads(said.stdout)["checks"]}
    assert checks["systemd"]["found"] == "zeusd's units are active"
    assert checks["policy"]["found"] == "read-only for you"
    assert checks["sampling"]["state"] == "ok"
    member = node.machine.run("zeusctl", "doctor", user=str(NOBODY), groups=[node.zeus_gid])
    assert "you may change power_limit of GPUs 0, 1" in member.stdout
    share = Path(f"{node.machine.root}/usr/local/share")
    assert (share / "man/man1/zeusctl.1").exists()
    assert (share / "man/man1/zeusctl-set.1").exists()
    for path in ("bash-completion/completions/zeusctl", "zsh/site-functions/_zeusctl"):
        assert "_ZEUSCTL_COMPLETE" in (share / path).read_text()
    node.machine.run("zeusctl", "set", "all", "-p", "200", "--persist")
    assert node.limits() == [200_000, 200_000]
    node.machine.systemctl("restart", "zeusd")
    node.wait_serving()
    assert node.limits() == [200_000, 200_000]
    node.machine.run("zeusctl", "reset", "all")
    assert node.limits() == [LIMIT, LIMIT]
    assert "persisted" in node.machine.run("zeusctl", "audit").stdout


def test_the_exporter_is_an_ordinary_client_of_nobodys(node: Node) -> None:
    port = free_port()
    assert node.machine.systemctl("is-enabled", "zeusd-exporter", check=False) == "disabled"
    environment = Path(f"{node.machine.root}/etc/zeusd/exporter.env")
    environment.write_text(f"ZEUSD_EXPORTER_LISTEN=127.0.0.1:{port}\n")
    for program in ("zeusd", "zeusctl", "zeusd-exporter", "zeusd-kubernetes", "zeus-fleet"):
        assert os.access(f"{node.machine.root}/usr/local/share/man/man1/{program}.1", os.R_OK)
    assert "zeusd_up 1.0" in node.machine.run("zeusd-exporter", "--once").stdout
    node.machine.systemctl("start", "zeusd-exporter")

    def scrape() -> str:
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{port}/metrics"
            return str(urllib.request.urlopen(url, timeout=TIMEOUT_S).read().decode())
        return ""

    text = wait_for(scrape, "the exporter to serve")
    assert "zeusd_up 1.0" in text
    assert text.count("zeusd_gpu_power_watts{") == 2
    pid = node.machine.show("zeusd-exporter", "MainPID")
    status = dict(
        line.split(":", 1)
        for line in node.machine.run("cat", f"/proc/{pid}/status").stdout.splitlines()
    )
    assert int(status["Uid"].split()[0]) >= 61184, "a user of its own, made for it alone"
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    node.machine.systemctl("stop", "zeusd-exporter")
    environment.unlink()


def test_installing_again_with_the_fleet_keeps_the_configuration_and_leases(
    node: Node, user: User
) -> None:
    assert user.set(0, 180) == "ok"
    before = Path(f"{node.machine.root}/etc/zeusd/zeusd.toml").read_text()
    node.machine.run("bash", f"{SOURCES}/scripts/install", "--fleet")
    assert Path(f"{node.machine.root}/etc/zeusd/zeusd.toml").read_text() == before
    node.wait_serving()
    assert node.limits() == [180_000, LIMIT]
    assert user.set(0, 170) == "ok"


@pytest.mark.needs("etcd")
def test_a_power_budget_is_kept_by_the_units_of_the_fleet(node: Node) -> None:
    machine = node.machine
    units = [f"zeus-fleet-{name}" for name in ("node", "allocate", "serve")]
    assert_hardly_exposed(node, units)
    assert {machine.systemctl("is-enabled", unit, check=False) for unit in units} == {"disabled"}
    kept = Path(f"{machine.root}/var/lib/zeus-fleet/records")
    with running_etcd() as etcd:
        variables = f"ETCD={etcd} NAME=n01 POLICY=uniform LISTEN=127.0.0.1:0"
        variables += " RECORD=/var/lib/zeus-fleet/records"
        Path(f"{machine.root}/etc/zeusd/fleet.env").write_text(
            "".join(f"ZEUS_FLEET_{one}\n" for one in variables.split())
        )
        Path(f"{machine.root}/etc/zeusd/budget.toml").write_text(
            "limit_w = 400\n[nodes]\nn01 = 200"
        )
        machine.run("zeus-fleet", "budget", "--file", "/etc/zeusd/budget.toml", "--etcd", etcd)
        machine.systemctl("start", "zeus-fleet-node")
        assert node.limits() == [100_000, 100_000], "what is ordered after it finds the minimum"
        machine.systemctl("start", *units)
        wait_for(lambda: node.limits() == [200_000, 200_000], "the grant", 60.0)
        for unit in units:
            status = machine.run("cat", f"/proc/{machine.show(unit, 'MainPID')}/status").stdout
            fields = dict(line.split(":", 1) for line in status.splitlines())
            assert fields["Uid"].split()[0] != "0"
            assert {int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")} == {0}
        machine.run("zeus-fleet", "budget", "300", "--etcd", etcd)
        wait_for(lambda: node.limits() == [150_000, 150_000], "the cut", 60.0)
        machine.systemctl("restart", "zeusd")
        assert node.limits() == [150_000, 150_000]
        machine.systemctl("stop", "zeusd")
        assert node.limits() == [100_000, 100_000], "nobody would lower them later"
        machine.systemctl("start", "zeusd")
        wait_for(lambda: node.limits() == [150_000, 150_000], "the agent to go on", 60.0)
        wait_for(lambda: kept.exists() and '"limit_w":300' in kept.read_text(), "the record", 60.0)
        machine.systemctl("stop", *units)
    machine.run("zeusctl", "reset", "all", "--ceiling", "fleet")
    wait_for(lambda: node.limits() == [LIMIT, LIMIT], "the limits to be back")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prefix", "/home/zeusd"], "the units cannot see /home/zeusd"),
        (["--prefix", "/opt/my zeusd"], "units cannot name /opt/my zeusd"),
        (["--prefix", "/opt/../home/zeusd"], "must not have .. in it"),
        (["--prefix", "relative"], "must be an absolute path"),
        (["--prefix", "/etc"], "is no virtual environment"),
        (["--unknown"], "scripts/install"),
    ],
)
def test_the_installer_refuses_what_would_not_work(
    node: Node, arguments: list[str], words: str
) -> None:
    done = node.machine.run("bash", f"{SOURCES}/scripts/install", *arguments, check=False)
    assert done.returncode != 0
    assert words in done.stderr
    user = node.machine.run("bash", f"{SOURCES}/scripts/install", user=str(NOBODY), check=False)
    assert "run it as root" in user.stderr


# --------------------------------------------------------------------------------- who may do what


def test_members_may_lower_and_everyone_may_read(node: Node, user: User) -> None:
    stranger = node.user("")
    assert user.set(0, 200) == "ok"
    assert node.limits() == [200_000, LIMIT]
    assert stranger.set(1, 200) == "permission_denied"
    code, text = stranger("state", node.double.uuid(0))
    assert code == "ok"
    assert "power_limit_mw=200000" in text
    assert stranger("leases")[0] == "ok"
    stranger.close()


def test_every_change_is_one_journal_record_with_its_fields(node: Node, user: User) -> None:
    calls = len(node.double.calls())
    uuid = node.double.uuid(1)
    for watts in (200, 190, 180):
        assert user.set(1, watts) == "ok"
    assert user("release")[0] == "ok"
    # zeusd has answered before another thread of it hands the records to the journal.
    changes = [("250 W", "200 W"), ("200 W", "190 W"), ("190 W", "180 W")]

    def of_the_last() -> list[dict[str, Any]]:
        """Records of an earlier test may come late, too."""
        sets = node.records(EVENT="set", GPU_UUID=uuid)
        sets = [one for one in sets if one["LEASE"] == sets[-1]["LEASE"]]
        return sets if [(one["OLD"], one["NEW"]) for one in sets] == changes else []

    sets = wait_for(of_the_last, "the records of the sets")
    lease = sets[0]["LEASE"]
    wait_for(lambda: node.records(EVENT="restore", LEASE=lease), "the record of the restore")
    (restore,) = node.records(EVENT="restore", LEASE=lease)
    assert (restore["OLD"], restore["NEW"], restore["REASON"]) == ("180 W", "250 W", "released")
    for record in (*sets, restore):
        assert record["GPU_UUID"] == uuid
        assert record["CONTROL"] == "power_limit"
        assert record["CLIENT_UID"] == str(NOBODY)
        assert (record["CLIENT_USER"], record["GPU_INDEX"]) == ("nobody", "1")
        assert int(record["CLIENT_PID"]) > 1
        assert record["LEASE"] == sets[0]["LEASE"]
        assert record["RESULT"] == "ok"
        assert record["_SYSTEMD_UNIT"] == "zeusd.service"
    written = [call.arguments[0] for call in node.double.calls()[calls:]]
    assert written == [200_000, 190_000, 180_000, 250_000], "one record for every write"


# -------------------------------------------------------------------------------- start, stop, die


def test_a_restart_keeps_leases(node: Node, user: User) -> None:
    assert user.set(0, 200) == "ok"
    calls = len(node.double.calls())
    pid = node.main_pid()
    node.machine.systemctl("restart", "zeusd")
    assert node.main_pid() != pid
    assert user("heartbeat") == ("ok", 1)
    assert node.limits() == [200_000, LIMIT]
    assert len(node.double.calls()) == calls, "nothing was written"
    assert user.set(0, 190) == "ok"


def answered(lines: IO[str], answers: IO[str]) -> Iterator[Any]:
    """What a program says, which goes on when that has been processed."""
    for line in lines:
        yield json.loads(line)
        answers.write("\n")
        answers.flush()


def until(name: str, lines: Iterator[Any]) -> Iterator[Any]:
    """The lines up to the first with a state."""
    for line in lines:
        yield line
        if line[1] == name:
            return


def test_a_search_continues_after_a_restart(node: Node, user: User) -> None:
    with node.machine.popen(
        PYTHON, "-c", TRAINING, user=str(NOBODY), groups=[node.zeus_gid]
    ) as training:
        assert training.stdin is not None
        assert training.stdout is not None
        lines = answered(training.stdout, training.stdin)
        next(one for one in lines if one[1] == "Profiling" and one[2] < LIMIT)
        pid = node.main_pid()
        node.machine.systemctl("restart", "--no-block", "zeusd")
        wait_for(lambda: node.main_pid() != pid, "zeusd to end")  # and the search is held
        said = [*until("Checked", lines)]
        searched = itertools.takewhile(lambda one: one[1] != "Done", said)
        back_s = int(node.machine.show("zeusd", "ExecMainStartTimestampMonotonic")) / 1e6
        tried = {one[2] for one in searched if one[0] > back_s}
        assert tried, "the search was under way"
        assert {150_000, 100_000} <= tried, "and went on to the last limit"
        *_, (_, _, limit, chosen, told) = (one for one in said if one[1] == "Done")
        energies_j = {round(1000 * watts): joules for watts, joules in told}
        assert chosen
        assert said[-1][2] == limit, "it has been checked"
        assert energies_j[limit] <= energies_j[LIMIT], "by its own figures, which takes more energy"
        wait_for(lambda: node.limits() == [limit, LIMIT], "the choice to be in force")
        training.stdin.close()
        assert training.wait() == 0
    assert node.limits() == [LIMIT, LIMIT]


def test_a_stop_restores_and_stays_one(node: Node, user: User) -> None:
    assert user.set(0, 200) == "ok"
    node.machine.systemctl("stop", "zeusd")
    assert node.limits() == [LIMIT, LIMIT]
    assert user("wait_at_most", 2) == ("ok", 0)
    code, message = user("node")
    assert code == "unavailable"
    assert "start zeusd" in message
    node.machine.systemctl("start", "zeusd-exporter")
    node.machine.systemctl("stop", "zeusd-exporter")
    for unit in ("zeusd.service", "zeusd.socket", "zeusd-stream.socket"):
        state = node.machine.show(unit, "ActiveState")
        assert state == "inactive", f"clients must not start zeusd, and {unit} is {state}"
    node.machine.systemctl("start", "zeusd")
    node.wait_serving()
    assert user.set(0, 200) == "lease_expired"
    assert user("acquire", node.double.uuid(0), ["power_limit"])[0] == "ok"
    assert user.set(0, 200) == "ok"


def test_a_killed_zeusd_restarts_with_the_leases_of_running_processes(
    node: Node, user: User
) -> None:
    dying = node.user()
    assert user.set(0, 200) == "ok"
    assert dying.set(1, 150) == "ok"
    before = node.machine.show("zeusd", "NRestarts")
    node.machine.systemctl("kill", "--signal=KILL", "--kill-whom=main", "zeusd")
    dying.kill()
    wait_for(lambda: node.limits() == [200_000, LIMIT], "what the dead held to be back")
    wait_for(lambda: node.machine.show("zeusd", "NRestarts") != before, "the restart")
    assert user.set(0, 190) == "ok"
    assert user("heartbeat") == ("ok", 1)


def test_a_zeusd_that_hangs_is_replaced(node: Node, user: User) -> None:
    assert user.set(0, 200) == "ok"
    pid = node.main_pid()
    node.machine.systemctl("kill", "--signal=STOP", "--kill-whom=main", "zeusd")
    wait_for(lambda: node.main_pid() not in (0, pid), "the watchdog", timeout_s=60)
    node.wait_serving()
    assert user("heartbeat") == ("ok", 1)
    assert node.limits() == [200_000, LIMIT]
    assert user.set(0, 190) == "ok"


def test_anyone_may_measure_and_follow_and_a_restart_loses_no_energy(
    node: Node, user: User
) -> None:
    gpu = node.double.uuid(0)
    assert user("follow", gpu) == ("ok", 20)
    begin_ns = time.monotonic_ns()
    node.machine.systemctl("restart", "zeusd")
    node.wait_serving()
    assert user("follow", gpu) == ("ok", 20)
    end_ns = time.monotonic_ns()
    code, energy_mj = user("energy_mj", gpu, begin_ns, end_ns)
    assert code == "ok"
    # 220 W, of which 5 % are allowed for the ticks at both ends.
    assert abs(energy_mj - 220_000 * (end_ns - begin_ns) / 1e9) < 0.05 * energy_mj


def test_fourteen_crashes_in_a_minute_are_survived(node: Node, user: User) -> None:
    node.machine.systemctl("reset-failed", "zeusd")  # starts of other tests do not count
    assert user.set(0, 200) == "ok"
    for number in range(14):
        pid = wait_for(node.main_pid, "a zeusd to be there")
        node.machine.run("kill", "-9", str(pid), check=False)
        wait_for(lambda gone=pid: node.main_pid() not in (0, gone), "another one")
        assert user.set(0, 190 - number) == "ok"
    assert user("heartbeat") == ("ok", 1)
    for unit in ("zeusd.service", "zeusd.socket", "zeusd-stream.socket"):
        assert node.machine.show(unit, "ActiveState") == "active"


def test_a_broken_installation_still_restores(node: Node, user: User) -> None:
    assert user.set(0, 200) == "ok"
    fleet = ("--ceiling", "fleet", "--for", "600s", "--then", "130")
    node.machine.run("zeusctl", "set", "1", "-p", "220", *fleet)
    assert node.limits() == [200_000, 220_000]
    lowered = [LIMIT, 130_000]  # nobody is there to lower GPU 1 in ten minutes
    site = next(Path(f"{node.machine.root}/opt/zeusd/lib").glob("python3*/site-packages/zeusd"))
    broken = site.with_name("zeusd-broken")
    site.rename(broken)
    few = node.machine.root / "etc/systemd/system/zeusd.service.d/few.conf"
    few.write_text("[Unit]\nStartLimitBurst=3\n")
    node.machine.systemctl("daemon-reload")
    try:
        node.machine.systemctl("kill", "--signal=KILL", "--kill-whom=main", "zeusd")
        wait_for(lambda: node.limits() == lowered, "the helper to restore", timeout_s=60)
        assert node.machine.show("zeusd", "ActiveState") == "failed"
        again = node.machine.run(
            *("env", f"NVML_DOUBLE_STATE={STATE}/nvml-state"),
            *(f"NVML_DOUBLE_RECORD={STATE}/nvml-record", "/usr/bin/python3", "-I", "-S"),
            *("/opt/zeusd/libexec/zeusd-restore.py", "--all"),
        )
        assert "no pending restores" in again.stderr
    finally:
        broken.rename(site)
        few.unlink()
        node.machine.systemctl("daemon-reload")
        node.machine.systemctl("reset-failed", "zeusd")
    node.machine.systemctl("start", "zeusd")
    node.wait_serving()
    assert node.limits() == lowered
    assert user.set(0, 200) == "lease_expired", "who lived through it is told"
    node.machine.run("zeusctl", "reset", "1", "--ceiling", "fleet")


# ------------------------------------------------------------------------------------------ reload


def test_a_reload_takes_a_good_file_and_a_bad_one_changes_nothing(node: Node, user: User) -> None:
    pid = node.main_pid()
    assert user.set(0, 200) == "ok"
    try:
        node.configure("[[gpu]]\npower_limit_w = 210\n")
        node.machine.systemctl("reload", "zeusd")
        wait_for(lambda: user.set(0, 220) == "out_of_range", "the new maximum to count")
        node.configure("[[gpu]]\n\npower_limit_w = 'much'\n")
        failed = node.machine.run("systemctl", "reload", "zeusd", check=False)
        assert failed.returncode != 0
        last = ("journalctl", "-u", "zeusd", "-n", "20", "-o", "cat")
        complaint = "zeusd.toml: line 5: [[gpu]] 1: power_limit_w"
        wait_for(lambda: complaint in node.machine.run(*last).stdout, "the complaint in the log")
        assert user.set(0, 220) == "out_of_range"
        # A file that breaks between check and signal is refused by zeusd itself, with its line.
        node.machine.run("kill", "-HUP", str(node.main_pid()))
        wait_for(lambda: node.records(EVENT="reload_failed"), "the refusal")
        assert user.set(0, 220) == "out_of_range"
        assert user.set(0, 205) == "ok"
    finally:
        node.configure("")
        node.machine.systemctl("reload", "zeusd")
    wait_for(lambda: user.set(0, 220) == "ok", "the old maximum to count again")
    assert node.main_pid() == pid


# --------------------------------------------------------------------------------------- hardening

PROBE = """
import ctypes, errno, json, os, socket, sys
def attempt(action):
    try:
        action()
        return "allowed"
    except OSError as error:
        return errno.errorcode[error.errno]
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
results = {
    "read /etc/shadow": attempt(lambda: open("/etc/shadow").read()),
    "write /etc": attempt(lambda: open("/etc/zeusd-was-here", "w")),
    "write /usr": attempt(lambda: open("/usr/zeusd-was-here", "w")),
    "see /home": attempt(lambda: os.listdir("/home/someone")),
    "AF_INET": attempt(lambda: socket.socket(socket.AF_INET)),
    "AF_NETLINK": attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
    "unshare": attempt(lambda: call(272, 0x10000000)),
    "setuid": attempt(lambda: os.setuid(65534)),
    "chown": attempt(lambda: os.chown("/run/zeusd", 65534, 65534)),
    "ptrace": attempt(lambda: call(101, 16, 1, 0, 0)),
    "mount": attempt(lambda: call(165, b"none", b"/tmp", b"tmpfs", 0, 0)),
    "init_module": attempt(lambda: call(175, 0, 0, b"")),
    "own state": attempt(lambda: open("/run/zeusd/probe", "w")),
}
print(json.dumps(results))
"""


@pytest.mark.parametrize("unit", ["zeusd", "zeusd-restore"])
def test_the_sandbox_of_each_unit_denies_access(node: Node, unit: str) -> None:
    root = node.machine.root
    (root / "home/someone").mkdir(exist_ok=True)
    text = (root / f"etc/systemd/system/{unit}.service").read_text()
    kept = [
        line
        for line in text.splitlines()
        if not line.startswith(("Exec", "Type=", "Restart", "Requires=", "Wants=", "Also="))
        and not line.startswith(("Sockets=", "WatchdogSec=", "OnFailure=", "Propagates"))
    ]
    kept.insert(
        kept.index("[Service]") + 1,
        f"Type=oneshot\nExecStart={PYTHON} /opt/zeusd/libexec/probe.py\n"
        "StandardOutput=file:/run/probe",
    )
    (root / "etc/systemd/system/probe.service").write_text("\n".join(kept))
    (root / "opt/zeusd/libexec/probe.py").write_text(PROBE)
    node.machine.systemctl("daemon-reload")
    node.machine.systemctl("start", "probe.service")
    results = json.loads(node.machine.run("cat", "/run/probe").stdout)
    node.machine.run("rm", "-f", "/run/probe")
    allowed = {name for name, outcome in results.items() if outcome == "allowed"}
    # Root may read its own files; it may write where its state is, and nowhere else.
    assert allowed <= {"own state", "read /etc/shadow"}
    assert "own state" in allowed


def test_the_probe_reads_the_same_inside_the_sandbox(node: Node) -> None:
    """It reports what a unit denies: here, the vendor's library."""
    said = _probe_in_unit(node)
    assert said.get("differs") == [], said["said"]
    assert {f"GPU {gpu} power_limit_mw" for gpu in range(2)} <= set(said["same"])
    drop_in = node.machine.root / "etc/systemd/system/zeusd.service.d/narrow.conf"
    drop_in.write_text(f"[Service]\nInaccessiblePaths={LIBRARY}\n")
    try:
        node.machine.systemctl("daemon-reload")
        assert "inside the sandbox" in _probe_in_unit(node)["said"]
    finally:
        drop_in.unlink()
        node.machine.systemctl("daemon-reload")


def _probe_in_unit(node: Node) -> dict[str, Any]:
    short = ("--seconds", "1", "--alone", "0.2", "--calls", "3", "--no-load")
    variables = [f"NVML_DOUBLE_{one.upper()}={STATE}/nvml-{one}" for one in ("state", "record")]
    command = ("env", *variables, "zeusctl", "probe", "--library", LIBRARY, "--in-unit", *short)
    done = node.machine.run(*command, "--output", "/dev/null", "--json", check=False)
    found = json.loads(done.stdout) if done.returncode == 0 else {}
    return {"said": done.stderr, **found.get("sandbox", {})}


# ----------------------------------------------------------------------------------- the very last


def test_an_amd_node_works_in_the_sandbox_that_amd_conf_makes(node: Node) -> None:
    machine, folder = node.machine, "/var/lib/amdsmi-double"
    (machine.root / folder[1:]).mkdir()
    double = AmdSmiDouble(machine.root / folder[1:], [{}, {}])
    inside = {name: f"{folder}/{Path(path).name}" for name, path in double.env.items()}
    env = " ".join(f'"{name}={path}"' for name, path in inside.items())
    added = []
    for unit in ("zeusd", "zeusd-restore"):
        drop_ins = machine.root / f"etc/systemd/system/{unit}.service.d"
        for name, text in (
            ("amd.conf", (machine.root / SOURCES[1:] / "systemd/amd.conf").read_text()),
            ("amd-double.conf", f"[Service]\nReadWritePaths={folder}\nEnvironment={env}\n"),
        ):
            (drop_ins / name).write_text(text)
            added.append(drop_ins / name)
    config = machine.root / "etc/zeusd/zeusd.toml"
    before = config.read_text()
    library = f"{folder}/{Path(double.library).name}"
    config.write_text(f'[amd]\nlibrary = "{library}"\nsysfs = "{folder}/sys"\n')
    try:
        machine.systemctl("daemon-reload")
        machine.systemctl("restart", "zeusd")
        node.wait_serving()
        said = json.loads(machine.run("/opt/zeusd/bin/zeusctl", "status", "--json").stdout)
        assert [gpu["name"] for gpu in said["gpus"]] == ["AMD Instinct MI300X"] * 2
        assert machine.show("zeusd", "ProtectKernelTunables") == "no"
        assert machine.show("zeusd", "ProtectSystem") == "strict"
        allowed = machine.show("zeusd", "DeviceAllow")
        assert "char-kfd" in allowed
        assert "char-drm" in allowed
        user = node.user()
        try:
            code, said = user("set_power_limit", said["gpus"][0]["uuid"], 400_000)
            assert code == "ok", said
            assert double.node.gpus[0].cap_uw == 400_000_000
        finally:
            user.kill()
        wait_for(lambda: double.node.gpus[0].cap_uw == 750_000_000, "the cap to be restored")
        assert {call.uid for call in double.calls()} == {0}
    finally:
        for path in added:
            path.unlink()
        config.write_text(before)
        machine.systemctl("daemon-reload")
        machine.systemctl("restart", "zeusd")
        node.wait_serving()


def test_zz_uninstalling_restores_and_leaves_nothing_running(node: Node, member: User) -> None:
    assert member.set(0, 200) == "ok"
    node.machine.run("zeusctl", "set", "1", "-p", "200", "--persist")
    node.machine.run("zeusctl", "set", "all", "-p", "150", "--ceiling", "fleet")
    assert node.limits() == [150_000, 150_000]
    node.machine.run("bash", f"{SOURCES}/scripts/install", "--uninstall")
    assert node.limits() == [LIMIT, LIMIT]
    root = node.machine.root
    assert not (root / "opt/zeusd").exists()
    assert not list((root / "etc/systemd/system").glob("zeusd*.s*t"))
    assert not list((root / "etc/systemd/system").glob("zeus*.service"))
    assert (root / "etc/zeusd/zeusd.toml").exists()
    assert not list((root / "usr/local").rglob("*zeusctl*"))
    left = node.machine.run("pgrep", "-f", "/opt/zeusd/bin", check=False).stdout.split()
    assert len(left) <= 1, "only the client of these tests may be left"
    node.machine.run("bash", f"{SOURCES}/scripts/install", "--uninstall")
