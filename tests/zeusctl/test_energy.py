"""`zeusctl allocate`, `deallocate`, `energy` and `forget`, and what other users see of it."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import socket
import stat
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.late import late
from tests.support import (
    NOBODY,
    RunningDaemon,
    configuration,
    known,
    public_directory,
    running_daemon,
    wait_for,
)
from tests.zeusctl.conftest import NODE, Ctl, as_nobody_says
from zeus_common.simulation import SimulatedNode, SimulatedWork
from zeus_ipc import Client
from zeus_ipc.charging import bounds_of, reason_of
from zeus_ipc.errors import LedgerFailed
from zeus_ipc.replies import UsageSum
from zeus_ipc.requests import BUCKET_S
from zeusctl import day_files
from zeusctl.commands.allocate import holdings
from zeusctl.exits import Exit
from zeusctl.parts import ManagedAllocations
from zeusd.energy.split import parent_of
from zeusd.runtime.identities import Identities

parquet = late("pyarrow.parquet")


def rows(ctl: Ctl, *options: str) -> dict[str, dict[str, str]]:
    """The rows of the CSV, by name."""
    found = csv.DictReader(io.StringIO(ctl("energy", "--format", "csv", *options).out))
    return {f"{one['kind']} {one['name'] or one['user']}".strip(): one for one in found}


def test_a_job_is_charged_what_measuring_the_same_time_says(
    ctl: Ctl, daemon: RunningDaemon, node: SimulatedNode
) -> None:
    with daemon.client() as client:
        uuid = client.node().gpus[1].uuid
        wait_for(lambda: len(client.timeline(uuid)) > 5, "a history")
        times_ns = [time.monotonic_ns()]
        assert ctl("allocate", "1", "--job", "900", "--user", str(NOBODY)).code == 0
        times_ns.append(time.monotonic_ns())
        time.sleep(0.5)
        times_ns.append(time.monotonic_ns())
        said = ctl("deallocate", "--job", "900")
        times_ns.append(time.monotonic_ns())
        before, within, after, around = times_ns
        windows = client.windows(uuid, [(within, after, False), (before, around, False)])[uuid]
    least, most = windows.energy_uj
    error = windows.uncertainty_uj[0]
    assert least is not None
    assert most is not None
    assert "job 900: " in said.out
    assert "1 GPU released" in said.out

    def job() -> dict[str, str]:
        return rows(ctl, "--job", "900")["job 900"]

    def charged_uj() -> int:
        return round(1e6 * float(job()["energy_j"]))

    wait_for(lambda: charged_uj() >= least - error, "the last readings to be charged")
    assert charged_uj() <= most
    assert (job()["basis"], job()["exact"], job()["uid"]) == ("allocated", "True", str(NOBODY))
    assert job()["begin"] <= job()["end"]


def test_all_ways_to_sum_agree_with_the_meters(ctl: Ctl) -> None:
    ctl("allocate", "0", "--pod", "ml/train-0", "--weight", "1")
    ctl("allocate", "0", "--pod", "ml/train-1", "--weight", "2")
    ctl("allocate", "2", "--job", "901", "--user", "0")
    for by in ("user", "job", "pod", "namespace", "gpu", "day"):
        said = ctl("energy", "--by", by, "--json")
        assert said.code == 0, said.err
        report = json.loads(said.out)
        assert sum(one["energy_j"] for one in report["sums"]) == pytest.approx(report["metered_j"])
    pods = {"pod ml/train-0", "pod ml/train-1"}
    wait_for(lambda: pods <= {*rows(ctl, "--by", "pod")}, "energy of both pods to be known")
    table = ctl("energy").out
    assert "(idle)" in table.splitlines()[-1]
    assert rows(ctl, "--by", "pod")["pod ml/train-1"]["exact"] == "True"  # idle: shared by rule
    assert "pod ml/train-0" in rows(ctl, "--pod", "ml/train-0")


def test_the_exit_code_is_1_if_the_sum_differs_from_the_meters(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeus_ipc.client import Client

    honest = Client.usage

    def tampered(*arguments: object, **options: object) -> object:
        found = honest(*arguments, **options)
        return found.model_copy(update={"metered_uj": [found.metered_uj[0] + 1]})

    monkeypatch.setattr(Client, "usage", tampered)
    said = ctl("energy")
    assert said.code == Exit.FAILED
    assert "differ from the GPUs' counters by -1 microjoules" in said.err


def test_the_folder_of_dcgm_exporter_determines_the_holders(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    with daemon.client() as client:
        gpus = [gpu.uuid for gpu in client.node().gpus]
        (tmp_path / "0").write_text("mapped1\n")
        (tmp_path / gpus[1]).write_text("mapped2\n mapped3 \n; rm -rf\n")
        (tmp_path / "77").write_text("mapped4\n")
        (tmp_path / "readme").write_text("mapped5\n")
        allocations = ManagedAllocations(client, {"mapped1": os.getuid()}.get)

        def changes() -> list[int]:
            return [*map(len, allocations.keep(holdings(tmp_path, client.node().gpus)))]

        assert changes() == [3, 0]
        assert changes() == [0, 0]
        assert {*gpus[:2]} <= {*held(client)}
        (tmp_path / "0").write_text("")
        (tmp_path / gpus[1]).write_text("mapped2\n")
        assert changes() == [1, 3]  # mapped2 has all of the GPU now
        assert gpus[0] not in held(client)
        assert client.deallocate("mapped2") == 1


def test_allocations_are_listed(ctl: Ctl, daemon: RunningDaemon) -> None:
    ctl("allocate", "0", "--job", "7", "--user", "0")
    ctl("allocate", "1", "--pod", "ml/train", "--weight", "2", "--parts", "7")
    said = ctl("allocations", "0,1").out.splitlines()
    assert [re.sub(r"\d+ s$", "SECONDS", line).split() for line in said[1:]] == [
        ["0", "job", "7", "root", "SECONDS"],
        ["1", "pod", "ml/train", "-", "2", "of", "7", "SECONDS"],
    ]
    assert len(ctl("allocations", "1").out.splitlines()) == 2
    for one in (("--job", "7"), ("--pod", "ml/train")):
        ctl("deallocate", *one)
    assert ctl("allocations", "0,1").out == "no GPU is allocated to a job or pod\n"


def held(client: Client) -> list[str]:
    ledger = known(client.metrics().ledger)
    return [one.gpu for one in ledger.held]


def test_a_prolog_and_an_epilog(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_JOB_ID": "903",
        "SLURM_JOB_UID": str(NOBODY),
        "SLURM_JOB_GPUS": "1,3",
        "SLURM_JOB_RESTART_COUNT": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert ctl("allocate", "--slurm").out == "job 903 holds GPU 1, GPU 3\n"
    assert "2 GPUs released" in ctl("deallocate", "--slurm").out
    again = ctl("deallocate", "--slurm").out  # as where the job's group was gone for 10 s before
    assert re.match("job 903: [0-9.]+ k?J in .* GPU-hours.*; 0 GPUs released", again)
    assert ctl("deallocate", "--job", "904").out == "job 904 held no GPU\n"
    assert rows(ctl, "--job", "903")["job 903"]["run"] == "2"
    monkeypatch.setenv("SLURM_JOB_GPUS", "")
    assert ctl("allocate", "--slurm").out == "job 903 holds no GPU\n"


def test_a_ledger_that_cannot_be_opened_is_an_error_and_limits_still_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = f'[accounting]\ndirectory = "{tmp_path}/file/x"\n'
    with running_daemon(
        "--simulate", "1xv100-pcie", *configuration(tmp_path, text), gpus=1
    ) as daemon:
        with daemon.client() as client:
            with pytest.raises(LedgerFailed, match="runs without accounting"):
                client.usage([0, BUCKET_S])
            client.set_power_limit(client.node().gpus[0].uuid, 150_000)
            (problem,) = client.node().problems
        assert (problem.part, problem.code) == ("ledger", "ENOTDIR")
        assert "runs without accounting" in problem.cause
        daemon.wait_for_records("ledger_failed")


@pytest.mark.needs("two users")
def test_no_option_shows_a_user_another_users_energy() -> None:
    with public_directory() as directory:
        ledger = directory / "ledger"
        rules = '\n[[allow]]\nusers = ["*"]\n[daemon]\nsocket_mode = "0666"\n'
        options = configuration(directory, f'[accounting]\ndirectory = "{ledger}"\n{rules}')
        with running_daemon(*NODE, *options, gpus=4, directory=directory) as daemon:
            with daemon.client() as client:
                gpus = [gpu.uuid for gpu in client.node().gpus]
                wait_for(lambda: len(client.timeline(gpus[2])) > 5, "a history")
                client.allocate(gpus[0], "4711", uid=54321)
                client.allocate(gpus[1], "secret/pod", kind="pod")
                client.allocate(gpus[2], "815", uid=NOBODY)
                assert client.deallocate("4711") == 1
                until = int(time.time()) // BUCKET_S * BUCKET_S + 2 * BUCKET_S
                wait_for(lambda: client.usage([0, until], "job", name="815").sums, "its energy")

            views = [("--by", by) for by in ("user", "job", "pod", "namespace", "gpu", "day")]
            asked = [("--user", "54321"), ("--job", "4711"), ("--pod", "secret/pod")]
            shown = [("energy", *one, "--format", form) for one in views for form in FORMS]
            named = [("energy", *one, "--format", form) for one in asked for form in FORMS]
            refused = [
                ("allocate", "0", "--job", "1"),
                ("deallocate", "--job", "815"),
                ("forget", "--user", "0"),
            ]
            said = as_nobody_says(daemon, *shown, *named, *refused)
            codes = [one.code for one in said]
            seen = "".join(one.out + one.err for one in said)
            assert codes[: len(shown)] == [0] * len(shown)
            assert codes[-len(refused) :] == [Exit.DENIED] * len(refused)
            assert "job 815" in seen
            assert "(others)" in seen
            assert "Traceback" not in seen
            for secret in ("54321", "4711", "secret"):
                # Not as a part of some longer number.
                assert not re.search(rf"(?<![\d.]){secret}(?!\d)", seen)
        assert stat.S_IMODE(ledger.stat().st_mode) == 0o700


FORMS = ("table", "csv", "json")


def metered_j(ctl: Ctl) -> float:
    metered: float = json.loads(ctl("energy", "--since", "1d", "--json").out)["metered_j"]
    return metered


def test_processes_decide_where_nobody_holds_a_gpu(tmp_path: Path) -> None:
    """A real process of this user computes on a GPU, and the ledger lists it."""
    identity = known(Identities().identify(os.getpid()))
    os.close(identity.pidfd)
    parent = parent_of(identity.account)
    text = f'[accounting]\ndirectory = "{tmp_path}"\nprocesses = true\n'
    with running_daemon(*NODE, *configuration(tmp_path, text), gpus=4) as daemon:
        with daemon.client() as client:
            gpus = [gpu.uuid for gpu in client.node().gpus]
            path = known(client.node().simulated)
            work = SimulatedWork(path, [gpus[0]], "nsdi23/v100/imagenet/resnet50/adadelta/32")
            end = int(time.time()) // BUCKET_S * BUCKET_S + BUCKET_S

            def charged() -> dict[str, UsageSum]:
                work.run()
                usage = client.usage([0, end + BUCKET_S], "user")
                assert sum(one.active_uj + one.idle_uj for one in usage.sums) == sum(
                    usage.metered_uj
                )
                return {one.kind: one for one in usage.sums}

            found = wait_for(
                lambda: (one := charged()).keys() >= {parent.kind.value, "idle"} and one,
                "the process, and the other GPUs, to be charged",
            )
            mine = found[parent.kind.value]
            assert (mine.uid, mine.methods) == (parent.uid, ["exclusive"])
            assert mine.lower_uj == mine.upper_uj == mine.active_uj + mine.idle_uj
            usage = client.usage([0, end + BUCKET_S], "process")
            (process,) = [one for one in usage.sums if one.kind == "process"]
            assert (process.name, process.run) == (str(os.getpid()), str(identity.start_ticks))
            assert sum(one.active_uj + one.idle_uj for one in usage.sums) == sum(usage.metered_uj)
            started_s = (
                time.time()
                - time.clock_gettime(time.CLOCK_BOOTTIME)
                + identity.start_ticks / os.sysconf("SC_CLK_TCK")
            )
            assert process.begin_s == pytest.approx(started_s, abs=2)
            work.close()
            # While a job holds the GPU, nobody lists its processes, and the job pays.
            client.allocate(gpus[0], "7", uid=NOBODY)
            assert client.deallocate("7") == 1


def test_files_of_days_add_up_as_often_as_they_come(ctl: Ctl, tmp_path: Path) -> None:
    ctl("allocate", "0", "--job", "77", "--user", "0")
    ctl("allocate", "1", "--pod", "ml/train", "--weight", "1")
    ctl("deallocate", "--pod", "ml/train")  # waits until it is charged
    ctl("deallocate", "--job", "77")
    said = ctl("energy", "--since", "1d", "--export", str(tmp_path))
    assert said.code == 0, said.err
    before_j = metered_j(ctl)
    ctl("energy", "--since", "1d", "--export", str(tmp_path))  # the same day, with more in it
    after_j = metered_j(ctl)
    assert {Path(line) for line in said.out.split()} <= {*tmp_path.iterdir()}
    other = tmp_path / "other"
    other.mkdir()
    for path in tmp_path.glob("*.csv"):  # two, if midnight came between
        there = path.read_text().replace(f"\n{socket.gethostname()},", "\nanother-node,")
        (other / path.name.replace(socket.gethostname(), "another-node")).write_text(there)
        (other / f"energy-copy-{path.name}").write_text(path.read_text())  # sent twice
    both = {}
    for by in ("user", "job", "pod", "namespace", "day"):
        report = ctl("energy", "--from", str(tmp_path), "--by", by, "--json")
        assert report.code == 0, report.err
        both[by] = json.loads(report.out)
        total = sum(one["energy_j"] for one in both[by]["sums"])
        assert total == pytest.approx(both[by]["metered_j"])
        assert 2 * before_j <= total + 1e-3
        assert total <= 2 * after_j + 1e-3
    assert {one["kind"] for one in both["job"]["sums"]} >= {"job", "namespace", "idle"}
    assert "ml/train" in {one["name"] for one in both["pod"]["sums"]}
    named = json.loads(ctl("energy", "--from", str(tmp_path), "--job", "77", "--json").out)
    assert {one["name"] for one in named["sums"]} == {"77"}


def test_sums_are_the_same_in_every_form(ctl: Ctl, tmp_path: Path) -> None:
    ctl("allocate", "0", "--job", "78", "--user", "0")
    ctl("deallocate", "--job", "78")
    assert "name a file with -o" in ctl("energy", "--format", "parquet").err
    export = tmp_path / "files"
    export.mkdir()
    said = ctl("energy", "--since", "1d", "--export", str(export), "--format", "parquet")
    assert said.code == 0, said.err
    assert {path.suffix for path in export.iterdir()} == {".parquet"}
    base = ("energy", "--since", "1d", "--from", str(export), "--by", "job")
    rows = {}
    for form in ("csv", "json", "parquet"):
        path = tmp_path / f"sums.{form}"
        said = ctl(*base, "--format", form, "-o", str(path))
        assert (said.code, said.out) == (0, ""), said.err
        assert re.fullmatch(rf"wrote \d+ rows? to {re.escape(str(path))}\n", said.err)
    rows["csv"] = list(csv.DictReader((tmp_path / "sums.csv").read_text().splitlines()))
    rows["json"] = json.loads((tmp_path / "sums.json").read_text())["sums"]
    rows["parquet"] = parquet.read_table(tmp_path / "sums.parquet").to_pylist()
    found = {form: [float(one["energy_j"]) for one in some] for form, some in rows.items()}
    assert found["csv"] == found["json"] == found["parquet"]
    for one in rows["parquet"]:
        methods = one["basis"].split("+") if one["basis"] else []
        kind = bounds_of(methods, meet=one["lower_j"] == one["upper_j"])
        assert (one["bounds"], one["exact"]) == (kind.value, kind.value == "exact")
        assert one["reason"] == ("" if one["exact"] else reason_of(methods))
    assert [*rows["csv"][0]] == [*rows["parquet"][0]] == [*rows["json"][0]]
    said = ctl("energy", "--since", "1d", "--by", "job", "--by-method", "--json")
    assert said.code == 0, said.err
    assert all(len(one["basis"]) <= 1 for one in json.loads(said.out)["sums"])


def test_cpus_are_never_added_to_gpus(ctl: Ctl, tmp_path: Path) -> None:
    """This node has GPUs only."""
    cpus = json.loads(ctl("energy", "--device", "cpu", "--json").out)
    assert (cpus["sums"], cpus["metered_j"]) == ([], 0)
    wait_for(lambda: metered_j(ctl) > 0, "GPUs' energy")
    refused = ctl("energy", "--device", "cpu", "--html", str(tmp_path / "page.html"))
    assert "omit --device cpu" in refused.err


def test_energy_by_day_is_drawn(ctl: Ctl, tmp_path: Path) -> None:
    wait_for(lambda: "(idle)" in ctl("energy").out, "energy to draw")
    picture = tmp_path / "energy.svg"
    said = ctl("energy", "--since", "2d", "--plot", str(picture))
    assert said.code == 0, said.err
    assert "(idle)" in picture.read_text()
    assert "ends in .png" in ctl("energy", "--plot", str(tmp_path / "energy.txt")).err


def test_a_page_is_written_from_the_node_and_from_files(ctl: Ctl, tmp_path: Path) -> None:
    wait_for(lambda: "(idle)" in ctl("energy").out, "energy to show")
    page, export = tmp_path / "energy.html", tmp_path / "files"
    export.mkdir()
    ctl("energy", "--export", str(export))
    for source in ((), ("--from", str(export))):
        said = ctl("energy", "--since", "2d", "--html", str(page), *source)
        assert said.code == 0, said.err
        assert said.out.endswith(f" to {page}\n")
        assert "(idle)" in page.read_text()
        assert "</svg>" in page.read_text()
        page.unlink()
    assert "--job has no effect with --html" in ctl("energy", "--html", str(page), "--job", "1").err


def test_files_that_are_none_are_refused(ctl: Ctl, tmp_path: Path) -> None:
    said = ctl("energy", "--from", str(tmp_path))
    assert (said.code, "has no files energy-*.csv" in said.err) == (Exit.UNKNOWN, True)
    for text in ("a,b\n1,2\n", ",".join(day_files.Row._fields) + "\nn1,x,user,,,0,1,1,1,1,1,\n"):
        (tmp_path / "energy-n1-2026-11-01.csv").write_text(text)
        said = ctl("energy", "--from", str(tmp_path))
        assert said.code == Exit.FAILED
        assert "is not a file of" in said.err
    assert "omit --by gpu" in ctl("energy", "--from", str(tmp_path), "--by", "gpu").err


def test_a_full_disk_under_an_export_is_named(ctl: Ctl, tmp_path: Path) -> None:
    for from_now_s in (-7200, 0, 7200):  # midnight may be between
        day = datetime.fromtimestamp(time.time() + from_now_s, timezone.utc).date()
        partial = tmp_path / f"energy-{socket.gethostname()}-{day}.csv"
        if not partial.is_symlink():
            partial.symlink_to("/dev/full")
    wait_for(lambda: "(idle)" in ctl("energy").out, "energy to export")
    said = ctl("energy", "--since", "1h", "--export", str(tmp_path))
    assert said.code == Exit.FAILED
    assert f"{tmp_path}/energy-" in said.err
    assert "No space left on device; make room" in said.err
