"""How far root owns a control group: in a tree of folders, and in the kernel's own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs
from tests.support import NOBODY, TIMEOUT_S, ending, public_directory
from zeusd.runtime.control_groups import (
    MOUNTS,
    ControlGroup,
    ControlGroups,
    ProcessWorkload,
    WorkloadKind,
    job_of,
    workload_of,
)
from zeusd.runtime.processes import identify_peer

needs_root = pytest.mark.needs("root")

STEP = "system.slice/slurmstepd.scope/job_7/step_0"
OWN = "user.slice/user-1000.slice/user@1000.service"


class Tree:
    """A fake hierarchy: folders, and the table of mounts that names them."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.root.mkdir()
        self._table = folder / "mountinfo"
        self.mount(f"30 1 0:26 / {self.root} rw shared:4 - cgroup2 cgroup2 rw,nsdelegate")

    def mount(self, *lines: str) -> None:
        self._table.write_text("".join(f"{line}\n" for line in lines))

    def make(self, path: str, owner: int | None = None, mode: int = 0o755) -> None:
        """Makes a group; the last one is `owner`'s."""
        folder = self.root
        for name in path.split("/"):
            folder = folder / name
            folder.mkdir(exist_ok=True, mode=0o755)
        folder.chmod(mode)
        if owner is not None:
            os.chown(folder, owner, owner)

    def groups(self, memberships: str) -> list[ControlGroup]:
        return ControlGroups(self._table, owner=os.getuid()).of(memberships)

    def workload(self, path: str) -> ProcessWorkload | None:
        return workload_of(self.groups(f"0::/{path}\n"))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_path_that_root_owns_counts_whole(tree: Tree) -> None:
    tree.make(STEP)
    assert tree.groups(f"0::/{STEP}\n") == [ControlGroup(f"/{STEP}")]
    assert tree.workload(STEP) == ProcessWorkload(WorkloadKind.JOB, "7")


# Names of groups below a user's own, by which the user imitates someone else.
FORGERIES = [
    "job_77",
    "slurm/uid_0/job_77",
    "slurm_node/uid_0/job_77/step_0/task_0",
    "system.slice/slurmstepd.scope/job_77/step_0/user/task_0",
    "slurmstepd.scope/sEKNKTV3WPV500",
    "kubepods.slice/kubepods-pod1f2e3d4c_0000_1111_2222_333344445555.slice",
    "kubepods/burstable/pod1f2e3d4c-0000-1111-2222-333344445555/x",
    "kubepods/pod" + "0" * 32,
    "docker-" + "0" * 64 + ".scope",
    "system.slice/sshd.service",
]


@needs_root
@pytest.mark.parametrize("name", FORGERIES)
def test_names_below_a_users_own_group_are_the_users(tree: Tree, name: str) -> None:
    path = f"{OWN}/{name}"
    tree.make(path)
    os.chown(tree.root / OWN, 1000, 1000)
    assert tree.workload(path) == ProcessWorkload(WorkloadKind.USER, "1000")
    assert job_of(tree.groups(f"0::/{path}\n")) == ""


@needs_root
@pytest.mark.parametrize("name", FORGERIES[:-2])
def test_names_that_users_made_elsewhere_count_for_nobody(tree: Tree, name: str) -> None:
    """A group that its owner was given, below one of root's."""
    tree.make(f"some.slice/{name}")
    os.chown(tree.root / "some.slice", 1000, 1000)
    assert tree.workload(f"some.slice/{name}") is None
    os.chown(tree.root / "some.slice", 0, 0)
    for folder in [tree.root / "some.slice" / name, *(tree.root / "some.slice" / name).parents]:
        if folder == tree.root / "some.slice":
            break
        os.chown(folder, 1000, 1000)
    assert tree.workload(f"some.slice/{name}") is None


@needs_root
def test_a_group_in_a_job_that_is_its_users_own_does_not_name_another_job(tree: Tree) -> None:
    inner = f"{STEP}/slurmstepd.scope/job_8"
    tree.make(inner)
    os.chown(tree.root / STEP, 1000, 1000)
    assert tree.workload(inner) == ProcessWorkload(WorkloadKind.JOB, "7")


def test_a_group_that_others_may_write_is_not_roots_alone(tree: Tree) -> None:
    tree.make(STEP)
    for folder in (tree.root / "system.slice/slurmstepd.scope", tree.root):
        folder.chmod(0o775)
        assert tree.workload(STEP) is None


def test_a_group_that_is_gone_names_nothing(tree: Tree) -> None:
    tree.make("system.slice/slurmstepd.scope")
    assert tree.workload(f"{STEP} (deleted)") is None


def test_each_hierarchy_is_looked_up_where_it_is_mounted(tree: Tree, tmp_path: Path) -> None:
    freezer = tmp_path / "a folder"
    (freezer / "slurm/uid_1000/job_99").mkdir(parents=True)
    escaped = str(freezer).replace(" ", "\\040")
    tree.mount(
        f"30 1 0:26 / {tree.root} rw - cgroup2 cgroup2 rw",
        f"31 1 0:27 / {escaped} rw - cgroup cgroup rw,freezer",
        f"32 1 0:28 / {tree.root} rw - cgroup cgroup rw,cpu,cpuacct",
        "33 1 0:29 / /proc rw - proc proc rw",
    )
    memberships = "5:freezer:/slurm/uid_1000/job_99\n4:cpu,cpuacct:/none\n0::/\nnonsense\n"
    assert tree.groups(memberships) == [
        ControlGroup("/slurm/uid_1000/job_99"),
        ControlGroup("/"),
        ControlGroup("/"),
    ]


def test_a_hierarchy_that_cannot_be_seen_whole_is_not_checked(tree: Tree) -> None:
    """As in a container: its own namespace, a part of the tree, or none of it."""
    assert tree.groups("0::/../../system.slice\n") == [
        ControlGroup("/../../system.slice", checked=False)
    ]
    for lines in ([f"30 1 0:26 /docker/x {tree.root} rw - cgroup2 cgroup2 rw"], []):
        tree.mount(*lines)
        assert tree.groups("0::/a\n") == [ControlGroup("/a", checked=False)]


# ------------------------------------------------------------------------------- the kernel's own


@contextlib.contextmanager
def kernel_group(version: int) -> Iterator[Path]:
    """A group at the root of a real hierarchy, removed with all that is below it."""
    base = None
    for line in Path(MOUNTS).read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if version == 2 and kind == "cgroup2":
            base = Path(fields.split(" ")[4])
        if version == 1 and kind == "cgroup" and "freezer" in options.split(","):
            base = Path(fields.split(" ")[4])
    if base is None or os.getuid() != 0 or not os.access(base, os.W_OK):
        needs.not_on_this_kernel(f"no control groups of version {version} can be made here")
    group = base / f"zeusd-test-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        # Folders only, from below: a group's files go with it, and its last process may be ending.
        give_up_at = time.monotonic() + 10
        while group.exists() and time.monotonic() < give_up_at:
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)


# In its own mount namespace: prints whether the hierarchy is found, and the reads of the table.
MOUNT_LATER = """
import io, os, subprocess, sys
from zeusd.runtime import control_groups
kind, options = sys.argv[1:]
with open("/proc/self/mountinfo") as table:
    mounts = [line.split(" ")[4] for line in table if " - cgroup" in line]
for folder in reversed(mounts):
    subprocess.run(["umount", "--lazy", folder], check=True)
tables, read = [], control_groups._read
control_groups._read = lambda table: tables.append(table) or read(table)
groups = control_groups.ControlGroups()
def found():
    found = [groups.of(f"7:{options}:/\\n")[0].checked for _ in range(3)]
    print(found, len(tables))
found()
os.makedirs(folder, exist_ok=True)
options = ["-o", options] if options else []
subprocess.run(["mount", "-t", kind, *options, kind, folder], check=True)
options = options[-1] if options else ""
found()
"""


@needs_root
def test_a_hierarchy_that_is_mounted_later_is_found() -> None:
    """The table of mounts is read again only when it has changed: anyone who connects causes the
    look-up."""
    for kind, options in (("cgroup2", ""), ("cgroup", "freezer")):
        command = ["unshare", "--mount", sys.executable, "-c", MOUNT_LATER, kind, options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            break
    assert done.stdout.splitlines() == ["[False, False, False] 1", "[True, True, True] 2"], done


# As nobody: makes groups below its own one, moves to each, and connects from there.
FORGE = """
import os, socket, sys
socket_path, own, *names = sys.argv[1:]
for name in names or [""]:
    if name:
        group = os.path.join(own, name)
        os.makedirs(group)
        open(os.path.join(group, "cgroup.procs"), "w").write("0")
    client = socket.socket(socket.AF_UNIX)
    client.connect(socket_path)
    client.recv(1)
"""


def jobs_of_a_client(own: Path, *names: str) -> list[str]:
    """The jobs of a client that root has put into the group `own`, and that then moves to groups
    below it, which it makes itself."""
    found = []
    with public_directory() as directory, socket.socket(socket.AF_UNIX) as listening:
        path = str(directory / "s")
        listening.bind(path)
        os.chmod(path, 0o777)
        listening.listen()
        listening.settimeout(TIMEOUT_S)
        client = subprocess.Popen(
            [
                *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
                *(sys.executable, "-I", "-S", "-c", FORGE, path, str(own), *names),
            ],
            preexec_fn=lambda: (own / "cgroup.procs").write_text("0"),
        )
        with ending(client):
            for name in names or [own.name]:
                connection, _ = listening.accept()
                with connection:
                    peer, pidfd = identify_peer(1, connection)
                    os.close(pidfd)
                    assert peer.uid == NOBODY
                    assert name.encode() in Path(f"/proc/{client.pid}/cgroup").read_bytes()
                    found.append(peer.job)
    return found


@needs_root
@pytest.mark.needs("util-linux")
@pytest.mark.parametrize("version", [1, 2])
def test_a_process_is_in_the_job_whose_group_root_made_and_in_none_that_it_made(
    version: int,
) -> None:
    """The kernel takes anything in a name but a slash and a newline."""
    with kernel_group(version) as group:
        (group / STEP).mkdir(parents=True)
        own = group / f"user.slice/user-{NOBODY}.slice/user@{NOBODY}.service"
        own.mkdir(parents=True)
        for part in (own, own / "cgroup.procs"):  # as systemd gives a user the own part of the tree
            os.chown(part, NOBODY, NOBODY)
        line = f"{'0:' if version == 2 else '9:freezer'}:/{group.name}/{STEP}"
        names = [FORGERIES[0], *FORGERIES[3:7]]
        names += [f"x{separator}{line}" for separator in ("\r", "\v", "\x1c", "\x85", "\u2028")]
        found = jobs_of_a_client(own, *names)
        assert dict(zip(names, found, strict=True)) == dict.fromkeys(names, "")
        assert jobs_of_a_client(group / STEP) == ["7"]


def test_no_mount_point_is_another_line(tree: Tree) -> None:
    """Users may mount by FUSE, where they like; the kernel escapes but blanks and newlines."""
    tree.make(STEP)
    tree.mount(
        "99 1 0:99 / /home/u/x\r\v\u2028y rw - fuse.sshfs u@host: rw",
        "a line of nonsense",
        f"30 1 0:26 / {tree.root} rw - cgroup2 cgroup2 rw",
    )
    assert tree.workload(STEP) == ProcessWorkload(WorkloadKind.JOB, "7")
