"""Which workload the control groups of a process name, and which jobs have a group."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from zeusd.runtime.control_groups import (
    ControlGroup,
    JobGroups,
    ProcessWorkload,
    WorkloadKind,
    job_of,
    workload_of,
)

UID = "1f2e3d4c-0000-1111-2222-333344445555"
SLICE_UID = UID.replace("-", "_")
STATIC_UID = UID.replace("-", "")
CONTAINER = "0123456789abcdef" * 4
STEPD = "/system.slice/slurmstepd.scope"

# One row for each layout, by the path that the kernel gives; see /proc/PID/cgroup.
LAYOUTS = [
    # Slurm, control groups of version 2
    (f"{STEPD}/job_1234/step_0/user/task_0", WorkloadKind.JOB, "1234"),
    (f"{STEPD}/job_1234/step_batch/slurm", WorkloadKind.JOB, "1234"),
    (f"{STEPD}/job_1234/step_extern/user/task_special", WorkloadKind.JOB, "1234"),
    (f"{STEPD}/job_1234/step_interactive/user/task_0", WorkloadKind.JOB, "1234"),
    (f"{STEPD}/job_1234/step_3+1/user/task_12", WorkloadKind.JOB, "1234"),
    ("/system.slice/node7_slurmstepd.scope/job_7/step_0/user/task_0", WorkloadKind.JOB, "7"),
    (
        "/batch.slice/batch-gpu.slice/slurmstepd.scope/job_7/step_0/user/task_0",
        WorkloadKind.JOB,
        "7",
    ),
    (f"{STEPD}/sEKNKTV3WPV500/step_0/user/task_0", WorkloadKind.JOB, "sEKNKTV3WPV500"),
    ("/batch.slice/n_7_slurmstepd.scope/s0123456789ABC/step_0", WorkloadKind.JOB, "s0123456789ABC"),
    (
        f"/system.slice/docker-{CONTAINER}.scope{STEPD}/job_5/step_0/user/task_0",
        WorkloadKind.JOB,
        "5",
    ),
    ("/system.slice/slurmd.service", WorkloadKind.SERVICE, "slurmd.service"),
    # Slurm, version 1
    ("/slurm/uid_1000/job_99/step_batch/task_0", WorkloadKind.JOB, "99"),
    ("/slurm_node7/uid_1000/job_99/step_0/task_0", WorkloadKind.JOB, "99"),
    # Kubernetes: systemd's driver, then kubelet's own
    (
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE_UID}.slice"
        f"/cri-containerd-{CONTAINER}.scope",
        WorkloadKind.POD,
        UID,
    ),
    (
        f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SLICE_UID}.slice"
        f"/crio-{CONTAINER}.scope/container",
        WorkloadKind.POD,
        UID,
    ),
    (
        f"/kubepods.slice/kubepods-pod{SLICE_UID}.slice/docker-{CONTAINER}.scope",
        WorkloadKind.POD,
        UID,
    ),
    (
        f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE_UID}.slice"
        f"/cri-containerd-{CONTAINER}.scope",
        WorkloadKind.POD,
        UID,
    ),
    (f"/kubepods/pod{UID}/{CONTAINER}", WorkloadKind.POD, UID),
    (f"/kubepods/burstable/pod{UID}/{CONTAINER}", WorkloadKind.POD, UID),
    (f"/kubepods/besteffort/pod{UID}/{CONTAINER}", WorkloadKind.POD, UID),
    (
        f"/system.slice/containerd.service/kubepods-burstable-pod{SLICE_UID}.slice:cri-containerd:"
        + CONTAINER,
        WorkloadKind.POD,
        UID,
    ),
    # static pods
    (f"/kubepods/burstable/pod{STATIC_UID}/{CONTAINER}", WorkloadKind.POD, STATIC_UID),
    (
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC_UID}.slice"
        f"/cri-containerd-{CONTAINER}.scope",
        WorkloadKind.POD,
        STATIC_UID,
    ),
    # a job in a pod: the pod holds the GPU
    (f"/kubepods/pod{UID}/{CONTAINER}{STEPD}/job_5/step_0/user/task_0", WorkloadKind.POD, UID),
    # Docker and Podman
    (f"/system.slice/docker-{CONTAINER}.scope", WorkloadKind.CONTAINER, CONTAINER),
    (f"/docker/{CONTAINER}", WorkloadKind.CONTAINER, CONTAINER),
    (f"/machine.slice/libpod-{CONTAINER}.scope/container", WorkloadKind.CONTAINER, CONTAINER),
    (f"/libpod_parent/libpod-{CONTAINER}", WorkloadKind.CONTAINER, CONTAINER),
    # sessions and services
    ("/user.slice/user-1000.slice/session-2.scope", WorkloadKind.USER, "1000"),
    ("/user.slice/user-1000.slice/user@1000.service/app.slice/x.scope", WorkloadKind.USER, "1000"),
    ("/system.slice/my_app.service", WorkloadKind.SERVICE, "my_app.service"),
    (
        "/system.slice/system-getty.slice/getty@tty1.service",
        WorkloadKind.SERVICE,
        "getty@tty1.service",
    ),
]

HELD_BY_ROOT = (WorkloadKind.JOB, WorkloadKind.POD)

NOTHING = [
    "/",
    "/init.scope",
    "/my_job_12/x",
    "/job_12",
    "/uid_0/job_12",
    "/slurm/uid_0/job_12x/y",
    f"{STEPD}/system",
    f"{STEPD}/sEKNKTV3WPV50",
    f"{STEPD}/sEKNKTV3WPV5000",
    f"{STEPD}/sEKNKTV3WPVLOU",  # letters that this base 32 lacks
    "/sEKNKTV3WPV500/step_0",
    f"/kubepods/pod{UID}0",
    f"/kubepods/{UID}",
    f"/machine.slice/libpod-conmon-{CONTAINER}.scope",
]


@pytest.mark.parametrize(("path", "kind", "name"), LAYOUTS)
def test_each_layout_is_known(path: str, kind: WorkloadKind, name: str) -> None:
    assert workload_of([ControlGroup(path)]) == ProcessWorkload(kind, name)
    assert job_of([ControlGroup(path)]) == (name if kind in HELD_BY_ROOT else "")


@pytest.mark.parametrize("path", NOTHING)
def test_a_name_that_only_resembles_a_workload_is_none(path: str) -> None:
    assert workload_of([ControlGroup(path)]) is None


def test_in_version_1_one_hierarchy_that_knows_is_enough() -> None:
    groups = [
        ControlGroup("/"),
        ControlGroup("/user.slice/user-1000.slice"),
        ControlGroup("/slurm/uid_1000/job_99/step_0"),
    ]
    assert workload_of(groups) == ProcessWorkload(WorkloadKind.JOB, "99")
    assert workload_of(groups[:2]) == ProcessWorkload(WorkloadKind.USER, "1000")
    assert workload_of([]) is None


OWNED_BY_ROOT_WHEREVER = [
    ("/slurm/uid_1000/job_99/step_0", "99"),
    (f"{STEPD}/job_5/step_0/user/task_0", "5"),
    (f"/../../../..{STEPD}/job_5/step_0", "5"),
    (f"/../kubepods-besteffort-pod{SLICE_UID}.slice/cri-containerd-{CONTAINER}.scope", UID),
    (
        f"/../../kubepods-burstable.slice/kubepods-burstable-pod{SLICE_UID}.slice/"
        f"cri-containerd-{CONTAINER}.scope",
        UID,
    ),
    (f"/../../pod{UID}/{CONTAINER}", UID),
    (f"/../../../burstable/pod{UID}/{CONTAINER}", UID),
]


@pytest.mark.parametrize(("path", "job"), OWNED_BY_ROOT_WHEREVER)
def test_owners_that_cannot_be_seen_need_a_path_of_nothing_but_roots_groups(
    path: str, job: str
) -> None:
    assert job_of([ControlGroup(path, checked=False)]) == job
    above = "user.slice/user-1000.slice/user@1000.service"
    assert job_of([ControlGroup(f"/{above}{path}".replace("/..", ""), checked=False)]) == ""
    assert job_of([ControlGroup(f"/../../{above}{path}".replace("/..", ""), checked=False)]) == ""
    assert job_of([ControlGroup(f"/anything{path}".replace("/..", ""), checked=False)]) == ""


def groups(root: Path) -> JobGroups:
    return JobGroups(str(root), os.getuid())


@pytest.mark.parametrize(("path", "kind", "job"), LAYOUTS)
def test_a_job_is_present_while_its_group_exists(
    tmp_path: Path, path: str, kind: WorkloadKind, job: str
) -> None:
    hierarchy = "freezer" if path.startswith("/slurm") else ""  # of version 1
    folder = tmp_path / hierarchy / path[1:]
    folder.mkdir(parents=True)
    found = groups(tmp_path)
    assert found.present([job, "8"]) == ({job} if kind in HELD_BY_ROOT else set())
    assert found.present(["8"]) == set()
    shutil.rmtree(tmp_path)
    assert found.present([job]) == set()


@pytest.mark.parametrize(
    ("file", "empty", "used"),
    [
        ("cgroup.events", "populated 0\nfrozen 0\n", "populated 1\nfrozen 0\n"),
        ("step_0/cgroup.procs", "", "4711\n"),
    ],
    ids=["version 2", "version 1"],
)
def test_a_group_that_a_killed_slurmstepd_left_empty_is_not_a_job(
    tmp_path: Path, file: str, empty: str, used: str
) -> None:
    said = tmp_path / "system.slice/slurmstepd.scope/job_7" / file
    said.parent.mkdir(parents=True)
    found = groups(tmp_path)
    for text, jobs in ((empty, set()), (used, {"7"}), (empty, set())):
        said.write_text(text)
        assert found.present(["7"]) == jobs


def test_a_group_below_one_that_another_user_owns_or_writes_is_not_a_job(tmp_path: Path) -> None:
    name = "slurmstepd.scope/job_7"
    (tmp_path / "user.slice/user-1000.slice/user@1000.service" / name).mkdir(parents=True)
    open_to_all = tmp_path / "system.slice/app.service"
    (open_to_all / name).mkdir(parents=True)
    open_to_all.chmod(0o777)
    assert groups(tmp_path).present(["7"]) == set()
    assert JobGroups(str(tmp_path), os.getuid() + 1).present(["7"]) == set()
    open_to_all.chmod(0o755)
    assert groups(tmp_path).present(["7"]) == {"7"}


def test_a_group_that_moved_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "system.slice/slurmstepd.scope/job_7").mkdir(parents=True)
    found = groups(tmp_path)
    assert found.present(["7"]) == {"7"}
    (tmp_path / "system.slice").rename(tmp_path / "batch.slice")
    assert found.present(["7"]) == {"7"}
