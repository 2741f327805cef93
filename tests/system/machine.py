"""A booted systemd: an overlay of this machine's root, or of another, in systemd-nspawn."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fake_nvml.double import NvmlDouble
from tests.support import PACKAGES, wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
TREE = os.environ.get("ZEUSD_TEST_TREE", "/")
"""Of what a machine is an overlay: this machine, or what `make_tree` made."""
_ENTER = 'mount --rbind /tmp "$1/tmp"; mount -t proc proc "$1/proc"; exec chroot "$@"'
IN_TREE = ("unshare", "--mount", "sh", "-ec", _ENTER, "sh", TREE)
"""Before a command: runs it in `TREE`, with this machine's /tmp."""
SOURCES = "/usr/src/zeusd"
LIBRARY = "/opt/nvml-double/libnvidia-ml.so.1"
"""Where a machine has the stand-in for NVML, ..."""
STATE = "/var/lib/nvml-double"
"""... and what its GPUs are like."""
BOOT_S = 120.0


class Machine:
    """A container, whose changes are discarded.

    Attributes:
        root: Its root folder, as this process sees it.
        changed: What differs in it from `TREE`; to be read only.
    """

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="zeusd-machine-", dir="/var/tmp"))
        self.root = self._directory / "root"
        self.changed = self._directory / "upper"
        self._process: subprocess.Popen[bytes] | None = None
        self._leader = 0
        self._groups: list[Path] = []

    def start(self) -> Machine:
        """Boots it."""
        parts = {name: self._directory / name for name in ("upper", "work", "root")}
        for part in parts.values():
            part.mkdir()
        options = f"lowerdir={TREE},upperdir={parts['upper']},workdir={parts['work']}"
        subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", options, str(self.root)], check=True
        )
        self._copy_sources()
        self._quieten()
        self._make_groups()
        name = f"zeusd-{os.getpid()}"
        with (self._directory / "console").open("wb") as console:
            self._process = subprocess.Popen(
                [
                    *("systemd-nspawn", "--quiet", "--boot", "--directory", str(self.root)),
                    *("--machine", name, "--register=no", "--keep-unit", "--link-journal=no"),
                    "--console=pipe",
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                preexec_fn=self._enter_groups,
                # One tree of control groups, as distributions boot; not as this machine happens to.
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )
        self._leader = wait_for(self._find_leader, "the container's init", BOOT_S)
        wait_for(self._is_up, "the container to boot", BOOT_S)
        return self

    def stop(self) -> None:
        """Ends it and removes all of it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                if self._leader:  # 0 would be this process's own group
                    os.kill(self._leader, 9)
            self._process.kill()
            self._process.wait()
        self._remove_groups()
        # Lazily: this process may have files of it mapped, which it unmaps when it ends.
        if os.path.ismount(self.root):
            subprocess.run(["umount", "--lazy", str(self.root)], check=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def run(
        self,
        *command: str,
        user: str | None = None,
        groups: Sequence[str] = (),
        check: bool = True,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command inside, and returns its output."""
        done = subprocess.run(
            self.command(*command, user=user, groups=groups),
            capture_output=True,
            text=True,
            env=self._environment(),
            **options,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{' '.join(command)} returned {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done

    def popen(
        self, *command: str, user: str | None = None, groups: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Starts a command inside, with pipes to talk to it."""
        return subprocess.Popen(
            self.command(*command, user=user, groups=groups),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment(),
        )

    def command(
        self, *command: str, user: str | None = None, groups: Sequence[str] = ()
    ) -> list[str]:
        """The command line that runs a command inside."""
        enter = ["nsenter", "--target", str(self._leader), "--mount", "--pid", "--ipc", "--uts"]
        enter += ["--root", "--wd=/", "--"]
        if user is not None:
            enter += ["setpriv", f"--reuid={user}", f"--regid={user}"]
            enter += [f"--groups={','.join(groups)}" if groups else "--clear-groups", "--"]
        return [*enter, *command]

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        """Runs systemctl inside."""
        return self.run("systemctl", *arguments, check=check).stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.systemctl("show", "--value", f"--property={name}", unit)

    def add_gpus(self, count: int) -> NvmlDouble:
        """Gives it the stand-in for NVML, that zeusd's units may use, and nothing that names it."""
        state = Path(f"{self.root}{STATE}")
        state.mkdir(parents=True)
        double = NvmlDouble(state, [{} for _ in range(count)])
        library = Path(f"{self.root}{LIBRARY}")
        library.parent.mkdir(parents=True)
        shutil.copy(double.library, library)
        env = f'"NVML_DOUBLE_STATE={STATE}/nvml-state" "NVML_DOUBLE_RECORD={STATE}/nvml-record"'
        for unit in ("zeusd", "zeusd-restore"):
            drop_in = Path(f"{self.root}/etc/systemd/system/{unit}.service.d/double.conf")
            drop_in.parent.mkdir(parents=True)
            drop_in.write_text(f"[Service]\nReadWritePaths={STATE}\nEnvironment={env}\n")
        return double

    # --------------------------------------------------------------------------------- internals

    @staticmethod
    def _environment() -> dict[str, str]:
        keep = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        return {
            **keep,
            "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C",
        }

    def _make_groups(self) -> None:
        """Control groups of its own: in those of another machine on this host are processes that
        it cannot see, and its systemd then refuses to kill anything.
        """
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kind, path = line.split(":", 2)
            mounts = {"": ("unified", "."), "name=systemd": ("systemd",)}.get(kind, ())
            for mount in mounts:
                parent = Path("/sys/fs/cgroup") / mount / path.lstrip("/")
                if (parent / "cgroup.procs").exists():
                    group = parent / self._directory.name
                    with contextlib.suppress(OSError):  # read-only: then there is but one
                        group.mkdir()
                        self._groups.append(group)
                    break

    def _enter_groups(self) -> None:
        for group in self._groups:
            with contextlib.suppress(OSError):
                (group / "cgroup.procs").write_text("0")

    def _remove_groups(self) -> None:
        def gone() -> bool:
            for group in self._groups:
                for folder in sorted(group.glob("**/"), reverse=True):
                    with contextlib.suppress(OSError):  # its processes are ending
                        folder.rmdir()
            return not any(group.exists() for group in self._groups)

        with contextlib.suppress(AssertionError):
            wait_for(gone, "the control groups to be empty", 10.0)

    def _copy_sources(self) -> None:
        target = Path(f"{self.root}{SOURCES}")
        skip = shutil.ignore_patterns("__pycache__")
        for name in (*PACKAGES, "examples", "packaging", "scripts", "systemd"):
            shutil.copytree(REPOSITORY / name, target / name, ignore=skip)
        for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
            shutil.copy2(REPOSITORY / name, target / name)
        # The checkout may have been made under umask 077.
        subprocess.run(["chmod", "-R", "go+rX", target], check=True)

    def _quieten(self) -> None:
        """Services of this machine that the tests do not need, and that would slow the boot."""
        units = Path(f"{self.root}/etc/systemd/system")
        for path in Path(f"{self.root}/etc/systemd/system").glob("*.wants/*"):
            if path.name.startswith(("dbus", "systemd-")) or path.suffix == ".target":
                continue
            mask = units / path.name
            if not os.path.lexists(mask):
                mask.symlink_to("/dev/null")
        for name in ("postgresql.service", "apt-daily.timer", "apt-daily-upgrade.timer"):
            mask = units / name
            if not os.path.lexists(mask):
                mask.symlink_to("/dev/null")
        # Each package would have the index of all manual pages made again.
        Path(f"{self.root}/var/lib/man-db/auto-update").unlink(missing_ok=True)
        # Images for containers forbid packages to start their services; nodes do not.
        Path(f"{self.root}/usr/sbin/policy-rc.d").unlink(missing_ok=True)

    def _find_leader(self) -> int:
        assert self._process is not None
        if self._process.poll() is not None:
            console = (self._directory / "console").read_text(errors="replace")
            raise AssertionError(f"systemd-nspawn ended:\n{console}")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        for child in children.read_text().split():
            comm = Path(f"/proc/{child}/comm")
            with contextlib.suppress(OSError):
                if comm.read_text().strip() in ("systemd", "init"):
                    return int(child)
        return 0

    def _is_up(self) -> bool:
        done = subprocess.run(
            self.command("systemctl", "is-system-running"), capture_output=True, text=True
        )
        return done.stdout.strip() in ("running", "degraded")
