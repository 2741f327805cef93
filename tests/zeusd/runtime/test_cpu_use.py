"""Who used the CPUs: control groups in a folder, as the kernel shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ending
from tests.zeusd.ledger.world import START_NS, Gpu, ReadAccounts, World
from zeus_common.units import SECOND_NS
from zeus_ipc.requests import Allocate, GetUsage
from zeusd.energy.split import Account, Kind
from zeusd.ledger.schema import open_ledger
from zeusd.ledger.store import LedgerStore
from zeusd.runtime.accounting import READ_NS, CpuAccounts
from zeusd.runtime.accounts import Clocks, Retention
from zeusd.runtime.control_groups import ROOT, JobGroups
from zeusd.runtime.cpu_use import SYSTEM, CpuUse, hierarchy
from zeusd.runtime.presence import UNKNOWN_PROCESS

JOB = "system.slice/slurmstepd.scope/job_7"
POD = "kubepods.slice/kubepods-pod11112222_3333_4444_5555_666677778888.slice"
ALL = [0, 1_900_000_800]


class Groups:
    """A tree of control groups with the CPU time of each."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def use(self, path: str, us: int, pids: str = "") -> None:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.stat").write_text(f"usage_usec {us}\nuser_usec {us}\n")
        if pids:
            (folder / "cgroup.procs").write_text(pids)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path / "tree")


def reader(groups: Groups) -> CpuUse:
    return CpuUse(str(groups.root), os.getuid(), {42: 1000, 43: 1001}.get)


def test_time_is_counted_by_workload_between_readings(groups: Groups) -> None:
    use = reader(groups)
    groups.use(JOB, 500, "")
    groups.use(f"{JOB}/step_0/user/task_0", 400, "42\n")
    groups.use("system.slice/cron.service", 10)
    assert use.read() == {}  # how long ago that was is not known
    groups.use(JOB, 700)
    groups.use("system.slice/cron.service", 15)
    groups.use("system.slice/ssh.service", 7)  # new since
    groups.use("user.slice/user-1001.slice", 20)
    groups.use(POD, 9)
    assert use.read() == {
        Account(Kind.JOB, "7", uid=1000): 200,
        SYSTEM: 12,
        Account(Kind.USER, uid=1001): 20,
        Account(Kind.POD, "unknown/11112222-3333-4444-5555-666677778888"): 9,
    }
    assert use.read() == {}


def test_version_1_counts_in_one_hierarchy(tmp_path: Path) -> None:
    """systemd makes the same groups in several hierarchies, and beside them in version 2."""
    groups = Groups(tmp_path / "tree")
    job, user = "slurm/uid_1000/job_7", "user.slice/user-1001.slice"

    def used(job_us: int, user_us: int) -> None:
        for tree in ("cpu,cpuacct", "unified"):
            groups.use(f"{tree}/{user}", user_us)
            groups.use(f"{tree}/{job}", job_us)
        groups.use("freezer/slurm/uid_1000/job_8", job_us)
        groups.use(f"cpu,cpuacct/{job}/step_0/task_0", 0, "42\n")
        for path, us in (("", 0), (user, user_us), (job, job_us)):
            folder = groups.root / "cpu,cpuacct" / path
            (folder / "cpu.stat").write_text("nr_periods 0\nnr_throttled 0\n")
            (folder / "cpuacct.usage").write_text(f"{us * 1000 + 999}\n")
        (groups.root / "cpuacct").unlink(missing_ok=True)
        (groups.root / "cpuacct").symlink_to("cpu,cpuacct")

    use = reader(groups)
    used(100, 100)
    assert use.read() == {}
    used(400, 150)
    assert use.read() == {Account(Kind.JOB, "7", uid=1000): 300, Account(Kind.USER, uid=1001): 50}


@pytest.mark.needs("root", "control groups")
def test_the_kernel_counts_a_jobs_time() -> None:
    """In version 1 or 2, whichever this machine has."""
    name = f"{os.getpid()}"
    top = Path(hierarchy(ROOT)) / f"zeusd-test-{name}"
    folders = [top, top / "slurmstepd.scope", top / f"slurmstepd.scope/job_{name}"]
    for folder in folders:
        folder.mkdir()
    try:
        use = CpuUse()
        use.read()
        code = "import sys, time\nsys.stdin.readline()\nwhile time.process_time() < 0.2: pass\n"
        with ending(
            subprocess.Popen(
                [sys.executable, "-c", code + "print()\nsys.stdout.flush()\nsys.stdin.readline()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        ) as job:
            (folders[-1] / "cgroup.procs").write_text(str(job.pid))
            job.stdin.write(b"\n")
            job.stdin.flush()
            job.stdout.readline()
            used_us = use.read()[Account(Kind.JOB, name, uid=os.getuid())]
            job.stdin.close()
        assert 100_000 < used_us < 1_000_000
    finally:
        for folder in reversed(folders):
            folder.rmdir()


def test_a_job_in_slurmds_service_is_not_the_services(groups: Groups) -> None:
    use = reader(groups)
    inside = "system.slice/slurmd.service/slurmstepd.scope/job_8"
    groups.use(f"{inside}/step_0", 1, "43")
    groups.use(inside, 1)
    groups.use("system.slice/slurmd.service", 1)
    use.read()
    groups.use(inside, 101)
    groups.use("system.slice/slurmd.service", 151)
    assert use.read() == {Account(Kind.JOB, "8", uid=1001): 100}


def test_a_group_that_is_made_again_counts_from_nothing(groups: Groups) -> None:
    use = reader(groups)
    groups.use("user.slice/user-1000.slice", 1000)
    use.read()
    groups.use("user.slice/user-1000.slice", 30)
    assert use.read() == {Account(Kind.USER, uid=1000): 30}


def test_cpu_time_of_a_job_without_processes_is_unattributed(groups: Groups) -> None:
    use = reader(groups)
    groups.use(JOB, 1)
    use.read()
    groups.use(JOB, 5, "99")
    assert use.read() == {UNKNOWN_PROCESS: 4}


def test_groups_that_a_user_made_count_for_that_user(groups: Groups) -> None:
    """Names below a user's slice are the user's to choose."""
    use = reader(groups)
    forged = "user.slice/user-1001.slice/user@1001.service/job_7"
    groups.use(forged, 1)
    groups.use("user.slice/user-1001.slice", 1)
    use.read()
    groups.use(forged, 101)
    groups.use("user.slice/user-1001.slice", 101)
    assert use.read() == {Account(Kind.USER, uid=1001): 100}


def test_packages_are_charged_by_cpu_time_in_their_own_ledger(
    tmp_path: Path, groups: Groups
) -> None:
    world = World(tmp_path)
    package = world.gpus["cpu:0"] = Gpu()
    gpus = world.open().accounts
    connection = open_ledger(tmp_path / "cpu")
    clocks = Clocks(lambda: package.now_ns, world.utc_ns, lambda: package.now_ns)
    accounts = ReadAccounts(
        tmp_path / "cpu",
        LedgerStore(connection, "boot"),
        lambda: [*world.gpus],
        world.gpus.get,
        clocks,
        JobGroups(str(groups.root), os.getuid()),
        Retention(),
        cpus=True,
    )
    request = Allocate(id=1, gpus=["GPU-0"], name="7", run="2", uid=1000)
    gpus.allocate(request, START_NS)
    cpus = CpuAccounts(accounts, reader(groups), lambda: package.now_ns, gpus.named)
    groups.use(f"{JOB}/step_0/user", 0, "42")
    groups.use(JOB, 0)
    groups.use("system.slice/cron.service", 0)
    cpus.work()
    for second in range(1, 4):
        world.tick(200, READ_NS // SECOND_NS * 10)
        groups.use(JOB, 3000 * second)
        groups.use("system.slice/cron.service", 1000 * second)
        cpus.work()
    accounts.settle()
    gpus.settle()
    found = {}
    for name, whose in (("cpu", accounts), ("gpu", gpus)):
        answer = whose.usage(GetUsage(id=1, edges=ALL, by="account"), None)
        assert sum(one.active_uj + one.idle_uj for one in answer.sums) == answer.metered_uj[0]
        found[name] = {(one.kind, one.name, one.run): one for one in answer.sums}
    job, system = found["cpu"]["job", "7", "2"], found["cpu"]["service", "system", ""]
    assert (job.active_uj, system.active_uj) == (4_500_000_000, 1_500_000_000)
    assert (job.lower_uj, job.upper_uj, job.methods) == (0, 6_000_000_000, ["utilization"])
    assert {*found["gpu"]} == {("job", "7", "2")}
    assert found["gpu"]["job", "7", "2"].active_uj == 6_000_000_000
