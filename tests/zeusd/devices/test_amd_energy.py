"""AMD's energy counter, reading by reading."""

from __future__ import annotations

from zeusd.devices.amd.energy import EnergyCounter, microjoules

S = 1_000_000_000


def counts(joules: float) -> int:
    return round(joules * 65_536)


def run(
    counter: EnergyCounter, seconds: float, share: float, watts: int = 500, from_s: float = 0.0
) -> list[int | None]:
    """Ten readings a second; the counter counts `share` of the energy, from 1000 J on."""
    found = []
    for tick in range(round(seconds * 10) + 1):
        t_s = from_s + tick / 10
        raw = counts(1000 + t_s * watts * share)
        found.append(counter.energy_uj(round(t_s * S), raw, watts))
    return found


def test_the_unit_is_the_firmwares() -> None:
    assert microjoules(65_536) == 1_000_000
    assert microjoules(1 << 40) == (1 << 40) * 1_000_000 // 65_536


def test_a_missing_value_is_none() -> None:
    counter = EnergyCounter()
    assert counter.energy_uj(0, 2**64 - 1, 500) is None  # as the firmware has it
    assert counter.energy_uj(0, 0, 500) is None


def test_a_counter_of_32_bits_continues_after_its_wrap() -> None:
    counter = EnergyCounter()
    before = counter.energy_uj(0, (1 << 32) - counts(10), None)
    after = counter.energy_uj(S, counts(40), None)
    assert after - before == 50_000_000


def test_a_smaller_value_that_no_power_explains_is_a_new_start() -> None:
    counter = EnergyCounter()
    counter.energy_uj(0, counts(30_000), None)
    assert counter.energy_uj(S, counts(5), None) == 5_000_000
    counter = EnergyCounter()
    counter.energy_uj(0, counts(1e9), None)  # more than 32 bits
    assert counter.energy_uj(S, counts(5), None) == 5_000_000


def test_a_counter_that_disagrees_with_power_is_not_used_until_it_agrees() -> None:
    counter = EnergyCounter()
    assert None not in run(counter, 10, share=1.0)
    found = run(counter, 10, share=0.1, from_s=20)
    assert found[0] is not None
    assert found[-1] is None
    assert not counter.believed
    found = run(counter, 10, share=1.0, from_s=40)
    assert found[-1] is not None


def test_one_odd_window_is_not_enough_and_idle_power_says_nothing() -> None:
    counter = EnergyCounter()
    run(counter, 10, share=1.0)
    run(counter, 4, share=3.0, from_s=11)
    assert counter.believed
    idle = EnergyCounter()
    assert None not in run(idle, 20, share=5.0, watts=3)
    assert idle.believed


def test_pauses_between_readings_are_not_judged() -> None:
    counter = EnergyCounter()
    for second in range(0, 60, 3):
        assert counter.energy_uj(second * S, counts(1 + second), 500) is not None
    assert counter.believed
