"""The modules and names of ml-energy/zeus, with releases and their place here."""

from __future__ import annotations

from typing import NamedTuple

PAGE = "https://zeusd-project.github.io/zeusd/migrating/#what-is-missing"


class OldModule(NamedTuple):
    """A module of ml-energy/zeus."""

    releases: str
    homes: tuple[str, ...] = ()
    begin: str | None = None


_CPU = "zeus.device.cpu"
_ENVIRONMENT = "zeus.compat.environment"
_FRAMEWORK = "zeus.compat.framework"
_LEARNING_RATE = "zeus.job"
_LOGGING = ("zeus.run.console", "zeus.compat.functions")
_PIPELINE = "zeus.optimizer.pipeline_frequency"
_POWER_LOG = "zeus.compat.power_log"
_PERSEUS = "zeus.compat.perseus"
_VENDORS = "zeus.compat.vendors"

MODULES: dict[str, OldModule] = {
    # Modules that exist here, without these names.
    "zeus.analyze": OldModule("0.1-0.8", (_POWER_LOG,)),
    "zeus.device": OldModule("0.10-", (_CPU, "zeus.compat.soc")),
    "zeus.device.cpu": OldModule("0.10-", (_VENDORS,)),
    "zeus.device.gpu": OldModule("0.9-", ("zeus.exceptions", _VENDORS)),
    "zeus.utils.framework": OldModule("0.9-", (_FRAMEWORK,)),
    "zeus.utils.metric": OldModule("0.9-", ("zeus.run.exceptions", _POWER_LOG)),
    # Modules that do not exist here.
    "zeus._legacy": OldModule("0.9-"),
    "zeus._legacy.job": OldModule("0.9-", ("zeus.job",)),
    "zeus._legacy.policy": OldModule("0.9-", ("zeus.policy",)),
    "zeus._legacy.policy.interface": OldModule("0.9-", ("zeus.policy.interface",)),
    "zeus._legacy.policy.mab": OldModule("0.9-", ("zeus.policy.mab",)),
    "zeus._legacy.policy.optimizer": OldModule("0.9-", ("zeus.policy",)),
    "zeus._legacy.simulate": OldModule("0.9-", ("zeus.simulate", "zeus.analyze")),
    "zeus.controller": OldModule("0.5-0.8", ("zeus.compat.early_stop",)),
    "zeus.device.common": OldModule("0.10-", ("zeus_ipc.processes",)),
    "zeus.device.cpu.common": OldModule("0.10-", (_CPU,)),
    "zeus.device.cpu.rapl": OldModule("0.10-", (_CPU, _VENDORS)),
    "zeus.device.exception": OldModule("0.9-", ("zeus.exceptions", _CPU, "zeus.compat.soc")),
    "zeus.device.gpu.common": OldModule("0.10-", ("zeus.device.gpu",)),
    "zeus.device.gpu.nvidia": OldModule("0.10-", ("zeus.device.gpu",)),
    "zeus.device.soc": OldModule("0.12-", ("zeus.compat.soc",)),
    "zeus.device.soc.common": OldModule("0.12-", ("zeus.compat.soc",)),
    "zeus.exception": OldModule("0.9-", ("zeus.exceptions",)),
    "zeus.monitor.power_streaming": OldModule("0.14-", ("zeus.compat.streaming",)),
    "zeus.optimizer.perseus": OldModule("0.8", (_PERSEUS,)),
    "zeus.optimizer.perseus.common": OldModule("0.8", (f"{_PIPELINE}.common",)),
    "zeus.optimizer.perseus.frequency_controller": OldModule(
        "0.8", (f"{_PIPELINE}.frequency_controller",)
    ),
    "zeus.optimizer.perseus.optimizer": OldModule("0.8", (_PERSEUS,)),
    "zeus.optimizer.perseus.server": OldModule("0.8", (f"{_PIPELINE}.server",)),
    "zeus.optimizer.perseus.server.job_manager": OldModule(
        "0.8", (f"{_PIPELINE}.server.job_manager",)
    ),
    "zeus.optimizer.perseus.server.router": OldModule(
        "0.8", (f"{_PIPELINE}.server.router",), begin="zeus.compat.perseus_environment"
    ),
    "zeus.optimizer.perseus.server.scheduler": OldModule("0.8", (f"{_PIPELINE}.server.scheduler",)),
    "zeus.policy.optimizer": OldModule("0.1-0.8", ("zeus.policy",)),
    "zeus.util": OldModule(
        "0.1-0.8",
        (_ENVIRONMENT, _LEARNING_RATE, "zeus.run.console", "zeus.utils.metric"),
    ),
    "zeus.util.env": OldModule("0.7-0.8", (_ENVIRONMENT,)),
    "zeus.util.framework": OldModule("0.4-0.8", (_FRAMEWORK,)),
    "zeus.util.logging": OldModule("0.1-0.8", _LOGGING),
    "zeus.util.lr_scaler": OldModule("0.1-0.8", (_LEARNING_RATE,)),
    "zeus.util.metric": OldModule("0.1-0.8", ("zeus.utils.metric",)),
    "zeus.util.testing": OldModule("0.5-0.8", ("zeus.compat.replay",)),
    "zeus.utils.env": OldModule("0.9-", (_ENVIRONMENT,)),
    "zeus.utils.lat_lon": OldModule("0.12-", ("zeus.compat.functions",)),
    "zeus.utils.logging": OldModule("0.9-", _LOGGING),
    "zeus.utils.lr_scaler": OldModule("0.9-", (_LEARNING_RATE,)),
    "zeus.utils.testing": OldModule("0.9-", ("zeus.compat.replay",)),
    "zeus.utils.zeusd": OldModule("0.15-", ("zeus.compat.streaming",)),
}
"""By path."""

_AMD = "AMD GPUs"
_APPLE = "Apple silicon"
_JETSON = "NVIDIA Jetson"
_WINDOWS = "Windows"

NOT_SUPPORTED: dict[str, str] = {
    "zeus.device.cpu.EMICPUs": _WINDOWS,
    "zeus.device.cpu.emi": _WINDOWS,
    "zeus.device.gpu.AMDGPU": _AMD,
    "zeus.device.gpu.AMDGPUs": _AMD,
    "zeus.device.gpu.ZeusdAMDGPU": _AMD,
    "zeus.device.gpu.amd": _AMD,
    "zeus.device.soc.AppleSilicon": _APPLE,
    "zeus.device.soc.Jetson": _JETSON,
    "zeus.device.soc.apple": _APPLE,
    "zeus.device.soc.jetson": _JETSON,
}
"""Modules and names that are for hardware or systems that are not supported here."""
