"""Asks zeusd for what a receipt is made of. What a user may see is decided there."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeus_common.epoch import offset_ns
from zeus_common.receipts import EDGE_MS, Evidence, Receipt, Subject, receipt_of
from zeus_ipc.errors import NotSupported, SeveralGpusFailed, UnknownGpu, ZeusIpcError
from zeus_ipc.requests import BUCKET_S

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import UsageSum, WindowEnergies


def make_receipt(
    client: Client,
    since_ns: int,
    until_ns: int,
    gpus: Sequence[str] = (),
    subject: Subject | None = None,
) -> Receipt:
    """Makes the receipt of an interval of the past. Waits for the energy of one that has just
    ended.

    Args:
        since_ns, until_ns: Its ends, ns of CLOCK_MONOTONIC.
        gpus: UUIDs; empty: all.
        subject: A job or process, whose GPUs alone are included; None: what used them most.

    Raises:
        ValueError: The interval is empty or ends in the future.
        LookupError: The subject used no GPU in it, as far as the reader may see.
        UnknownGpu: zeusd does not have one of the GPUs now.
        ZeusIpcError: zeusd does not answer.
    """
    if until_ns <= since_ns:
        raise ValueError("the end must be after the beginning")
    if until_ns > time.monotonic_ns():
        raise ValueError("the interval ends in the future; wait until it is over")
    subject, utc_ns = subject or Subject(), offset_ns()
    node = client.node()
    chosen = [gpu for gpu in node.gpus if not gpus or gpu.uuid in gpus]
    names = [gpu.uuid for gpu in chosen]
    for gone in {*gpus}.difference(names):
        raise UnknownGpu(
            f"zeusd has no GPU {gone} now, so no receipt of it; `zeusctl gpus` lists those it has"
        )
    windows = {name: _window(client, name, since_ns, until_ns) for name in names}
    # Of others, the ledger will have no more.
    counted = [name for name in names if not isinstance(windows[name], str)]
    usage, settled_ms = _usage(client, names, counted, since_ns + utc_ns, until_ns + utc_ns)
    if subject.kind and not isinstance(usage, str):
        chosen = [gpu for gpu in chosen if any(map(subject.is_user, usage[gpu.uuid]))]
        names = [gpu.uuid for gpu in chosen]
    if not chosen:
        if not subject.kind:
            raise UnknownGpu("zeusd has no GPUs now; `zeusctl status` says why")
        raise LookupError(
            f"{' '.join(subject)} used no GPU in that time, as far as you may see; check --since "
            "and the GPUs"
        )
    # The longest time between two rows of a history: the value at an instant may be that old.
    domains = (
        ("power_limit", max(0, since_ns - 1_200_000_000_000), until_ns),
        ("gpu_clock", since_ns, until_ns),
        ("gap", since_ns, None),  # one may end after the interval
    )
    return receipt_of(
        Evidence(
            host=socket.gethostname(),
            node=node,
            gpus=chosen,
            since_ns=since_ns,
            until_ns=until_ns,
            utc_ns=utc_ns,
            uid=client.policy().uid,
            windows=windows,
            timelines={
                (name, domain): _timeline(client, name, domain, begin_ns, end_ns)
                for name in names
                for domain, begin_ns, end_ns in domains
            },
            audit=client.audit(limit=1000),  # all that zeusd keeps
            usage=usage,
            settled_ms=settled_ms,
            subject=subject,
        )
    )


def _window(client: Client, gpu: str, since_ns: int, until_ns: int) -> WindowEnergies | str:
    try:
        window = (max(0, since_ns), max(0, until_ns), 0)
        return client.windows(gpu, [window], limited=True)[gpu]
    except SeveralGpusFailed as error:
        return error.errors[gpu].message
    except ZeusIpcError as error:
        return error.message


def _timeline(
    client: Client, gpu: str, domain: str, begin_ns: int, end_ns: int | None
) -> list[tuple[int, int]]:
    """A GPU's readings; none where `_window` says why."""
    try:
        return client.timeline(gpu, domain, begin_ns, end_ns)
    except (SeveralGpusFailed, NotSupported):
        return []


def _usage(
    client: Client, gpus: Sequence[str], counted: Sequence[str], since_ns: int, until_ns: int
) -> tuple[dict[str, list[UsageSum]] | str, int]:
    """The ledger's sums by GPU, and until when those of the counted ones are complete; or why there
    are none."""
    bucket_ns = BUCKET_S * 1_000_000_000
    first_s, last_s = since_ns // bucket_ns * BUCKET_S, -(-until_ns // bucket_ns) * BUCKET_S
    # Of buckets that are part of the interval as a whole, it does not matter when they were used.
    edges = sorted({first_s, first_s + BUCKET_S, last_s - BUCKET_S, last_s})
    # How long to wait for the energy ledger: lists of processes come up to 13 s late.
    give_up_s = time.monotonic() + 15.0
    sums: dict[str, list[UsageSum]] = {}
    settled_ms = until_ms = until_ns // 1_000_000
    try:
        while counted:
            settled_ms = client.usage(edges, "total", gpus=counted).settled_ms
            if settled_ms + EDGE_MS >= until_ms or time.monotonic() > give_up_s:
                break
            time.sleep(0.5)
        for gpu in gpus:
            accounts, processes = (
                client.usage(edges, by, gpus=[gpu]).sums for by in ("account", "process")
            )
            sums[gpu] = [
                *accounts,
                *(process for process in processes if process.kind == "process"),
            ]
    except ZeusIpcError as error:
        return error.message, 0
    return sums, settled_ms
