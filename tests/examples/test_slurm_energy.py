"""The plugin `acct_gather_energy/zeusd` by itself: which job it asks for, against a real zeusd.

Slurm 26.05 is not here: what it would do is done by a program that calls the plugin's functions."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import RunningDaemon, configuration, running_daemon, wait_for

pytestmark = pytest.mark.needs("slurm", "gcc")

PLUGIN = Path(__file__).parents[2] / "examples/slurm/energy/acct_gather_energy_zeusd.c"
SLUID = "sEKNKTV3WPV500"

CALLS = """
#include PLUGIN
int main(void)
{
    char line[16];
    init();
    while (fgets(line, sizeof line, stdin)) {
        acct_gather_energy_t energy;
        acct_gather_energy_p_get_data(ENERGY_DATA_NODE_ENERGY_UP, &energy);
        printf("%s %d %" PRIu64 "\\n", step.job, step.begun, energy.consumed_energy);
        fflush(stdout);
        step.polled = 0;
    }
    return 0;
}
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("ledger")
    text = f'[accounting]\ndirectory = "{folder}"\n'
    with running_daemon("--simulate", "2xv100-pcie", *configuration(folder, text)) as running:
        yield running


@pytest.fixture
def plugin(daemon: RunningDaemon, tmp_path: Path) -> Path:
    """A program that is a step of a job, as far as the plugin knows."""
    program = tmp_path / "step"
    defines = {"PLUGIN": PLUGIN, "SOCKET": daemon.socket, "CGROUP": tmp_path / "cgroup"}
    subprocess.run(
        [
            *("gcc", "-std=gnu11", "-Wall", "-Wno-unused-parameter", "-x", "c", "-o", program, "-"),
            *(f'-D{name}="{value}"' for name, value in defines.items()),
        ],
        input=CALLS,
        text=True,
        check=True,
    )
    return program


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("0::/system.slice/slurmstepd.scope/job_77/step_extern/slurm", "77"),
        ("0::/system.slice/n1_slurmstepd.scope/job_77/step_batch/slurm", "77"),
        (f"0::/system.slice/slurmstepd.scope/{SLUID}/step_0/slurm", SLUID),
        (f"0::/site.slice/n1_slurmstepd.scope/{SLUID}/step_batch/slurm", SLUID),
        (f"9:freezer:/other\n3:devices:/slurm/uid_0/job_77/step_0\n0::/{SLUID}", "77"),
    ],
)
def test_a_step_is_charged_what_its_job_is(
    daemon: RunningDaemon, plugin: Path, group: str, name: str
) -> None:
    plugin.with_name("cgroup").write_text(f"{group}\n")
    with (
        daemon.client() as zeusd,
        subprocess.Popen(
            [plugin], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as step,
    ):
        gpu, other = (one.uuid for one in zeusd.node().gpus)
        zeusd.allocate(gpu, "77", uid=0, run=SLUID, control_group=SLUID)
        zeusd.allocate(other, "78", uid=0, run=SLUID[:-1] + "1")

        def asks() -> tuple[str, int, int]:
            assert step.stdin is not None
            assert step.stdout is not None
            step.stdin.write("\n")
            step.stdin.flush()
            job, begun, joules = step.stdout.readline().split()
            return job, int(begun), int(joules)

        wait_for(lambda: asks()[1], "zeusd to answer")
        job, _, joules = wait_for(lambda: (said := asks())[2] >= 30 and said, "energy of the job")
        assert job == name
        usage = zeusd.usage([0, 2**40 // 900 * 900], "job", name=name)
        (run,) = usage.sums
        assert (run.name, run.run) == ("77", SLUID)
        assert joules <= (run.active_uj + run.idle_uj) / 1e6
        zeusd.deallocate("77")
        zeusd.deallocate("78")
        assert step.stdin is not None
        step.stdin.close()


@pytest.mark.parametrize(
    "group",
    [
        "0::/user.slice/user-1000.slice/session-1.scope",
        f"0::/user.slice/user-1000.slice/user@1000.service/{SLUID}",
        "0::/system.slice/slurmstepd.scope/sEKNKTV3WPV50/step_0",  # too short
        "0::/system.slice/slurmstepd.scope/sEKNKTV3WPV5000/step_0",
        "0::/system.slice/slurmstepd.scope/sEKNKTV3WPVI00/step_0",  # no letter of base 32
        "0::/system.slice/slurmstepd.scope/system",
    ],
)
def test_processes_outside_a_job_request_nothing(plugin: Path, group: str) -> None:
    plugin.with_name("cgroup").write_text(f"{group}\n")
    said = subprocess.run([plugin], input="\n", capture_output=True, text=True, check=True).stdout
    assert said.split() == ["0", "0"]
