from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import types
import warnings
from functools import partial
from pathlib import Path

import pytest

from tests.support import NOBODY, ended, forked
from tests.zeusd.core.world import facts
from zeus.device import visible
from zeus.device.visible import visible_gpus, within_reach
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


AMD = [facts(f"GPU-{0xA0 + index:016x}", index).info for index in range(4)]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "3"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000a3,1"}, [3, 1]),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "0,1"}, [3]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_on_amd_gpus_the_list_is_read_as_hip_reads_it(
    env: dict[str, str], expected: list[int]
) -> None:
    assert [gpu.index for gpu in visible_gpus(AMD, env)] == expected
    assert [gpu.index for gpu in visible_gpus(AMD, env, simulated=True)] == expected


PARTITIONED = [
    gpu.model_copy(update={"mig_enabled": len(numbers) > 1, "runtime_indices": numbers})
    for gpu, numbers in zip(AMD, ([4, 5], [6], [0, 1, 2], [3]), strict=True)
]
"""As HIP counts where the kernel's order is not that of PCI addresses."""


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, [2, 2, 2, 3, 0, 0, 1]),
        ({"HIP_VISIBLE_DEVICES": "6,4,0,1"}, [1, 0, 2, 2]),
        ({"HIP_VISIBLE_DEVICES": "4,4"}, []),
        ({"ROCR_VISIBLE_DEVICES": "3,4,5", "HIP_VISIBLE_DEVICES": "2,0"}, [0, 3]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000a3,GPU-00000000000000a1"}, [3, 1]),
    ],
)
def test_partitions_are_counted_as_hip_counts_them(
    env: dict[str, str], expected: list[int]
) -> None:
    assert [gpu.index for gpu in visible_gpus(PARTITIONED, env)] == expected


def test_partitions_that_cannot_be_told_apart_are_refused_with_what_to_do() -> None:
    divided = [AMD[0], AMD[1].model_copy(update={"mig_enabled": True})]
    with pytest.raises(ZeusGPUInitError, match=r"GPU 1 is partitioned.*to SPX"):
        visible_gpus(divided, {})
    with pytest.raises(ZeusGPUInitError, match="name partitions by HIP's index"):
        visible_gpus(PARTITIONED, {"ROCR_VISIBLE_DEVICES": "GPU-00000000000000a0"})


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


@pytest.mark.parametrize(
    ("hip", "cuda", "started", "gpus", "remedy"),
    [
        ("6.2", None, False, "nvidia", r"set library under \[amd\]"),
        ("6.2", None, True, "amd", None),
        (None, "12.8", True, "amd", r"remove library under \[amd\]"),
        (None, "12.8", False, "amd", None),  # another framework may compute
        (None, "12.8", True, "nvidia", None),
        (None, None, False, "nvidia", None),
    ],
)
def test_a_framework_of_another_vendor_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    hip: str | None,
    cuda: str | None,
    started: bool,
    gpus: str,
    remedy: str | None,
) -> None:
    version = types.SimpleNamespace(hip=hip, cuda=cuda)
    calls = types.SimpleNamespace(is_initialized=lambda: started)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(version=version, cuda=calls))
    there = AMD if gpus == "amd" else GPUS
    if remedy is None:
        assert visible_gpus(there, {}) == there
        return
    with pytest.raises(ZeusGPUInitError, match=remedy) as caught:
        visible_gpus(there, {})
    assert "\n" not in str(caught.value)
    assert visible_gpus(there, {}, simulated=True) == there


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


class Driver:
    """The driver's view of these GPUs, and device files that can be opened or not."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.dev = folder / "proc", folder / "dev"
        self.dev.mkdir()
        # The driver numbers its files as it likes.
        for gpu, minor in zip(GPUS, (2, 0, 1), strict=True):
            domain, rest = gpu.pci_address.split(":", 1)
            one = self.proc / f"{domain[-4:]}:{rest}"
            one.mkdir(parents=True)
            text = f"Model: \t\t {gpu.name}\nGPU UUID: \t {gpu.uuid}\nDevice Minor: \t {minor}\n"
            (one / "information").write_text(text)

    def has(self, *minors: int) -> None:
        for minor in minors:
            (self.dev / f"nvidia{minor}").touch()


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(tmp_path)
    reach = partial(within_reach, driver=made.proc, devices=made.dev)
    monkeypatch.setattr(visible, "within_reach", reach)
    return made


def test_in_a_container_indices_count_the_gpus_it_has(driver: Driver) -> None:
    driver.has(0, 1)  # of GPUs 1 and 2
    assert seen(None) == [1, 2]
    assert seen("0") == [1]
    assert seen("1,0") == [2, 1]
    assert seen("2") == []
    assert seen("GPU-bbbb") == [2]
    assert seen("GPU-aaaa1111") == [], "it is the node's, but not the container's"


def test_a_process_without_gpus_lists_all_of_them(driver: Driver) -> None:
    """A container that has the socket and no GPU, as the exporter's and a monitor's."""
    assert seen(None) == [0, 1, 2]


def test_a_simulated_node_has_no_device_files(driver: Driver) -> None:
    driver.has(0)
    assert len(visible_gpus(GPUS, {}, simulated=True)) == 3


def test_a_device_file_that_may_not_be_opened_does_not_count(driver: Driver) -> None:
    """As in a control group that keeps the others' GPUs from a job."""
    driver.has(0, 1, 2)
    (driver.dev / "nvidia2").chmod(0)
    if os.getuid() == 0:  # no mode applies to root: a child with another user checks
        for folder in (driver.dev, *driver.dev.parents):
            if folder != Path(tempfile.gettempdir()) and folder.is_relative_to(
                tempfile.gettempdir()
            ):
                folder.chmod(0o755)
        for name in ("nvidia0", "nvidia1"):
            (driver.dev / name).chmod(0o666)

        def as_another() -> None:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            assert seen(None) == [1, 2]

        assert ended(forked(as_another)) == 0
    else:
        assert seen(None) == [1, 2]


def test_importing_the_monitor_is_light() -> None:
    source = (
        "import sys, zeus.monitor\n"
        "heavy = {'torch', 'pandas', 'numpy', 'matplotlib', 'sklearn', 'zmq', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
