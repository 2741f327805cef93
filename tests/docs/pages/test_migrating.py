"""Everything that the page for users of ml-energy/zeus lists as unchanged is as in 0.16.0."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import snippets
from tests.docs.pages.following import DOCS
from tests.support import running_daemon, wait_for
from tests.zeus.node import VirtualNode
from zeus.compat.table import MODULES

PAGE = DOCS / "migrating.md"

_OPTIMIZER = (
    "monitor optimum_selector=None wait_steps=1 warmup_steps=10 profile_steps=40 pl_step=25 "
    "profile_path=None"
)
_RANKS = "rank dp_rank pp_rank tp_rank device_id dp_degree pp_degree tp_degree world_size"
_SCHEDULER = "job_info rank_infos pfo_settings"
_JOB = (
    "job_id=None job_id_prefix batch_sizes default_batch_size eta_knob=0.5 beta_knob=2.0 "
    "target_metric=0.5 higher_is_better_metric=True max_epochs=100 num_pruning_rounds=2 "
    "window_size=0 mab_prior_mean=0.0 mab_prior_precision=0.0 mab_num_explorations=2 mab_seed=None"
)
_PUSHED = "cpu_indices gpu_indices update_period pushgateway_url job"
THERE = {
    "BatchSizeOptimizer": "monitor server_url job rank",
    "BatchSizeOptimizer.get_batch_size": "self",
    "BatchSizeOptimizer.on_evaluate": "self metric",
    "BatchSizeOptimizer.on_train_begin": "self",
    "Callback": "",
    "Callback.on_evaluate": "self metric",
    "Callback.on_instruction_begin": "self name",
    "Callback.on_step_begin": "self",
    "CallbackSet": "callbacks",
    "Done": "optimal_power_limit",
    "Energy": "",
    "EnergyCumulativeCounter": _PUSHED,
    "EnergyCumulativeCounter.begin_window": "self name sync_execution=True",
    "EnergyCumulativeCounter.end_window": "self name sync_execution=True",
    "EnergyHistogram": "cpu_indices gpu_indices pushgateway_url job gpu_bucket_range "
    "cpu_bucket_range dram_bucket_range",
    "EnergyHistogram.begin_window": "self name sync_execution=True",
    "EnergyHistogram.end_window": "self name sync_execution=True",
    "FrequencyController": "device_id=0",
    "FrequencyController.end": "self",
    "FrequencyController.set_frequency": "self frequency",
    "FrequencyScheduler": _SCHEDULER,
    "FrequencyScheduler.next_schedule": "self",
    "FrequencyScheduler.observe": "self profiling_results",
    "GlobalPowerLimitOptimizer": _OPTIMIZER,
    "GlobalPowerLimitOptimizer.on_epoch_begin": "self",
    "GlobalPowerLimitOptimizer.on_epoch_end": "self",
    "GlobalPowerLimitOptimizer.on_step_begin": "self",
    "HFGlobalPowerLimitOptimizer": _OPTIMIZER,
    "JobSpec": _JOB,
    "MaxSlowdownConstraint": "factor",
    "Measurement": "time gpu_energy cpu_energy=None dram_energy=None soc_energy=None",
    "OptimumSelector.select": "self measurements",
    "PipelineFrequencyOptimizer": f"{_RANKS} server_url job_metadata=None",
    "PointSolution": f"{_SCHEDULER} solution_path",
    "PointSolution3D": "",
    "CPUPowerDomain": "",
    "GPUPowerDomain": "",
    "PowerDomain": "",
    "PowerGauge": "gpu_indices update_period pushgateway_url job",
    "PowerLimitMeasurement": "power_limit energy time",
    "PowerMonitor": "gpu_indices=None update_period=None max_samples_per_gpu=None "
    "power_domains=None",
    "PowerMonitor.get_all_power_timelines": "self gpu_index=None start_time=None end_time=None",
    "PowerMonitor.get_energy": "self start_time end_time",
    "PowerMonitor.get_power": "self time=None",
    "PowerMonitor.get_power_timeline": "self power_domain gpu_index=None start_time=None "
    "end_time=None",
    "PowerMonitor.stop": "self",
    "Profiling": "current_power_limit steps",
    "Ready": "next_power_limit steps",
    "TemperatureMonitor": "gpu_indices=None update_period=1.0 max_samples_per_gpu=None",
    "TemperatureMonitor.get_temperature": "self time=None",
    "TemperatureMonitor.get_temperature_timeline": "self gpu_index=None start_time=None "
    "end_time=None",
    "TemperatureMonitor.stop": "self",
    "Time": "",
    "Warmup": "current_power_limit steps",
    "ZeusMonitor": "gpu_indices=None cpu_indices=None approx_instant_energy=False log_file=None "
    "sync_execution_with='torch'",
    "ZeusMonitor.begin_window": "self key sync_execution=True restart=False",
    "ZeusMonitor.end_window": "self key sync_execution=True cancel=False",
    "ZeusMonitor.reset_windows": "self",
    "get_gpus": "ensure_homogeneous=False",
    "infer_counter_update_period": "gpu_indicies",
    "make_3d_parallel": "sched_cls name=None",
    "zeus_cost": "energy time eta_knob max_power",
}
"""Parameters in 0.16.0, in their order, with their defaults."""

NO_ORDER = {"JobSpec", "Measurement", "Ready", "Warmup", "Profiling", "Done"}
"""Whose parameters are given by name."""

METHODS = [
    "get_name",
    "get_power_management_limit_constraints",
    "get_power_management_limit",
    "set_power_management_limit",
    "reset_power_management_limit",
    "set_persistence_mode",
    "get_persistence_mode",
    "get_supported_memory_clocks",
    "set_memory_locked_clocks",
    "reset_memory_locked_clocks",
    "get_supported_graphics_clocks",
    "set_gpu_locked_clocks",
    "reset_gpu_locked_clocks",
    "reset_locked_clocks",
    "get_average_power_usage",
    "get_instant_power_usage",
    "get_average_memory_power_usage",
    "supports_get_total_energy_consumption",
    "get_total_energy_consumption",
    "get_gpu_temperature",
]


def _listed() -> list[tuple[str, str]]:
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| module | names |") : text.index("`zeus.optimizer` also has")]
    found = []
    for line in table.splitlines()[2:]:
        names = re.findall(r"`([\w.]+)`", line)
        found += [(names[0], name) for name in names[1:]]
    return found


LISTED = _listed()


def _parameters(what: Any) -> list[tuple[str, str]]:
    found = []
    for one in inspect.signature(what).parameters.values():
        default = "" if one.default is one.empty else repr(one.default)
        found.append((one.name, default))
    return found


def _expected(text: str) -> list[tuple[str, str]]:
    return [(name, default) for name, _, default in (one.partition("=") for one in text.split())]


@pytest.mark.parametrize(("module", "name"), LISTED, ids=[f"{m}.{n}" for m, n in LISTED])
def test_listed_names_exist_with_their_parameters(module: str, name: str) -> None:
    thing = getattr(importlib.import_module(module), name)
    for key, text in THERE.items():
        owner, _, method = key.partition(".")
        if owner != name or (not text and not method):
            continue
        expected = _expected(text)
        parameters = _parameters(getattr(thing, method) if method else thing)
        if name in NO_ORDER:
            assert {one for one, _ in expected} <= {one for one, _ in parameters}, key
            continue
        assert [one for one, _ in parameters[: len(expected)]] == [one for one, _ in expected], key
        for (_, there), (_, here) in zip(expected, parameters, strict=False):
            assert not there or here == there, key
        for one, default in parameters[len(expected) :]:
            assert default, f"{key}: {one} is new and must be given"


def test_nothing_is_listed_without_parameters_to_hold_it_to() -> None:
    assert len(LISTED) > 30
    for _, name in LISTED:
        assert any(key.partition(".")[0] == name for key in THERE), name


def test_all_methods_of_gpus_are_there_in_both_spellings(tmp_path: Path) -> None:
    gpu = importlib.import_module("zeus.device.gpu")
    node = VirtualNode("v100-pcie", tmp_path)
    node_gpu = node.monitor(gpu_indices=[0]).gpus
    gpu._aliases_used.clear()
    for name in METHODS:
        assert callable(getattr(gpu.GPUs, name)), name
        assert callable(getattr(gpu.GPU, name)), name
        camel = re.sub(r"_(.)", lambda match: match[1].upper(), name)
        with pytest.warns(DeprecationWarning, match=name):
            assert callable(getattr(node_gpu, camel)), camel
    node.close()


def test_imports_listed_as_refused_are_refused() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if "refused: an `ImportError`" in line]
    names = re.findall(r"`(zeus[\w.]+)`", row)
    assert len(names) == 3
    for name in names:
        with pytest.raises(ImportError, match="migrating"):
            importlib.import_module(name)


def test_every_old_module_has_a_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| release | module | in zeusd |") : text.index("Scripts of their")]
    listed = set(re.findall(r"`(zeus[\w.]+)`", table))
    missing = {
        path
        for path in MODULES
        if path not in listed and not path.startswith("zeus.optimizer.perseus.")
    }
    # Modules that are listed as unchanged above the table, and the package of the others.
    assert missing == {"zeus.device", "zeus.device.gpu", "zeus.utils.metric", "zeus._legacy"}


def test_their_program_runs_and_leaves_nothing_behind(tmp_path: Path) -> None:
    program, *_ = snippets.of(PAGE)
    with running_daemon("--simulate", "v100-pcie", gpus=1) as daemon:
        env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket}
        env.pop("CUDA_VISIBLE_DEVICES", None)
        ran = subprocess.run(
            [sys.executable, "-c", program.source],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.endswith("epoch ended\n100000 to 250000 mW, now 100000\n")
        with daemon.client() as client:
            gpu = client.node().gpus[0].uuid
            wait_for(
                lambda: client.state([gpu])[gpu].power_limit_mw == 250_000, "the limit to be back"
            )
    header, *rows = (tmp_path / "energy.csv").read_text().splitlines()
    assert header == "start_time,window_name,elapsed_time,gpu0_energy"
    assert [row.split(",")[1] for row in rows] == ["step 0", "step 1", "step 2", "epoch"]
