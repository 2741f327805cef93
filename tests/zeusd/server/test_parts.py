"""The server's small parts: the owner of a uid, the cost of a request, the rate of reports."""

from __future__ import annotations

import logging
import os
import pwd
import socket
import time
from pathlib import Path

import msgpack
import pytest

from tests.support import wait_for
from zeus_ipc.codec import decode_reply, encode
from zeus_ipc.errors import ErrorCode
from zeus_ipc.operations import OPERATIONS
from zeus_ipc.requests import Request, request_adapter
from zeus_ipc.wire import PROTOCOL_VERSION
from zeusd.server import decoding, visibility
from zeusd.server.decoding import Invalid, decode
from zeusd.server.reports import EVERY_NS, Reports
from zeusd.server.subuids import READ_NS, SubordinateUids
from zeusd.server.visibility import monotonic_offset_s


def test_subordinate_uids_have_an_owner(tmp_path: Path) -> None:
    name = pwd.getpwuid(os.getuid()).pw_name
    file = tmp_path / "subuid"
    file.write_text(
        f"# comment\n{name}:100000:65536\n1234:200000:10\nnobody-of-that-name:300000:10\n"
        "nobody-of-that-name:400000:10\nnobody-else:500000:10\n1:x:3\nbroken\n5:0:100\n6:10:-3\n"
    )
    now_ns = 0
    uids = SubordinateUids(str(file), lambda: now_ns)
    assert uids.owner(100_000) == uids.owner(165_535) == os.getuid()
    assert uids.owner(165_536) == 165_536
    assert [uids.owner(uid) for uid in (199_999, 200_000, 200_009, 200_010)] == [
        199_999,
        1234,
        1234,
        200_010,
    ]
    assert [uids.owner(uid) for uid in (0, 1000, 310_000)] == [0, 1000, 310_000]
    assert [uids.owner(uid) for uid in (300_005, 400_009, 500_001)] == [300_000, 300_000, 500_000]
    file.write_text("77:100000:65536\n")
    now_ns += 2 * READ_NS
    assert uids.owner(100_000) == 77
    file.write_text(
        "1:100000:1000000000\n2:200000:10\n3:200000:65536\n4:200100:10\nnobody-there:0:5\n"
        "nobody-there:1000:10\n99999999999999999999:2000:10\n9:3000000000000:5\n"
    )
    now_ns += 2 * READ_NS
    within = [uids.owner(uid) for uid in (100_000, 200_005, 200_050, 200_105, 200_200, 300_000)]
    assert within == [1, 2, 3, 4, 3, 1]
    assert [uids.owner(uid) for uid in (1_005, 2_005)] == [1_000, 2_005]
    file.unlink()
    os.mkfifo(file)  # nobody writes
    now_ns += 2 * READ_NS
    assert uids.owner(100_000) == 100_000
    file.unlink()
    now_ns += 2 * READ_NS
    assert uids.owner(100_000) == 100_000


def request(**fields: object) -> bytes:
    return msgpack.packb({"v": PROTOCOL_VERSION, "id": 7, **fields})


@pytest.mark.parametrize(
    ("data", "request_id", "code", "words"),
    [
        (b"\xc1", 0, ErrorCode.BAD_REQUEST, "one msgpack map"),
        (msgpack.packb([1]), 0, ErrorCode.BAD_REQUEST, "not a map"),
        (msgpack.packb({"v": 1, "op": "hello"}), 0, ErrorCode.BAD_REQUEST, "no usable id"),
        (msgpack.packb({"v": 1, "id": True}), 0, ErrorCode.BAD_REQUEST, "no usable id"),
        (msgpack.packb({"v": 9, "id": 7}), 7, ErrorCode.UNSUPPORTED_VERSION, "version 1, not 9"),
        (request(op="fly"), 7, ErrorCode.UNKNOWN_OPERATION, "heartbeat"),
        (request(op="state", gpus=[]), 7, ErrorCode.BAD_REQUEST, "gpus"),
        (request(op="state", gpus=["x"] * 1025), 7, ErrorCode.BAD_REQUEST, "1025 exceeds"),
        (request(op=["x"] * 1025, gpus=[{"id": 3}]), 7, ErrorCode.BAD_REQUEST, "1025 exceeds"),
        (request(op="allocate", name="x" * 400), 7, ErrorCode.BAD_REQUEST, "letters, digits and"),
        (
            request(op="deallocate", name="a b"),
            7,
            ErrorCode.BAD_REQUEST,
            "name: 'a b' is not valid",
        ),
        (
            request(op="publish_profile", gpus=["x"], limits_mw=[1]),
            *(7, ErrorCode.BAD_REQUEST, "is not valid: a profile needs one progress"),
        ),
        (request(op="set", gpus=["x"], value=[1]), 7, ErrorCode.BAD_REQUEST, "control"),
        (request(op="windows", windows=[0.5]), 7, ErrorCode.BAD_REQUEST, "windows.0: Input"),
    ],
)
def test_errors_of_a_request(data: bytes, request_id: int, code: str, words: str) -> None:
    with pytest.raises(Invalid) as caught:
        decode(data)
    reply = decode_reply(encode(caught.value.reply))
    assert (reply["v"], reply["id"], reply["error"]["code"]) == (1, request_id, code)
    assert words in reply["error"]["message"]


@pytest.mark.parametrize("odd", [None, [], ["set"] * 900, {}, {"x": []}, 1.5, "x" * 250])
@pytest.mark.parametrize(
    ("field", "code"),
    [("op", ErrorCode.UNKNOWN_OPERATION), ("v", ErrorCode.UNSUPPORTED_VERSION)],
)
def test_an_operation_or_version_of_any_type_gets_a_short_answer(
    field: str, code: ErrorCode, odd: object
) -> None:
    with pytest.raises(Invalid) as caught:
        decode(encode({"v": PROTOCOL_VERSION, "id": 7, "op": "node", field: odd}))
    assert caught.value.reply["id"] == 7
    error = caught.value.reply["error"]
    assert error.code is code
    assert len(error.message) < 1000


def test_an_unknown_operation_gets_the_list_of_operations() -> None:
    with pytest.raises(Invalid) as caught:
        decode(request(op="fly"))
    assert caught.value.reply["error"].details["operations"] == list(OPERATIONS)


def test_the_longest_name_of_a_pod_is_taken() -> None:
    name = f"{'n' * 63}/{'p' * 253}"
    found = decode(request(op="allocate", gpus=["GPU-1"], kind="pod", name=name))
    assert getattr(found, "name") == name  # noqa: B009 - one of many requests


def test_reports_name_the_user_and_come_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_ns = 0
    reports = Reports(lambda: now_ns)
    caplog.set_level(logging.WARNING)

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    for uid in (0, 4_000_000):
        reports.add(uid, "protocol_error", "broke a rule")
    wait_for(lambda: len(said()) == 2, "two records")
    for _ in range(99):
        reports.add(0, "rate_limited", "is too fast")
    reports.add(0, "protocol_error", "broke another rule")
    time.sleep(0.05)
    assert len(said()) == 2
    now_ns += EVERY_NS
    reports.add(4_000_000, "protocol_error", "broke a rule again")
    wait_for(lambda: len(said()) == 4, "two more records")
    now_ns += EVERY_NS // 2
    reports.add(0, "protocol_error", "broke one more")
    reports.stop()
    assert said() == [
        "user root broke a rule",
        "user 4000000 broke a rule",
        "user root broke another rule (99 other events of this user were not logged)",
        "user 4000000 broke a rule again",
        "user root broke one more",
    ]
    assert {record.uid for record in caplog.records} == {0, 4_000_000}


def test_omitted_log_lines_are_reported_when_the_minute_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where nothing else happens any more."""
    reports = Reports(every_ns=50_000_000)
    caplog.set_level(logging.WARNING)
    reports.add(0, "rate_limited", "is too fast")
    wait_for(lambda: caplog.records, "a record")
    reports.add(0, "protocol_error", "broke a rule")
    wait_for(lambda: len(caplog.records) == 2, "the other")
    reports.stop()
    assert caplog.records[1].event == "protocol_error"


def test_the_offset_of_a_time_namespace_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert monotonic_offset_s("self") == monotonic_offset_s(os.getpid())
    assert monotonic_offset_s(2**22 + 5) == 0.0, "a process that is gone has none"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert visibility.unusable(ours) is None
        offset_s = monotonic_offset_s(os.getpid()) - 0.002
        monkeypatch.setattr(visibility, "monotonic_offset_s", lambda pid: offset_s)
        assert "0.002 s behind zeusd's" in visibility.unusable(ours).message


def test_validators_are_built_with_what_the_oldest_pydantic_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Adapter:  # of 2.7: rebuild() came with 2.10
        built = False

        def validate_python(self, value: object) -> Request:
            self.built = True
            return request_adapter.validate_python(value)

    adapter = Adapter()
    monkeypatch.setattr(decoding, "request_adapter", adapter)
    decoding.prepare()
    assert adapter.built
    assert type(request_adapter.validator).__name__ == "SchemaValidator"
