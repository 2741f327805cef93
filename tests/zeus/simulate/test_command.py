"""`python -m zeus.simulate`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.zeus.simulate.test_groups import tables
from tests.zeus.simulate.test_plots import runs, texts
from zeus.simulate.command import main
from zeus.simulate.groups import by_group, read_groups, synthetic_groups
from zeus.simulate.results import write_rows


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_groups_are_synthesized(tmp_path: Path) -> None:
    path = tmp_path / "groups.csv.xz"
    made = run("synthetic-groups", "--groups", "8", "--seed", "3", "-o", path)
    assert made.exit_code == 0, made.output
    assert read_groups(path) == by_group(synthetic_groups(8, 3))
    assert f"{len(synthetic_groups(8, 3))} jobs in 8 groups" in made.output


def test_groups_are_made_from_alibabas_tables(tmp_path: Path) -> None:
    jobs, tags = tables(tmp_path)
    path = tmp_path / "groups.csv"
    made = run("make-groups", "--job", jobs, "--tags", tags, "-o", path)
    assert made.exit_code == 0, made.output
    assert len(read_groups(path)) == 7
    lines = [line.split() for line in made.output.splitlines()[1:]]
    assert [line[0] for line in lines] == [
        "movielens-1m", "cifar100", "squad", "sentiment140", "librispeech", "imagenet"
    ]  # fmt: skip
    assert lines[0][1:] == ["2", "groups", "4", "jobs,", "mean", "11", "s"]
    refused = run("make-groups", "--job", jobs, "--tags", tags, "-o", path, "--least-jobs", "3")
    assert refused.exit_code == 1
    assert "0 groups of 3 or more" in refused.output


def test_results_are_shown_and_drawn(tmp_path: Path) -> None:
    first, second, picture = (tmp_path / name for name in ("a.csv", "b.parquet", "all.svg"))
    write_rows(runs(), first)
    write_rows(runs(policy="gts"), second)
    shown = run("show", first, second)
    assert shown.exit_code == 0, shown.output
    headings = [line for line in shown.output.splitlines() if "recurrences, eta" in line]
    assert [heading.split(":")[0] for heading in headings] == ["gp", "gts"]
    drawn = run("plot", first, second, "-o", picture, "--kind", "cost", "--kind", "regret")
    assert drawn.exit_code == 0, drawn.output
    assert "cumulative regret" in texts(picture)
    assert "batch size" not in texts(picture).splitlines()


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("synthetic-groups", "--groups", "0", "-o", "x.csv"), "at least one group, not 0"),
        (("synthetic-groups", "-o", "/nowhere/x.csv"), "/nowhere/x.csv cannot be used: No such"),
        (
            ("make-groups", "--job", "/no", "--tags", "/no", "-o", "x"),
            "/no cannot be read: No such",
        ),
        (("show", "/no.csv"), "/no.csv cannot be read: No such"),
        (("plot", "/no.csv", "-o", "x.png"), "/no.csv cannot be read: No such"),
    ],
)
def test_errors_are_reported_in_one_sentence(arguments: tuple[str, ...], wrong: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 1
    assert found.output.startswith("Error: ")
    assert wrong in found.output
    assert found.output.count("\n") == 1


def test_it_can_be_run_as_a_module_and_imports_little() -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['zeus.simulate', '--help']\n"
        "try:\n    runpy.run_module('zeus.simulate', run_name='__main__')\n"
        "finally:\n    print({'numpy', 'matplotlib', 'pyarrow'} & {*sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.endswith("set()\n")
    for name in ("make-groups", "synthetic-groups", "show", "plot"):
        assert name in found.stdout
