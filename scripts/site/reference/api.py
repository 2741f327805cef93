"""Every public name of the packages that others import, with its location.

mkdocstrings reads the docstrings from the source.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from .markdown import heading, paragraphs


@dataclass(frozen=True)
class Page:
    """A page of names.

    Attributes:
        title: Its heading.
        lead: Purpose of the names.
        modules: Modules whose public names it lists.
    """

    title: str
    lead: str
    modules: tuple[str, ...]


_PIPELINE = "zeus.optimizer.pipeline_frequency"

PAGES = {
    "reference/api/monitor.md": Page(
        "zeus.monitor", "Measuring time, energy, power and temperature.", ("zeus.monitor",)
    ),
    "reference/api/metric.md": Page(
        "zeus.metric", "Energy and power of windows as Prometheus metrics.", ("zeus.metric",)
    ),
    "reference/api/measure.md": Page(
        "zeus.measure",
        "Measuring without changing anything: a decorator, a block, callbacks, emissions and cost.",
        (
            "zeus.measure",
            "zeus.measure.huggingface",
            "zeus.measure.lightning_callback",
            "zeus.measure.logs",
            "zeus.monitor.carbon",
            "zeus.monitor.price",
            "zeus.profile",
        ),
    ),
    "reference/api/power_limit.md": Page(
        "zeus.optimizer.power_limit",
        "Finding the best power limit of a job. `zeus.optimizer` has the optimizers, too.",
        ("zeus.optimizer.power_limit",),
    ),
    "reference/api/batch_size.md": Page(
        "zeus.optimizer.batch_size",
        "Finding the best batch size over runs. `zeus.optimizer` has the optimizer, too.",
        (
            "zeus.optimizer.batch_size",
            "zeus.optimizer.batch_size.common",
            "zeus.optimizer.batch_size.exceptions",
        ),
    ),
    "reference/api/pipeline_frequency.md": Page(
        _PIPELINE,
        "A clock for every instruction of a pipeline. `zeus.optimizer` has the optimizer, too.",
        (
            _PIPELINE,
            f"{_PIPELINE}.profile",
            f"{_PIPELINE}.schedules",
            f"{_PIPELINE}.planner",
            f"{_PIPELINE}.plans",
            f"{_PIPELINE}.online_profiler",
            f"{_PIPELINE}.torch_pipelining",
            f"{_PIPELINE}.common",
            f"{_PIPELINE}.server.scheduler",
        ),
    ),
    "reference/api/run.md": Page(
        "zeus.run",
        "A command that is run repeatedly: `ZeusMaster` and `ZeusDataLoader`.",
        ("zeus.run", "zeus.job", "zeus.analyze"),
    ),
    "reference/api/policy.md": Page(
        "zeus.policy",
        "Policies that choose batch sizes and power limits.",
        ("zeus.policy", "zeus.policy.interface"),
    ),
    "reference/api/simulate.md": Page(
        "zeus.simulate",
        "Simulating recurring jobs on measured tables.",
        (
            "zeus.simulate",
            "zeus.simulate.study",
            "zeus.simulate.workloads",
            "zeus.simulate.groups",
            "zeus.simulate.results",
            "zeus.simulate.summary",
            "zeus.simulate.plots",
        ),
    ),
    "reference/api/serving.md": Page(
        "zeus.serving",
        "Inference servers: the energy of requests, and clocks under a latency objective.",
        (
            "zeus.serving",
            "zeus.serving.clock_control",
            "zeus.serving.clock_tune",
            "zeus.serving.ledger",
            "zeus.serving.rows",
            "zeus.serving.columns",
            "zeus.serving.recorder",
            "zeus.serving.transformers",
            "zeus.serving.wire",
            "zeus.serving.asgi",
            "zeus.serving.metrics",
        ),
    ),
    "reference/api/device.md": Page(
        "zeus.device", "The GPUs and CPUs that a process sees.", ("zeus.device", "zeus.device.cpu")
    ),
    "reference/api/callback.md": Page(
        "zeus.callback",
        "The hooks of a training loop, and several callbacks as one.",
        ("zeus.callback",),
    ),
    "reference/api/exceptions.md": Page(
        "zeus.exceptions", "All errors of `zeus`.", ("zeus.exceptions",)
    ),
    "reference/api/utils.md": Page(
        "zeus.utils",
        "Utilities, and names that scripts for earlier versions of ml-energy/zeus import.",
        ("zeus.utils.framework", "zeus.utils.metric", "zeus.run.console"),
    ),
    "reference/api/zeus_ipc.md": Page(
        "zeus_ipc",
        "A client of zeusd, its errors, and what is needed to speak to a simulated node. "
        "The messages are on a page of their own: [operations and fields](../protocol.md).",
        (
            "zeus_ipc",
            "zeus_ipc.stream",
            "zeus_ipc.errors",
            "zeus_ipc.heartbeat",
            "zeus_common.simulation",
            "zeus_ipc.sockets",
            "zeus_ipc.codec",
        ),
    ),
}
"""The pages by path. A module that is on none of them, and what begins with an underscore, may
change from one release to the next."""

_ELSEWHERE = frozenset({"zeus_ipc.__version__"})


def pages() -> dict[str, str]:
    """The pages by path."""
    return {path: _page(one) for path, one in PAGES.items()}


def public_names(module: str) -> list[str]:
    """The public names of a module, in the order of its source.

    The names in `__all__`; without it, definitions that do not begin with an underscore, and
    re-exports (`from a import b as b`).
    """
    tree = ast.parse(_source(module).read_text(encoding="utf-8"))
    listed: list[str] | None = None
    defined: list[str] = []
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                listed = ast.literal_eval(value)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.append(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                defined.append(name)
    own = [name for name in defined if not name.startswith("_") and name != "log"]
    passed_on = [
        one.name
        for statement in ast.walk(tree)
        if isinstance(statement, ast.ImportFrom)
        for one in statement.names
        if one.asname == one.name
    ]
    found = [*(own if listed is None else listed), *passed_on]
    return [name for name in dict.fromkeys(found) if f"{module}.{name}" not in _ELSEWHERE]


def _source(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def _page(page: Page) -> str:
    found = f"# {page.title}\n\n"
    several = len(page.modules) > 1
    if several:
        found += page.lead + "\n"
    seen: set[str] = set()
    for module in page.modules:
        tree = ast.parse(_source(module).read_text(encoding="utf-8"))
        if several:
            found += heading(2, module)
        found += paragraphs(ast.get_docstring(tree) or page.lead)
        for name in public_names(module):
            if name not in seen:
                seen.add(name)
                found += f"\n::: {module}.{name}\n    options:\n      heading_level: 3\n"
    return found
