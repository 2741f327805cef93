"""What NVIDIA's driver estimates of a GPU's power and speed at other clocks, as nvml.h describes it
(R610: nvmlPerfMetricsSamples_v1_t). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from zeus_ipc.controls import MAX_MHZ
from zeusd.energy.probed.report import DriverEstimates, EstimatedPoint

_OBSERVES, _PREDICTS = 0, 1
"""Types of controllers: one observes the work, and estimates it at other clocks of the memory; the
other estimates the power at other graphics clocks, the first of a point's."""

_MAX_MW = 20_000_000
"""More than any GPU draws."""


def estimates_of(filled: Any) -> DriverEstimates:
    """Reads nvidia-ml-py's structure, which has room for 13 samples: the last of each controller.

    What is not marked as valid, or in no plausible range, is left out.
    """
    figures: dict[str, Any] = {"samples": int(filled.numSamples)}
    observed: list[EstimatedPoint] = []
    predicted: list[EstimatedPoint] = []
    for sample in filled.samples[: filled.numSamples]:
        for one in sample.controllerData[: sample.numControllerData]:
            if one.controllerType == _OBSERVES and one.data.dlppc2x.observedMetrics.bValid:
                data = one.data.dlppc2x.observedMetrics
                figures["observed"] = next(_rails([data]), None)
                observed = [
                    point
                    for clock in data.initialDramclkEst
                    for point in _rails(clock.estimatedMetrics[: clock.numEstimatedMetrics])
                ]
            elif one.controllerType == _PREDICTS and one.data.pfpp1x.estimatedMetrics.bValid:
                data = one.data.pfpp1x.estimatedMetrics
                best, fastest = data.maxPerfPerWattPoint, data.fmaxAtVmaxPoint
                figures["most_efficient"] = _point(best.freqkHz, best.pwrmW)
                figures["fastest"] = _point(fastest.freqkHz, fastest.pwrmW)
                headroom_mw = data.tgpHeadroommW
                figures["headroom_w"] = headroom_mw / 1000 if headroom_mw <= _MAX_MW else None
                points = data.estimatedMetrics[: data.numVfPoints]
                predicted = [*filter(None, (_point(p.freqkHz[0], p.estTgpPwrmW) for p in points))]
    return DriverEstimates(**figures, points=[*observed, *predicted])


def _rails(samples: Iterable[Any]) -> Iterator[EstimatedPoint]:
    for sample in samples:
        khz, mw = sample.coreRail.rails[0].freqkHz, sample.tgpPwrTuple.pwrmW
        point = _point(khz, mw, sample.fbRail.freqkHz, sample.perfMetrics.perfms)
        if sample.bValid and point is not None:
            yield point


def _point(
    khz: int, mw: int, memory_khz: int | None = None, time_ms: int | None = None
) -> EstimatedPoint | None:
    """A point; None: it is in no plausible range, as where the driver fills another structure."""
    mhz, memory_mhz = khz // 1000, (memory_khz or 0) // 1000
    if not (0 < mhz <= MAX_MHZ and memory_mhz <= MAX_MHZ and 0 < mw <= _MAX_MW):
        return None
    return EstimatedPoint(mhz, memory_mhz or None, mw / 1000, time_ms)
