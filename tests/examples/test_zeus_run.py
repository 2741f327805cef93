"""examples/zeus_run: a recurring job, as its README starts it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.examples.programs import EXAMPLES, environment, run, with_torch
from zeus.run import read_history

FOLDER = EXAMPLES / "zeus_run"
SMALL = [
    *("--samples", "1024", "--b_0", "128", "--b_min", "128", "--b_max", "256", "--seed", "1"),
    *("--target_metric", "0.3", "--num_recurrence", "3", "--profile_iters", "1,2"),
]


def test_a_job_recurs_and_trains_on_a_simulated_gpu(tmp_path: Path) -> None:
    command = with_torch("run_zeus.py", "--simulate", "v100", "--log_base", tmp_path, *SMALL)
    ran = run(command, FOLDER, environment(""))
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert ran.stderr == ""
    (folder,) = tmp_path.iterdir()
    history = read_history(folder)
    assert read_history(folder / "history.py") == history
    assert [one.reached for one in history].count(True) == 3
    assert history[0].bs == 128
    sizes = {one.bs for one in history}
    assert sizes <= {128, 256}

    results = sorted(folder.glob("*.train.json"))
    assert len(results) == len(history)
    for path, entry in zip(results, history, strict=True):
        result = json.loads(path.read_text())
        assert path.name.endswith(f"+bs{entry.bs}.train.json")
        assert (result["energy"], result["time"]) == (entry.energy, entry.time)
        # A V100 draws at least 26 W idle and at most 250 W.
        assert 26 * entry.time < entry.energy < 250 * entry.time
        # It really trained: the accuracy is reached in the last epoch and in no other.
        log = (folder / f"{path.name.partition('+bs')[0]}.train.log").read_text()
        percents = [float(found) for found in re.findall(r"accuracy ([\d.]+)%", log)]
        assert len(percents) == result["num_epochs"] > 1
        assert [percent >= 30 for percent in percents[:-1]] == [False] * (len(percents) - 1)
        if entry.reached:
            assert percents[-1] >= 30
        assert log in ran.stdout

    # Of each size all limits are measured, or those for which its runs had the time.
    assert json.loads((folder / "bs128.power.json").read_text())["optimal_pl"] >= 100_000
    for path in folder.glob("*.power.json*"):
        tried = list(json.loads(path.read_text())["train_power"])
        assert (
            tried
            == ["250000", "225000", "200000", "175000", "150000", "125000", "100000"][: len(tried)]
        )
    assert len(list(folder.glob("*.power.json*"))) == len(sizes)
    assert "The last run took " in ran.stdout


def test_errors_are_reported_in_one_sentence(tmp_path: Path) -> None:
    arguments = ["--log_base", str(tmp_path), "--num_recurrence", "1"]
    for more, message in [
        (["--simulate", "9xnothing"], "zeusd did not start: "),
        ([], "no zeusd listens at /nowhere"),
        (["--policy", "best"], "there is no policy 'best'"),
    ]:
        ran = run(with_torch("run_zeus.py", *arguments, *more), FOLDER, environment("/nowhere"))
        assert ran.returncode == 2, ran.stderr
        assert ran.stdout == ""
        assert ran.stderr.startswith(f"run_zeus.py: {message}")
        assert "Traceback" not in ran.stderr
    assert not list(tmp_path.iterdir())
