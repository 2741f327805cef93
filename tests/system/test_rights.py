"""Permissions follow the kernel's identity of a process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest

from tests.fake_nvml.double import NvmlDouble
from tests.support import (
    NOBODY,
    TIMEOUT_S,
    as_nobody,
    ending,
    public_directory,
    running_daemon,
    script,
)
from tests.system.sites import HOLDER, Site

SPOOFER = """
import json, os, sys
import msgpack, zmq
context = zmq.Context()
dealer = context.socket(zmq.DEALER)
dealer.setsockopt(zmq.RCVTIMEO, 60_000)
dealer.connect("ipc://" + sys.argv[1])
claims = {"uid": 0, "gid": 0, "pid": 1, "user": "root", "groups": [0], "CapEff": "000001ffffffffff"}
message = {"v": 1, "id": 1, "op": "set", "gpus": [sys.argv[2]], "control": "power_limit",
           "value": [150_000], "client": "root", **claims}
dealer.send(msgpack.packb(message))
reply = msgpack.unpackb(dealer.recv())
print(json.dumps([os.getuid(), reply["result"]["gpus"][sys.argv[2]]["error"]["code"]]))
"""


@pytest.mark.needs("two users", "namespaces", "user namespaces")
@pytest.mark.parametrize("wrapper", [[], ["unshare", "--user", "--map-root-user"]])
def test_nothing_a_client_says_makes_it_another_user(wrapper: list[str]) -> None:
    with public_directory() as directory:
        double = NvmlDouble(directory, [{}])
        with running_daemon(
            *("--nvml-library", double.library, "--socket-mode", "0666"),
            gpus=1,
            env=double.env,
            directory=directory,
        ) as daemon:
            done = subprocess.run(
                [*wrapper, sys.executable, "-c", SPOOFER, daemon.socket, double.uuid(0)],
                capture_output=True,
                text=True,
                **as_nobody(),
            )
            assert done.returncode == 0, done.stderr
            uid, code = json.loads(done.stdout)
            assert uid == (0 if wrapper else NOBODY), "in its own namespace it believes to be root"
            assert code == "permission_denied"
            assert double.calls() == []
            (refusal,) = daemon.wait_for_records("refused")
            assert refusal["uid"] == NOBODY
            with daemon.client() as root:
                root.set_power_limit(double.uuid(0), 150_000)  # root of the host administers
            namespace = ["unshare", "--pid", "--fork", "--kill-child"]
            done = subprocess.run(
                [*namespace, sys.executable, "-c", SPOOFER, daemon.socket, double.uuid(0)],
                capture_output=True,
                text=True,
            )
            assert json.loads(done.stdout) == [0, "permission_denied"], "root in a container"


@pytest.mark.needs("two users")
def test_only_computing_users_may_control_if_the_site_requires_it() -> None:
    text = "[access]\nrequire_compute_process = true\nroot = 'never'\n"
    with contextlib.ExitStack() as stack:
        site = Site(stack, 1, text)
        source = HOLDER.replace("gpus, 150_000", "gpus[0], 150_000")
        refused = script(source, site.daemon.socket, stderr=subprocess.PIPE, **as_nobody())
        _, error = refused.communicate(timeout=TIMEOUT_S)
        assert "only while one of the user's processes computes on it" in error
        with ending(subprocess.Popen(["sleep", "60"], text=True, **as_nobody())) as computing:
            site.double.computes(0, computing.pid)
            with ending(site.holder(source + "sys.stdin.read()")):
                assert site.limits() == [150_000]
