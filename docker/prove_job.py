"""A job for docker/prove: computes on GPU 0, and holds a limit of it until it is killed."""

from __future__ import annotations

import time

from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError


def attempt(client: Client, gpu: int, watts: int) -> None:
    """Sets a limit, and prints what zeusd says."""
    try:
        client.set_power_limit(client.node().gpus[gpu].uuid, watts * 1000)
    except ZeusIpcError as error:
        print(f"GPU {gpu}, {watts} W: {error.code}: {error}", flush=True)
    else:
        print(f"GPU {gpu}, {watts} W: set", flush=True)


def main() -> None:
    """Runs until killed."""
    with Client() as client:
        node = client.node()
        assert node.simulated is not None
        attempt(client, 0, 150)  # nothing computes there yet
        with SimulatedWork(node.simulated, [node.gpus[0].uuid], "model/compute") as work:
            work.launch(1e6)
            attempt(client, 1, 150)
            attempt(client, 0, 400)
            attempt(client, 0, 150)
            print("holding", flush=True)
            time.sleep(3600)


if __name__ == "__main__":
    main()
