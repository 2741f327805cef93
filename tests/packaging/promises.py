"""The promise of each extra: programs that run with only that extra installed."""

from __future__ import annotations

BASE = "base"
"""What is installed where no extra is asked for."""

PROMISES: dict[str, str] = {
    BASE: """
import zeus.monitor, zeus.optimizer.power_limit, zeus.show_env, zeus_ipc, zeusd.main
from zeus.device import get_gpus
from zeus.optimizer.batch_size import BatchSizeOptimizer, JobSpec
from zeus.optimizer.pipeline_frequency import Frontier
from click.testing import CliRunner
import zeusctl.cli, zeusd.cli

for verb in zeusctl.cli.VERBS:
    done = CliRunner().invoke(zeusctl.cli.cli, [verb, "--help"])
    assert done.exit_code == 0, (verb, done.output)
""",
    "torch": """
from zeus.run import ZeusDataLoader
from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer
""",
    "hf": """
from transformers import TrainerCallback
from zeus.optimizer.power_limit import HFGlobalPowerLimitOptimizer

assert issubclass(HFGlobalPowerLimitOptimizer, TrainerCallback)
""",
    "lightning": """
from lightning.pytorch import Callback
from zeus.optimizer.power_limit import LightningGlobalPowerLimitOptimizer

assert issubclass(LightningGlobalPowerLimitOptimizer, Callback)
""",
    "carbon": """
from zeus.monitor.carbon import CarbonEmissionMonitor
from zeus.monitor.price import EnergyCostMonitor
import httpx
""",
    "kubernetes": """
from click.testing import CliRunner
from zeusctl.kubernetes.__main__ import main
from zeusctl.kubernetes import agent, kubelet, watch

done = CliRunner().invoke(main, ["--namespace", "research", "--node", "here"])
assert "the API server cannot be found" in done.output, done.output
""",
    "fleet": """
from click.testing import CliRunner
from zeus_fleet.commands import main
from zeus_fleet.store import FleetStore

FleetStore(["localhost:2379"])
done = CliRunner().invoke(main, ["status", "--etcd", "127.0.0.1:1"])
assert "127.0.0.1:1 does not answer" in done.output, done.output
""",
    "fleet-server": """
from zeus_fleet.server import FleetServer
from zeus_fleet.store import FleetStore
import uvicorn

FleetServer(FleetStore(["localhost:2379"]))
""",
    "pfo": """
from zeus.optimizer.pipeline_frequency import PipelineFrequencyOptimizer, torch_pipelining
from zeus.optimizer.pipeline_frequency.planner import Planner
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile
from zeus.optimizer.pipeline_frequency.schedules import one_f_one_b
from pathlib import Path

lines = ["stage,instruction,frequency,time,energy"]
for stage in (0, 1):
    for name, base in (("forward", 1), ("backward", 2)):
        for mhz in (1000, 1200, 1400):
            s = base * (stage + 1) * 1400 / mhz
            lines.append(f"{stage},{name},{mhz},{s},{s * (mhz / 1000) ** 3 * 100}")
Path("profile.csv").write_text("\\n".join(lines))
profile = InstructionProfile.read("profile.csv")
frontier = Planner(profile, one_f_one_b(2, 4), p2p_power_w=70.0).frontier(points=5)
assert len(frontier.plans) > 1
""",
    "pfo-server": """
from zeus.optimizer.pipeline_frequency.server.router import app
import uvicorn

assert app.openapi()["paths"]
""",
    "bso": """
from zeus.optimizer.batch_size import BatchSizeOptimizer
from zeus.optimizer.batch_size.http import HttpTrials
""",
    "bso-server": """
from zeus.optimizer.batch_size.command import main
from zeus.optimizer.batch_size.common import JobSpecFromClient
from zeus.optimizer.batch_size.server.router import app
from zeus.optimizer.batch_size.store import Store

assert app.openapi()["paths"]
store = Store("bso.db")
spec = JobSpecFromClient(
    job_id="job-1", job_id_prefix="job", batch_sizes=[32, 64], default_batch_size=32,
    gpu_model="Tesla V100", max_power=300.0, number_of_gpus=1,
)
store.register(spec)
assert store.begin_trial(spec.job_id, "run").batch_size == 32
""",
    "postgresql": """
import psycopg
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.store import Store
""",
    "serving": """
from click.testing import CliRunner
from zeus.serving import Ledger
from zeus.serving.command import main

Ledger().settle()
assert CliRunner().invoke(main, ["replay", "--help"]).exit_code == 0
""",
    "otel": """
from zeus.serving import telemetry
import opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http
""",
    "vllm": """
from prometheus_client import CollectorRegistry
from zeus.serving import Ledger
from zeus.serving.vllm.probe import register

register()
""",
    "simulate": """
from click.testing import CliRunner
from zeus.job import Job
from zeus.policy import JITPowerLimitOptimizer, make_policy
from zeus.simulate import Simulator
from zeus.simulate.command import main
from zeus.simulate.workloads import power_trace, train_trace

done = CliRunner().invoke(main, ["synthetic-groups", "--groups", "2", "-o", "groups.csv"])
assert done.exit_code == 0, done.output
simulator = Simulator(
    train_trace(), power_trace("v100"), make_policy("gp", seed=1),
    JITPowerLimitOptimizer(verbose=False), seed=1, verbose=False,
)
job = Job("librispeech", "deepspeech2", "adamw", target_metric=40.0, max_epochs=16, default_bs=192)
assert simulator.simulate_one_job(job, num_recurrence=2, beta_knob=2.0, eta_knob=0.5)
""",
    "plot": """
from pathlib import Path
from zeusctl.plots import Track, check_available, draw_tracks

check_available()
draw_tracks([Track("GPU 0", power_w=[(0.0, 90.0), (1.0, 100.0)])], Path("history.png"))
assert Path("history.png").read_bytes().startswith(b"\\x89PNG")
""",
    "parquet": """
from pathlib import Path
from zeusctl.recording import COLUMNS, read, writer_for

writer = writer_for(Path("samples.parquet"), None)
writer.write({name: kind(1) for name, kind in COLUMNS.items()})
writer.close()
assert len(read(Path("samples.parquet"))) == 1
""",
    "top": "import zeusctl.top.app, textual",
    "metrics": """
import zeusctl.exporter.collector, zeusctl.exporter.__main__, prometheus_client
from zeus.metric import EnergyHistogram
""",
    "systemd": """
import systemd.daemon, systemd.journal
import zeusd.systemd
""",
}
"""Programs by extra. Each runs in an empty folder, and may write there."""

FOR_DEVELOPERS = frozenset({"dev", "docs", "benchmark", "test-hf"})
"""Extras that promise nothing to users."""
