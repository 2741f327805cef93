"""`--gpu-power` and `--gpu-clocks` on a real slurmctld and slurmd, in a booted systemd."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import TIMEOUT_S, free_port, wait_for
from tests.system.machine import SOURCES, Machine
from tests.system.test_systemd import LIMIT, PYTHON, Node, boot_node
from tests.zeusctl.conftest import COMMANDS, says

pytestmark = [
    pytest.mark.needs("slurm", "slurmdbd", "gcc", "systemd-nspawn", "root"),
    pytest.mark.xdist_group("slurm"),
    pytest.mark.timeout(300),
]

SPANK = f"{SOURCES}/examples/slurm/spank"
ENERGY = f"{SOURCES}/examples/slurm/energy"
ONE_HIERARCHY = str(Path(__file__).with_name("one_hierarchy.c"))
PRELOADED = "/usr/local/lib/one_hierarchy.so"
GROUPS = "/sys/fs/cgroup/system.slice/{host}_slurmstepd.scope"
"""Of jobs, as Debian's slurmd names it."""

USER = "daemon"
"""Whose jobs run: an ordinary user with a name."""

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu,shard
AccountingStorageType=accounting_storage/slurmdbd
AcctGatherEnergyType=acct_gather_energy/zeusd
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1,energy=1
AccountingStorageHost={host}
AccountingStoragePort={accounting}
Prolog=/etc/slurm/prolog.sh
Epilog=/etc/slurm/epilog.sh
PrologFlags=Contain
ReturnToService=2
KillWait=1
NodeName={host} CPUs=2 Gres=gpu:2,shard:8
PartitionName=all Nodes=ALL Default=YES
"""

ACCOUNTING = """
AuthType=auth/munge
DbdHost={host}
DbdPort={accounting}
SlurmUser=root
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageUser=root
StorageLoc=slurm
"""

DATABASE = (
    *("/usr/sbin/mariadbd", "--skip-networking", "--skip-grant-tables"),
    "--loose-innodb-snapshot-isolation=OFF",  # as slurmdbd requires of MariaDB 11.6 and later
)


class Cluster:
    """One node that is controller and compute node at once."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.machine: Machine = node.machine
        self.root = Path(node.machine.root)
        self.host = self.machine.run("hostname", "-s").stdout.strip()
        self.commands = self.machine.popen(PYTHON, "-c", COMMANDS)

    def start(self) -> None:
        run, etc = self.machine.run, self.root / "etc/slurm"
        etc.mkdir(exist_ok=True)
        names = ("controller", "daemon", "accounting")
        facts = {name: str(free_port()) for name in names} | {"host": self.host}
        (etc / "slurm.conf").write_text(CONFIGURATION.format(**facts))
        (etc / "slurmdbd.conf").touch(0o600)
        (etc / "slurmdbd.conf").write_text(ACCOUNTING.format(**facts))
        # The job's first position is not the first device; and a comment that is no UTF-8.
        gres = "# M\xfcller\nName=gpu File=/dev/nvidia[1,0]\nName=shard Count=8\n"
        (etc / "gres.conf").write_bytes(gres.encode("latin-1"))
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v2\n")
        self.install("prolog.sh")
        self.install("epilog.sh")
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-o", f"{self.root}{PRELOADED}", ONE_HIERARCHY], check=True
        )
        self.refusals("fail")
        for plugin in (SPANK, ENERGY):
            run("make", "-C", plugin, "install")
        for minor in range(2):
            run("mknod", f"/dev/nvidia{minor}", "c", "1", "3")
        run("usermod", "-aG", "zeus", USER)
        (self.root / "etc/hosts").write_text(f"127.0.0.1 localhost {self.host}\n")
        run("mkdir", "-p", "/var/spool/slurmctld", "/var/spool/slurmd", "/run/munge")
        run("mkdir", "-p", "/run/mariadbd")
        run("ln", "-sfn", "/run/mariadbd", "/run/mysqld")  # the name before Debian 14
        run("chown", "munge:munge", "/run/munge")
        run("chown", "mysql:mysql", "/run/mariadbd")
        self.service("munge", "/usr/sbin/munged", "--foreground", user="munge")
        self.service("mariadb", *DATABASE, user="mysql")
        self.answers("munge", "-n")
        self.answers("mariadb", "-e", "select 1")
        self.service("slurmdbd", "/usr/sbin/slurmdbd", "-D")
        self.answers("sacctmgr", "-i", "add", "cluster", "test")
        self.service("slurmctld", "/usr/sbin/slurmctld", "-D")
        self.start_slurmd()

    def install(self, name: str) -> None:
        """The prolog or epilog of the example."""
        shutil.copy(f"{self.root}{SOURCES}/examples/slurm/{name}", self.root / "etc/slurm" / name)

    def service(self, name: str, *command: str, user: str = "root", preload: str = "") -> None:
        options = ("--quiet", "--collect", f"--unit=test-{name}", f"--uid={user}")
        self.machine.run("systemd-run", *options, f"--setenv=LD_PRELOAD={preload}", *command)

    def zeusctl(self, *arguments: str) -> str:
        """What root's `zeusctl ARGUMENTS --json` prints, all in one process."""
        return says(self.commands, *arguments, "--json").out

    def start_slurmd(self) -> None:
        command = ("/usr/sbin/slurmd", "-D", "-N", self.host)
        self.service("slurmd", *command, preload=PRELOADED)
        state = ("sinfo", "-h", "-o", "%T")
        wait_for(lambda: "idle" in self.machine.run(*state, check=False).stdout, "the node")

    def answers(self, *command: str) -> None:
        wait_for(lambda: self.machine.run(*command, check=False).returncode == 0, command[0])

    def refusals(self, what: str) -> None:
        text = f"optional zeusd_spank.so min=50 max=700 on_refusal={what}\n"
        (self.root / "etc/slurm/plugstack.conf").write_text(text)

    def sbatch(
        self, *options: str, body: str = "sleep 60", gres: str = "gpu:1"
    ) -> subprocess.CompletedProcess[str]:
        command = ["sbatch", "--parsable", f"--gres={gres}", "-o", "/tmp/job-%j.out", *options]
        text = shlex.join([*command, f"--wrap={body}"])
        return self.machine.run(
            "runuser", "-u", USER, "--", "sh", "-c", f"cd /tmp; {text}", check=False
        )

    def salloc(self, *options: str, body: str) -> str:
        """The output of a shell script in an allocation."""
        command = ["salloc", "--quiet", "--gres=gpu:1", *options, "sh", "-c", body]
        text = f"cd /tmp; {shlex.join(command)}"
        return self.machine.run("runuser", "-u", USER, "--", "sh", "-c", text).stdout

    def group(self, job: str) -> str:
        """The control group of a job, in which leases know it: by its SLUID from 26.05 on."""
        found = re.search(r"\bSLUID=(\w+)", self.details(job))
        return f"job_{job}" if found is None else found[1]

    def group_path(self, job: str) -> str:
        """The folder of the control group."""
        return f"{GROUPS.format(host=self.host)}/{self.group(job)}"

    def submit(self, *options: str, body: str = "sleep 60", gres: str = "gpu:1") -> str:
        done = self.sbatch(*options, body=body, gres=gres)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self.fact(job, "JobState")

    def details(self, job: str) -> str:
        """What Slurm knows of a job, with the positions of its devices."""
        return self.machine.run("scontrol", "show", "job", "-d", job, check=False).stdout

    def fact(self, job: str, name: str) -> str:
        text = self.machine.run("scontrol", "show", "job", job, check=False).stdout
        return next(
            (one[len(name) + 1 :] for one in text.split() if one.startswith(name + "=")), ""
        )

    def wait_state(self, job: str, *states: str) -> None:
        wait_for(lambda: self.state(job) in states, f"job {job} to be {states}")

    def accounted(self, job: str) -> str:
        """State and applied limit, from Slurm's accounting."""
        options = ("-n", "-P", "-X", "-j", job, "-o", "State,AdminComment")
        return self.machine.run("sacct", *options, check=False).stdout.strip()

    def wait_accounted(self, job: str, line: str) -> None:
        wait_for(lambda: self.accounted(job) == line, f"sacct: {line}, not {self.accounted(job)}")

    def output(self, job: str) -> str:
        path = self.root / f"tmp/job-{job}.out"
        inside = self.machine.run("cat", f"/tmp/job-{job}.out", check=False).stdout
        return inside or (path.read_text() if path.exists() else "")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    for node in boot_node(watchdog_s=None, update=True):
        cluster = Cluster(node)
        cluster.start()
        yield cluster
        for name in ("slurmd", "slurmctld", "slurmdbd", "mariadb", "munge"):
            node.machine.systemctl("stop", f"test-{name}", check=False)


def capped(cluster: Cluster, watts: int) -> bool:
    return sorted(cluster.node.limits()) == sorted([watts * 1000, LIMIT])


def said_by_prologs(cluster: Cluster) -> str:
    """The whole log: what was said last may still be on its way there."""
    cluster.machine.run("journalctl", "--sync")
    return cluster.machine.run("journalctl", "-q", "-t", "zeusd-prolog", "-o", "cat").stdout


def restored(cluster: Cluster, timeout_s: float = TIMEOUT_S) -> None:
    limits = cluster.node.limits
    wait_for(lambda: limits() == [LIMIT, LIMIT], "the limits to be restored", timeout_s)


ENDS = {
    "ends": ("COMPLETED", ()),
    "is cancelled": ("CANCELLED by 0", ("scancel",)),
    "is killed": ("FAILED", ("pkill", "-KILL", "-u", USER)),
}
"""By how a job ends: its state then, as sacct shows it, and what ends it."""


@pytest.mark.parametrize("end", ENDS)
def test_a_jobs_power_limit_is_set_and_restored_however_it_ends(cluster: Cluster, end: str) -> None:
    state, command = ENDS[end]
    body = "zeusctl status --columns power_limit_w --format csv; sleep "
    job = cluster.submit("--gpu-power=150W", body=body + ("100" if command else "1"))
    wait_for(lambda: "power_limit_w" in cluster.output(job), "the job to begin")
    if command:
        assert capped(cluster, 150)
        cluster.machine.run(*command, *([job] if command[0] == "scancel" else []))
    cluster.wait_state(job, state.split()[0])
    restored(cluster)
    assert "150" in cluster.output(job).split()
    cluster.wait_accounted(job, f"{state}|gpu_power_w=150")


@pytest.mark.parametrize(
    ("option", "locked", "recorded"),
    [
        ("--gpu-clocks=600,900", [600, 900], "gpu_clocks_mhz=600-900"),
        ("--gpu-freq=600,verbose", [600, 600], "gpu_freq=600+verbose"),
    ],
)
def test_clocks_are_locked_before_the_job_begins(
    cluster: Cluster, option: str, locked: list[int], recorded: str
) -> None:
    """On the GPU that has the job's power limit, and until the job's end."""
    body = "zeusctl leases --json; echo begun; sleep 100"
    job = cluster.submit("--gpu-power=150", option, body=body)
    wait_for(lambda: "begun" in cluster.output(job), "the job to begin")
    assert cluster.fact(job, "AdminComment") == f"gpu_power_w=150,{recorded}"
    said = json.loads(cluster.output(job).partition("begun")[0])
    clocks = [one for one in said["leases"] if one["control"] == "gpu_clocks"]
    limited = [one["gpu"] for one in said["ceilings"] if one["name"] == f"job:{job}"]
    assert [(one["gpu"], one["value"]) for one in clocks] == [(limited[0], locked)]
    cluster.machine.run("scancel", job)
    cluster.wait_state(job, "CANCELLED")
    wait_for(lambda: "gpu_clocks" not in cluster.zeusctl("leases"), "the lease to end")


def test_each_task_of_an_array_has_the_clocks_that_it_asked_for(cluster: Cluster) -> None:
    """Of the array's own number, which one of them has, Slurm lists all."""
    job = cluster.submit("--gpu-freq=600", "--array=0-1", "-N", "1", body="sleep 100")

    def locked() -> list[tuple[int, list[int]]]:
        said = json.loads(cluster.zeusctl("leases"))
        clocks = [one for one in said["leases"] if one["control"] == "gpu_clocks"]
        return sorted((one["gpu"], one["value"]) for one in clocks)

    wait_for(lambda: locked() == [(0, [600, 600]), (1, [600, 600])], f"two leases, not {locked()}")
    cluster.machine.run("scancel", job)
    wait_for(lambda: locked() == [], "the leases to end")


def test_a_jobs_gpu_is_the_one_that_gres_conf_has_at_its_position(cluster: Cluster) -> None:
    job = cluster.submit("--gpu-power=150")
    wait_for(lambda: capped(cluster, 150), "the limit")
    assert "GRES=gpu:1(IDX:0)" in cluster.details(job)
    assert cluster.node.limits() == [LIMIT, 150_000]
    cluster.machine.run("scancel", job)
    cluster.wait_state(job, "CANCELLED")
    restored(cluster)


def test_a_shard_leaves_the_gpus_other_jobs_alone(cluster: Cluster) -> None:
    """Their leases and their share of its energy."""
    run = cluster.machine.run
    first = cluster.submit(body="zeusctl set 1 -p 150 -- sleep 100", gres="shard:1")
    wait_for(lambda: cluster.node.limits() == [LIMIT, 150_000], "the first job's limit")
    second = cluster.submit(body="sleep 100", gres="shard:2")
    cluster.wait_state(second, "RUNNING")
    assert cluster.node.limits() == [LIMIT, 150_000]
    (lease,) = json.loads(cluster.zeusctl("leases"))["leases"]
    assert (lease["job"], lease["gpu"]) == (cluster.group(first).removeprefix("job_"), 1)

    def both_are_charged() -> bool:
        said = json.loads(cluster.zeusctl("energy", "--by", "job"))["sums"]
        shares = {one["name"]: one["energy_j"] for one in said if one["name"] in (first, second)}
        return len(shares) == 2 and min(shares.values()) > 0

    wait_for(both_are_charged, "both jobs to be charged")
    run("scancel", first, second)
    cluster.wait_state(second, "CANCELLED")
    restored(cluster)


def test_nothing_is_done_to_a_gpu_that_may_be_another_jobs(cluster: Cluster) -> None:
    """GPU 0 is lost, zeusd was restarted since, and gres.conf names no devices."""
    run, double = cluster.machine.run, cluster.node.double
    gres = cluster.root / "etc/slurm/gres.conf"
    before = gres.read_bytes()
    double.inject(0, "nvmlDeviceGetHandleByIndex_v2", 15)
    try:
        run("systemctl", "restart", "zeusd")
        wait_for(lambda: "1 GPUs" in cluster.machine.show("zeusd", "StatusText"), "zeusd")
        # slurmd has read its devices long ago.
        gres.write_text("AutoDetect=nvml\n")
        job = cluster.submit("--gpu-power=150", body="echo ran", gres="gpu:1")
        cluster.wait_state(job, "FAILED", "CANCELLED")
        log = said_by_prologs(cluster)
        (line,) = [one for one in log.splitlines() if one.startswith(f"job {job}, GPUs 0: ")]
        assert "energy is not charged (6), not reset (6), --gpu-power=150: Slurm gave the" in line
        assert cluster.node.limits() == [LIMIT, LIMIT]
        gres.write_bytes(before)
        job = cluster.submit("--gpu-power=150", body="sleep 100", gres="gpu:1")
        wait_for(lambda: cluster.node.limits() == [LIMIT, 150_000], "the healthy GPU's limit")
        run("scancel", job)
        cluster.wait_state(job, "CANCELLED")
    finally:
        gres.write_bytes(before)
        double.clear_faults()
    cluster.node.wait_serving()
    restored(cluster)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--gpu-power=much", "--gpu-power=much: write watts from 50 to 700"),
        ("--gpu-power=900", "--gpu-power=900: write watts from 50 to 700"),
        ("--gpu-power=200mW", "write watts"),
        ("--gpu-clocks=900,600", "--gpu-clocks=900,600: write MHz"),
    ],
)
def test_a_value_that_no_gpu_accepts_is_refused_at_submission(
    cluster: Cluster, option: str, said: str
) -> None:
    done = cluster.sbatch(option)
    assert done.returncode != 0
    assert said in done.stderr


def test_a_refused_value_is_the_jobs_error_or_a_warning(cluster: Cluster) -> None:
    """A V100 takes 100 to 250 W."""
    job = cluster.submit("--gpu-power=600", body="echo ran")
    cluster.wait_state(job, "FAILED", "CANCELLED")
    restored(cluster)
    log = said_by_prologs(cluster)
    assert re.search(rf"^job {job}, GPUs \d: --gpu-power=600: ", log, re.MULTILINE)
    assert "100 to 250 W" in log
    assert "GPU limits not applied: --gpu-power=600" in cluster.output(job)
    assert "ran" not in cluster.output(job)
    cluster.refusals("warn")
    job = cluster.submit("--gpu-power=600", body="echo ran")
    cluster.wait_state(job, "COMPLETED")
    assert "GPU limits not applied: --gpu-power=600" in cluster.output(job)
    assert "ran" in cluster.output(job)
    state = ("sinfo", "-h", "-o", "%T")
    wait_for(lambda: "idle" in cluster.machine.run(*state).stdout, "the node, which is not drained")
    cluster.refusals("fail")


@pytest.mark.parametrize(
    ("options", "ran"),
    [
        (["--gpu-clocks=600,900"], False),
        (["--gpu-freq=medium"], True),
        (["--gpu-power=150", "--gpu-freq=medium"], False),
    ],
)
def test_refused_clocks_are_the_jobs_error_or_as_in_slurm_a_warning(
    cluster: Cluster, options: list[str], ran: bool
) -> None:
    """The driver is closed."""
    cluster.zeusctl("quiesce")
    job = cluster.submit(*options, body="echo ran")
    cluster.wait_state(job, "COMPLETED", "FAILED", "CANCELLED")
    cluster.zeusctl("resume")
    said = cluster.output(job)
    for option in options:
        assert f"GPU limits not applied: {option}: zeusd is quiesced by" in said
    assert ("ran" in said.splitlines(), cluster.state(job) == "COMPLETED") == (ran, ran)


def test_a_step_cannot_ask_for_another_value(cluster: Cluster) -> None:
    job = cluster.submit("--gpu-power=200", body="srun --gpu-power=150 true; srun true && echo ran")
    cluster.wait_state(job, "COMPLETED")
    assert "a job's GPUs are set when it begins" in cluster.output(job)
    assert "ran" in cluster.output(job)
    restored(cluster)


@pytest.fixture
def no_epilog(cluster: Cluster) -> Iterator[None]:
    """A site that forgot the epilog."""
    (cluster.root / "etc/slurm/epilog.sh").write_text("#!/bin/sh\nexit 0\n")
    yield
    cluster.install("epilog.sh")


@pytest.mark.parametrize("killed", [False, True], ids=["slurmstepd ends", "slurmstepd is killed"])
def test_a_jobs_power_limit_ends_with_its_control_group(
    cluster: Cluster, no_epilog: None, killed: bool
) -> None:
    """Long before the minute after which a job without a group loses its limit."""
    run = cluster.machine.run
    job = cluster.submit("--gpu-power=150", "--no-requeue", body="sleep 100")
    cluster.wait_state(job, "RUNNING")
    wait_for(lambda: capped(cluster, 150), "the limit")
    run("sleep", "5")  # zeusd looks for a job's group every 2 s
    if killed:
        group = cluster.group_path(job)
        run("sh", "-c", f"kill -9 $(find {group} -name cgroup.procs | xargs cat)")
        wait_for(
            lambda: "populated 0" in run("cat", f"{group}/cgroup.events").stdout,
            "the last process to be gone",
        )
    else:
        run("scancel", job)
    wait_for(lambda: cluster.node.limits() == [LIMIT, LIMIT], "the limits to be restored", 40)
    run("scancel", job, check=False)
    wait_for(lambda: cluster.state(job) not in ("RUNNING", "COMPLETING"), "the job to end")


def test_a_limit_lasts_between_the_steps_of_an_allocation(cluster: Cluster) -> None:
    """`PrologFlags=Contain` keeps the job's control group, and with it the ceiling."""
    shows = "zeusctl status --columns power_limit_w --format csv"
    finds = "scontrol show job -d $SLURM_JOB_ID | sed -n 's/^ *SLUID=//p'"
    group = f"{GROUPS.format(host=cluster.host)}/${{sluid:-job_$SLURM_JOB_ID}}"
    body = f"srun true; sluid=$({finds}); cat {group}/cgroup.events; srun {shows}"
    said = cluster.salloc("--gpu-power=150", body=body).split()
    assert said[:2] == ["populated", "1"]
    assert "150" in said[2:]
    restored(cluster)


def test_a_jobs_power_limit_is_restored_after_its_node_crashed(cluster: Cluster) -> None:
    """slurmd, the job and zeusd end at once, and the GPU keeps its limit."""
    run = cluster.machine.run
    body = "zeusctl status --columns power_limit_w --format csv; sleep 100"
    job = cluster.submit("--gpu-power=150W", "--no-requeue", body=body)
    wait_for(lambda: "power_limit_w" in cluster.output(job), "the job to begin")
    ends = "systemctl kill --signal=KILL zeusd test-slurmd; pkill -KILL slurmstepd; pkill -KILL -u "
    run("sh", "-c", ends + USER)  # at once: zeusd is back within a second
    # slurmctld does this after SlurmdTimeout.
    run("scontrol", "update", f"NodeName={cluster.host}", "State=DOWN", "Reason=crashed")
    cluster.wait_accounted(job, "NODE_FAIL|gpu_power_w=150")
    wait_for(lambda: f"job:{job}" in cluster.zeusctl("leases"), "zeusd to be back")
    assert capped(cluster, 150)
    run("scontrol", "update", f"NodeName={cluster.host}", "State=RESUME")
    cluster.start_slurmd()
    restored(cluster, 3 * TIMEOUT_S)  # without the epilog, zeusd waits a minute


def test_sacct_shows_the_energy_that_the_ledger_charged(cluster: Cluster) -> None:
    job = cluster.submit(body="sleep 12")
    cluster.wait_state(job, "COMPLETED")

    def shown() -> float:
        options = ("-n", "-P", "-X", "-j", job, "-o", "ConsumedEnergyRaw")
        text = cluster.machine.run("sacct", *options, check=False).stdout.strip()
        return float(text or 0)

    joules = wait_for(shown, "ConsumedEnergyRaw")
    said = cluster.zeusctl("energy", "--job", job)
    (run,) = json.loads(said)["sums"]
    assert run["basis"] == ["allocated"]
    # The plugin looks once a second, from the extern step's begin to its end.
    assert 0.6 * run["energy_j"] <= joules <= run["energy_j"] + 1


def test_a_suspended_job_is_charged_for_the_gpu_that_it_keeps(cluster: Cluster) -> None:
    """Its processes are stopped, and nobody else gets the GPU."""
    run = cluster.machine.run
    job = cluster.submit(body="sleep 200")

    def charged() -> dict[str, float]:
        sums = json.loads(cluster.zeusctl("energy", "--job", job)).get("sums")
        return sums[0] if sums else {"energy_j": 0.0}

    wait_for(lambda: charged()["energy_j"], "the job to be charged")
    run("scontrol", "suspend", job)
    cluster.wait_state(job, "SUSPENDED")
    suspended = charged()
    both = cluster.submit("--gres=gpu:2", body="true")
    # Longer than the time after which a job without a control group has ended.
    later = wait_for(
        lambda: (now := charged())["gpu_hours"] > suspended["gpu_hours"] + 15 / 3600 and now,
        "the job to be charged while it is suspended",
    )
    assert cluster.state(both) == "PENDING"
    assert later["end"] is None
    assert (later["basis"], later["bounds"]) == (["allocated"], "exact")
    # The stand-in for a V100 draws tens of watts idle.
    assert later["energy_j"] - suspended["energy_j"] > 15 * 10
    run("scontrol", "resume", job)
    cluster.wait_state(job, "RUNNING")
    run("scancel", job)
    cluster.wait_state(both, "COMPLETED")
    wait_for(lambda: charged()["end"], "the job to end")
    assert charged()["energy_j"] >= later["energy_j"]
