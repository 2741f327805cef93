"""Metrics of a budget for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from zeus_fleet.view import View

STATES = ("ok", "waits", "leaving", "stuck", "silent", "absent")


class FleetMetrics(Collector):
    """All metric families.

    Args:
        view: The newest view; None: etcd has not responded yet.
        up: Whether the last request to etcd succeeded.
    """

    def __init__(self, view: View | None, up: bool) -> None:
        self._view = view
        self._up = up

    def collect(self) -> Iterator[Metric]:
        """The families; without a view, only whether etcd responds."""
        yield GaugeMetricFamily(
            "zeus_fleet_up", "0: the last request to etcd failed.", value=float(self._up)
        )
        if self._view is None:
            return
        yield from _of_domains(self._view)
        yield from _of_nodes(self._view)
        yield _gauge("standing_budget_watts", "Limit outside of events.", self._view.standing_w)
        yield _gauge("busy_gpus", "GPUs of jobs.", self._view.busy_gpus)
        yield _gauge(
            "lost_gpus",
            "Loss of jobs' progress by limits, in GPUs at full speed, by profiles.",
            self._view.lost_gpus,
        )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"zeus_fleet_{name}", text, value=value)


def _of_domains(view: View) -> Iterator[Metric]:
    for name, text, field in (
        ("budget_watts", "Limit of a domain: the site, a row or a rack.", "limit_w"),
        ("reserve_watts", "Reserve for GPUs that cannot be lowered.", "reserve_w"),
        ("floor_watts", "Sum of the minimum limits.", "floors_w"),
        ("granted_watts", "Sum of grants.", "granted_w"),
        ("held_watts", "Sum of the power limits that GPUs may have.", "held_w"),
        ("drawn_watts", "Sum of power drawn by GPUs.", "drawn_w"),
    ):
        family = GaugeMetricFamily(f"zeus_fleet_{name}", text, labels=["domain"])
        for domain in view.domains:
            family.add_metric([domain.name], getattr(domain, field))
        yield family


def _of_nodes(view: View) -> Iterator[Metric]:
    for name, text, field in (
        ("granted_watts", "A node's grant.", "granted_w"),
        ("held_watts", "Sum of the power limits that a node's GPUs may have.", "held_w"),
        ("drawn_watts", "Power drawn by a node's GPUs.", "drawn_w"),
        ("wanted_watts", "A node's demand.", "wanted_w"),
        ("stuck_watts", "Power above the minimum of GPUs that cannot be lowered.", "stuck_w"),
        ("silent_seconds", "Time since a node's last heartbeat.", "silent_s"),
    ):
        family = GaugeMetricFamily(f"zeus_fleet_node_{name}", text, labels=["node"])
        for node in view.nodes:
            value = getattr(node, field)
            if value is not None:
                family.add_metric([node.name], value)
        yield family
    states = GaugeMetricFamily(
        "zeus_fleet_node_state", "1: the node is in this state.", labels=["node", "state"]
    )
    for node in view.nodes:
        for state in STATES:
            states.add_metric([node.name, state], float(node.state == state))
    yield states


def text(view: View | None, up: bool) -> bytes:
    """All metrics in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FleetMetrics(view, up))
    return generate_latest(registry)
