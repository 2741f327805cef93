"""The Debian package: built from the tree, and its life on a node as apt's users meet it there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.fake_nvml.double import NvmlDouble
from tests.packaging.closure import PROJECT
from tests.support import NOBODY, PACKAGES, wait_for
from tests.system.machine import IN_TREE, LIBRARY, REPOSITORY, SOURCES, TREE, Machine
from zeus_ipc import __version__

LIMIT = 250_000
CONFIGURATION = "/etc/zeusd/zeusd.toml"
UNIT_FOLDERS = ("lib/systemd/system", "usr/lib/systemd/system", "etc/systemd/system")
NEXT_VERSION = "987.0.0rc1"
STAYS = (
    *("/var/lib/dpkg", "/var/lib/apt", "/var/log", "/var/cache", "/var/backups"),
    *("/run", "/tmp", "/usr/src/zeusd", "/etc/systemd/system/zeusd.service.d"),
    "/etc/systemd/system/zeusd-restore.service.d",
)
"""Where a purge need not clean up: apt's own records, what this test has put there."""


on_a_node = [pytest.mark.needs("debian package"), pytest.mark.timeout(300)]


def build(tree: Path, output: Path, cache: Path) -> Path:
    """Builds the package of a tree, not packed as tightly as it would be: that takes long."""
    command = [*IN_TREE, str(tree / "packaging/build-deb"), "--cache", str(cache), str(output)]
    env = {**os.environ, "DPKG_DEB_COMPRESSOR_TYPE": "gzip", "DPKG_DEB_COMPRESSOR_LEVEL": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def lintian(package: Path) -> subprocess.CompletedProcess[str]:
    """The output of lintian, which fails for an error or a warning."""
    command = [*IN_TREE, "lintian", "--allow-root", "--fail-on=error,warning", str(package)]
    # It leaves files behind.
    env = {**os.environ, "TMPDIR": str(package.parent)}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def next_tree(folder: Path) -> Path:
    """This tree as an unpacked sdist of a later version: with no git, and another number."""
    folder.mkdir()
    for name in (*PACKAGES, "systemd", "packaging", "scripts", "examples"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "NOTICE"):
        shutil.copy2(REPOSITORY / name, folder)
    version = folder / "zeus_ipc/_version.py"
    text = version.read_text()
    assert __version__ in text
    version.write_text(text.replace(__version__, NEXT_VERSION))
    return folder


def earlier(package: Path, folder: Path) -> Path:
    """The package of a later tree as one of this version, without a second build."""
    folder.mkdir()
    tree = folder / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", str(package), str(tree)], check=True)
    for found, version in (
        (tree / "DEBIAN/control", NEXT_VERSION.replace("rc", "~rc")),
        (next(tree.glob("usr/lib/zeusd/lib/*/site-packages/zeus_ipc/_version.py")), NEXT_VERSION),
    ):
        text = found.read_text()
        assert text.count(version) == 1
        found.write_text(text.replace(version, __version__))
    pack = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", str(tree), str(folder)]
    subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("zeusd_*.deb"))


@dataclass
class Node:
    """A node, its GPUs, a package as built, an earlier one, and what lintian says meanwhile."""

    machine: Machine
    double: NvmlDouble
    package: Path
    upgrade: Path
    opinion: Future[subprocess.CompletedProcess[str]]
    holders: list[subprocess.Popen[str]] = field(default_factory=list)

    def dpkg(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.apt("dpkg", *arguments, check=check)

    def apt(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        quiet = "DEBIAN_FRONTEND=noninteractive"
        return self.machine.run("env", quiet, *command, check=check, stdin=subprocess.DEVNULL)

    def put(self, package: Path) -> str:
        """Copies a package in and returns its path there."""
        shutil.copy(package, f"{self.machine.root}/var/cache/{package.name}")
        return f"/var/cache/{package.name}"

    def wait_serving(self) -> None:
        wait_for(lambda: "2 GPUs" in self.machine.show("zeusd", "StatusText"), "zeusd to serve")

    def limits(self) -> list[int]:
        return [self.double.limit_mw(gpu) for gpu in range(2)]

    def main_pid(self, unit: str = "zeusd") -> int:
        return int(self.machine.show(unit, "MainPID"))

    def zeusctl(self, *arguments: str, user: str | None = str(NOBODY)) -> Any:
        done = self.machine.run("zeusctl", *arguments, "--json", user=user)
        return json.loads(done.stdout)

    def leases(self) -> list[dict[str, Any]]:
        return list(self.zeusctl("leases")["leases"])

    def hold(self, gpu: int, watts: int) -> dict[str, Any]:
        """An ordinary user sets a limit and keeps it. Returns the lease."""
        group = self.machine.run("getent", "group", "zeus").stdout.split(":")[2]
        command = ("zeusctl", "set", str(gpu), "-p", str(watts), "--", "sleep", "600")
        self.holders.append(self.machine.popen(*command, user=str(NOBODY), groups=[group]))
        wait_for(lambda: self.limits()[gpu] == watts * 1000, "the limit to be set")
        (lease,) = self.leases()
        return lease

    def configure(self, text: str) -> None:
        header = f'[nvml]\nlibrary = "{LIBRARY}"\n'
        Path(f"{self.machine.root}{CONFIGURATION}").write_text(header + text)

    def units(self) -> list[str]:
        root = self.machine.root
        found = (path for folder in UNIT_FOLDERS for path in (root / folder).glob("zeusd*"))
        return sorted(path.name for path in found if path.is_file() and not path.is_symlink())

    def left(self) -> list[str]:
        """Files of zeusd's that this machine has and its host has not."""
        below = self.machine.changed
        found = []
        for folder, names, files in os.walk(below):
            inside = "/" + os.path.relpath(folder, below)
            if inside.startswith(STAYS):
                names.clear()
                continue
            paths = (os.path.join(inside, name) for name in (*names, *files))
            found += [path for path in paths if "zeus" in path and not path.startswith(STAYS)]
        return sorted(path for path in found if os.path.lexists(f"{self.machine.root}{path}"))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("package")
    machine = Machine()
    node = None
    aside = ThreadPoolExecutor(1)
    try:
        tree = next_tree(folder / "tree")
        later = aside.submit(build, tree, folder / "next", folder / "cache")
        machine.start()
        upgrade = later.result()
        opinion = aside.submit(lintian, upgrade)
        package = earlier(upgrade, folder / "first")
        if Path(TREE, "usr/lib/python3/dist-packages/systemd").exists():
            # All that it depends on is there, and apt takes seconds to read of what else there is.
            shutil.rmtree(machine.root / "var/lib/apt/lists")
        double = machine.add_gpus(2)
        node = Node(machine, double, package, upgrade, opinion)
        yield node
    finally:
        aside.shutdown(cancel_futures=True)
        for holder in node.holders if node is not None else []:
            holder.kill()
            holder.wait()
        machine.stop()


# ------------------------------------------------------------------------------- what is in it


def test_the_lock_is_what_pyproject_asks_for() -> None:
    lock = (REPOSITORY / "packaging/requirements.txt").read_text()
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.MULTILINE))
    script = (REPOSITORY / "packaging/lock").read_text()
    extras = set(re.findall(r"--extra (\S+)", script))
    install = (REPOSITORY / "scripts/install").read_text()
    (installed,) = re.findall(r'"\.\[(.*)\$\{fleet:\+,fleet-server\}\]"', install)
    assert extras | {"systemd"} == set(installed.split(",")), "what scripts/install installs, too"
    wanted = [*PROJECT["dependencies"]]
    for extra in sorted(extras):
        wanted += PROJECT["optional-dependencies"][extra]
    for one in map(Requirement, wanted):
        assert one.name in locked, (
            f"{one.name} is not in packaging/requirements.txt: packaging/lock"
        )
        assert one.specifier.contains(locked[one.name]), f"{one}, not {locked[one.name]}"


@pytest.mark.usefixtures("node")
class TestPackage:
    pytestmark = on_a_node

    def test_it_writes_only_to_its_own_paths(self, node: Node, tmp_path: Path) -> None:
        subprocess.run(["dpkg-deb", "--extract", str(node.upgrade), str(tmp_path)], check=True)
        files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
        places = re.compile(
            r"etc/zeusd/zeusd\.toml$|usr/bin/zeus|usr/lib/zeusd/|(usr/)?lib/systemd/system/zeusd"
            r"|usr/lib/(sysusers|tmpfiles)\.d/zeusd|usr/share/(doc|man|lintian)/"
            r"|usr/share/.*complet.*zeusctl"
        )
        names = [str(path.relative_to(tmp_path)) for path in files]
        assert [name for name in names if not places.match(name)] == []
        assert not [name for name in names if name.endswith((".pyc", "direct_url.json", "RECORD"))]
        built_in = str(node.upgrade.parents[1]).encode()
        made_in = re.compile(rb"zeusd-deb\.\w{6}|" + re.escape(built_in) + b"/")
        for path in files:
            if not path.is_symlink():
                assert not made_in.search(path.read_bytes()), f"{path}: a path of the build"
        made, carried_examples = REPOSITORY / "examples", tmp_path / "usr/share/doc/zeusd/examples"
        wanted = [path.relative_to(made) for path in made.rglob("*") if path.is_file()]
        missing = [path for path in wanted if not (carried_examples / path).is_file()]
        assert [path for path in missing if "__pycache__" not in path.parts] == []
        listed = (tmp_path / "usr/share/doc/zeusd/dependencies.txt").read_text()
        carried = [path.name for path in (tmp_path / "usr/lib/zeusd").rglob("*.dist-info")]
        assert len(carried) > 8
        page = (REPOSITORY / "docs/operate/debian.md").read_text()
        assert f"msgpack and {listed.count('https://pypi.org/') - 3} more from PyPI" in page
        for name in carried:
            project, version = name.removesuffix(".dist-info").split("-")
            assert re.search(f"^{project.replace('_', '[-_]')} {version}$", listed, re.M | re.I)

    # ------------------------------------------------------------------------ its life on a node

    def test_an_installation_of_scripts_install_is_not_overridden(self, node: Node) -> None:
        unit = Path(f"{node.machine.root}/etc/systemd/system/zeusd.service")
        text = (REPOSITORY / "systemd/zeusd.service").read_text()
        unit.write_text(text.replace("@PREFIX@", "/opt/there"))
        refused = node.dpkg("--install", node.put(node.package), check=False)
        unit.unlink()
        assert refused.returncode != 0
        assert "scripts/install --uninstall --prefix /opt/there" in refused.stderr
        assert not Path(f"{node.machine.root}/usr/bin/zeusctl").exists()

    def test_the_installed_zeusd_serves_all_users(self, node: Node) -> None:
        machine = node.machine
        node.apt("apt-get", "install", "--yes", node.put(node.package))
        node.configure("")
        machine.systemctl("restart", "zeusd")
        node.wait_serving()
        for unit in ("zeusd.service", "zeusd.socket", "zeusd-stream.socket"):
            assert machine.systemctl("is-enabled", unit) == "enabled"
        assert machine.systemctl("is-enabled", "zeusd-exporter", check=False) == "disabled"
        assert machine.systemctl("is-active", "zeusd-exporter", check=False) == "inactive"
        checks = {check["name"]: check for check in node.zeusctl("doctor")["checks"]}
        assert checks["systemd"]["found"] == "zeusd's units are active"
        assert checks["policy"]["found"] == "read-only for you"
        metrics = machine.run("zeusd-exporter", "--once", user=str(NOBODY)).stdout
        assert metrics.count("zeusd_gpu_power_watts{") == 2
        events = machine.run("journalctl", "-u", "zeusd", "-o", "cat", "EVENT=started", check=False)
        assert events.returncode == 0
        share = Path(f"{machine.root}/usr/share")
        for page in ("zeusctl", "zeusctl-set", "zeusd", "zeusd-exporter"):
            assert (share / f"man/man1/{page}.1.gz").exists()
        for path in ("bash-completion/completions/zeusctl", "zsh/vendor-completions/_zeusctl"):
            assert "_ZEUSCTL_COMPLETE" in (share / path).read_text()
        alone = machine.run("/usr/bin/python3", "-c", "import zeus_ipc", check=False)
        assert "ModuleNotFoundError" in alone.stderr, "the system's Python must not see it"
        poisoned = machine.run("env", "PYTHONPATH=/usr/lib/none", "zeusctl", "--version")
        assert __version__ in poisoned.stdout

    def test_the_uninstaller_of_scripts_install_leaves_it_alone(self, node: Node) -> None:
        before, units = node.main_pid(), node.units()
        done = node.machine.run("bash", f"{SOURCES}/scripts/install", "--uninstall", check=False)
        assert done.returncode == 1
        assert "apt-get remove zeusd" in done.stderr
        assert (node.main_pid(), node.units()) == (before, units)
        assert node.leases() == []

    def test_its_units_are_sandboxed(self, node: Node) -> None:
        for unit, most in (("zeusd", 1.3), ("zeusd-restore", 1.3), ("zeusd-exporter", 1.2)):
            said = node.machine.run("systemd-analyze", "security", "--no-pager", unit).stdout
            (exposure,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", said)
            assert float(exposure) <= most, unit

    def test_an_upgrade_keeps_leases_and_what_the_administrator_chose(self, node: Node) -> None:
        machine = node.machine
        machine.systemctl("start", "zeusd-exporter")
        lease = node.hold(0, 200)
        calls = len(node.double.calls())
        before = {unit: node.main_pid(unit) for unit in ("zeusd", "zeusd-exporter")}
        node.configure("[lease]\nttl = 20\n")
        refused = node.dpkg("--install", node.put(node.upgrade), check=False)
        assert refused.returncode != 0
        assert "line 4: lease.ttl" in refused.stderr
        assert "it was not restarted" in refused.stderr
        assert node.main_pid() == before["zeusd"], "the zeusd before goes on"
        node.configure("[lease]\nttl_s = 20\n")
        mine = Path(f"{machine.root}{CONFIGURATION}").read_text()
        node.dpkg("--configure", "zeusd")
        node.wait_serving()
        for unit, pid in before.items():
            wait_for(
                lambda unit=unit, pid=pid: node.main_pid(unit) not in (0, pid),
                f"another {unit}",
            )
        assert node.zeusctl("status")["node"]["daemon_version"] == NEXT_VERSION
        (kept,) = node.leases()
        same = ("uuid", "control", "value", "pid")
        assert [kept[name] for name in same] == [lease[name] for name in same]
        assert kept["held_s"] >= lease["held_s"]
        assert node.limits() == [200_000, LIMIT]
        assert len(node.double.calls()) == calls, "nothing was written"
        assert node.holders[0].poll() is None
        assert Path(f"{machine.root}{CONFIGURATION}").read_text() == mine
        assert machine.systemctl("is-enabled", "zeusd-exporter", check=False) == "disabled"
        # And back.
        node.dpkg("--install", node.put(node.package))
        node.wait_serving()
        wait_for(
            lambda: node.zeusctl("status")["node"]["daemon_version"] != NEXT_VERSION,
            "the former zeusd",
        )
        (kept,) = node.leases()
        assert [kept[name] for name in same] == [lease[name] for name in same]
        assert len(node.double.calls()) == calls, "nothing was written"
        # One that is disabled or masked stays so.
        machine.systemctl("mask", "--now", "zeusd-exporter")
        machine.systemctl("disable", "--now", "zeusd")
        wait_for(lambda: node.limits() == [LIMIT, LIMIT], "the stop to restore")
        # What dpkg runs when it has unpacked another.
        node.apt("/var/lib/dpkg/info/zeusd.postinst", "configure", NEXT_VERSION)
        assert machine.systemctl("is-enabled", "zeusd", check=False) == "disabled"
        assert machine.systemctl("is-active", "zeusd", check=False) == "inactive"
        assert machine.systemctl("is-enabled", "zeusd-exporter", check=False) == "masked"
        machine.systemctl("unmask", "zeusd-exporter")
        machine.systemctl("enable", "--now", "zeusd")
        node.wait_serving()

    def test_a_removal_restores_everything_and_a_purge_leaves_nothing(self, node: Node) -> None:
        machine = node.machine
        # Independent of earlier tests.
        machine.run("pkill", "--exact", "zeusctl", check=False)
        node.configure("")
        machine.systemctl("restart", "zeusd")
        node.wait_serving()
        wait_for(lambda: node.limits() == [LIMIT, LIMIT], "nothing to be held")
        node.hold(0, 180)
        node.zeusctl("set", "1", "-p", "200", "--persist", user=None)
        Path(f"{machine.root}/etc/zeusd/exporter.env").touch()
        machine.systemctl("start", "zeusd-exporter")
        node.apt("apt-get", "remove", "--yes", "zeusd")
        assert node.limits() == [LIMIT, LIMIT]
        assert node.units() == []
        assert Path(f"{machine.root}{CONFIGURATION}").exists()
        assert not Path(f"{machine.root}/usr/lib/zeusd").exists()
        left = machine.run("pgrep", "--full", "/usr/lib/zeusd", check=False).stdout.split()
        assert len(left) <= len(node.holders), "only the commands that this test has started"
        node.apt("apt-get", "purge", "--yes", "zeusd")
        assert node.left() == []
        assert not Path(f"{machine.root}/etc/zeusd").exists()
        assert machine.run("ls", "/run/zeusd", check=False).returncode != 0
        for name in ("zeus", "zeus-admin"):
            assert machine.run("getent", "group", name).stdout, "who owned files is not made again"

    # ---------------------------------------------------------------- what was made in the meantime

    def test_it_is_named_after_the_one_version(self, node: Node) -> None:
        shown = subprocess.run(
            ["dpkg-deb", "--show", str(node.upgrade)], capture_output=True, text=True, check=True
        ).stdout
        name, found = shown.split()
        assert (name, found.partition("+")[0]) == ("zeusd", NEXT_VERSION.replace("rc", "~rc"))
        assert node.upgrade.name.startswith(f"zeusd_{found}_")

    def test_lintian_finds_nothing(self, node: Node) -> None:
        done = node.opinion.result()
        assert done.returncode == 0, done.stdout + done.stderr
