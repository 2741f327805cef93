"""Pods are charged for the GPUs that kubelet gave them: with a simulated zeusd and a kubelet."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support import RunningDaemon, configuration, running_daemon, wait_for
from tests.zeusctl.kubernetes.node import Kubelet, a_pod, pod_resources
from zeus_ipc import Client
from zeus_ipc.errors import DaemonUnavailable, ZeusIpcError
from zeus_ipc.replies import GpuInfo, UsageSum
from zeus_ipc.requests import BUCKET_S
from zeusctl.kubernetes.accounts import PodAccounts, holdings
from zeusctl.kubernetes.kubelet import Kubelet as KubeletClient
from zeusctl.kubernetes.kubelet import KubeletUnavailable
from zeusctl.kubernetes.pods import Pod, pod_of
from zeusctl.kubernetes.watch import PodWatch
from zeusctl.parts import Devices, GpuPart

GPUS = cast(
    "list[GpuInfo]",
    [
        SimpleNamespace(
            uuid=f"GPU-{index}",
            index=index,
            pci_address=f"00000000:0{index}:00.0",
            device_file=f"/dev/nvidia{index}",
        )
        for index in range(3)
    ],
)
SPLIT = {"MIG-a": GpuPart("GPU-1", 1, 7, 9), "MIG-b": GpuPart("GPU-1", 3, 7, 10)}
NODE = Devices(GPUS, SPLIT)


WHOLE, HALF = GpuPart("GPU-0"), GpuPart("GPU-0", 1)


@pytest.mark.parametrize(
    ("devices", "parts"),
    [
        ({"a": ["GPU-0", "GPU-2"]}, {"a": [WHOLE, GpuPart("GPU-2")]}),
        (
            {"a": ["GPU-0::0", "GPU-0::3"], "b": ["GPU-0::1"]},
            {"a": [GpuPart("GPU-0", 2)], "b": [HALF]},
        ),
        ({"a": ["MIG-a"], "b": ["nvidia1/gi10"]}, {"a": [SPLIT["MIG-a"]], "b": [SPLIT["MIG-b"]]}),
        ({"a": ["GPU-0"], "b": ["GPU-0"]}, {"a": [HALF], "b": [HALF]}),
        ({"ended": ["GPU-0"], "b": ["GPU-0"]}, {"b": [WHOLE]}),
    ],
    ids=["whole", "replicas", "MIG", "listed twice", "ended, though kubelet still lists it"],
)
def test_pods_hold_what_kubelet_lists(
    devices: dict[str, list[str]], parts: dict[str, list[GpuPart]]
) -> None:
    listed = {("ml", name): ids for name, ids in devices.items()}
    ended = pod_of(a_pod("ended", namespace="ml", phase="Succeeded"))
    found: dict[str, list[GpuPart]] = {}
    for one in holdings(listed, [ended, pod_of(a_pod("b", namespace="ml"))], NODE)[0]:
        found.setdefault(one.name.removeprefix("ml/"), []).append(one.part)
    assert {name: sorted(held, key=lambda part: part.gpu) for name, held in found.items()} == parts


def test_a_device_that_is_not_here_is_reported_and_charged_to_nobody() -> None:
    found, unknown = holdings({("ml", "a"): ["GPU-9", "MIG-c", "nvidia1/gi3"]}, [], NODE)
    assert (found, unknown) == (set(), {"GPU-9", "MIG-c", "nvidia1/gi3"})


def test_a_static_pod_is_found_by_the_name_that_its_control_group_has() -> None:
    pod = a_pod("static")
    pod["metadata"]["annotations"]["kubernetes.io/config.mirror"] = "0123456789abcdef" * 2
    ((one,), _) = holdings({("research", "static"): ["GPU-0"]}, [pod_of(pod)], NODE)
    assert one.control_group == "0123456789abcdef" * 2


class Zeusd:
    """Requests of an agent to a zeusd with one GPU."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.trouble: ZeusIpcError | None = None

    def node(self) -> SimpleNamespace:
        gpu = SimpleNamespace(
            uuid="GPU-0", index=0, pci_address="0", device_file="", mig_enabled=False
        )
        return SimpleNamespace(gpus=[gpu])

    def allocate(self, gpu: str, name: str, **_: object) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.asked.append(f"+{name}")

    def deallocate(self, name: str, **_: object) -> None:
        self.asked.append(f"-{name}")


class Answers:
    """A kubelet with given answers, one after the other, which then ends the agent."""

    def __init__(self) -> None:
        self.script: list[Callable[[], dict[tuple[str, str], list[str]]]] = []
        self.ended = threading.Event()

    def devices(self) -> dict[tuple[str, str], list[str]]:
        answer = self.script.pop(0)
        if not self.script:
            self.ended.set()
        return answer()


def answers(**names: str) -> Callable[[], dict[tuple[str, str], list[str]]]:
    return lambda: {("research", name): [gpu] for name, gpu in names.items()}


def away() -> dict[tuple[str, str], list[str]]:
    raise KubeletUnavailable("no socket")


class Agent:
    """An agent with a fake zeusd and a fake kubelet."""

    def __init__(self, *pods: Pod) -> None:
        self.zeusd, self.kubelet, self.known = Zeusd(), Answers(), Known()
        self.known.found = [*pods]
        client = cast("Client", self.zeusd)
        kubelet = cast("KubeletClient", self.kubelet)
        self.accounts = PodAccounts(client, [self.known.watch], kubelet, period_s=0)

    def run(self, *script: Callable[[], dict[tuple[str, str], list[str]]]) -> list[str]:
        """Runs the agent for a number of polls; returns its requests to zeusd."""
        self.zeusd.asked.clear()
        self.kubelet.ended.clear()
        self.kubelet.script = [*script]
        self.accounts.run(self.kubelet.ended)
        return self.zeusd.asked


def test_a_kubelet_that_restarts_ends_no_holding_of_a_pod_that_runs() -> None:
    """Its socket is gone for a while; then it lists no pod until it knows them again."""
    pods = {name: pod_of(a_pod(name)) for name in ("a", "b")}
    agent = Agent(*pods.values())
    assert agent.run(answers(a="GPU-0")) == ["+research/a"]
    assert agent.run(away, away, answers(), answers(a="GPU-0")) == []
    assert agent.run(answers(), answers(b="GPU-0")) == ["-research/a", "+research/b"]
    # One that ended meanwhile, and one with the name of a deleted one.
    agent.known.found = [replace(pods["b"], ended=True)]
    assert agent.run(away, answers()) == ["-research/b"]
    agent.known.found = [pods["a"]]
    assert agent.run(answers(a="GPU-0")) == ["+research/a"]
    agent.known.found = [pod_of(a_pod("a"))]
    assert agent.run(answers()) == ["-research/a"]


def test_another_zeusd_is_informed_again_of_holders() -> None:
    agent = Agent()
    assert agent.run(answers(a="GPU-0")) == ["+research/a"]
    agent.zeusd.trouble = DaemonUnavailable("no socket")
    assert agent.run(answers(a="GPU-0", b="GPU-0")) == ["-research/a"]
    agent.zeusd.trouble = None
    assert agent.run(answers(a="GPU-0", b="GPU-0")) == ["+research/a", "+research/b"]
    assert agent.run(answers(a="GPU-0", b="GPU-0")) == []


class Known:
    """The pods that the Kubernetes API knows."""

    def __init__(self) -> None:
        self.found: list[Pod] | None = []
        self.watch = cast("PodWatch", self)

    def pods(self) -> list[Pod] | None:
        return self.found


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("ledger")
    text = f'[accounting]\ndirectory = "{folder}"\n'
    node = "1xv100-pcie,1xh100-sxm:mig=1g+3g"
    with running_daemon("--simulate", node, *configuration(folder, text), gpus=2) as running:
        yield running


def charged(zeusd: Client) -> dict[str, UsageSum]:
    end = int(time.time()) // BUCKET_S * BUCKET_S + 2 * BUCKET_S
    usage = zeusd.usage([0, end], "pod")
    assert sum(one.active_uj + one.idle_uj for one in usage.sums) == sum(usage.metered_uj)
    return {one.name: one for one in usage.sums if one.kind == "pod"}


def test_pods_are_charged_from_kubelets_list_to_its_next(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    kubelet = Kubelet(str(tmp_path / "kubelet.sock"))
    known = Known()
    with daemon.client() as zeusd:
        whole, split = zeusd.node().gpus
        (small, large) = zeusd.processes(split.uuid)[split.uuid].mig_devices
        accounts = PodAccounts(zeusd, [known.watch], KubeletClient(kubelet.path))
        known.found = None  # not known yet: nothing is done
        kubelet.pods = [
            pod_resources("one", [whole.uuid], "ml"),
            pod_resources("two", [small.uuid], "ml", "nvidia.com/mig-1g.10gb"),
            pod_resources("three", [large.uuid], "web", "nvidia.com/mig-3g.40gb"),
        ]
        accounts.reconcile()
        assert charged(zeusd) == {}
        known.found = [pod_of(a_pod("one", namespace="ml"))]
        accounts.reconcile()
        wait_for(lambda: "ml/one" in charged(zeusd), "a tick while it is held")
        (first,) = known.found
        kubelet.pods, known.found = kubelet.pods[1:], []
        accounts.reconcile()  # the deallocation waits until it is charged
        three = {"ml/one", "ml/two", "web/three"}
        found = wait_for(
            lambda: (now := charged(zeusd)) and {*now} == three and now, "all to be charged"
        )
        assert (found["ml/one"].methods, found["ml/one"].run) == (["allocated"], first.uid)
        assert {*found["ml/two"].methods, *found["web/three"].methods} == {"weights"}
        # A restarted agent, and a kubelet that is away for a while, change nothing.
        again = PodAccounts(zeusd, [known.watch], KubeletClient(kubelet.path))
        again.reconcile()
        kubelet.stop()
        with pytest.raises(KubeletUnavailable, match="mount"):
            again.reconcile()
        assert {*charged(zeusd)} == three
        restarted = Kubelet(kubelet.path)  # a new socket
        restarted.pods = [pod_resources("four", [whole.uuid], "ml")]

        def reconciled() -> bool:
            with contextlib.suppress(KubeletUnavailable):
                again.reconcile()
                return True
            return False

        wait_for(reconciled, "kubelet to be found again")
        wait_for(lambda: "ml/four" in charged(zeusd), "a tick of the pod that it lists")
        restarted.stop()
