"""Workload power profiles, on the C stand-in for the driver's library."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.fake_nvml.double import ALWAYS, NEVER, mask_of
from tests.zeusd.devices.opening import Opener, code_of, news
from zeus_common.checks import Check
from zeus_ipc.controls import PROFILES, Control
from zeusctl.machine_checks import profiles_check
from zeusd.devices.nvml.codes import Return
from zeusd.runtime.devices import Inspector

GB200 = {"architecture": 10, "profiles_valid": mask_of(0, 1, 2, 3, 5, 6, 7, 13)}
_PROFILE_CALL = "nvmlDeviceWorkloadPowerProfile"


def test_profiles_have_nvmls_numbers_and_names() -> None:
    prefix = "NVML_POWER_PROFILE_"
    numbers = {
        name.removeprefix(prefix).lower().replace("_", "-"): number
        for name, number in vars(pynvml).items()
        if name.startswith(prefix) and "OPERATION" not in name and name != prefix + "MAX"
    }
    assert numbers == {PROFILES[number]: number for number in numbers.values()}
    assert len(numbers) >= 15


@pytest.mark.parametrize("shift", [0, 20])
def test_profiles_are_reported_with_what_they_conflict_with(open_nvml: Opener, shift: int) -> None:
    """The table's places are not the profiles' numbers."""
    nvml, _ = open_nvml(GB200 | {"profile_shift": shift})
    gpu = nvml.device_handle(0)
    assert nvml.offers(gpu, Control.POWER_PROFILE)
    found = {one.profile: one for one in nvml.power_profiles(gpu)}
    assert sorted(found) == [0, 1, 2, 3, 5, 6, 7, 13]
    assert (found[6].priority, found[6].conflicts) == (6, (7,))
    assert found[5].conflicts == ()
    nvml.write_control(gpu, Control.POWER_PROFILE, (1, 6, 7))
    assert nvml.read_control(gpu, Control.POWER_PROFILE) == (1, 6, 7)
    assert nvml.enforced_power_profiles(gpu) == (1, 6)


@pytest.mark.parametrize(
    ("old", "calls"),
    [
        (0, [("UpdateProfiles_v1", 1), ("UpdateProfiles_v1", 0), ("UpdateProfiles_v1", 1)]),
        (
            1,
            [
                ("SetRequestedProfiles", 1),
                ("ClearRequestedProfiles", 0),
                ("SetRequestedProfiles", 1),
            ],
        ),
    ],
)
def test_profiles_are_set_and_cleared_and_never_overwritten(
    open_nvml: Opener, old: int, calls: list[tuple[str, int]]
) -> None:
    nvml, double = open_nvml(GB200 | {"profiles_old": old})
    gpu = nvml.device_handle(0)
    double.request_outside(0, 13)
    nvml.write_control(gpu, Control.POWER_PROFILE, (1, 13))
    nvml.write_control(gpu, Control.POWER_PROFILE, (7, 13))
    assert double.profiles(0) == {7, 13}
    made = [(one.symbol.removeprefix(_PROFILE_CALL), one.arguments) for one in double.calls()]
    masks = [mask_of(1), mask_of(1), mask_of(7)]
    assert made == [(name, (op, mask)) for (name, op), mask in zip(calls, masks, strict=True)]


@pytest.mark.parametrize(
    "changes", [{"architecture": 9, "profiles_valid": 3}, {"architecture": 10}]
)
def test_gpus_without_profiles_are_not_asked_again_and_again(
    open_nvml: Opener, changes: dict[str, Any]
) -> None:
    nvml, _ = open_nvml(changes)
    inspector = Inspector(nvml, 0)
    for _ in range(4):
        inspector.look()
    assert inspector.settled
    assert "power_profile" not in news(Inspector(nvml, 0)).info.controls
    error = code_of(nvml.read_control, nvml.device_handle(0), Control.POWER_PROFILE)
    assert error == Return.NOT_SUPPORTED


def test_profiles_need_privilege_and_a_gpu_that_has_them(open_nvml: Opener) -> None:
    nvml, double = open_nvml(GB200, privilege=NEVER)
    gpu = nvml.device_handle(0)
    assert code_of(nvml.write_control, gpu, Control.POWER_PROFILE, (1,)) == Return.NO_PERMISSION
    double.node.privilege = ALWAYS
    assert code_of(nvml.write_control, gpu, Control.POWER_PROFILE, (9,)) == Return.INVALID_ARGUMENT
    assert double.profiles(0) == set()


def test_who_has_the_capability_may_change_profiles_and_doctor_names_them(
    open_nvml: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml, double = open_nvml(GB200, privilege=NEVER)
    gpu, device = nvml.device_handle(0), tmp_path / "nvidia-caps/nvidia-cap9"
    monkeypatch.setenv("NVML_DOUBLE_CAPABILITY", str(device))
    folder = tmp_path / "capabilities"
    for name, minor in (("mig/config", 1), ("gpu0/wpps/access", 9), ("fabric-imex-mgmt", 3)):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 256\nDeviceFileModify: 1\n")

    def found() -> Check:
        (check,) = profiles_check(folder, tmp_path)
        return check

    assert code_of(nvml.write_control, gpu, Control.POWER_PROFILE, (1,)) == Return.NO_PERMISSION
    assert found().state == "ok"  # it is made with mode 0400
    device.parent.mkdir()
    device.touch(0o444)
    nvml.write_control(gpu, Control.POWER_PROFILE, (1,))
    assert double.profiles(0) == {1}
    assert code_of(nvml.write_control, gpu, Control.POWER_LIMIT, (400_000,)) == Return.NO_PERMISSION
    said = found()
    assert (said.state, said.remedy) == ("note", f"`chmod 0400 {device}`, if only zeusd should")
    assert said.found.startswith("everyone may change workload power profiles without zeusd, by ")
    assert "capability gpu0/wpps/access" in said.found


@pytest.mark.needs("root")
def test_whoever_may_read_a_capabilitys_device_file_is_named(tmp_path: Path) -> None:
    device = tmp_path / "nvidia-caps/nvidia-cap9"
    device.parent.mkdir()
    (tmp_path / "wpps").write_text("DeviceFileMinor: 9\nDeviceFileMode: 292\n")
    device.touch()
    for mode, uid, gid, who in (
        (0o400, 0, 0, "only root"),
        (0o440, 0, 0, "only root"),
        (0o440, 0, 54321, "group 54321"),
        (0o640, 54320, 54321, "user 54320, group 54321"),
        (0o004, 0, 0, "everyone"),
    ):
        device.chmod(mode)
        os.chown(device, uid, gid)
        (check,) = profiles_check(tmp_path, tmp_path)
        assert check.found.startswith(f"{who} may change ")
    device.unlink()
    (check,) = profiles_check(tmp_path, tmp_path)
    assert check.found.startswith("everyone may change ")
