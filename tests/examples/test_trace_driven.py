"""examples/trace_driven, as its README starts it."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.examples.programs import EXAMPLES, python
from tests.preloaded import preloaded
from tests.support import TIMEOUT_S, ending, wait_for
from zeus.job import Job
from zeus.simulate.groups import synthetic_groups, write_groups
from zeus.simulate.results import RunRow, read_rows
from zeus.simulate.study import Case, run_study

FOLDER = EXAMPLES / "trace_driven"
IMPORTED = ("numpy", "matplotlib.figure", "matplotlib.backends.backend_agg", "rich.table")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return preloaded(*IMPORTED).run(*map(str, arguments), cwd=FOLDER, env=os.environ)


def test_one_job_with_the_references_options(tmp_path: Path) -> None:
    out, picture = tmp_path / "runs.csv", tmp_path / "runs.png"
    ran = run(
        "run_single.py",
        *("--dataset", "librispeech", "--model", "deepspeech2", "--optimizer", "adamw"),
        *("--target_metric", "40.0", "--max_epochs", "16", "--b_0", "192", "--gpu", "v100"),
        *("--eta_knob", "0.5", "--beta_knob", "2.0", "--seed", "1"),
        *("--policy", "pruning-gts", "--output", out, "--plot", picture, "--verbose"),
    )
    assert ran.returncode == 0, ran.stderr
    rows = read_rows(out)
    # As published of the reference's simulator.
    sizes = [192, 156, 128, 96, 72, 64, 56, 48, 32, 24, 16, 12, 8, 48, 32, 24, 16, 12]
    assert [row.batch_size for row in rows[:18]] == sizes
    assert [row.run for row in rows if not row.reached] == [13]
    first = rows[0]
    assert (first.power_limit, first.energy, first.time, first.cost) == (
        225,
        pytest.approx(8_495_173.59, abs=0.01),
        pytest.approx(56_443.49, abs=0.01),
        pytest.approx(11_303_022.51, abs=0.01),
    )
    assert rows[-1].recurrence == 210
    assert ran.stdout.count("recurrence ") == len(rows)
    assert "batch size 8, 125 W" in ran.stdout
    assert "target not reached" in ran.stdout
    assert "Against the default batch size" in ran.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_job_with_several_seeds_and_other_options(tmp_path: Path) -> None:
    out = tmp_path / "runs.csv"
    ran = run(
        *("run_single.py", "--num_recurrence", "120", "--seed", "4", "--seeds", "2"),
        *("--eta_knob", "0.25", "--beta_knob", "3", "--window_size", "2", "--output", out),
        *("--policy", "pruning-gts"),
    )
    assert ran.returncode == 0, ran.stderr
    job = Job("librispeech", "deepspeech2", "adamw", 40.0, 16, 192)
    usual = Case(job, policy="pruning-gts", num_recurrence=120, window_size=2)
    cases = [replace(usual, seed=seed, eta_knob=0.25, beta_knob=3.0) for seed in (4, 5)]
    assert read_rows(out) == run_study(cases).rows


def test_a_clusters_groups_with_the_references_options(tmp_path: Path) -> None:
    out = tmp_path / "runs.parquet"
    ran = run(
        *("run_alibaba.py", "--gpu", "v100", "--eta_knob", "0.5", "--beta_knob", "2.0"),
        *("--num_groups", "12", "--num_jobs", "15", "--processes", "2", "--output", out),
        *("--policy", "gp", "--policy", "pruning-gts"),
    )
    assert ran.returncode == 0, ran.stderr
    assert "made up" in ran.stderr
    rows = read_rows(out)
    assert {row.policy for row in rows} == {"gp", "pruning-gts"}
    assert {row.seed for row in rows if row.name == "synthetic-000"} == {0x25070499}
    per_group: dict[tuple[str, str], list[RunRow]] = {}
    for row in rows:
        per_group.setdefault((row.policy, row.name), []).append(row)
    assert len(per_group) == 2 * 12
    assert all(sum(row.reached for row in some) <= 15 for some in per_group.values())
    shown = [line.split()[0] for line in ran.stdout.splitlines() if line]
    assert shown.count("movielens-1m") == shown.count("imagenet") == 2


def test_groups_may_be_given(tmp_path: Path) -> None:
    groups = tmp_path / "groups.csv.xz"
    write_groups(synthetic_groups(2, 5), groups)
    ran = run("run_alibaba.py", "--groups", groups, "--policy", "pruning-gts", "--gpu", "a40")
    assert ran.returncode == 0, ran.stderr
    assert "2 workloads on a40, 2 jobs" in ran.stdout
    assert not ran.stderr


def workers(pid: int) -> list[int]:
    """The processes that a study has started, and that work: they have NumPy."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    commands = {int(one): Path(f"/proc/{one}/cmdline").read_bytes() for one in pids}
    started = [one for one, command in commands.items() if b"spawn_main" in command]
    return [one for one in started if b"numpy" in Path(f"/proc/{one}/maps").read_bytes()]


@pytest.mark.parametrize(
    ("who", "how", "code", "told"),
    [
        ("study", signal.SIGINT, 130, ""),
        ("worker", signal.SIGKILL, 2, "run_single.py: a process of the study was killed, perhaps"),
    ],
)
def test_a_study_that_is_ended_leaves_no_process(
    who: str, how: signal.Signals, code: int, told: str
) -> None:
    command = python("run_single.py", "--seeds", "20000", "--processes", "2")
    running = subprocess.Popen(
        command,
        cwd=FOLDER,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell runs in the background, these tests perhaps, ignores it, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with ending(running) as study:
        pids = wait_for(lambda: len(workers(study.pid)) == 2 and workers(study.pid), "two workers")
        os.kill(study.pid if who == "study" else pids[0], how)
        _, stderr = study.communicate(timeout=TIMEOUT_S)
    assert study.returncode == code
    assert stderr.startswith(told)
    assert "Traceback" not in stderr
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "workers end")


@pytest.mark.parametrize(
    ("arguments", "code", "wrong"),
    [
        (("run_single.py", "--b_0", "7"), 1, "the default batch size 7 of Job(librispeech"),
        (("run_single.py", "--plot", "x.jpg"), 2, "--plot must end with .png, .svg, .pdf, not be"),
        (("run_single.py", "--output", "/nowhere/x.csv"), 2, "there is no folder /nowhere"),
        (("run_alibaba.py", "--groups", "/no.csv"), 2, "/no.csv cannot be read: No such file"),
        (
            ("run_alibaba.py", "--num_groups", "7", "--policy", "none"),
            1,
            "7 of 7 jobs (none synthetic-000, none synthetic-001, none synthetic-002, "
            "none synthetic-003, none synthetic-004, ...): there is no policy 'none'",
        ),
    ],
)
def test_errors_are_reported_in_one_sentence(
    arguments: tuple[str, ...], code: int, wrong: str
) -> None:
    ran = run(*arguments)
    assert ran.returncode == code
    last = ran.stderr.splitlines()[-1]
    assert last.startswith(f"{arguments[0]}: {wrong}")
    assert "Traceback" not in ran.stderr
