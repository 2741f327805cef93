"""Each command that reads a table takes what the common reader takes (test_tables.py has all forms
and faults), and refuses the rest with one sentence that names the file."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests import late
from tests.zeus.serving.server import serve
from tests.zeus.serving.test_replay import _save
from tests.zeus.simulate.test_results import ROWS
from zeus.optimizer.pipeline_frequency.command import main as plan
from zeus.serving.command import main as serving
from zeus.simulate.command import main as simulate
from zeus.simulate.groups import read_groups, synthetic_groups, write_groups
from zeus.simulate.results import write_rows
from zeus.simulate.tables import Measurements
from zeus.simulate.workloads import train_trace
from zeusctl.commands.record import _from_recording
from zeusctl.exits import CommandError

PROFILE = "stage,instruction,frequency,time,energy\n" + "".join(
    f"{stage},{name},{mhz},{0.05 * 1410 / mhz},{20 * mhz / 1410}\n"
    for stage in (0, 1)
    for name in ("forward", "backward")
    for mhz in (1410, 1200)
)
POWER = "dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\n" + "".join(
    f"cifar100,shufflenetv2,{size},adadelta,{watts},{9000 / watts},{0.9 * watts}\n"
    for size in (512, 1024)
    for watts in (100, 250)
)
RECORDING = (
    "time,gpu,uuid,power_w,average_power_w,memory_power_w,module_power_w,energy_j,power_limit_w,"
    "gpu_clock_mhz,memory_clock_mhz,temperature_c,throttle_reasons,lost\n"
    "1.5,0,GPU-0,100.5,,,,1,250,1410,1215,40,0,0\n1.6,0,GPU-0,101,,,,11,250,1410,1215,40,0,0\n"
)


@dataclass
class Command:
    """A command, the text of a good table for it, and how to run it: exit code and output."""

    text: str
    run: Callable[[Path], tuple[int, str]]


def _click(command: object, *arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(command, arguments)  # type: ignore[arg-type]  # any command
    assert not found.exception or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


def _call(work: Callable[[], object]) -> tuple[int, str]:
    """What a script or a command makes of an error."""
    try:
        work()
    except (ValueError, CommandError) as error:
        return 1, f"Error: {error}\n"
    return 0, ""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Command]:
    folder = tmp_path_factory.mktemp("tables")
    _save(serve(1, seconds=40), folder)
    write_rows(ROWS, folder / "runs.csv")
    write_groups(synthetic_groups(6), folder / "groups.csv")
    steps, energy, out = (folder / name for name in ("steps.csv", "energy.csv", "out.csv"))
    (folder / "tenants.csv").write_text("request,tenant\nr0,alice\nr1,bob\n")

    def replay(*options: object) -> tuple[int, str]:
        given = {"--steps": steps, "--energy": energy, "--out": out, "--totals": folder / "t.json"}
        given |= dict(zip(options[::2], options[1::2], strict=True))  # type: ignore[arg-type]  # texts
        pairs = [str(one) for pair in given.items() for one in pair]
        return _click(serving, "replay", "--method", "tokens", *pairs)

    def planned(path: Path) -> tuple[int, str]:
        options = ["--num-stages", "2", "--num-mbs", "2", "--plot-interval", "0", "--deadline", "1"]
        target = folder / f"plans-{path.name}-{path.parent.name}"
        return _click(plan, "--inst-profile", str(path), "--output-dir", str(target), *options)

    return {
        "replay --steps": Command(steps.read_text(), lambda path: replay("--steps", path)),
        "replay --energy": Command(energy.read_text(), lambda path: replay("--energy", path)),
        "replay --tenants": Command(
            (folder / "tenants.csv").read_text(), lambda path: replay("--tenants", path)
        ),
        "simulate show": Command(
            (folder / "runs.csv").read_text(), lambda path: _click(simulate, "show", str(path))
        ),
        "groups": Command(
            (folder / "groups.csv").read_text(), lambda path: _call(lambda: read_groups(path))
        ),
        "simulator": Command(POWER, lambda path: _call(lambda: Measurements(train_trace(), path))),
        "planner": Command(PROFILE, planned),
        "plot --recording": Command(
            RECORDING, lambda path: _call(lambda: _from_recording(path, "all"))
        ),
    }


COMMANDS = (
    *("replay --steps", "replay --energy", "replay --tenants", "simulate show"),
    *("groups", "simulator", "planner", "plot --recording"),
)


def _turned(text: str) -> str:
    """Columns in the reverse order, in capitals, with one more."""
    rows = [[*row[::-1], "more"] for row in csv.reader(io.StringIO(text))]
    rows[0] = [name.upper() for name in rows[0]]
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    return file.getvalue()


def _in_parquet(text: str) -> bytes:
    read = late.late("pyarrow.csv").read_csv(io.BytesIO(text.encode()))
    file = io.BytesIO()
    late.late("pyarrow.parquet").write_table(read, file)
    return file.getvalue()


def _in_line_3(text: str) -> str:
    """An unclosed quote, as of a file that was cut off."""
    lines = text.splitlines()
    return "\n".join([*lines[:2], lines[2].rpartition(",")[0]]) + "\n"


READ: dict[str, tuple[str, Callable[[str], str | bytes]]] = {
    "turned": ("t.csv", _turned),
    "compressed by another name": ("t.csv", lambda text: gzip.compress(text.encode())),
    "Parquet by the name of a table": ("t.csv", _in_parquet),
}
REFUSED: dict[str, tuple[Callable[[str], str | bytes], str]] = {
    "a row too short": (_in_line_3, "line 3: it has "),
    "no rows": (lambda text: text.splitlines()[0] + "\n", "no"),
    "half of a Parquet": (lambda text: _in_parquet(text)[:-40], "is not a whole Parquet file"),
}


@pytest.mark.parametrize("form", READ)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_good_table_is_read_in_any_form(
    commands: dict[str, Command], tmp_path: Path, command: str, form: str
) -> None:
    name, made = READ[form]
    data = made(commands[command].text)
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    code, output = commands[command].run(path)
    assert code == 0, output


@pytest.mark.parametrize("form", REFUSED)
@pytest.mark.parametrize("command", COMMANDS)
def test_another_file_is_refused_with_one_sentence(
    commands: dict[str, Command], tmp_path: Path, command: str, form: str
) -> None:
    made, says = REFUSED[form]
    data = made(commands[command].text)
    path = tmp_path / "t.csv"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    code, output = commands[command].run(path)
    assert code == 1
    assert output.startswith("Error: ")
    assert output.count("\n") == 1
    assert "t.csv" in output
    assert says in output
