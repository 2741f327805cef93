from __future__ import annotations

import threading
import time
from pathlib import Path

import zmq

from zeus_ipc.codec import decode_request, encode
from zeus_ipc.transport import ZmqTransport


def test_what_was_sent_in_the_moment_of_a_loss_is_sent_again(tmp_path: Path) -> None:
    """libzmq had told of the loss already, so nothing more will be heard of the request."""
    path = str(tmp_path / "socket")
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, 20_000)
    router.bind(f"ipc://{path}")
    seen: list[int] = []

    def answer_the_third() -> None:
        for _ in range(3):
            peer, data = router.recv_multipart()
            seen.append(decode_request(data)["id"])
            if len(seen) != 2:
                router.send_multipart([peer, encode({"id": seen[-1], "ok": {}})])

    server = threading.Thread(target=answer_the_third)
    server.start()
    transport = ZmqTransport(path)
    try:
        transport.request({"v": 1, "op": "node"}, 20.0)
        transport.connection().lost_at_ns = time.monotonic_ns()
        reply = transport.request({"v": 1, "op": "node"}, 20.0)
    finally:
        server.join()
        transport.close()
        router.close()
        context.term()
    assert seen == [seen[0], reply["id"], reply["id"]]
