from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from zeus.serving import bench
from zeus.serving.command import main
from zeus.serving.gpus import chosen, engines_of
from zeus.serving.rows import RequestEnergy

HOUR_S = 1_700_000_000.0


def _log(directory: Path) -> Path:
    """Two tenants, one refused request, 100 J idle."""
    path = directory / "requests.jsonl"
    lines = []
    for n in range(4):
        joules = math.nan if n == 3 else 10.0 * (n + 1)
        row = RequestEnergy(
            f"r{n}",
            *(joules, joules / 2, joules / 2, joules * 0, joules / 100, joules / 20),
            "regression",
            "too few" if n == 3 else "",
            "even" if n % 2 == 0 else "",
            "task" if n < 3 else "",
            end_ns=n * 3600 * 10**9,
            decode_tokens=10,
        )
        stamp = {"settled_s": HOUR_S, "settled_ns": 3 * 3600 * 10**9, "model": "m"}
        lines.append(row.as_json("0", stamp))
    totals = {"measured_j": 165.0, "requests_j": 60.0, "idle_j": 100.0, "unattributed_j": 5.0}
    lines.append(json.dumps({"settled": totals}))
    path.write_text("\n".join(lines) + "\n")
    return path


def _report(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["report", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_report_sums_by_tenant(tmp_path):
    text = _report(str(_log(tmp_path)), "--by", "tenant", "--csv")

    rows = {row["tenant"]: row for row in csv.DictReader(io.StringIO(text))}
    assert set(rows) == {"even", "(none)"}
    assert float(rows["even"]["joules"]) == 40
    assert float(rows["even"]["p50_j"]) == 20
    assert float(rows["even"]["j_per_output_token"]) == 2
    assert (rows["(none)"]["requests"], rows["(none)"]["refused"]) == ("2", "1")


def test_a_task_of_several_requests_is_one_line(tmp_path):
    text = _report(str(_log(tmp_path)), "--by", "group", "--csv", "--idle", "proportional")

    rows = {row["group"]: row for row in csv.DictReader(io.StringIO(text))}
    assert set(rows) == {"task", "(none)"}
    assert (rows["task"]["requests"], rows["task"]["refused"]) == ("3", "0")
    assert (float(rows["task"]["joules"]), float(rows["task"]["idle_j"])) == (60, 100)


@pytest.mark.parametrize(
    ("idle", "expected"),
    [
        ("exclude", {"even": 0.0, "(none)": 0.0}),
        ("proportional", {"even": 100 * 2 / 3, "(none)": 100 / 3}),
        ("owner", {"even": 0.0, "(none)": 0.0, "owner": 100.0}),
    ],
)
def test_a_report_distributes_idle_energy(tmp_path, idle, expected):
    text = _report(str(_log(tmp_path)), "--by", "tenant", "--csv", "--idle", idle)

    rows = {row["tenant"]: float(row["idle_j"]) for row in csv.DictReader(io.StringIO(text))}
    assert rows == pytest.approx(expected)


def test_a_report_for_people_shows_the_sum_beside_zeusds(tmp_path):
    picture = tmp_path / "report.png"
    text = _report(str(_log(tmp_path)), "--by", "hour", "--plot", str(picture))

    assert text.count("2023-11-1") == 4
    assert "measured by zeusd                165.0 J" in text
    assert picture.stat().st_size > 1000


def test_a_last_line_that_was_not_written_to_its_end_is_left_out(tmp_path):
    """As after a crash of the service, or while it writes."""
    path = _log(tmp_path)
    whole = _report(str(path))
    path.write_text(path.read_text() + '{"request": "x", "jou')
    assert _report(str(path)) == whole


def test_a_line_that_is_none_is_named(tmp_path):
    path = _log(tmp_path)
    whole = path.read_text()
    for lines, says in (
        (whole + '{"request": "x"}\n', "line 6: joules is missing"),
        (whole + "[1]\n", "line 6: "),
        (whole.replace('"joules": 10.0', '"joules": -10.0'), "line 1: joules: Input should be "),
        (whole.replace('"joules": 10.0', '"joules": NaN'), "line 1: joules: Input should be a"),
        (re.sub('"settled_s": [0-9.e+]+', '"settled_s": 1.7e12', whole), "settled_s: Input"),
        (re.sub('"decode_tokens": [0-9]+', '"decode_tokens": -1', whole), "decode_tokens: Input"),
        (whole.replace('"idle_j": 100.0', '"idle_j": -100.0'), "line 5: settled.idle_j: Input"),
        (whole + whole, "line 6: this line was there before; give each log once"),
        ("", "has no settled requests yet"),
    ):
        path.write_text(lines)
        result = CliRunner().invoke(main, ["report", str(path)])
        assert result.exit_code == 1
        assert result.output.startswith(f"Error: {path}")
        assert says in result.output
        assert result.output.count("\n") == 1

    path.write_bytes(b"\x1f\x8b\x08")  # half of a compressed one
    result = CliRunner().invoke(main, ["report", str(path)])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {path} is not")


def test_a_log_counts_once_and_no_chart_replaces_it(tmp_path):
    path = _log(tmp_path)
    (tmp_path / "copy.svg").write_text(path.read_text())
    for more, says in (
        ([str(path)], "was there before"),
        ([str(tmp_path / "copy.svg")], "was there before"),
        (["--plot", str(tmp_path / "copy.svg"), str(tmp_path / "copy.svg")], "is read by this"),
    ):
        result = CliRunner().invoke(main, ["report", str(path), *more])
        assert result.exit_code == 1
        assert says in result.output


def test_two_sides_of_a_server_are_joined_by_request(tmp_path):
    (tmp_path / "decode").mkdir()
    prefill, decode = _log(tmp_path), _log(tmp_path / "decode")
    lines = decode.read_text().splitlines()
    lines[0] = lines[0].replace('"r0"', '"of one side"')
    text = "\n".join(lines) + "\n"
    decode.write_text(text.replace("1700000000.0", "1700000001.0"))
    logs = [str(prefill), str(decode), "--by", "tenant", "--csv", "--idle", "proportional"]

    apart, joined = (
        {row["tenant"]: row for row in csv.DictReader(io.StringIO(_report(*logs, *more)))}
        for more in ((), ("--join",))
    )

    assert [apart["even"][name] for name in ("requests", "mean_j")] == ["4", "20.0"]
    assert joined["even"]["requests"] == "3"  # r0, r2 of both sides, and one of one side
    assert [joined["(none)"][name] for name in ("requests", "refused", "p50_j")] == [
        *("2", "1", "40.0"),
    ]
    for name in ("joules", "idle_j", "j_per_output_token"):
        assert float(joined["even"][name]) == pytest.approx(float(apart["even"][name]))


# ------------------------------------------------------------------------------------------ bench


class FakeClient:
    """Two GPUs of 100 J each, in any window."""

    def windows(self, gpus: Any, windows: Any = ()) -> dict[str, Any]:
        values = [100_000_000] * len(windows)
        return {
            gpu: SimpleNamespace(energy_uj=values, uncertainty_uj=[2_000_000] * len(windows))
            for gpu in gpus
        }


def test_a_benchmark_gets_its_energy(tmp_path):
    path = tmp_path / "result.json"
    path.write_text('{"total_output_tokens": 50, "total_input_tokens": 0}')
    status, energy = bench.run([sys.executable, "-c", "exit(3)"], FakeClient(), ["a", "b"])
    found = bench.add(path, energy)

    assert status == 3
    assert json.loads(path.read_text()) == found
    assert found["energy_joules"] == 200
    assert found["joules_per_output_token"] == 4
    assert "joules_per_input_token" not in found
    assert found["mean_power_watts"] == pytest.approx(200 / found["energy_window_seconds"])

    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert bench.run(killed, FakeClient(), ["a"])[0] == 137

    path.write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        bench.add(path, energy)


def test_a_missing_command_is_not_found_with_any_folders_in_the_path(monkeypatch):
    def denied(*_: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", "no-such-command")  # of a closed folder

    for run in (subprocess.run, denied):
        monkeypatch.setattr(bench.subprocess, "run", run)
        with pytest.raises(
            ValueError, match=r"^no-such-command: command not found; check the name"
        ):
            bench.run(["no-such-command"], FakeClient(), ["a"])
    with pytest.raises(PermissionError):
        bench.run([__file__], FakeClient(), ["a"])


def test_the_result_is_where_the_benchmark_was_told():
    command = ["vllm", "bench", "--result-dir", "out", "--result-filename=x.json", "--seed"]
    assert bench.result_path(command) == Path("out/x.json")
    assert bench.result_path(["vllm", "bench"]) is None


# ---------------------------------------------------------------------------------------- options

GPUS: list[Any] = [SimpleNamespace(uuid=f"GPU-{n}", index=n) for n in range(4)]


def test_engines_are_named_with_their_gpus():
    assert engines_of((), GPUS) == {"0": [f"GPU-{n}" for n in range(4)]}
    assert engines_of(("a=0,1", "b=GPU-3"), GPUS) == {"a": ["GPU-0", "GPU-1"], "b": ["GPU-3"]}
    assert chosen(GPUS, ("1", "GPU-1", "1")) == ["GPU-1"], "its energy counts once"
    for wrong in (("a",), ("=0",), ("a=9",), ("a=0", "a=1"), ("a=0", "b=0")):
        with pytest.raises(ValueError, match=r"engine|GPU 9"):
            engines_of(wrong, GPUS)
    with pytest.raises(ValueError, match="no GPU"):
        chosen([], ())
