"""Runs the code of simulating.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests import snippets
from zeus.simulate.command import main
from zeus.simulate.groups import synthetic_groups
from zeus.simulate.workloads import WORKLOADS

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/train/simulating.md"


def test_the_python_runs_and_so_do_commands_on_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = snippets.of(PAGE)
    assert len(blocks) == 2
    first = blocks[0].run()
    assert len([run for run in first["history"] if run.reached]) == 50
    # In this process: pytest's own module is not to be imported again.
    second = snippets.Block(
        blocks[1].path, blocks[1].line, blocks[1].source.replace("processes=2", "processes=1")
    )
    assert not second.run()["study"].failures
    assert "pruning-gts: cifar100, shufflenetv2, adadelta on a40" in capsys.readouterr().out
    for words in re.findall(r"`python -m zeus\.simulate ([^`]+)`", PAGE.read_text()):
        if not words.startswith("make-groups"):
            found = CliRunner().invoke(main, shlex.split(words))
            assert found.exit_code == 0, (words, found.output)
    assert (tmp_path / "regret.svg").is_file()
    assert (tmp_path / "groups.csv").is_file()


def test_the_pages_match_the_program() -> None:
    job = synthetic_groups()[0]
    row = f"{job.group},{job.start_time},{job.end_time},{job.dataset},{job.runtime_ratio}"
    assert row in PAGE.read_text()
    readme = (ROOT / "examples/trace_driven/README.md").read_text()
    for one in WORKLOADS:
        cells = (one.dataset, one.network, one.optimizer, one.target_metric, one.max_epochs)
        assert f"| {' | '.join(map(str, cells))} | {one.default_bs} |" in readme
