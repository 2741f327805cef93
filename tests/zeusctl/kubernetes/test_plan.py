"""The requests of pods, and their consequences; pure."""

from __future__ import annotations

from typing import Any

import pytest

from tests.zeusctl.kubernetes.node import a_pod, field, pod_resources
from zeus_ipc.replies import CeilingInfo, GpuInfo, GpuState
from zeusctl.kubernetes.kubelet import devices_of
from zeusctl.kubernetes.plan import CeilingPlan, condition_of, differences, held, plan
from zeusctl.kubernetes.pods import ANNOTATIONS, milliwatts, pod_of
from zeusctl.parts import Devices, GpuPart

KEY = ("research", "training")


DYNAMO = "dynamo.nvidia.com/gpu-power-limit"


def gpu(index: int, number: int | None = None, **ceilings: int) -> GpuInfo:
    found = GpuInfo.model_construct(
        uuid=f"GPU-{index}abc",
        index=index,
        pci_address=f"00000000:0{index}:00.0",
        device_file=f"/dev/nvidia{index if number is None else number}",
        ceilings=[],
    )
    for name, watts in ceilings.items():
        found.ceilings.append(
            CeilingInfo.model_construct(
                name=f"job:{name.replace('_', '-')}", control="power_limit", value=[watts * 1000]
            )
        )
    return found


GPUS = [gpu(0), gpu(1)]


def planned(pod: dict[str, Any], *ids: str) -> CeilingPlan:
    return plan([pod_of(pod)], {KEY: ids} if ids else {}, GPUS)


@pytest.mark.parametrize(
    ("text", "mw"),
    [("200", 200_000), (" 200W ", 200_000), ("0", None), ("200mW", None), ("", None), ("1e3", None)]
    + [("99999", None), ("-200", None), ("200.5", None), ("٢٠٠", None)],
)
def test_an_annotation_is_a_whole_number_of_watts(text: str, mw: int | None) -> None:
    assert [milliwatts(one, text) for one in ANNOTATIONS] == [mw, mw]


def test_of_several_annotations_the_lowest_counts_and_one_that_is_wrong_is_named() -> None:
    pod = a_pod(watts="200")
    pod["metadata"]["annotations"][DYNAMO] = "150"
    assert {*planned(pod, "GPU-0abc").bounds.values()} == {150_000}
    pod["metadata"]["annotations"][DYNAMO] = "low"
    found = planned(pod, "GPU-0abc")
    assert {*found.bounds.values()} == {200_000}
    assert [*found.refusals.values()] == [
        f'{DYNAMO}: "low" is not a number of watts; write, for example, "200"'
    ]


def test_each_gpu_of_a_pod_gets_a_ceiling_of_the_pods_uid() -> None:
    pod = a_pod()
    found = planned(pod, "GPU-1abc", "GPU-0abc")
    name = f"job:{pod['metadata']['uid']}"
    assert found.bounds == {("GPU-0abc", name): 200_000, ("GPU-1abc", name): 200_000}
    assert not found.refusals


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_gets_none(phase: str) -> None:
    assert not planned(a_pod(phase=phase), "GPU-0abc").bounds


def test_a_pod_that_is_being_deleted_keeps_its_limit_while_it_runs() -> None:
    pod = a_pod()
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert planned(pod, "GPU-0abc").bounds


def test_a_pod_without_its_gpus_yet_is_waited_for() -> None:
    found = planned(a_pod())
    assert found.waiting
    assert not found.refusals


@pytest.mark.parametrize(
    ("pod", "ids", "said"),
    [
        (a_pod(watts="low"), ["GPU-0abc"], '"low" is not a number of watts'),
        (a_pod(gpus=0), [], "no container of the pod requests a GPU"),
        (a_pod(gpus=0, resourceClaims=[{}]), [], "none of the pod's resource claims has a GPU"),
        (a_pod(annotation=DYNAMO, gpus=0), [], f"{DYNAMO}: no container of the pod"),
        (a_pod(), ["MIG-1234"], "a part of a GPU has no power limit of its own"),
        (a_pod(), ["gpu.nvidia.com/node-1/gpu-1-mig-19-0-1"], "a part of a GPU has no power limit"),
        (a_pod(), ["GPU-5abc"], "zeusd does not know it"),
    ],
)
def test_impossible_requests_are_refused_with_the_reason(
    pod: dict[str, Any], ids: list[str], said: str
) -> None:
    found = planned(pod, *ids)
    (text,) = found.refusals.values()
    assert said in text
    assert not found.bounds
    assert not found.waiting


def test_a_pod_of_claims_is_waited_for_until_its_gpu_is_known() -> None:
    pod = a_pod(gpus=0, resourceClaims=[{}], phase="Pending")
    found = planned(pod)
    assert (len(found.waiting), found.refusals) == (1, {})
    pod["status"]["phase"] = "Running"
    found = planned(pod, "gpu.nvidia.com/node-1/gpu-0")
    (said,) = found.refusals.values()
    assert "the API server does not say which GPU this is" in said
    # The agent may have been restarted: what it set before stays.
    (name,) = found.waiting
    assert differences(found, {("GPU-0abc", name): 200_000}) == ({}, [])
    assert planned(pod, "GPU-1abc").bounds == {("GPU-1abc", name): 200_000}


MINE = "12345678-1234-1234-1234-123456789abc"
OWN = "job:" + MINE


@pytest.mark.parametrize(
    ("limit_w", "enforced_w", "other_w", "set_by", "status", "said"),
    [
        (200, 200, None, OWN, "True", "at most 200 W, by this pod"),
        (150, 150, 150, "job:77", "True", "at most 150 W, by the ceiling job:77"),
        (180, 180, None, "site", "True", "at most 180 W, by the site limit"),
        (120, 120, None, "lease", "True", "at most 120 W, by a lease"),
        (120, 120, None, None, "True", "at most 120 W, by someone outside zeusd"),
        (200, 170, None, "BMC", "True", "at most 170 W, by the board or its BMC"),
        (200, None, None, OWN, "True", "at most 200 W, by this pod"),
        (250, 250, None, None, "False", "at most 250 W, by someone outside zeusd"),
        (250, 180, None, "BMC", "True", "at most 180 W, by the board or its BMC"),
    ],
)
def test_the_condition_has_the_limit_in_force_and_who_bounds_it(
    limit_w: int,
    enforced_w: int | None,
    other_w: int | None,
    set_by: str | None,
    status: str,
    said: str,
) -> None:
    pod = a_pod()
    pod["metadata"]["uid"] = MINE
    one = gpu(0, **{MINE.replace("-", "_"): 200}, **({"77": other_w} if other_w else {}))
    highest = {"power_limit_highest_mw": (other_w or 200) * 1000, "power_limit_max_mw": 250_000}
    one = one.model_copy(update=highest)
    state = GpuState.model_construct(
        power_limit_mw=limit_w * 1000,
        enforced_power_limit_mw=None if enforced_w is None else enforced_w * 1000,
        limit_author=set_by,
    )
    shown = condition_of(pod_of(pod), planned(pod, "GPU-0abc"), [one], {"GPU-0abc": state})
    assert shown is not None
    assert (shown.status, shown.message) == (status, f"GPU 0 (GPU-0abc): {said}")
    # Of two GPUs, one that does not answer may exceed the limit.
    both = planned(pod, "GPU-0abc", "GPU-1abc")
    assert (condition_of(pod_of(pod), both, [one, GPUS[1]], {"GPU-0abc": state}) is None) == (
        status == "True"
    )


def test_a_static_pod_is_named_as_its_control_group_is() -> None:
    pod = a_pod()
    pod["metadata"]["annotations"]["kubernetes.io/config.mirror"] = "0123456789abcdef" * 2
    ((_, name),) = planned(pod, "GPU-0abc").bounds
    assert name == "job:" + "0123456789abcdef" * 2


def test_a_pod_cannot_take_the_name_of_another_ones_control_group() -> None:
    pod = a_pod()
    before = planned(pod, "GPU-0abc").bounds
    pod["metadata"]["annotations"]["kubernetes.io/config.hash"] = "0123456789abcdef" * 2
    assert planned(pod, "GPU-0abc").bounds == before


@pytest.mark.parametrize(
    ("device", "index"),
    [("GPU-1abc", 1), ("gpu-1ABC", 1), ("GPU-1abc::3", 1), ("1", 1), ("0000:01:00.0", 1)]
    + [("00000000:01:00.0", 1), ("nvidia1", 1), ("/dev/nvidia1", 1), ("11", None), ("", None)],
)
def test_device_plugins_name_gpus_in_several_ways(device: str, index: int | None) -> None:
    found = Devices(GPUS).find(device)
    assert (None if found is None else found.gpu) == (None if index is None else f"GPU-{index}abc")


def test_a_number_counts_only_if_it_is_index_and_device_number() -> None:
    """A GPU was lost, and NVML counts the others again: 0 is the file of 1."""
    node = Devices([gpu(0, number=1), gpu(1, number=2)])
    assert [node.find(name) for name in ("0", "1", "nvidia0")] == [None, None, None]
    assert node.find("nvidia1") == GpuPart("GPU-0abc")


def test_only_what_differs_is_done_and_only_pods_ceilings_are_touched() -> None:
    mine, old = "12345678-1234-1234-1234-123456789abc", "12345678-1234-1234-1234-123456789abd"
    one = gpu(0, **{mine.replace("-", "_"): 200, old.replace("-", "_"): 150, "77": 180})
    other = gpu(1, **{mine.replace("-", "_"): 200})
    wanted = {("GPU-0abc", f"job:{mine}"): 200_000, ("GPU-1abc", f"job:{mine}"): 250_000}
    put, removed = differences(CeilingPlan(wanted), held([one, other]))
    assert put == {("GPU-1abc", f"job:{mine}"): 250_000}
    assert removed == [("GPU-0abc", f"job:{old}")]


def test_a_pod_keeps_its_limit_while_kubelet_does_not_name_its_gpus() -> None:
    pod = a_pod()
    one = gpu(0, **{pod["metadata"]["uid"].replace("-", "_"): 200})
    assert differences(planned(pod), held([one])) == ({}, [])
    pod["status"]["phase"] = "Succeeded"
    assert differences(planned(pod), held([one]))[1], "but not longer than it lives"


def test_kubelets_answer_is_read() -> None:
    answer = b"".join(
        field(1, one)
        for one in (
            pod_resources("training", ["GPU-1", "GPU-2"]),
            pod_resources("net", ["0"], resource="rdma/hca"),
            pod_resources("x" * 300, ["GPU-3"], "other"),
        )
    )
    assert devices_of(answer) == {KEY: ["GPU-1", "GPU-2"], ("other", "x" * 300): ["GPU-3"]}


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_cut_answer_of_kubelets_is_an_error(cut: int) -> None:
    answer = field(1, pod_resources("training", ["GPU-1"]))
    with pytest.raises(ValueError, match="not a list of pods"):
        devices_of(answer[:cut])
