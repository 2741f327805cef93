"""`zeusctl quiesce` and `resume`: close the driver, and reopen it."""

from __future__ import annotations

from zeus_common.text import count, named
from zeus_ipc.errors import ErrorCode
from zeusctl.entities import KnownGpu
from zeusctl.exits import CommandError
from zeusctl.reports import QuiesceReport, ResumeReport
from zeusctl.session import Session, now, verb


@verb()
def quiesce(session: Session) -> None:
    """Close the driver, as before a GPU reset (administrators).

    A GPU can be reset, or its MIG mode changed, only while no process has the driver open. zeusd
    first revokes all leases and restores everything. Then it closes every /dev/nvidia* and keeps
    them closed, even across restarts, until `zeusctl resume`.

    \b
    zeusctl quiesce && nvidia-smi --gpu-reset -i 3; zeusctl resume
    """
    index = {gpu.uuid: gpu.index for gpu in session.node.gpus}
    result = session.client.quiesce()
    pending = [f"{control} of {named(uuid, index)}" for uuid, control in result.pending]
    report = QuiesceReport(
        at=now(),
        quiesced=not result.open,
        open=result.open,
        pending_restores=pending,
    )

    def lines() -> list[str]:
        sentences = [
            f"{one} could not be restored; zeusd retries it after resume" for one in pending
        ]
        if not result.open:
            sentences.append("zeusd has closed the driver; `zeusctl resume` reopens it")
        return sentences

    session.answer(report, lines)
    if result.open:
        raise CommandError(
            f"zeusd still has {', '.join(result.open)} open, because a driver call does not "
            "return; `systemctl restart zeusd` closes them, and it stays quiesced",
            ErrorCode.QUIESCED,
        )


@verb()
def resume(session: Session) -> None:
    """Reopen the driver after quiesce (administrators).

    Read every GPU again, and write limits that were set with --persist again. Without a `quiesce`
    before, nothing happens.
    """
    quiesced = session.node.quiesced_ns is not None
    node = session.client.resume()
    report = ResumeReport(at=now(), gpus=[KnownGpu.of(gpu) for gpu in node.gpus])
    done = "has reopened the driver" if quiesced else "was not quiesced; nothing changed"
    session.answer(report, [f"zeusd {done}: {count(len(node.gpus), 'GPU')}"])
