from __future__ import annotations

import subprocess
import sys
import types
import warnings

import pytest

from tests.zeusd.core.world import facts
from zeus.device import visible
from zeus.device.visible import visible_gpus
from zeus.exceptions import ZeusGPUInitError

GPUS = [
    facts(uuid, index).info
    for index, uuid in enumerate(("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333"))
]
MIXED = [*GPUS[:2], GPUS[2].model_copy(update={"name": "Another GPU"})]


def seen(value: str | None, **env: str) -> list[int]:
    if value is not None:
        env["CUDA_VISIBLE_DEVICES"] = value
    return [gpu.index for gpu in visible_gpus(GPUS, env)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 1 ", [2, 1]),
        ("0,-1,1", [0]),
        ("-1", []),
        ("0,7,1", [0]),
        ("1,1", []),
        ("nonsense", []),
        ("GPU-bbbb3333", [2]),
        ("GPU-b,GPU-aaaa1", [2, 0]),
        ("GPU-aaaa", []),
        ("0,GPU-zzzz,1", [0]),
        ("NoDevFiles", []),
    ],
)
def test_the_list_is_read_as_cuda_reads_it(value: str | None, expected: list[int]) -> None:
    assert seen(value) == expected


@pytest.mark.parametrize("value", ["MIG-1234", "0,MIG-1234", "mig-gpu-aaaa/1/0"])
def test_mig_is_refused_with_what_to_do(value: str) -> None:
    with pytest.raises(ZeusGPUInitError, match="whole GPU"):
        seen(value)


def test_on_a_mixed_node_indices_need_an_order() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "2"}
    with pytest.raises(ZeusGPUInitError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        visible_gpus(MIXED, env)
    assert visible_gpus(MIXED, {**env, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == [MIXED[2]]
    assert visible_gpus(MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-b"}) == [MIXED[2]]
    assert visible_gpus(MIXED, env, simulated=True) == [MIXED[2]]


def test_on_a_mixed_node_without_a_list_one_warning_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(visible, "_warned", False)
    with pytest.warns(UserWarning, match="several models"):
        assert visible_gpus(MIXED, {}) == MIXED
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        visible_gpus(MIXED, {})


def test_pytorch_knows_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order = ["bbbb3333", "aaaa1111", "aaaa2222"]
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: 3,
            get_device_properties=lambda index: types.SimpleNamespace(uuid=order[index]),
        )
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert [gpu.index for gpu in visible_gpus(MIXED, {})] == [2, 0, 1]


def test_importing_the_monitor_is_light() -> None:
    source = (
        "import sys, zeus.monitor\n"
        "heavy = {'torch', 'pandas', 'numpy', 'matplotlib', 'sklearn', 'zmq', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
