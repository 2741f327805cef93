"""zeusctl on a node with GPUs that lack something."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_nvml.double import NvmlDouble
from tests.support import public_directory, running_daemon, wait_for
from tests.zeus.test_odd_gpus import A100, DISPLAY, NO_POWER
from tests.zeusctl.conftest import Ctl
from zeusctl.exits import Exit
from zeusd.devices.nvml.codes import Return


@pytest.fixture(scope="module")
def socket() -> Iterator[str]:
    """A node of an A100, a display card without a power sensor, and a GPU that is lost."""
    with public_directory() as directory:
        double = NvmlDouble(directory, [A100, DISPLAY, A100])
        for symbol in NO_POWER:
            double.inject(1, symbol, Return.NOT_SUPPORTED)
        double.inject(2, "*", Return.GPU_IS_LOST)
        options = ("--nvml-library", double.library)
        with running_daemon(*options, env=double.env, gpus=2, directory=directory) as running:
            yield running.socket


def test_doctor_faults_the_lost_gpu_and_not_the_display_card(ctl: Ctl, socket: str) -> None:
    def line(name: str) -> str:
        out = ctl("--socket", socket, "doctor").out
        return next(line for line in out.splitlines() if line.split()[1:2] == [name])

    lost = "fault  gpu        GPU 2 cannot be used: nvmlDeviceGetHandleByIndex: the GPU has fallen"
    assert line("gpu").startswith(lost)
    lacking = "ok     sampling   1 device sampled; GPU 1 (Quadro P400) has no sensor of energy"
    wait_for(lambda: line("sampling").startswith(lacking), "the A100 to be sampled")


def test_allocations_need_a_ledger(ctl: Ctl, socket: str) -> None:
    said = ctl("--socket", socket, "allocations")
    assert said.code == Exit.NOT_SUPPORTED
    assert "keeps no energy ledger; set a directory under [accounting]" in said.err


def test_measure_counts_the_gpus_that_can_be_measured(
    ctl: Ctl, socket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    said = ctl("--socket", socket, "measure", "--", "sleep", "0.2")
    assert "gpu:0" in said.err
    assert "gpu:1" not in said.err
    lacking = "GPU 1 (Quadro P400) has no sensor of energy or power, and is not counted"
    assert lacking in said.err
    assert "all GPUs: " in said.err
    assert (
        "all GPUs are counted, not only CUDA_VISIBLE_DEVICES=0; name GPUs before `--`" in said.err
    )
    named = ctl("--socket", socket, "measure", "0,1", "--", "true")
    assert "GPU 1 reports neither energy nor power" in named.err
    assert "all GPUs are counted" not in named.err
