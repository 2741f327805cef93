"""Missing data of one GPU has a name, and changes nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.zeusd.ledger.test_shared import IDLE_W, Shared
from tests.zeusd.ledger.test_shared import shared as shared
from tests.zeusd.ledger.world import GPU, World, energy_uj
from zeus_common.units import SECOND_NS
from zeus_ipc.charging import ChargeBasis, bounds_of
from zeus_ipc.replies import UsageSum
from zeus_ipc.requests import Allocate, Deallocate
from zeusd.energy.split import Account, Kind
from zeusd.runtime.activity import Activity, Listed, PidUse

SLICES = 7


def test_a_gpu_that_is_lost_has_its_own_gap_and_the_others_none(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=2).open()
    world.allocate("7", gpus=["GPU-1"])
    world.tick(100, 20, idle=True)
    world.accounts.settle()
    lost = world.gpus.pop("GPU-0")
    for _ in range(10):
        world.run(1, 300)
        world.accounts.settle()
    assert world.usage() == {"idle": 200, "7": 200 + 3000}
    lost.tick(50, 1, idle=True, every_ns=10 * SECOND_NS)
    world.gpus["GPU-0"] = lost
    world.tick(100, 20, idle=True)
    assert world.usage() == {"idle": 200 + 200, "not sampled": 500, "7": 200 + 3000 + 200}
    assert world.usage("gpu") == {"GPU-0": 900, "GPU-1": 3400}


def test_jobs_that_change_while_a_gpu_is_not_read_are_charged_between_bounds(world: World) -> None:
    """As while a call of the driver takes 38 s: only the energy of the whole time is known."""
    (gpu,) = world.gpus.values()
    world.allocate("7")
    world.tick(150, 100)
    began_ns = world.now_ns
    gpu.tick(150, every_ns=38 * SECOND_NS)
    world.accounts.deallocate(Deallocate(id=1, name="7"), began_ns + 3 * SECOND_NS)
    request = Allocate(id=1, gpus=[GPU], name="8", kind="job", uid=1000)
    world.accounts.allocate(request, began_ns + 9 * SECOND_NS)
    world.tick(150, 100)
    gpu.tick(150, every_ns=38 * SECOND_NS)  # nobody changes
    world.tick(150, 100)
    assert world.usage() == {"7": 1500 + 450, "8": 150 * 29 + 3000 + 5700, "not sampled": 900}
    answer = world.answer(by_method=True)
    found = {(one.name, *one.methods): one for one in answer.sums}
    gap_uj = 38 * 150_000_000
    assert {key for key in found if key[0] in "78"} == {
        (name, method) for name in "78" for method in ("allocated", "unread")
    }
    for (_, method), one in found.items():
        spread_uj = one.upper_uj - one.lower_uj
        assert spread_uj >= gap_uj if method == "unread" else spread_uj == 0
        assert (bounds_of([method], not spread_uj) is ChargeBasis.EXACT) is (method != "unread")
    assert found["7", "unread"].lower_uj == 0
    assert sum(map(energy_uj, answer.sums)) == gpu.energy_uj


def test_a_reboot_costs_the_last_minute_at_most(world: World, tmp_path: Path) -> None:
    """Also where the power failed: the history in memory is gone."""
    world.allocate("7")
    for _ in range(150):
        world.gpus[GPU].tick(100, 1, every_ns=SECOND_NS)
        world.accounts.work()
    world.accounts.close()
    drawn = world.gpus[GPU].energy_uj // 1_000_000
    found = World(tmp_path).open(boot="boot-2").usage()
    assert drawn - 60 * 100 <= found["7"] <= drawn


def test_mig_devices_that_change_leave_the_one_that_runs_as_it_was(shared: Shared) -> None:
    """One pod's device stays, while the other's is destroyed and a third is made."""
    watts = {"a": 140, "b": 80, "c": 60}
    parts = {"a": 3, "b": 4, "c": 4}
    pids = {"a": 1, "b": 2, "c": 3}
    world = shared.world

    def begin(name: str) -> None:
        group = {"kind": "pod", "control_group": f"uid-{name}", "gpus": [GPU]}
        world.allocate(f"ml/{name}", uid=-1, weight=parts[name], parts=SLICES, **group)
        account = Account(Kind.POD, f"unknown/uid-{name}")
        shared.processes.start(pids[name], shared.gpu.now_ns, account)

    def second(names: str, measured: bool = True) -> None:
        """Instances have no measured use in the interval in which one of them was made."""
        begin_ns = shared.gpu.now_ns
        shared.gpu.tick(IDLE_W + sum(watts[name] for name in names), 10)
        weights = {name: (watts if measured else parts)[name] for name in names}
        uses = [PidUse(pids[name], shared.gpu.now_ns, weights[name]) for name in names]
        activity = Activity(begin_ns, tuple(uses), measured)
        running = tuple(pids[name] for name in names)
        world.accounts.listed(Listed(GPU, shared.gpu.now_ns, running, activity))

    def charged() -> dict[tuple[str, str], UsageSum]:
        answer = world.answer("pod", by_method=True)
        assert sum(map(energy_uj, answer.sums)) == sum(answer.metered_uj) == shared.gpu.energy_uj
        return {(one.name or one.kind, *one.methods[:1]): one for one in answer.sums}

    begin("a")
    begin("b")
    for _ in range(10):
        second("ab")
    of_b = charged()["ml/b", "utilization"]
    assert world.deallocate("ml/b", kind="pod") == [GPU]
    for number in range(5):
        second("a", measured=number > 0)
    begin("c")
    for number in range(5):
        second("ac", measured=number > 0)
    found = charged()
    standing_w = IDLE_W * 3 / SLICES

    def near(one: UsageSum, expected_j: float) -> bool:
        return abs(energy_uj(one) / 1e6 - expected_j) < 0.001

    assert near(found["ml/a", "utilization"], 18 * (standing_w + watts["a"]))
    doubtful = found["ml/a", "slices"]
    truth_uj = 2 * (standing_w + watts["a"]) * 1e6
    assert doubtful.lower_uj < truth_uj <= doubtful.upper_uj + 10
    assert near(doubtful, 2 * standing_w + watts["a"] + (watts["a"] + watts["c"]) * 3 / SLICES)
    assert found["ml/b", "utilization"].model_copy(update={"end_s": of_b.end_s}) == of_b
    assert near(of_b, 10 * (IDLE_W * 4 / SLICES + watts["b"]))
    assert near(found["ml/c", "utilization"], 4 * (IDLE_W * 4 / SLICES + watts["c"]))
