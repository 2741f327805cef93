"""What the doctor and zeusctl ask about many GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from zeus_common.checks import each_of
from zeus_ipc.errors import DaemonUnavailable, GpuLost, LeaseHeld, SeveralGpusFailed


def test_gpus_that_fail_are_asked_no_more_and_hide_no_others() -> None:
    lost, several = GpuLost("gone", gpu="7"), {"20": LeaseHeld("held"), "21": GpuLost("gone")}
    asked: list[int] = []

    def ask(uuids: Sequence[str]) -> dict[str, int]:
        asked.append(len(uuids))
        if "7" in uuids:
            raise lost
        if "20" in uuids:
            raise SeveralGpusFailed(several)
        return {uuid: int(uuid) for uuid in uuids}

    answers, errors = each_of(ask, [str(number) for number in range(24)])
    assert errors == {"7": lost, **several}
    assert [*answers.values()] == [number for number in range(24) if number not in (7, 20, 21)]
    assert asked == [16, 16, 7, 5]


def test_without_a_daemon_no_gpu_is_blamed() -> None:
    def away(uuids: Sequence[str]) -> dict[str, int]:
        raise DaemonUnavailable("no zeusd")

    with pytest.raises(DaemonUnavailable):
        each_of(away, ["1"])
