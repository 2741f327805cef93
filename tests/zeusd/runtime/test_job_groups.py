"""Which jobs have a control group, in trees of folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeusd.runtime.control_groups import JobGroups

UID = "1f2e3d4c-0000-1111-2222-333344445555"
SLICE_UID = UID.replace("-", "_")
STATIC_UID = UID.replace("-", "")
CONTAINER = "0123456789abcdef" * 4
SLUID = "sEKNKTV3WPV500"

# Where the group of a job or pod is, below the place where control groups are mounted.
LAYOUTS = [
    ("system.slice/slurmstepd.scope/job_7/step_0/user", "7"),
    ("system.slice/node1_slurmstepd.scope/job_7", "7"),
    ("batch.slice/batch-gpu.slice/slurmstepd.scope/job_7", "7"),
    (f"system.slice/slurmstepd.scope/{SLUID}/step_0", SLUID),
    (f"system.slice/docker-{CONTAINER}.scope/system.slice/slurmstepd.scope/job_7", "7"),
    ("freezer/slurm/uid_1000/job_7/step_0", "7"),
    ("devices/slurm_node1/uid_1000/job_7", "7"),
    (f"kubepods.slice/kubepods-pod{SLICE_UID}.slice/cri-containerd-{CONTAINER}.scope", UID),
    (f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE_UID}.slice", UID),
    (f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE_UID}.slice", UID),
    (f"kubepods/burstable/pod{UID}/{CONTAINER}", UID),
    (f"memory/kubepods/pod{UID}", UID),
    (f"kubepods/pod{STATIC_UID}", STATIC_UID),
    (f"kubepods.slice/kubepods-pod{STATIC_UID}.slice", STATIC_UID),
]


def groups(root: Path) -> JobGroups:
    return JobGroups(str(root), os.getuid())


@pytest.mark.parametrize(("path", "job"), LAYOUTS)
def test_a_job_is_present_while_its_group_exists(tmp_path: Path, path: str, job: str) -> None:
    (tmp_path / path).mkdir(parents=True)
    found = groups(tmp_path)
    assert found.present([job, "8"]) == {job}
    assert found.present(["8"]) == set()
    for folder in [tmp_path / path, *(tmp_path / path).parents]:
        if folder == tmp_path:
            break
        folder.rmdir()
    assert found.present([job]) == set()


def test_a_group_that_a_killed_slurmstepd_left_empty_is_not_a_job(tmp_path: Path) -> None:
    group = tmp_path / "system.slice/slurmstepd.scope/job_7"
    group.mkdir(parents=True)
    found = groups(tmp_path)
    for populated, jobs in (("0", set()), ("1", {"7"}), ("0", set())):
        (group / "cgroup.events").write_text(f"populated {populated}\nfrozen 0\n")
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
