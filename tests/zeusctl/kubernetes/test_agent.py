"""The agent with a simulated zeusd, and stand-ins for kubelet and the Kubernetes API server."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from kubernetes import client

from tests.support import TIMEOUT_S, RunningDaemon, ending, running_daemon, wait_for, zeusctl_line
from tests.zeusctl.kubernetes.api_server import ApiServer
from tests.zeusctl.kubernetes.node import NODE, Kubelet, a_pod, a_slice, claim, pod_resources
from zeus_ipc import Client
from zeusctl.kubernetes.agent import Agent, Events
from zeusctl.kubernetes.kubelet import Kubelet as KubeletClient
from zeusctl.kubernetes.pods import pod_of
from zeusctl.kubernetes.slices import Slices
from zeusctl.kubernetes.watch import PodWatch

HIGHEST_W = 250.0
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "2xv100-pcie", gpus=2) as running:
        yield running


@pytest.fixture(scope="module")
def zeusd(daemon: RunningDaemon) -> Iterator[Client]:
    with daemon.client() as found:
        yield found


class Cluster:
    """An API server, a kubelet, and agents of one node.

    Args:
        zeusd: The node's.
        directory: For kubelet's socket.
    """

    def __init__(self, zeusd: Client, directory: Path) -> None:
        self.api = ApiServer()
        self.kubelet = Kubelet(str(directory / "kubelet.sock"))
        self.zeusd = zeusd
        self.uuids = [gpu.uuid for gpu in zeusd.node().gpus]
        self._ends: list[Callable[[], None]] = []

    def start(self, *namespaces: str) -> Callable[[], None]:
        """Starts an agent; returns a function that ends it."""
        settings = client.Configuration(host=self.api.url)
        changed, ended = threading.Event(), threading.Event()
        apis = [client.CoreV1Api(client.ApiClient(settings)) for _ in range(len(namespaces) + 1)]
        watches = [
            PodWatch(api, NODE, namespace, changed.set, pause_s=0.01)
            for api, namespace in zip(apis, namespaces, strict=False)
        ]
        kubelet = KubeletClient(self.kubelet.path)
        slices = Slices(client.CustomObjectsApi(client.ApiClient(settings)), NODE)
        events = Events(apis[-1], NODE)
        agent = Agent(self.zeusd, watches, kubelet, events, changed, slices.uuid, resync_s=0.05)
        thread = threading.Thread(target=agent.run, args=(ended,), daemon=True)
        for watch in watches:
            watch.start()
        thread.start()

        def end() -> None:
            ended.set()
            changed.set()
            thread.join()
            for watch in watches:
                watch.stop()
            kubelet.close()

        self._ends.append(end)
        return end

    def run(self, pod: dict[str, Any], *gpus: int) -> dict[str, Any]:
        """A pod is bound to the node, and kubelet gives it GPUs."""
        metadata = pod["metadata"]
        ids = [self.uuids[index] for index in gpus]
        self.kubelet.pods.append(pod_resources(metadata["name"], ids, metadata["namespace"]))
        self.api.apply(pod)
        return pod

    def limits(self) -> list[float]:
        states = self.zeusd.state(self.uuids)
        return [(states[uuid].power_limit_mw or 0) / 1000 for uuid in self.uuids]

    def wait(self, *watts: float) -> None:
        wait_for(lambda: self.limits() == [*watts], f"limits of {watts}, not {self.limits()}")

    def wait_condition(self, pod: dict[str, Any], status: str, said: str) -> dict[str, Any]:
        def shown() -> dict[str, Any]:
            found = self.api.condition(pod)
            right = found.get("status") == status and said in found["message"]
            return found if right else {}

        return wait_for(shown, f"a condition with {said!r}, not {self.api.condition(pod)}")

    def told(self, reason: str) -> list[str]:
        return [one["message"] for one in self.api.events if one["reason"] == reason]

    def close(self) -> None:
        for end in self._ends:
            end()
        self.api.close()
        self.kubelet.stop()
        for gpu in self.zeusd.node().gpus:
            for one in gpu.ceilings:
                self.zeusd.set_ceiling(gpu.uuid, one.name, None)


@pytest.fixture
def cluster(zeusd: Client, tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        found = Cluster(zeusd, tmp_path)
        stack.callback(found.close)
        yield found


def test_a_pods_gpus_are_limited_until_it_is_deleted(cluster: Cluster) -> None:
    cluster.start("research")
    pod = cluster.run(a_pod(watts="150"), 1)
    cluster.wait(HIGHEST_W, 150)
    wait_for(lambda: cluster.told("PowerLimitSet"), "the event")
    assert cluster.told("PowerLimitSet") == ["GPU 1: at most 150 W until the pod ends"]
    (event,) = cluster.api.events
    assert event["involvedObject"]["uid"] == pod["metadata"]["uid"]
    cluster.api.delete(pod)
    cluster.wait(HIGHEST_W, HIGHEST_W)


def test_a_pod_that_asks_in_dynamos_words_for_gpus_of_a_claim(cluster: Cluster) -> None:
    """The limit is set, shown in the pod's status, and restored."""
    cluster.api.slices = [a_slice(("gpu-1", cluster.uuids[1]))]
    cluster.start("research")
    pod = a_pod(
        watts="150",
        annotation="dynamo.nvidia.com/gpu-power-limit",
        gpus=0,
        resourceClaims=[{"name": "gpu", "resourceClaimName": "one"}],
    )
    device = ("gpu.nvidia.com", NODE, "gpu-1", ["k8s.gpu.nvidia.com/claim=1-gpu-1"])
    cluster.kubelet.pods.append(claim("training", device, namespace="research"))
    cluster.api.apply(pod)
    cluster.wait(HIGHEST_W, 150)
    shown = cluster.wait_condition(pod, "True", "at most 150 W, by this pod")
    assert shown["reason"] == "PowerLimitSet"
    assert shown["observedGeneration"] == 1
    began = datetime.fromisoformat(shown["lastTransitionTime"].replace("Z", "+00:00"))
    assert abs(time.time() - began.timestamp()) < 600
    # Another ceiling is lower; and the generation of the pod changes with its spec.
    cluster.zeusd.set_ceiling(cluster.uuids[1], "fleet", 120_000)
    cluster.wait_condition(pod, "True", "at most 120 W, by the ceiling fleet")
    cluster.zeusd.set_ceiling(cluster.uuids[1], "fleet", None)
    pod["metadata"]["generation"] = 2
    cluster.api.apply(pod)
    wait_for(lambda: cluster.api.condition(pod)["observedGeneration"] == 2, "the generation")
    cluster.wait_condition(pod, "True", "at most 150 W, by this pod")
    pod["status"]["phase"] = "Succeeded"
    cluster.api.apply(pod)
    cluster.wait(HIGHEST_W, HIGHEST_W)


def test_a_condition_is_written_once_and_without_its_role_the_rest_works(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.start("research")
    pod = cluster.run(a_pod(watts="600"), 0)
    cluster.wait_condition(pod, "False", "600 W is outside 100 to 250 W")
    pod["metadata"]["annotations"].clear()
    cluster.api.apply(pod)
    cluster.wait_condition(pod, "False", "the pod asks for no power limit")
    cluster.api.forbidden.add("research")
    other = a_pod("other", "150")
    cluster.run(other, 1)
    cluster.wait(HIGHEST_W, 150)
    wait_for(lambda: "a role with patch on pods/status" in caplog.text, "the agent to say so")
    nodes: list[int] = []
    node = cluster.zeusd.node
    cluster.zeusd.node = lambda: (nodes.append(1), node())[1]  # type: ignore[method-assign]  # counted
    wait_for(lambda: len(nodes) > 6, "the agent to compare several times")
    del cluster.zeusd.node
    assert cluster.api.patches == 3
    assert cluster.api.condition(other) == {}


def test_an_annotation_that_changes_is_followed(cluster: Cluster) -> None:
    cluster.start("research")
    pod = cluster.run(a_pod(watts="150"), 0)
    cluster.wait(150, HIGHEST_W)
    pod["metadata"]["annotations"]["zeusd.dev/power-limit"] = "180"
    cluster.api.apply(pod)
    cluster.wait(180, HIGHEST_W)
    del pod["metadata"]["annotations"]["zeusd.dev/power-limit"]
    cluster.api.apply(pod)
    cluster.wait(HIGHEST_W, HIGHEST_W)


def test_a_pod_is_limited_once_kubelet_has_given_it_gpus(cluster: Cluster) -> None:
    cluster.start("research")
    pod = a_pod(watts="150")
    cluster.api.apply(pod)
    wait_for(lambda: cluster.api.watchers() == 1, "the watch")
    cluster.kubelet.pods = [pod_resources("training", [cluster.uuids[0]])]
    cluster.wait(150, HIGHEST_W)


def test_an_init_container_waits_until_the_limit_is_in_force(
    cluster: Cluster, daemon: RunningDaemon, tmp_path: Path
) -> None:
    """The command on the page, as an ordinary client."""
    program = tmp_path / "zeusctl"
    program.write_text(f"#!/bin/sh\n{zeusctl_line()}\n")
    program.chmod(0o755)
    page = (REPOSITORY / "docs/operate/kubernetes.md").read_text()
    block = page.partition('```yaml title="wait for the limit"\n')[2].partition("```")[0]
    (container,) = yaml.safe_load(block)["initContainers"]
    pod = a_pod(watts="150")
    path = f"{tmp_path}:{os.environ['PATH']}"
    uid = pod["metadata"]["uid"]
    env = {**os.environ, "PATH": path, "POD_UID": uid, "ZEUSD_SOCK_PATH": daemon.socket}
    with ending(subprocess.Popen(container["command"], env=env)) as waiting:
        cluster.start("research")
        cluster.run(pod, 1)
        assert waiting.wait(TIMEOUT_S) == 0
        assert cluster.limits() == [HIGHEST_W, 150]


def test_only_the_namespaces_that_the_administrator_lists_count(cluster: Cluster) -> None:
    cluster.start("research", "teaching")
    cluster.run(a_pod(watts="120", namespace="elsewhere"), 0)
    cluster.run(a_pod("lesson", "160", namespace="teaching"), 1)
    cluster.wait(HIGHEST_W, 160)
    assert not [one for one in cluster.api.requests if "elsewhere" in one or "/v1/pods" in one]


def test_all_namespaces_and_only_this_nodes_pods(cluster: Cluster) -> None:
    cluster.start("*")
    cluster.run(a_pod("far", "120", node="node-2"), 0)
    cluster.run(a_pod(watts="160", namespace="elsewhere"), 1)
    cluster.wait(HIGHEST_W, 160)


def test_two_pods_on_one_gpu_get_the_lower_limit(cluster: Cluster) -> None:
    cluster.start("research")
    low = cluster.run(a_pod("low", "120"), 0)
    cluster.run(a_pod("high", "180"), 0)
    cluster.wait(120, HIGHEST_W)
    cluster.api.delete(low)
    cluster.wait(180, HIGHEST_W)


def test_a_value_that_the_gpu_does_not_take_is_reported_to_the_pods_user(cluster: Cluster) -> None:
    cluster.start("research")
    cluster.run(a_pod(watts="600"), 0)
    wait_for(lambda: cluster.told("PowerLimitRefused"), "the event")
    (said,) = cluster.told("PowerLimitRefused")
    assert "GPU 0" in said
    assert "600 W is outside 100 to 250 W" in said
    cluster.run(a_pod("other", "150"), 1)  # and no second event while others are seen to
    cluster.wait(HIGHEST_W, 150)
    assert len(cluster.told("PowerLimitRefused")) == 1


def test_a_watch_that_is_too_old_begins_again_with_a_list(cluster: Cluster) -> None:
    cluster.start("research")
    pod = cluster.run(a_pod(watts="150"), 0)
    cluster.wait(150, HIGHEST_W)
    cluster.api.lose(pod)
    cluster.wait(HIGHEST_W, HIGHEST_W)
    assert sum("watch=" not in one for one in cluster.api.requests) == 2


def test_an_api_server_that_is_away_ends_no_limit(cluster: Cluster) -> None:
    cluster.start("research")
    cluster.run(a_pod(watts="150"), 0)
    cluster.wait(150, HIGHEST_W)
    cluster.api.forbidden.add("research")
    cluster.api.compact()
    before = len(cluster.api.requests)
    wait_for(lambda: len(cluster.api.requests) > before + 2, "the agent to try again")
    assert cluster.limits() == [150, HIGHEST_W]
    cluster.api.forbidden.clear()
    cluster.run(a_pod("other", "160"), 1)
    cluster.wait(150, 160)


def test_events_while_no_agent_ran_are_caught_up(cluster: Cluster) -> None:
    end = cluster.start("research")
    gone = cluster.run(a_pod("gone", "150"), 0)
    stays = cluster.run(a_pod("stays", "160"), 1)
    cluster.wait(150, 160)
    end()
    cluster.api.delete(gone)
    events = len(cluster.api.events)
    cluster.start("research")
    cluster.wait(HIGHEST_W, 160)
    assert len(cluster.api.events) == events, "a limit that is in force is no news"
    assert stays["metadata"]["uid"] in str(cluster.zeusd.node().gpus[1].ceilings)


def test_a_ceiling_that_someone_removes_is_set_again(cluster: Cluster) -> None:
    cluster.start("research")
    pod = cluster.run(a_pod(watts="150"), 0)
    cluster.wait(150, HIGHEST_W)
    cluster.zeusd.set_ceiling(cluster.uuids[0], f"job:{pod['metadata']['uid']}", None)
    cluster.wait(150, HIGHEST_W)


def test_before_all_pods_are_known_nothing_is_removed(cluster: Cluster) -> None:
    pod = a_pod(watts="150")
    name = f"job:{pod['metadata']['uid']}"
    cluster.zeusd.set_ceiling(cluster.uuids[0], name, 150_000)
    cluster.api.forbidden.add("teaching")
    cluster.start("research", "teaching")
    wait_for(lambda: len(cluster.api.requests) > 5, "the agent to try again")
    assert cluster.limits() == [150, HIGHEST_W]
    cluster.api.forbidden.clear()
    cluster.wait(HIGHEST_W, HIGHEST_W)


def test_without_kubelet_limits_stay(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.start("research")
    cluster.run(a_pod(watts="150"), 0)
    cluster.wait(150, HIGHEST_W)
    cluster.kubelet.stop()
    wait_for(lambda: "kubelet does not say" in caplog.text, "the agent to notice")
    assert cluster.limits() == [150, HIGHEST_W]


def test_while_the_driver_is_closed_pods_get_no_events(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    node = cluster.zeusd.node
    monkeypatch.setattr(cluster.zeusd, "node", lambda: (looks.append(1), node())[1])
    cluster.zeusd.quiesce()
    cluster.run(a_pod(watts="150"), 0)
    cluster.start("research")
    wait_for(lambda: len(looks) > 2, "the agent to look")
    cluster.zeusd.resume()
    cluster.wait(150, HIGHEST_W)
    assert not cluster.told("PowerLimitRefused")


def test_while_zeusd_sees_no_gpus_pods_get_no_events() -> None:
    told: list[Any] = []
    devices = {("research", "training"): ["GPU-1"]}
    parts: Any = (
        SimpleNamespace(node=lambda: SimpleNamespace(gpus=[])),
        [SimpleNamespace(pods=lambda: [pod_of(a_pod())])],
        SimpleNamespace(devices=lambda: devices),
        SimpleNamespace(tell=lambda *what: told.append(what), forget_others=lambda uids: None),
    )
    assert Agent(*parts, threading.Event()).reconcile(), "it looks again soon"
    assert told == []
