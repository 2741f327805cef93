"""The files of recurring jobs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from zeus.analyze import HistoryEntry
from zeus.optimizer.power_limit import ProfileError
from zeus.run import files, read_history
from zeus.run.files import FileError, PowerByLimit
from zeus.run.power_json import PowerJson

HISTORY = [
    HistoryEntry(bs=1024, pl=None, energy=1234567.125, reached=True, time=5432.0),
    HistoryEntry(bs=512, pl=None, energy=0.1 + 0.2, reached=False, time=1e-3),
    HistoryEntry(bs=8, pl=125, energy=3.0, reached=True, time=2.0),
]


def test_names() -> None:
    job_id = files.job_id(3, 12)
    assert job_id == "rec03+try12"
    assert str(files.train_log("/logs", job_id)) == "/logs/rec03+try12.train.log"
    assert str(files.train_json("/logs", job_id, 64)) == "/logs/rec03+try12+bs64.train.json"
    assert str(files.power_json("/logs", 64)) == "/logs/bs64.power.json"


def test_a_history_is_read_in_both_forms(tmp_path: Path) -> None:
    files.write_history(tmp_path, HISTORY)
    assert read_history(tmp_path) == HISTORY
    assert read_history(tmp_path / "history.json") == HISTORY
    assert read_history(str(tmp_path / "history.py")) == HISTORY
    # A reader of ml-energy/zeus's file can read ours.
    names = {"HistoryEntry": HistoryEntry}
    assert eval((tmp_path / "history.py").read_text(), names) == HISTORY
    (tmp_path / "history.json").unlink()
    assert read_history(tmp_path) == HISTORY
    files.write_history(tmp_path, [])
    assert read_history(tmp_path / "history.json") == read_history(tmp_path / "history.py") == []
    with pytest.raises(FileNotFoundError):
        read_history(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("history.py", "[__import__('os').system('touch PWNED')]"),
        ("history.py", "[HistoryEntry(bs=open('PWNED', 'w').fileno(), pl=None)]"),
        ("history.py", "[HistoryEntry(8, None, 1.0, True, 1.0)]"),
        ("history.py", "[HistoryEntry(bs=8, pl=None, energy=1.0, reached=1, time=1.0)]"),
        ("history.py", "[HistoryEntry(bs=8, pl=None, energy=1e999, reached=True, time=1.0)]"),
        ("history.py", "[HistoryEntry(bs=8"),
        ("history.py", "HistoryEntry(bs=8)"),
        ("history.py", "(" * 100_000),
        ("history.json", '[{"bs": 8}]'),
        ("history.json", '[{"bs": "8", "pl": null, "energy": 1, "reached": true, "time": 1}]'),
        ("history.json", "[8]"),
        ("history.json", "8"),
        ("history.json", "no JSON"),
    ],
)
def test_an_invalid_history_is_refused_and_not_run(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} is not a history of runs: "):
        read_history(tmp_path / name)
    assert not (tmp_path / "PWNED").exists()


def test_a_result_of_the_reference_is_read(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text('{"energy": 5.0, "time": 2.0, "cost": 9.0, "num_epochs": 3, "reached": true}')
    result = files.load_result(path)
    assert (result.energy, result.num_epochs, result.reached) == (5.0, 3, True)
    assert (result.overhead, result.stopped_by_cost) == (0.0, False)
    path.write_text('{"energy": 5.0, "time"')
    with pytest.raises(FileError, match=r"one\.json is not a result of a run"):
        files.load_result(path)


def test_a_profile_has_the_form_of_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "bs8.power.json"
    profile = PowerByLimit(
        job_id="rec01+try01",
        train_power={250_000: 200.0, 100_000: 99.5},
        train_throughput={250_000: 10.0, 100_000: 7.0},
        eval_power={100_000: 80.0},
        eval_throughput={100_000: 30.0},
        optimal_pl=100_000,
        gpus=["V100"],
    )
    files.save(path, profile)
    written = json.loads(path.read_text())
    assert written["train_power"] == {"250000": 200.0, "100000": 99.5}
    assert written["optimal_pl"] == 100_000
    assert files.load_profile(path) == profile
    assert list(tmp_path.iterdir()) == [path]

    kept = PowerJson(path, "rec02+try01", iterations=40)
    first, second = kept.load(path).measurements
    assert (first.power_limit, first.time, first.energy) == (250, 4.0, 800.0)
    assert (second.power_limit, second.energy / second.time) == (100, 99.5)
    files.save(path, profile.model_copy(update={"train_power": {250_000: 200.0}}))
    with pytest.raises(ProfileError, match="not both the power and the throughput"):
        kept.load(path)


def test_without_pytorch_the_loader_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "zeus.run.dataloader", raising=False)
    with pytest.raises(ImportError, match=r"not installed; pip install 'zeusd\[torch\]'"):
        importlib.import_module("zeus.run.dataloader")
