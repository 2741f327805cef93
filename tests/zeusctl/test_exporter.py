"""The exporter, asked by a real Prometheus; its names, rules and dashboard against promtool."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests import needs
from tests.support import TIMEOUT_S, RunningDaemon, ending, free_port, running_daemon, wait_for
from tests.zeusctl.conftest import READINGS, python
from zeus_common.simulation import SimulatedNode
from zeus_ipc.errors import DeadlineExceeded, OutOfRange
from zeus_ipc.replies import SourceState, UserLoad
from zeusctl.exporter import collector
from zeusctl.exporter.collector import ZeusdCollector

MONITORING = Path(__file__).resolve().parents[2] / "examples" / "monitoring"


def tool(name: str) -> str:
    needs.require("prometheus")
    path = shutil.which(name)
    assert path is not None
    return path


@contextlib.contextmanager
def serving(command: list[str], url: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **env},
    )

    def answers() -> bool:
        assert process.poll() is None, f"{command[0]} ended"
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(url, timeout=5).read())
        return False

    try:
        wait_for(answers, f"{command[0]} to serve")
        yield process
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def exporter(daemon: RunningDaemon) -> Iterator[str]:
    """An exporter of a daemon; its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    command = [python(), "-m", "zeusctl.exporter", "--listen", f"127.0.0.1:{port}"]
    asked = {f"ZEUSD_EXPORTER_{name}": "1" for name in ("WORKLOADS", "OTEL")}  # as of the unit
    with serving(command, url, ZEUSD_SOCK_PATH=daemon.socket, **asked):
        yield url


@pytest.fixture(scope="module")
def url(daemon: RunningDaemon) -> Iterator[str]:
    """The exporter of the module's daemon. It keeps nothing from one scrape to the next."""
    with exporter(daemon) as found:
        yield found


def scrape(url: str) -> str:
    text: str = urllib.request.urlopen(url, timeout=TIMEOUT_S).read().decode()
    return text


def values(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def one(text: str, name: str, **labels: str) -> float:
    """The only sample with these labels."""
    (value,) = (
        value
        for found, value in values(text)[name]
        if all(found.get(label) == wanted for label, wanted in labels.items())
    )
    return value


OF_TARGETS = ("namespace", "pod", "container", "service", "endpoint", "node", "cluster")
"""Labels that Kubernetes' discovery and the Prometheus operator give to targets, beside `job` and
`instance`."""


def test_a_prometheus_sees_what_happens_on_the_node(
    daemon: RunningDaemon, node: SimulatedNode, url: str, tmp_path: Path
) -> None:
    """The real server, with the shipped rules, scrapes a node with a fault."""
    port = free_port()
    target = url.removeprefix("http://").removesuffix("/metrics")
    text = (MONITORING / "prometheus.yml").read_text()
    text = text.replace("127.0.0.1:9850", target).replace("15s", "200ms")
    text += "        labels: {" + ", ".join(f"{name}: target" for name in OF_TARGETS) + "}\n"
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    base = f"http://127.0.0.1:{port}"
    command = [tool("prometheus"), f"--config.file={tmp_path / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={tmp_path / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with serving(command, f"{base}/-/ready"):

        def ask(query: str) -> list[dict[str, Any]]:
            arguments = urllib.parse.urlencode({"query": query})
            reply = json.loads(scrape(f"{base}/api/v1/query?{arguments}"))
            found: list[dict[str, Any]] = reply["data"]["result"]
            return found

        wait_for(lambda: ask("zeusd_gpu_power_watts"), "the first scrape")
        assert len(ask("zeusd_gpu_power_watts")) == 4
        assert [float(found["value"][1]) for found in ask("zeusd_up")] == [1.0]
        with daemon.client() as client:
            client.set_power_limit(client.node().gpus[1].uuid, 150_000)
            wait_for(
                lambda: ask('zeusd_gpu_power_limit_watts{kind="enforced", gpu="1"} == 150'),
                "the limit",
            )
            held = 'zeusd_lease_held{control="power_limit"} == 1'
            wait_for(lambda: ask(held), "the lease, which is asked for at another moment")
            assert [one["metric"]["gpu"] for one in ask(held)] == ["1"]
            node.inject(1, "set_power_limit", 999)
        wait_for(lambda: ask('zeusd_restore_pending{gpu="1"} == 1'), "the pending restore")
        wait_for(lambda: ask("rate(zeusd_gpu_energy_joules_total[5s]) > 20"), "the energy")
        wait_for(
            lambda: ask('zeusd_nvml_errors_total{operation="set_power_limit", code="999"} > 0'),
            "the driver's errors",
        )

        def alerts() -> set[str]:
            found = json.loads(scrape(f"{base}/api/v1/alerts"))["data"]["alerts"]
            return {alert["labels"]["alertname"] for alert in found}

        # Others may come before it, as of a scrape that a busy machine was late with.
        wait_for(lambda: "ZeusdRestorePending" in alerts(), "the alert")
        node.clear_faults()
        wait_for(lambda: ask("sum(zeusd_restore_pending) == 0"), "the limit to be back")
        with daemon.client() as client:
            uuid = client.node().gpus[2].uuid
            client.acquire(uuid, ["power_limit"])
            with pytest.raises(OutOfRange):
                client.set_power_limit(uuid, 1000)
            wait_for(lambda: len(client.timeline(uuid)) > 5, "a history")
            client.allocate(uuid, "8", uid=1)
            client.allocate(client.node().gpus[3].uuid, "ml/infer", kind="pod")
            # Each panel has something to show: no name in the dashboard is unknown here.
            for query in queries():
                wait_for(lambda: ask(query), query)
            wait_for(lambda: ask('zeusd_job_energy_joules_total{slurm_job="8"}'), "the job")
            of_pod = '{k8s_namespace_name="ml",k8s_pod_name="infer",pod="target",job="zeusd"}'
            wait_for(lambda: ask(f"zeusd_pod_energy_joules_total{of_pod}"), "the pod")
            client.deallocate("8")
            client.deallocate("ml/infer", kind="pod")
        labels = json.loads(scrape(f"{base}/api/v1/labels"))["data"]
        assert {"pod", "namespace", "slurm_job"} <= {*labels}
        assert [label for label in labels if label.startswith("exported_")] == []


def queries() -> list[str]:
    """The queries of the dashboard, for all nodes and GPUs."""
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [expr.replace("$instance", ".*").replace("$gpu", ".*") for expr in found]


def test_names_and_units_are_prometheus_own(url: str) -> None:
    text = scrape(url)
    checked = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    own = {name for name in families if name.startswith("zeusd_")}
    assert len(own) > 30
    assert all(families[name].documentation for name in own)


def test_rules_are_valid_and_fire_when_they_should(tmp_path: Path) -> None:
    subprocess.run(
        [tool("promtool"), "check", "rules", str(MONITORING / "alerts.yml")],
        check=True,
        capture_output=True,
    )
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yml"), tmp_path)
    tested = subprocess.run(
        [tool("promtool"), "test", "rules", "alerts_test.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_rules_and_dashboard_name_only_what_there_is(url: str) -> None:
    text = scrape(url)
    known = set(values(text)) | set(re.findall(r"# TYPE (\S+)", text))
    named = " ".join(queries()) + (MONITORING / "alerts.yml").read_text()
    asked = set(re.findall(r"\bzeusd_[a-z_]+", named)) - {"zeusd_test"}
    # These have samples only after something was refused or changed.
    rare = {"zeusd_refusals_total", "zeusd_nvml_errors_total", "zeusd_restores_total"}
    missing = {name for name in asked if name not in known and name not in rare}
    assert missing == set()
    assert {name.removesuffix("_total") for name in rare} <= {
        name.removesuffix("_total") for name in known
    }


def test_zeusds_counters_are_exported(daemon: RunningDaemon, node: SimulatedNode, url: str) -> None:
    before = scrape(url)
    with daemon.client() as client:
        gpu = client.node().gpus[2]
        client.set_gpu_clocks(gpu.uuid, 600, 900)
        text = scrape(url)
        labels = {"gpu": "2", "clock": "gpu"}
        assert one(text, "zeusd_gpu_locked_clock_hertz", end="lowest", **labels) == 600e6
        assert one(text, "zeusd_gpu_locked_clock_hertz", end="highest", **labels) == 900e6
    after = scrape(url)
    ended = {"reason": "goodbye", "result": "restored"}
    was = sum(v for found, v in values(before).get("zeusd_restores_total", []) if found == ended)
    assert one(after, "zeusd_restores_total", **ended) == was + 1
    node.set_outside(0, 120_000)
    with daemon.client() as client:
        client.set_power_limit(client.node().gpus[0].uuid, 110_000)
    changed = {"control": "power_limit", "result": "adopted"}
    was = one(before, "zeusd_outside_changes_total", **changed)
    assert one(scrape(url), "zeusd_outside_changes_total", **changed) == was + 1
    with daemon.client() as client:
        client.restore()
    assert one(after, "zeusd_gpu_clock_hertz", gpu="0", clock="memory") == 877e6
    counts = {
        found["operation"]: value for found, value in values(after)["zeusd_nvml_call_seconds_count"]
    }
    assert counts["sensors"] > counts["set_gpu_clocks"] > 0


def test_accounts_begin_at_0_and_add_up_to_what_is_accounted(
    daemon: RunningDaemon, node: SimulatedNode, url: str
) -> None:
    with daemon.client() as client:
        gpu = client.node().gpus[0].uuid
        wait_for(lambda: len(client.timeline(gpu)) > 5, "a history")
        begin_j = node.true_energy_j(0)
        client.allocate(gpu, "7", uid=0)
        alice = {"kind": "user", "account": "root"}

        def charged() -> float | None:
            found = values(scrape(url)).get("zeusd_account_energy_joules_total", [])
            return next((value for labels, value in found if labels == alice), None)

        first_j = wait_for(lambda: [v for v in [charged()] if v is not None], "the account")[0]
        assert 0 <= first_j <= 1.1 * (node.true_energy_j(0) - begin_j)  # a minute may begin
        assert client.deallocate("7") == 1
        wait_for(charged, "the account to be charged")
        text = scrape(url)
        parts = ("account", "idle", "unattributed", "accounted")
        sums = {
            part: sum(
                v
                for labels, v in values(text).get(f"zeusd_{part}_energy_joules_total", [])
                if labels.get("held") != "yes"
            )
            for part in parts
        }
        accounted = sums.pop("accounted")
        assert sum(sums.values()) == pytest.approx(accounted, abs=1e-5)
        assert accounted > 0
        for bound in ("lower", "upper"):  # exact values have no bounds
            assert values(text).get(f"zeusd_account_energy_{bound}_joules_total", []) == []
        assert values(text).get("zeusd_problem_seconds", []) == []


def test_jobs_and_opentelemetrys_names_are_exported_only_if_wanted(daemon: RunningDaemon) -> None:
    def of(found: dict[str, list[tuple[dict[str, str], float]]], kind: str) -> list[dict[str, str]]:
        return [labels for labels, _ in found[f"zeusd_{kind}_energy_joules_total"]]

    with daemon.client() as client:
        uuid = client.node().gpus[3].uuid
        wait_for(lambda: client.timeline(uuid), "a history")
        client.allocate(uuid, "71", uid=1)
        client.allocate(client.node().gpus[2].uuid, "ml/train", kind="pod")

        def exported(**options: bool) -> dict[str, list[tuple[dict[str, str], float]]]:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(ZeusdCollector(client, **options))
            return values(generate_latest(registry).decode())

        plain = exported()
        assert not {"hw_energy_joules_total", "zeusd_job_energy_joules_total"} & {*plain}
        found = exported(workloads=True, otel=True)
        job = {"slurm_job": "71", "user": "daemon"}
        assert job in of(found, "job")
        pod = {"k8s_namespace_name": "ml", "k8s_pod_name": "train"}
        assert pod in of(found, "pod")
        hardware = {labels["hw_id"]: labels for labels, _ in found["hw_energy_joules_total"]}
        assert hardware[uuid]["hw_type"] == "gpu"
        client.deallocate("71")
        client.deallocate("ml/train", kind="pod")


def test_every_figure_has_its_unit_and_its_labels(daemon: RunningDaemon) -> None:
    """The node has each kind of device, a failed restore, and a user whose requests zeusd slows."""
    with daemon.client() as client:
        node, metrics = client.node(), client.metrics()
        first, second = (gpu.uuid for gpu in node.gpus[:2])
        client.acquire(first, ["power_limit"])
        (lease,) = client.leases()

        asked_ns = time.monotonic_ns()
        names = ("cpu:0", "dram:0", "module:1")
        figures = {"energy_uj": 5_250_000, "power_mw": 464_000, "tick_ns": 20_000_000}
        figures |= {"t_ns": metrics.t_ns - 1_500_000_000, "limited_ns": {"power": 2_500_000_000}}
        sources = [SourceState(source=name, **figures) for name in (*names, first)]
        loaded = {"connections": 1, "limited_ns": 3_500_000_000, "limited": True}
        users = [UserLoad(uid=0, refused=2, faults=3, **loaded)]
        metrics = metrics.model_copy(update={"sources": sources, "users": users})
        beat = {"ttl_ms": 15_000, "expires_ns": asked_ns + 9_000_000_000}
        waits = {"restoring": True, "trouble": "no", "pending_ns": asked_ns - 7_000_000_000}
        leases = [lease.model_copy(update=one) for one in (beat, {"gpu": second, **waits})]
        replies: Any = SimpleNamespace(
            node=lambda: node, metrics=lambda: metrics, leases=lambda: leases, state=client.state
        )
        registry = CollectorRegistry(auto_describe=False)
        registry.register(ZeusdCollector(replies, otel=True))
        text = generate_latest(registry).decode()
        client.release(first)
    found = {
        (name.removeprefix("zeusd_"), *(labels[key] for key in sorted({*labels} - {"uuid"}))): value
        for name, samples in values(text).items()
        for labels, value in samples
    }
    expected = {
        ("gpu_energy_joules_total", "0"): 5.25,
        ("gpu_limited_seconds_total", "0", "power"): 2.5,
        ("module_energy_joules_total", "1"): 5.25,
        ("module_power_watts", "1"): 464,
        ("cpu_energy_joules_total", "0", "package"): 5.25,
        ("cpu_energy_joules_total", "0", "memory"): 5.25,
        ("hw_energy_joules_total", first, "gpu"): 5.25,
        ("hw_energy_joules_total", "cpu:0", "cpu"): 5.25,
        **{("sample_lag_seconds", name): 1.5 for name in (*names, "gpu:0")},
        **{("sample_period_seconds", name): 0.02 for name in (*names, "gpu:0")},
        ("user_rate_limited_seconds_total", "root"): 3.5,
        ("user_connections_refused_total", "root"): 2,
        ("user_protocol_errors_total", "root"): 3,
        ("lease_held", "power_limit", "0"): 1,
        ("lease_held", "power_limit", "1"): 0,
        ("restore_pending", "power_limit", "0"): 0,
        ("restore_pending", "power_limit", "1"): 1,
        ("gpus",): 4,
        ("gpu_info", "0", node.gpus[0].name, node.gpus[0].pci_address): 1,
    }
    assert {key: found.get(key) for key in expected} == expected
    sampled = ("hw_energy_joules_total", "sample_lag_seconds")
    assert {key for key in found if key[0] in sampled} <= {*expected}
    assert 6 <= found["lease_heartbeat_age_seconds", "power_limit", "0"] < 60
    assert 7 <= found["restore_pending_seconds", "power_limit", "1"] < 60


def test_a_gpu_that_is_lost_is_exported_as_unreadable(node: SimulatedNode, url: str) -> None:
    assert one(scrape(url), "zeusd_gpu_readable", gpu="1") == 1
    for call in READINGS:
        node.inject(1, call, 15)
    text = wait_for(  # a state is as good as new for two update periods
        lambda: next(
            (t for t in [scrape(url)] if one(t, "zeusd_gpu_readable", gpu="1") == 0), None
        ),
        "the GPU to be unreadable",
    )
    assert one(text, "zeusd_gpu_readable", gpu="0") == 1
    assert {labels["gpu"] for labels, _ in values(text)["zeusd_gpu_power_watts"]} == {
        *("0", "2", "3")
    }


def test_an_exporter_without_a_daemon_reports_it_and_finds_it_again(tmp_path: Path) -> None:
    """One that is started first, outlives zeusd, and is asked all the while."""
    with running_daemon("--simulate", "1xv100-pcie") as node, exporter(node) as url:
        assert one(scrape(url), "zeusd_up") == 1
        started = one(scrape(url), "zeusd_start_time_seconds")
        node.stop()
        text = scrape(url)
        assert one(text, "zeusd_up") == 0
        assert "zeusd_gpu_power_watts" not in values(text)
        node.start_again()
        node.wait_until_serving(1)
        wait_for(lambda: one(scrape(url), "zeusd_up") == 1, "zeusd to be found again")
        assert one(scrape(url), "zeusd_start_time_seconds") > started


def test_it_closes_its_socket_when_it_ends(daemon: RunningDaemon) -> None:
    with ending(
        subprocess.Popen(
            [sys.executable, "-W", "always::ResourceWarning", "-m", "zeusctl.exporter"]
            + ["--listen", "127.0.0.1:0"],
            stderr=subprocess.PIPE,
            env={**os.environ, "ZEUSD_SOCK_PATH": daemon.socket},
            text=True,
        )
    ) as process:
        assert process.stderr is not None
        assert "serving at" in process.stderr.readline()
        process.terminate()
        assert process.stderr.read() == ""
        assert process.wait(TIMEOUT_S) == 0


def test_scrapes_at_the_same_time_share_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a zeusd that hangs costs each of them one time limit."""
    begins, answer = [], threading.Event()
    requests: list[None] = []

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            begins.append(time.perf_counter())
            return begins[-1]

    class Hung:
        def node(self) -> None:
            requests.append(None)
            assert answer.wait(TIMEOUT_S)
            raise DeadlineExceeded("no answer")

    monkeypatch.setattr(collector, "time", Clock)
    client: Any = Hung()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ZeusdCollector(client))
    with ThreadPoolExecutor(4) as pool:
        texts = [pool.submit(generate_latest, registry) for _ in range(4)]
        wait_for(lambda: len(begins) == 4, "all to have begun")
        answer.set()
        for text in texts:
            assert one(text.result().decode(), "zeusd_up") == 0
    assert len(requests) == 1
    generate_latest(registry)
    assert len(requests) == 2, "an answer is for those who wait for it"


def test_a_quiesced_node_is_exported_as_one(daemon: RunningDaemon, url: str) -> None:
    with daemon.client() as client:
        client.quiesce()
        try:
            text = scrape(url)
            assert one(text, "zeusd_up") == 1
            assert one(text, "zeusd_quiesced") == 1
            assert "zeusd_gpu_power_watts" not in values(text)
        finally:
            client.resume()
    assert one(scrape(url), "zeusd_quiesced") == 0


def test_a_port_that_is_taken_is_reported(daemon: RunningDaemon) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [python(), "-m", "zeusctl.exporter"]
        command += ["--listen", f"127.0.0.1:{taken.getsockname()[1]}"]
        env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket}
        ran = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ran.returncode == 1
    assert "choose another address with --listen" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_full_disk_is_named_by_once(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        command = [python(), "-m", "zeusctl.exporter", "--once"]
        command += ["--socket", str(tmp_path / "none")]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[1:] == [
        "zeusd-exporter: standard output cannot be written: No space left on device"
    ]
