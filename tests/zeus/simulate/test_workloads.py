from __future__ import annotations

import pytest

from zeus.policy import JITPowerLimitOptimizer, make_policy
from zeus.simulate import Simulator
from zeus.simulate.study import workload_job
from zeus.simulate.workloads import GPUS, WORKLOADS, power_trace, train_trace, workload


@pytest.mark.parametrize("gpu", GPUS)
def test_every_workload_was_measured_on_every_gpu(gpu: str) -> None:
    simulator = Simulator(
        train_trace(), power_trace(gpu), make_policy("gts"), JITPowerLimitOptimizer(verbose=False)
    )
    for one in WORKLOADS:
        job = workload_job(one.dataset, gpu)
        sizes = simulator.batch_sizes(job)
        assert job.default_bs in sizes
        assert job.default_bs == one.default_bs or max(sizes) < one.default_bs
        found = simulator.measurements.usual(job, 0.5)
        assert found.power_limit == max(simulator.power_limits(job))
        if gpu == "v100":
            assert found.time == pytest.approx(one.usual_time, rel=2e-3)


def test_they_are_in_the_order_of_their_length() -> None:
    times = [one.usual_time for one in WORKLOADS]
    assert times == sorted(times)


def test_workloads_that_were_not_measured_are_reported() -> None:
    with pytest.raises(ValueError, match="no workload with the data set 'mnist'; there are movie"):
        workload("mnist")
    with pytest.raises(ValueError, match="no traces of a h100; there are a40"):
        power_trace("h100")
