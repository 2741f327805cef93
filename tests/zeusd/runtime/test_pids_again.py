"""A pid that another process gets is another process."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.needs("root")
def test_no_process_is_charged_as_another_that_had_its_pid() -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m"]
    said = subprocess.run(
        [*command, "tests.zeusd.runtime.pids_again", "400"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout.split() == ["40", "0"], said.stderr
