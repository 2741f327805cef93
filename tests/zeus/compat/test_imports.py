"""Every import of ml-energy/zeus's examples and documentation works, or names the page."""

from __future__ import annotations

import ast
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import needs
from tests.zeus.node import VirtualNode
from zeus import compat
from zeus.compat.table import MODULES, NOT_SUPPORTED

LISTED = [
    line.split()
    for line in Path(__file__).with_name("imports.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
NAMES = [(module, name) for _, module, *names in LISTED for name in names]


@pytest.mark.parametrize(
    ("release", "module", "names"),
    [(release, module, names) for release, module, *names in LISTED],
    ids=[f"{release}-{module}" for release, module, *_ in LISTED],
)
def test_an_import_works_or_is_refused_with_the_page(
    release: str, module: str, names: list[str]
) -> None:
    if "ZeusDataLoader" in names:
        needs.module("torch")
    for name in names:
        statement = f"from {module} import {name.removeprefix('!')} as found"
        scope: dict[str, object] = {}
        if name.startswith("!"):
            with pytest.raises(ImportError, match="which zeus does not support here; see https://"):
                exec(statement, scope)
        else:
            exec(statement, scope)
            assert scope["found"] is not None


def test_old_modules_do_not_hide_those_that_are_here() -> None:
    for path in MODULES:
        if path not in sys.modules:
            importlib.import_module(path)
    here = {
        path for path in MODULES if not isinstance(sys.modules[path].__loader__, compat._Finder)
    }
    assert here == {
        "zeus.analyze",
        "zeus.device",
        "zeus.device.cpu",
        "zeus.device.gpu",
        "zeus.utils.framework",
        "zeus.utils.metric",
    }
    for path in here:
        assert hasattr(sys.modules[path], "__getattr__"), path


def test_an_unknown_name_raises_the_usual_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from zeus.utils.env import nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("zeus.utils.nothing")
    import zeus.utils.framework

    assert not hasattr(zeus.utils.framework, "nothing")


def test_refused_imports_are_listed() -> None:
    refused = {
        path
        for module, name in NAMES
        if name.startswith("!")
        for path in (module, f"{module}.{name[1:]}")
    }
    assert {one for one in NOT_SUPPORTED if one in refused} >= {
        "zeus.device.cpu.emi",
        "zeus.device.soc.apple",
        "zeus.device.soc.jetson",
    }


def test_old_paths_are_the_same_things_and_can_be_pickled() -> None:
    from zeus._legacy.job import Job as old_job
    from zeus._legacy.simulate import HistoryEntry
    from zeus.exception import ZeusBaseError as old_error

    from zeus.exceptions import ZeusBaseError
    from zeus.job import Job

    assert old_job is Job
    assert old_error is ZeusBaseError
    entry = HistoryEntry(32, 200, 1.0, True, 2.0)
    assert pickle.loads(pickle.dumps(entry)) == entry
    # A pickle that was made there names its classes by their module there.
    there = b"\x80\x04czeus._legacy.job\nJob\n."
    assert pickle.loads(there) is Job


def test_modules_are_found_in_any_order_and_by_any_statement_once_they_are_asked_for() -> None:
    program = (
        "import sys, zeus\n"
        "print([one for one in sys.modules if one.startswith('zeus.')])\n"
        "import zeus.device.gpu.common\n"
        "import zeus._legacy.policy.optimizer as policy\n"
        "import zeus.util.metric\n"
        "from zeus.device import gpu\n"
        "from zeus.utils.env import *\n"
        "assert gpu.common.GPUs is gpu.GPUs\n"
        "assert zeus.util.metric.zeus_cost(1, 1, 1, 1) == 1\n"
        "assert policy.JITPowerLimitOptimizer.__module__ == 'zeus.policy.power'\n"
        "assert get_env('ZEUS_NOT_SET', int, 3) == 3\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ast.literal_eval(ran.stdout) == ["zeus.compat.table", "zeus.compat"]


def test_the_pipeline_server_reads_the_variables_of_its_old_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSEUS_SCHEDULER", "PointSolution")
    monkeypatch.setenv("PERSEUS_LOG_LEVEL", "INFO")
    monkeypatch.setenv("ZEUS_PFO_LOG_LEVEL", "WARNING")
    monkeypatch.setenv("ZEUS_PFO_SCHEDULER", "x")
    monkeypatch.delenv("ZEUS_PFO_SCHEDULER")
    monkeypatch.delitem(sys.modules, "zeus.optimizer.perseus.server.router", raising=False)
    importlib.import_module("zeus.optimizer.perseus.server.router")
    assert os.environ["ZEUS_PFO_SCHEDULER"] == "PointSolution"
    assert os.environ["ZEUS_PFO_LOG_LEVEL"] == "WARNING", "the new name wins"


@pytest.mark.parametrize("spec", ["v100", "mi300x"])
def test_the_vendor_of_the_gpus_is_told(
    spec: str, virtual_node: Callable[[str], VirtualNode]
) -> None:
    virtual_node(spec)
    amd = importlib.import_module("zeus.device.gpu.amd")
    nvidia = importlib.import_module("zeus.device.gpu")
    assert (amd.amdsmi_is_available(), nvidia.nvml_is_available()) == (
        spec == "mi300x",
        spec == "v100",
    )
