"""Which job a control group's path names."""

from __future__ import annotations

import pytest

from zeusd.core.jobs import job_of


@pytest.mark.parametrize(
    ("cgroup", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_1234/step_0/user/task_0", "1234"),
        ("0::/system.slice/host_slurmstepd.scope/job_7", "7"),
        ("5:devices:/slurm/uid_1000/job_99/step_batch\n1:name=systemd:/user.slice", "99"),
        (
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
            "1f2e3d4c_0000_1111_2222_333344445555.slice/cri-containerd-abc.scope",
            "1f2e3d4c-0000-1111-2222-333344445555",
        ),
        (
            "0::/kubepods/besteffort/pod1f2e3d4c-0000-1111-2222-333344445555/abcdef",
            "1f2e3d4c-0000-1111-2222-333344445555",
        ),
        ("0::/user.slice/user-1000.slice/session-2.scope", ""),
        ("0::/user.slice/my_job_12/x", ""),
        ("0::/job_12x/y", ""),
        ("", ""),
    ],
)
def test_the_job_is_the_batch_systems_and_nobody_elses(cgroup: str, job: str) -> None:
    assert job_of(cgroup) == job
