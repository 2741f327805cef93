"""zeusd in containers: as pid 1 in its own namespaces, and the files of the images.

The images themselves are built and run by docker/prove, which takes minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.preloaded import preloaded
from tests.support import (
    CLIENTS,
    IMPORTED,
    TIMEOUT_S,
    RunningDaemon,
    ending,
    public_directory,
    running_daemon,
    wait_for,
)
from zeus_ipc import Client, __version__, errors

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKER = REPOSITORY / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()

needs_root = pytest.mark.needs("namespaces")


# ------------------------------------------------------------- a pid namespace of its own, by hand


class Secluded(RunningDaemon):
    """zeusd as pid 1 of a pid namespace, on a folder that is a mount, as in a container."""

    def _spawn(
        self, program: Sequence[str] = ("-m", "zeusd"), imported: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        serve = [sys.executable, *program, "serve", "--socket", self.socket]
        serve += ["--state-dir", str(self.state_dir), "--log-format", "json", *self.arguments]
        folder = shlex.quote(str(self.directory))
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [
                    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("sh", "-ec", f'mount --bind {folder} {folder}; exec "$@"', "sh", *serve),
                ],
                stdin=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        """zeusd's, as it is seen from here."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text().split()[0])

    def inside(
        self, *command: str, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """A process in its container."""
        # The root, too: this may be a chroot, which is no root of a mount namespace.
        enter = ("nsenter", "--target", str(self.pid), "--mount", "--pid", "--root")
        return subprocess.Popen(
            [*enter, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "ZEUSD_SOCK_PATH": self.socket, **(env or {})},
            **options,
        )


@pytest.fixture
def secluded() -> Iterator[Secluded]:
    with public_directory() as directory:
        daemon = Secluded(directory, "--simulate", "2xv100-pcie:setter_ms=0")
        try:
            daemon.wait_for_records("serving")
            yield daemon
        finally:
            daemon.process.kill()  # and its child with it
            daemon.process.wait()


def doctor(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    """Exit code, and checks by name."""
    out, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, {check["name"]: check for check in json.loads(out)["checks"]}


@needs_root
def test_an_invisible_client_is_refused_at_once_and_fills_no_log(secluded: Secluded) -> None:
    with secluded.client() as client:
        for call in (client.node, client.leases, lambda: client.set_power_limit("GPU-0", 1000)):
            with pytest.raises(errors.DaemonUnavailable, match="--pid=host, or hostPID: true") as e:
                call()
            assert e.value.details == {"reason": "pid_namespace"}
        record = secluded.wait_for_records("peer_refused")[0]
        assert (record["level"], record["uid"]) == ("warning", os.getuid())
        for _ in range(100):
            with contextlib.suppress(errors.DaemonUnavailable), secluded.client() as other:
                other.node()
        assert len(secluded.records("peer_refused")) < 30


@needs_root
def test_the_doctor_sees_it_from_both_sides(secluded: Secluded) -> None:
    command = (sys.executable, "-m", "zeusctl", "doctor", "--json")
    env = {**os.environ, "ZEUSD_SOCK_PATH": secluded.socket}
    pipe = subprocess.PIPE
    code, checks = doctor(subprocess.Popen(command, stdout=pipe, text=True, env=env))
    assert code == 1
    assert checks["socket"]["found"].startswith("zeusd does not see this process")
    assert "--pid=host" in checks["socket"]["remedy"]

    code, checks = doctor(secluded.inside(*command, env={"KUBERNETES_SERVICE_HOST": "10.0.0.1"}))
    assert code == 1
    assert checks["container"]["state"] == "fault"
    assert "hostPID: true" in checks["container"]["remedy"]


HOLD = """
import sys
from zeus_ipc import Client
client = Client()
client.set_power_limit(client.node().gpus[0].uuid, 150_000)
print("held", flush=True)
sys.stdin.read()
"""


@needs_root
def test_as_pid_1_it_is_one_process_and_restores_everything_at_sigterm(secluded: Secluded) -> None:
    zeusd = secluded.pid
    assert f"NSpid:\t{zeusd}\t1\n" in Path(f"/proc/{zeusd}/status").read_text()
    assert Path(f"/proc/{zeusd}/task/{zeusd}/children").read_text() == ""
    with secluded.inside(sys.executable, "-c", HOLD) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        os.kill(zeusd, 15)
        secluded.process.wait(TIMEOUT_S)
        assert secluded.process.returncode == 0
        holder.kill()
    (restored,) = secluded.records("restore")
    assert (restored["result"], restored["new"]) == ("ok", "250 W")
    assert not Path(secluded.socket).exists()


@needs_root
def test_one_capability_is_enough(tmp_path: Path) -> None:
    """CAP_SYS_ADMIN, and nothing else."""
    with public_directory() as directory:
        command = ["setpriv", "--bounding-set=-all,+sys_admin", "--inh-caps=-all"]
        command += [sys.executable, "-m", "zeusd", "serve", "--simulate", "1xv100-pcie"]
        command += ["--socket", str(directory / "z.sock"), "--state-dir", str(directory / "state")]
        with ending(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as process:
            try:
                with Client(directory / "z.sock", timeout_s=TIMEOUT_S) as client:
                    wait_for((directory / "z.sock").exists, "the socket")
                    gpu = client.node().gpus[0].uuid
                    client.set_power_limit(gpu, 150_000)
                    assert client.state(gpu)[gpu].power_limit_mw == 150_000
            finally:
                process.terminate()
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()
            assert process.wait(TIMEOUT_S) == 0


# --------------------------------------------------------------------------------- the Dockerfile


def instructions() -> list[tuple[str, str]]:
    """Name and rest of each, comments gone and lines joined."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines))
    return [
        (line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line
    ]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage by its name; those before the first under an empty one."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for one in instructions():
        if one[0] == "FROM":
            name = one[1].rpartition(" AS ")[2]
            found[name] = []
        found[name].append(one)
    return found


def test_the_images_stand_on_the_base_and_take_from_the_builder_what_it_built() -> None:
    found = stages()
    targets = {"daemon": "builder"}
    targets |= {name: f"{name}-builder" for name in ("kubernetes", "training")}
    assert set(found) == {"", "python", *targets, *targets.values()}
    assert found[""] == [("ARG", "BASE=debian:bookworm-slim")]
    assert found["python"][0] == ("FROM", "${BASE} AS python")
    for target, builder in targets.items():
        assert found[target][0] == ("FROM", f"python AS {target}")
        assert ("COPY", f"--from={builder} /opt/zeusd /opt/zeusd") in found[target]
        for name, rest in found[target]:
            assert not (name == "RUN" and re.search(r"apt|pip|venv", rest)), rest


def test_nothing_secret_and_nothing_unneeded_stays_in_a_layer() -> None:
    for name, rest in instructions():
        assert name not in ("ADD", "MAINTAINER", "VOLUME")
        if name in ("ENV", "ARG"):
            assert not re.search(r"(?i)token|password|secret|://", rest), rest
        if name == "RUN":
            assert "set -eu;" in rest, rest
            assert "curl" not in rest
            for install in re.findall(r"apt-get install [^;]*", rest):
                assert "--no-install-recommends" in install, install
    (python,) = (rest for name, rest in stages()["python"] if name == "RUN")
    assert "rm -rf /var/lib/apt/lists/*" in python


def test_the_images_users_are_numbers_that_others_name() -> None:
    found = stages()
    (daemon,) = (rest for name, rest in found["daemon"] if name == "RUN")
    for user in ("zeus:x:9850", "zeus-admin:x:9851", "zeusd-exporter:x:9853"):
        assert user in daemon
    assert ("USER", "1000:1000") in found["training"]
    compose = services()
    assert compose["exporter"]["user"] == "9853:9853"
    assert compose["training"]["user"] == "1000:1000"
    assert containers()["exporter"]["securityContext"]["runAsUser"] == 9853


def test_the_images_are_labelled_with_this_version() -> None:
    for target in ("daemon", "kubernetes", "training"):
        found = stages()[target]
        assert ("ARG", f"VERSION={__version__}") in found
        (labels,) = (rest for name, rest in found if name == "LABEL")
        names = re.findall(r"org\.opencontainers\.image\.([a-z.]+)=", labels)
        wanted = {"title", "description", "version", "revision", "source", "licenses", "base.name"}
        assert wanted <= set(names)
    images = {one["image"] for one in (*containers().values(), *services().values())}
    own = {image for image in images if image.startswith("zeusd")}
    assert own == {f"zeusd:{__version__}", f"zeusd-training:{__version__}"}
    assert f"-t zeusd:{__version__} ." in DOCKERFILE


def test_the_pins_are_what_zeusd_needs_and_what_it_takes() -> None:
    """Every dependency, and of those that the project names a version in its range."""
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    wanted = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["metrics"],
        *project["project"]["optional-dependencies"]["top"],
        *project["project"]["optional-dependencies"]["kubernetes"],
    ]
    for requirement in map(Requirement, wanted):
        assert requirement.name in pins
        assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_copied_files_exist_and_reach_the_builder() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in lines if line.startswith("!")]
    first = next(line for line in lines if not line.startswith("#"))
    assert first == "*", "nothing, but for these"
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (REPOSITORY / source).exists(), source
                assert source in allowed, source


def test_the_images_configuration_is_what_kubernetes_is_given(tmp_path: Path) -> None:
    path = DOCKER / "zeusd.toml"
    checked = preloaded(*IMPORTED).run("-m", "zeusd", "check-config", str(path))
    assert (checked.returncode, checked.stderr) == (0, "")
    manifests = yaml.safe_load_all((REPOSITORY / "examples/kubernetes/daemonset.yaml").read_text())
    (config,) = (one for one in manifests if one["kind"] == "ConfigMap")
    assert tomllib.loads(config["data"]["zeusd.toml"]) == tomllib.loads(path.read_text())


# ----------------------------------------------------------------------- compose, and Kubernetes


class _Loader(yaml.SafeLoader):
    """YAML with compose's own tags, whose values go."""


_Loader.add_constructor("!reset", lambda loader, node: None)


def compose_file(name: str) -> dict[str, Any]:
    return dict(yaml.load((DOCKER / name).read_text(), _Loader))


def services() -> dict[str, dict[str, Any]]:
    return dict(compose_file("compose.yaml")["services"])


def containers() -> dict[str, dict[str, Any]]:
    """The DaemonSet's, by name."""
    manifests = yaml.safe_load_all((REPOSITORY / "examples/kubernetes/daemonset.yaml").read_text())
    (daemonset,) = (one for one in manifests if one["kind"] == "DaemonSet")
    return {one["name"]: one for one in daemonset["spec"]["template"]["spec"]["containers"]}


def test_every_service_has_the_least_and_zeusd_what_kubernetes_gives_it() -> None:
    for name, one in services().items():
        assert one["read_only"] is True, name
        assert one["cap_drop"] == ["ALL"], name
        assert one["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in one
        assert one.get("network_mode") != "host"
        assert ("cap_add" in one) == (one.get("pid") == "host") == (name == "zeusd")
    zeusd, exporter = containers()["zeusd"], containers()["exporter"]
    assert services()["zeusd"]["cap_add"] == zeusd["securityContext"]["capabilities"]["add"]
    assert services()["zeusd"]["network_mode"] == "none"
    assert (
        services()["zeusd"]["environment"].items()
        <= {one["name"]: one["value"] for one in zeusd["env"]}.items()
    )
    assert services()["exporter"]["command"][0] == exporter["command"][0]
    assert services()["zeusd"]["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": "all", "capabilities": ["gpu", "utility"]}
    ]


def test_clients_get_the_folder_and_may_not_write_in_it() -> None:
    for name in ("exporter", "training"):
        (mount,) = services()[name]["volumes"]
        assert mount == {
            "type": "bind",
            "source": "/run/zeusd",
            "target": "/run/zeusd",
            "read_only": True,
        }


def test_files_and_images_in_compose_exist() -> None:
    compose = compose_file("compose.yaml")
    targets = stages()
    for name, one in compose["services"].items():
        for mount in one.get("volumes", []):
            if mount["type"] == "volume":
                assert mount["source"] in compose["volumes"], name
            elif mount["source"].startswith("."):
                assert (DOCKER / mount["source"]).is_file(), mount
                assert mount["read_only"] is True
        for network in one.get("networks", []):
            assert network in compose["networks"]
        for port in one.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nothing is open to the network"
        assert re.search(r":v?[0-9]+\.[0-9]+\.[0-9]+$", one["image"]), "versions are pinned"
        if "build" in one:
            assert one["build"]["target"] in targets
            assert (DOCKER / one["build"]["context"] / one["build"]["dockerfile"]).exists()
    example = compose["services"]["training"]["command"][1]
    assert (REPOSITORY / example.removeprefix("/opt/zeusd/")).is_file()
    simulated = compose_file("compose.simulated.yaml")["services"]
    assert set(simulated) <= set(compose["services"])
    assert simulated["zeusd"]["deploy"] is simulated["training"]["deploy"] is None


@pytest.mark.needs("prometheus")
def test_prometheus_takes_its_configuration_and_asks_the_exporter(tmp_path: Path) -> None:
    text = (DOCKER / "prometheus.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(text)
    alerts = (REPOSITORY / "examples/monitoring/alerts.yml").read_text()
    (tmp_path / "alerts.yml").write_text(alerts)
    checked = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (job,) = yaml.safe_load(text)["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    service, port = target.split(":")
    command = services()[service]["command"]
    assert command[command.index("--listen") + 1].endswith(f":{port}")
    datasource = yaml.safe_load((DOCKER / "grafana/datasource.yml").read_text())["datasources"][0]
    assert datasource["url"] == "http://prometheus:9090"
    assert "prometheus" in services()


def test_a_liveness_probe_gets_an_answer() -> None:
    """Health check and probes, on a right node."""
    (health,) = re.findall(r"HEALTHCHECK .*\n\s+CMD (\[.*\])", DOCKERFILE)
    zeusd = containers()["zeusd"]
    commands = [
        json.loads(health),
        zeusd["readinessProbe"]["exec"]["command"],
        zeusd["livenessProbe"]["exec"]["command"],
    ]
    with running_daemon("--simulate", "1xv100-pcie", gpus=1) as daemon:
        for name, *arguments in commands:
            assert name == "zeusctl"
            env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket}
            ran = preloaded(*CLIENTS).run("-m", name, *arguments, env=env)
            assert ran.returncode == 0, ran.stderr


def test_the_proof_is_a_script_that_parses_and_gives_what_is_written() -> None:
    text = (DOCKER / "prove").read_text()
    subprocess.run(["bash", "-n", str(DOCKER / "prove")], check=True)
    assert os.access(DOCKER / "prove", os.X_OK)
    given = re.findall(r"--cap-add ([A-Z_]+)", text.partition("daemon=(")[2].partition(")\n")[0])
    assert given == services()["zeusd"]["cap_add"]
    for option in ("--read-only", "--cap-drop ALL", "no-new-privileges", "--pid host"):
        assert option in text
    (needed,) = re.findall(r"^for program in ([a-z ]+); do$", text, re.M)
    page = " ".join((DOCKER.parent / "docs/operate/containers.md").read_text().split())
    assert f"apt-get install {needed}`" in page
