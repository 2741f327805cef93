"""Identifies boots, loads of the driver, processes and state files.

zeusd and `zeusd restore` share it. Standard library only, because `zeusd restore` runs when nothing
else does.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import time
from pathlib import Path

DEFAULT_STATE_DIR = "/run/zeusd/state"
EMBEDDED_STATE_DIR = "/run/zeusd/embedded"
JOURNAL_NAME = "journal"
EMBEDDED_PREFIX = "embedded-"
DRIVER_MODULE = "/sys/module/nvidia"


def boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def driver_id(module: str = DRIVER_MODULE) -> str:
    """Identifies this load of the driver; limits and locked clocks are lost with a reload.

    It consists of the version and the inode of the module's directory in sysfs, which is new at
    each load.
    """
    try:
        inode = os.stat(module).st_ino
    except OSError:
        return "none"
    try:
        version = Path(module, "version").read_text().strip()
    except OSError:
        version = "?"
    return f"{version}/{inode}"


def is_trusted(status: os.stat_result) -> bool:
    """Whether a state file is a regular file that this user owns and nobody else may write."""
    mine = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return mine and stat.S_ISREG(status.st_mode)


def pidfd_inodes_are_unique() -> bool:
    """From Linux 6.9 on, each process has its own pidfd inode, which is never reused within a
    boot."""
    first, second = os.pidfd_open(os.getpid()), os.pidfd_open(os.getppid() or 1)
    try:
        return os.fstat(first).st_ino != os.fstat(second).st_ino
    finally:
        os.close(first)
        os.close(second)


def process_cookie(pid: int, pidfd: int, unique_inodes: bool) -> int:
    """A number that tells this process from all others of this boot with the same pid.

    Raises:
        OSError, ValueError, IndexError: The process has exited.
    """
    if unique_inodes:
        return os.fstat(pidfd).st_ino
    status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return int(status.rpartition(")")[2].split()[19])


def has_exited(pidfd: int) -> bool:
    """Whether a process has exited."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def open_process(pid: int, cookie: int, unique_inodes: bool) -> int | None:
    """A pidfd for exactly this process, or None if it has exited. A zombie counts as exited."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if process_cookie(pid, pidfd, unique_inodes) == cookie and not has_exited(pidfd):
            return pidfd
    except (OSError, ValueError, IndexError):
        pass
    os.close(pidfd)
    return None


def flock_within(fd: int, timeout_s: float) -> bool:
    """Locks a file, waiting for some time. Returns whether this process has the lock."""
    give_up_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= give_up_s:
                return False
            time.sleep(0.01)
        else:
            return True
