"""GPUs of resource claims (DRA): as kubelet lists them, and as ResourceSlices name them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from tests.support import RunningDaemon, wait_for
from tests.zeusctl.kubernetes.api_server import ApiServer
from tests.zeusctl.kubernetes.node import NODE, Kubelet, a_slice, claim, field, pod_resources
from tests.zeusctl.kubernetes.test_accounts import Known, charged
from tests.zeusctl.kubernetes.test_accounts import daemon as daemon
from zeusctl.kubernetes.accounts import PodAccounts
from zeusctl.kubernetes.kubelet import Kubelet as KubeletClient
from zeusctl.kubernetes.kubelet import devices_of
from zeusctl.kubernetes.slices import PAUSE_S, Slices, uuids_of

UUID = "GPU-8f6d0f2c-1111-2222-3333-444455556666"
MIG = "MIG-8f6d0f2c-1111-2222-3333-444455556666"
DRIVER = "gpu.nvidia.com"


def listed(*pods: bytes) -> dict[tuple[str, str], list[str]]:
    return devices_of(b"".join(field(1, one) for one in pods))


def test_a_claims_device_is_its_uuid_where_its_cdi_name_has_one() -> None:
    names = [f"nvidia.com/gpu={UUID}"]
    pods = [
        claim("a", (DRIVER, NODE, "gpu-0", names)),
        claim("b", ("", "", "", [f"k8s.{DRIVER}/claim=0000-{MIG}"])),  # before 1.31
        claim("c", (DRIVER, NODE, "gpu-1", [f"k8s.{DRIVER}/claim=0000-gpu-1"])),
        claim("d", ("nic.example.com", NODE, "nic-0", ["example.com/nic=0"])),
        claim("e", ("compute-domain.nvidia.com", NODE, "channel-0", ["k8s.x/channel=0"])),
        claim("f", ("gpu.nvidia.com.example.org", NODE, "gpu-0", names)),
    ]
    assert listed(*pods) == {
        ("ml", "a"): [UUID],
        ("ml", "b"): [MIG],
        ("ml", "c"): [f"{DRIVER}/{NODE}/gpu-1"],
    }


def test_slices_of_each_version_name_uuids() -> None:
    for basic in (False, True):
        items = [a_slice(("gpu-0", UUID), ("gpu-0-mig-19-0-1", ""), basic=basic)]
        assert dict(uuids_of({"items": items})) == {f"{DRIVER}/{NODE}/gpu-0": UUID}
    qualified = a_slice(("gpu-0", ""))
    qualified["spec"]["devices"][0]["attributes"][f"{DRIVER}/uuid"] = {"string": UUID}
    assert dict(uuids_of({"items": [qualified]})) == {f"{DRIVER}/{NODE}/gpu-0": UUID}
    assert dict(uuids_of({})) == {}


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.close()


def slices(api: ApiServer, now_s: list[float]) -> Slices:
    settings = client.Configuration(host=api.url)
    custom = client.CustomObjectsApi(client.ApiClient(settings))
    return Slices(custom, NODE, lambda: now_s[0])


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_the_api_server_is_asked_about_this_node_and_not_too_often(
    api: ApiServer, version: str
) -> None:
    now_s = [0.0]
    found = slices(api, now_s)
    api.slices_version = version
    api.slices = [a_slice(("gpu-0", UUID)), a_slice(("gpu-0", MIG), node="other")]
    assert found.uuid(f"{DRIVER}/{NODE}/gpu-0") == UUID
    asked = len(api.requests)
    for _ in range(3):
        assert found.uuid(f"{DRIVER}/{NODE}/gpu-0") == UUID
        assert found.uuid(f"{DRIVER}/{NODE}/gpu-1") is None
    assert len(api.requests) == asked
    api.slices = [a_slice(("gpu-1", MIG))]
    now_s[0] = PAUSE_S
    assert found.uuid(f"{DRIVER}/{NODE}/gpu-1") == MIG


def test_a_service_account_that_may_not_list_slices_learns_which_role_it_needs(
    api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [0.0]
    found = slices(api, now_s)
    api.forbidden = {""}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert found.uuid(f"{DRIVER}/{NODE}/gpu-0") is None
            now_s[0] += PAUSE_S
    assert caplog.text.count("a ClusterRole with list on resourceslices") == 1


def test_pods_are_charged_for_what_they_claim(
    daemon: RunningDaemon, api: ApiServer, tmp_path: Path
) -> None:
    kubelet = Kubelet(str(tmp_path / "kubelet.sock"))
    known = Known()
    with daemon.client() as zeusd:
        whole, split = zeusd.node().gpus
        (small, _) = zeusd.processes(split.uuid)[split.uuid].mig_devices
        api.slices = [a_slice(("gpu-0", whole.uuid), ("gpu-1-mig-19-0-1", small.uuid))]
        found = slices(api, [0.0])
        accounts = PodAccounts(zeusd, [known.watch], KubeletClient(kubelet.path), found.uuid)
        of_mig = (DRIVER, NODE, "gpu-1-mig-19-0-1", ["k8s.gpu.nvidia.com/claim=1-gpu-1-mig"])
        of_gpu = (DRIVER, NODE, "gpu-0", ["k8s.gpu.nvidia.com/claim=2-gpu-0"])
        of_none = (DRIVER, NODE, "gpu-1-mig-9-4-4", ["k8s.gpu.nvidia.com/claim=3-gpu-1-mig"])
        kubelet.pods = [
            claim("claims", of_gpu),
            claim("claims-mig", of_mig, of_mig),  # by two containers, or two requests
            claim("later", of_none),
            pod_resources("none", [], "ml"),
        ]
        accounts.reconcile()
        names = {"ml/claims", "ml/claims-mig"}
        now = wait_for(lambda: (one := charged(zeusd)) and {*one} >= names and one, "all")
        assert now["ml/claims"].methods == ["allocated"]
        assert now["ml/claims-mig"].methods == ["weights"]
        assert "ml/later" not in now
        kubelet.pods = [claim("claims", of_gpu), claim("shares", of_gpu)]
        accounts.reconcile()
        shared = wait_for(lambda: (one := charged(zeusd)) and "ml/shares" in one and one, "it")
        assert shared["ml/shares"].methods == ["weights"]
        kubelet.pods = []
        accounts.reconcile()
    kubelet.stop()
