"""Where the monitor's joules come from."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeus.exceptions import from_ipc
from zeus_ipc.errors import ZeusIpcError

if TYPE_CHECKING:
    from zeus.device import GPUs
    from zeus_ipc.client import Client

POLL_S = 0.02
"""How often power is read where there is no counter: Pascal's sensor ticks at this rate."""


class EnergySource:
    """Cumulative energy of GPUs: by their counters, or by integrating power where there is none.

    Args:
        client: The node.
        gpus: The process's GPUs.
        indices: Those to read.
    """

    def __init__(self, client: Client, gpus: GPUs, indices: Sequence[int]) -> None:
        self._client = client
        self._counted = {gpus[i].uuid: i for i in indices if gpus[i].info.supports.energy_counter}
        integrated = {gpus[i].uuid: i for i in indices if gpus[i].uuid not in self._counted}
        self._integrator = _PowerIntegrator(client, integrated) if integrated else None

    def energy_j(self) -> dict[int, float]:
        """Energy since some fixed time, J, by GPU index.

        Raises:
            ZeusBaseGPUError: It cannot be read.
        """
        energy: dict[int, float] = {}
        try:
            if self._counted:
                readings = self._client.energy(list(self._counted))
                energy = {
                    self._counted[uuid]: reading.energy_mj / 1000
                    for uuid, reading in readings.items()
                }
            if self._integrator is not None:
                energy.update(self._integrator.energy_j())
        except ZeusIpcError as error:
            raise from_ipc(error) from error
        return energy

    def power_w(self) -> dict[int, float]:
        """Present power, W, by GPU index; GPUs that do not tell are absent."""
        indices = dict(self._counted)
        try:
            readings = self._client.power(list(indices)) if indices else {}
        except ZeusIpcError as error:
            raise from_ipc(error) from error
        return {
            indices[uuid]: reading.instant_mw / 1000
            for uuid, reading in readings.items()
            if reading.instant_mw is not None
        }


class _PowerIntegrator:
    """Adds up power on a thread of its own; each reading holds until the next."""

    def __init__(self, client: Client, indices: dict[str, int]) -> None:
        self._client = client
        self._indices = indices
        self._guard = threading.Lock()
        self._energy_j = dict.fromkeys(indices.values(), 0.0)
        self._power_w: dict[int, float] = {}
        self._t_s = time.monotonic()
        self._read()
        threading.Thread(target=self._run, name="zeus-power", daemon=True).start()

    def energy_j(self) -> dict[int, float]:
        with self._guard:
            self._read()
            return dict(self._energy_j)

    def _read(self) -> None:
        readings = self._client.power(list(self._indices))
        now_s = time.monotonic()
        for uuid, reading in readings.items():
            index = self._indices[uuid]
            watts = (reading.instant_mw or 0) / 1000
            before_w = self._power_w.get(index, watts)
            self._energy_j[index] += before_w * (now_s - self._t_s)
            self._power_w[index] = watts
        self._t_s = now_s

    def _run(self) -> None:
        while True:
            time.sleep(POLL_S)
            with self._guard:
                try:
                    self._read()
                except ZeusIpcError:
                    continue  # whoever asks for the energy is told
