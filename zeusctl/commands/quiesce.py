"""`zeusctl quiesce` and `resume`: out of the driver's way, and back."""

from __future__ import annotations

import click

from zeusctl.exits import CommandError, Exit
from zeusctl.session import Session, common_options, now, pass_session
from zeusctl.text import count


@click.command()
@common_options
@pass_session
def quiesce(session: Session) -> None:
    """Administrators: let go of the driver, as before a reset.

    A GPU can be reset, or its MIG mode changed, only while nobody has the driver open. Everything
    goes back first, and holders lose their leases. Then zeusd closes every /dev/nvidia*
    and stays away, over restarts too, until `zeusctl resume`.

    \b
    zeusctl quiesce && nvidia-smi --gpu-reset -i 3; zeusctl resume
    """
    from zeusctl.reports import QuiesceReport

    index = {gpu.uuid: gpu.index for gpu in session.node.gpus}
    result = session.client.quiesce()
    not_back = [f"{control} of GPU {index.get(uuid, uuid)}" for uuid, control in result.owed]
    report = QuiesceReport(at=now(), quiesced=not result.open, open=result.open, not_back=not_back)

    def lines() -> list[str]:
        found = [f"{one} could not be put back; it is tried again after resume" for one in not_back]
        if not result.open:
            found.append("zeusd has let go of the driver; `zeusctl resume` takes it up again")
        return found

    session.answer(report, lines)
    if result.open:
        raise CommandError(
            f"zeusd still has {', '.join(result.open)} open, because a call to the driver does not "
            "return; `systemctl restart zeusd` closes them, and it stays quiesced",
            Exit.NOT_BACK,
            "quiesced",
        )


@click.command()
@common_options
@pass_session
def resume(session: Session) -> None:
    """Administrators: take the driver up again after quiesce.

    Every GPU is read anew, and limits that were set with --persist are written again. Without a
    `quiesce` before, nothing happens.
    """
    from zeusctl.reports import ResumeReport
    from zeusctl.views import known_report

    node = session.client.resume()
    report = ResumeReport(at=now(), gpus=[known_report(gpu) for gpu in node.gpus])
    session.answer(report, [f"zeusd has taken up the driver again: {count(len(node.gpus), 'GPU')}"])
