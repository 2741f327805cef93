"""The output of `--json`, compared with files: its readers must be able to read later versions. And
its output in words, but for numbers and what differs from machine to machine.

After a wanted change: `python -m tests.zeusctl.test_golden` writes the files again. A field that is
taken away or changed asks for another number in the report's schema.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.support import RunningDaemon, wait_for
from tests.zeusctl.conftest import Ctl
from zeusctl.reports import REPORTS, schemas

GOLDEN = Path(__file__).with_name("golden")
SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "schema"

VERBS: dict[str, tuple[str, ...]] = {
    "status": ("status", "--json"),
    "gpus": ("gpus", "--json"),
    "leases": ("leases", "--json"),
    "processes": ("processes", "--json"),
    "show": ("show", "2", "--json"),
    "set": ("set", "1", "-p", "200", "-g", "600,900", "--persist", "--json"),
    "reset": ("reset", "1", "-c", "gpu_clocks", "--json"),
    "release": ("release", "--json"),
    "measure": ("measure", "0,1", "--json", "--no-cpu", "--", "true"),
    "audit": ("audit", "-n", "1", "--json"),
    "energy": ("energy", "--json"),
    "allocate": ("allocate", "0,1", "--job", "7", "--user", "0", "--json"),
    "allocations": ("allocations", "--json"),
    "deallocate": ("deallocate", "--job", "7", "--json"),
    "forget": ("forget", "--user", "1234567", "--json"),
    "doctor": ("doctor", "--json"),
    "quiesce": ("quiesce", "--json"),
    "resume": ("resume", "--json"),
    "record": ("record", "0", "-d", "1s", "-o", "samples.csv", "--json"),
    "error": ("show", "9", "--json"),
}

MOVING = {
    *("at", "when", "until", "uptime_s", "held_s", "expires_in_s", "number", "pid", "socket"),
    *("power_w", "energy_j", "uncertainty_j", "average_power_w", "gpu_energy_j", "time_s", "rows"),
    *("temperature_c", "gpu_clock_mhz", "energy_last_hour_j", "dropped", "uid", "user", "command"),
    *("throttle_reasons", "found", "leases", "path", "memory_used_mib"),
    *("since", "sums", "gpu_hours", "lower_j", "upper_j", "active_j", "idle_j", "metered_j"),
    *("begin", "end", "begins"),
}
"""What differs from run to run: only its kind is compared."""


MACHINES = {"doctor", "energy", "error", "measure", "record"}
"""What depends on more than the node, or is tested elsewhere."""


def still(value: Any, name: str = "") -> Any:
    """Replaces values that depend on time and machine."""
    if name == "limited" and isinstance(value, dict):
        return [*value]  # not known before the first ten seconds
    if isinstance(value, dict):
        return {key: still(one, key) for key, one in value.items()}
    if isinstance(value, list) and name not in MOVING:
        return [still(one, name) for one in value]
    if name in MOVING and value is not None:
        if isinstance(value, list):
            return [
                still(one) if isinstance(one, dict) else type(one).__name__ for one in value[:1]
            ]
        return f"<{type(value).__name__}>"
    if isinstance(value, str):
        return re.sub(r"/\S*\.sock\S*", "<socket>", value)
    return value


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_prints_what_it_always_printed(
    ctl: Ctl,
    daemon: RunningDaemon,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = still(answer(ctl, daemon, name))
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    assert found == golden
    if name not in MACHINES:
        assert in_words(ctl, daemon, name) == (GOLDEN / f"{name}.txt").read_text()


def in_words(ctl: Callable[..., Any], daemon: RunningDaemon, name: str) -> str:
    """Both outputs of a verb, without fractions, times, padding, paths, UUIDs and programs."""
    said = run(ctl, daemon, name, [one for one in VERBS[name] if one != "--json"])
    text = f"{said.out}--- {said.code}\n{said.err}"
    text = re.sub(r"\S*/\S+\b|(?<=GPU-)[\w-]+|(python|pytest)[\d.]* .*|[━─|▁-█]+", "X", text)
    text = re.sub(r"[-+]?\d+[.:]\d[\d.:]*( k?J\b)?|\b[A-Z][a-z]{2} \d+ ", "N", text)
    text = re.sub(r"\d+(?= (?:[smhCJ]|min)\b)|(?<=GiB) +\d+|(?<=  power) +\d+", " N", text)
    text = re.sub(r" +", " ", text)
    return re.sub(r"(limited, last N s) .*", r"\1 X", text)  # not known before ten seconds


def run(ctl: Callable[..., Any], daemon: RunningDaemon, name: str, arguments: Sequence[str]) -> Any:
    """Runs a verb while someone holds a limit."""
    with daemon.client() as client:
        client.resume()
        client.restore()
        client.release()
        client.set_power_limit(client.node().gpus[0].uuid, 200_000)
        gpu = client.node().gpus[2].uuid
        wait_for(lambda: client.timeline(gpu), "a history")
        if name == "resume":
            ctl("quiesce")
        if name in ("allocations", "deallocate"):
            ctl(*VERBS["allocate"])
        return ctl(*arguments)


def answer(ctl: Callable[..., Any], daemon: RunningDaemon, name: str) -> Any:
    """The report of a verb."""
    said = run(ctl, daemon, name, VERBS[name])
    text = said.out if said.out.strip() else said.err
    report = json.loads(text.splitlines()[-1])
    kind = REPORTS[report["schema"].removeprefix("zeusctl.").partition("/")[0]]
    TypeAdapter(kind).validate_python(report)
    if name == "doctor":  # what else there is depends on the machine
        known = {"socket", "version", "GPUs", "policy", "sampling", "restores", "visible"}
        report["checks"] = [check for check in report["checks"] if check["name"] in known]
    return report


@pytest.mark.parametrize("name", schemas())
def test_the_published_schema_is_that_of_the_report(ctl: Ctl, name: str) -> None:
    said = ctl("schema", name)
    assert json.loads(said.out) == json.loads((SCHEMAS / f"{name}.json").read_text())


def write() -> None:
    """Writes golden files and schemas again."""
    import contextlib
    import io
    import os
    import tempfile

    from tests.support import running_daemon
    from tests.zeusctl.conftest import NODE, Said, with_ledger
    from zeusctl.cli import main

    SCHEMAS.mkdir(exist_ok=True)
    for name, published in schemas().items():
        text = json.dumps(published(), indent=2)
        (SCHEMAS / f"{name}.json").write_text(text + "\n")
    ledger = with_ledger(Path(tempfile.mkdtemp()))
    with running_daemon(*NODE, *ledger, gpus=4) as daemon:
        os.environ["ZEUSD_SOCK_PATH"] = daemon.socket
        os.chdir(tempfile.mkdtemp())

        def ctl(*arguments: str) -> Said:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    main(list(arguments))
                except SystemExit as end:
                    return Said(int(str(end.code)), out.getvalue(), err.getvalue())

        for name in VERBS:
            text = json.dumps(still(answer(ctl, daemon, name)), indent=2)
            (GOLDEN / f"{name}.json").write_text(text + "\n")
            if name not in MACHINES:
                (GOLDEN / f"{name}.txt").write_text(in_words(ctl, daemon, name))
            with daemon.client() as client:
                client.resume()
                client.restore()


if __name__ == "__main__":
    sys.exit(write())
