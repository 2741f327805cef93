"""The reference has everything that the code has.

What it must have is taken from what programs print, accept or answer, and from the sources, and not
from the objects that the reference is made of.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from scripts.site.reference import commands
from tests import snippets
from tests.docs.built import Site
from tests.preloaded import preloaded
from tests.snippets import ROOT
from tests.support import CLIENTS, IMPORTED, PACKAGES, RunningDaemon, running_daemon
from zeus.run.settings import Settings
from zeus_ipc import __version__
from zeus_ipc.socket_transport import SocketTransport
from zeusctl.cli import cli
from zeusctl.commands.about import pages as manual

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # starlette would rather have another HTTP client
    from fastapi.testclient import TestClient

pytestmark = pytest.mark.timeout(300)  # the first waits for the build


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "2xv100-pcie", gpus=2) as one:
        yield one


def _helps(run: Callable[..., str], name: str) -> Iterator[tuple[str, str]]:
    """What `--help` prints of a command and of each of its verbs."""
    text = run()
    yield name, text
    verbs = re.search(r"^Commands:\n((?:  .*\n)+)", text, re.MULTILINE)
    for verb in re.findall(r"^  (\S+)", verbs[1], re.MULTILINE) if verbs else ():
        yield from _helps(functools.partial(run, verb), f"{name} {verb}")


@pytest.mark.parametrize("name", sorted({*commands.CLICK, *commands.ARGPARSE} - {"zeusd restore"}))
def test_every_command_says_its_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in commands.CLICK:
        said = CliRunner().invoke(commands.command_of(name), ["--version"]).output
    else:
        with pytest.raises(SystemExit):
            commands.parser_of(name).parse_args(["--version"])
        said = capsys.readouterr().out
    assert __version__ in said


def _click(name: str, *verbs: str) -> str:
    arguments = [*verbs, "--help"]
    return CliRunner().invoke(commands.command_of(name), arguments, prog_name=name).output


def _argparse(name: str, *verbs: str) -> str:
    main = importlib.import_module(commands.ARGPARSE[name]).main
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        main([*verbs, "--help"])
    return printed.getvalue()


def _all_helps() -> Iterator[tuple[str, str]]:
    for name in commands.CLICK:
        yield from _helps(functools.partial(_click, name), name)
    for name in commands.ARGPARSE:
        yield name, _argparse(name)
    for verb in ("energy", "power"):
        name = "python -m zeus.monitor"
        yield f"{name} {verb}", _argparse(name, verb)


def _options(command: click.Command, name: str) -> Iterator[tuple[str, click.Option]]:
    for one in command.params:
        if isinstance(one, click.Option) and not one.hidden:
            yield f"{name} {one.opts[-1]}", one
    if isinstance(command, click.Group):
        context = click.Context(command)
        for verb in command.list_commands(context):
            found = command.get_command(context, verb)
            assert found is not None
            yield from _options(found, f"{name} {verb}")


@pytest.mark.parametrize("name", commands.CLICK)
def test_every_option_says_what_it_does(name: str) -> None:
    options = dict(_options(commands.command_of(name), name))
    assert options
    assert [option for option, one in options.items() if not one.help] == []


def test_every_option_of_every_command_is_there(site: Site) -> None:
    pages = {name: path for path, names in commands.PAGES.items() for name in names}
    missing, seen = [], 0
    for name, text in _all_helps():
        if name == "zeusd restore" and "--dry-run" not in text:
            continue  # it hands --help on
        page = next(pages[one] for one in pages if f"{name} ".startswith(f"{one} "))
        anchor = re.sub(r"[^\w -]", "", name).replace(" ", "-")
        rows = site.rows(page.removesuffix(".md") + "/", anchor)
        listed = {word.strip(",") for row in rows for word in row.split()}
        said = {
            option
            for line in re.findall(r"^ {2,6}(-\S.*?)(?:  |$)", text, re.MULTILINE)
            for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", line)
        }
        seen += len(said)
        missing += [f"{name} {option}" for option in said - listed]
    assert missing == []
    assert seen > 150


def test_every_error_code_is_there(site: Site) -> None:
    source = (ROOT / "zeus_ipc/errors.py").read_text()
    codes = set(re.findall(r"^    [A-Z_]+ = \"(\w+)\"$", source, re.MULTILINE))
    used = set()
    for path in (ROOT / "zeusd").rglob("*.py"):
        used |= {name.lower() for name in re.findall(r"ErrorCode\.([A-Z_]+)", path.read_text())}
    assert len(codes) > 20
    assert used <= codes
    rows = site.rows("reference/errors/")
    assert rows == codes


def test_every_exit_code_is_there(site: Site) -> None:
    statuses = manual(cli)["zeusctl"].partition(".SH EXIT STATUS\n")[2].partition(".SH ")[0]
    codes = set(re.findall(r"\\fB(\d+)\\fR", statuses))
    section = site.section("reference/exit_codes/", "zeusctl")
    assert len(codes) > 10
    assert codes <= set(re.findall(r"^\d+$", section, re.MULTILINE))


def _exposed(text: str) -> dict[str, str]:
    """Names and types in Prometheus's text format, with the counters' endings."""
    found = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    created = {name for name in found if name.endswith("_created")}
    return {name: kind for name, kind in found.items() if name not in created}


def test_every_metric_of_the_exporter_is_there(site: Site, daemon: RunningDaemon) -> None:
    asked = ("--once", "--socket", daemon.socket, "--workloads", "--otel")
    text = preloaded(*CLIENTS).run("-m", "zeusctl.exporter", *asked).stdout
    exposed = _exposed(text)
    assert site.rows("reference/metrics/", "zeusd-exporter") == exposed.keys()
    section = site.section("reference/metrics/", "zeusd-exporter").split()
    labels = set(re.findall(r'[{,](\w+)="', text)) - {"le"}
    assert labels <= {word.strip(",") for word in section}


SERVERS = pytest.mark.parametrize(
    ("package", "name"),
    [("batch_size", "ServerSettings"), ("pipeline_frequency", "PlanServerSettings")],
)
"""The package of each server, and the class of its settings."""


@SERVERS
def test_every_metric_of_the_servers_is_there(
    site: Site, package: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server = importlib.import_module(f"zeus.optimizer.{package}.server.router")
    settings = importlib.import_module(f"zeus.optimizer.{package}.server.settings")
    app = server.create_app(getattr(settings, name).from_env({}))

    with TestClient(app) as client:
        exposed = _exposed(client.get("/metrics").text)
    assert len(exposed) > 9
    title = f"{package.replace('_', '-')}-server"
    assert site.rows("reference/metrics/", title) == exposed.keys()


def test_every_metric_of_windows_is_there(site: Site) -> None:
    source = (ROOT / "zeus/metric.py").read_text()
    named = set(re.findall(r"`((?:energy|power)_monitor_\w+)`", source))
    assert site.rows("reference/metrics/", "zeusmetric") == named


def test_every_key_of_zeusd_toml_is_there_and_taken(site: Site, tmp_path: Path) -> None:
    html = (site.folder / "reference/configuration/index.html").read_text()
    file = (ROOT / "systemd/zeusd.toml").read_text()
    installed: dict[str, set[str]] = {}
    for line in file.splitlines():
        header = re.match(r"# (\[\[?)(\w+)\]", line)
        key = re.match(r"# (\w+) = ", line)
        if header:
            keys = installed.setdefault(header[2], set())
        elif key:
            keys.add(key[1])
    assert len(installed) > 6
    sections = re.findall(r'<h2 id="(\w+)">(\[+)', html)
    lines = []
    for name, brackets in sections:
        rows = site.rows("reference/configuration/", name)
        assert installed.pop(name, set()) <= rows, name
        lines.append(f"{brackets}{name}{brackets.replace('[', ']')}")
        begin = html.index(f'<h2 id="{name}">')
        for key, default in re.findall(
            r"<tr>\s*<td><code>(\w+)</code></td>\s*<td>.*?</td>\s*<td>(.*?)</td>",
            html[begin:].partition("</table>")[0],
            re.DOTALL,
        ):
            value = re.fullmatch(r"<code>(.*)</code>", default)
            lines.append(f"{key} = {value[1]}" if value else f"# {key}")
    assert installed == {}
    path = tmp_path / "zeusd.toml"
    path.write_text("\n".join(lines).replace("&quot;", '"').replace("&gt;", ">"))
    ran = preloaded(*IMPORTED).run("-m", "zeusd", "check-config", str(path))
    assert ran.returncode == 0, ran.stderr + path.read_text()
    assert "# power_limit_w" in path.read_text()
    assert "ttl_s = 15.0" in path.read_text()


def test_every_key_that_zeusd_reads_is_there(site: Site) -> None:
    """Reads the settings in the source that turns a configuration into the daemon's settings."""
    tree = ast.parse((ROOT / "zeusd/config.py").read_text())
    sections = {
        one.name.removesuffix("Section").lower(): {
            line.target.id
            for line in one.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
        for one in tree.body
        if isinstance(one, ast.ClassDef) and one.name.endswith("Section") and one.body[1:]
    }
    sections.pop("_", None)
    assert len(sections) > 8
    for name, keys in sections.items():
        assert site.rows("reference/configuration/", name) == keys, name


@SERVERS
def test_every_setting_of_the_servers_is_there(site: Site, package: str, name: str) -> None:
    module = importlib.import_module(f"zeus.optimizer.{package}.server.settings")
    with pytest.raises(Exception, match="is not a setting") as refused:
        getattr(module, name).from_env({f"{module.PREFIX}NONE": "1"})
    known = set(str(refused.value).partition("there are ")[2].split(", "))
    assert len(known) > 5
    rows = site.rows("reference/servers/")
    assert known == {name for name in rows if name.startswith(module.PREFIX)}


def test_every_environment_variable_is_there(site: Site) -> None:
    found: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            source = path.read_text()
            if re.search(r"ZEUS|env", source):
                for node in ast.walk(ast.parse(source)):
                    found |= _variables(node)
    text = site.text("reference/environment/") + site.text("reference/servers/")
    words = set(re.findall(r"[A-Z][A-Z0-9_]+", text))
    ours = {name for name in found if name.startswith("ZEUS")}
    assert {"ZEUSD_SOCK_PATH", "ZEUS_STALL_TIMEOUT_S", "ZEUS_BSO_TOKEN"} <= ours
    settings = Settings(target_metric=0.5).to_env()
    assert set(settings) <= words
    assert {"CUDA_VISIBLE_DEVICES", "NO_COLOR"} <= found
    # Variables that are set for others, and not by users.
    assert found - words - {"ZEUS_BSO_", "ZEUS_PFO_", "PYDANTIC_DISABLE_PLUGINS"} == set()


def _variables(node: ast.AST) -> set[str]:
    """The environment variables that a piece of code names."""
    named: ast.expr | None = None
    match node:
        case ast.Constant(value=str(text)) if re.fullmatch(r"ZEUS(D|CTL)?_[A-Z0-9_]+", text):
            return {text}
        case ast.Call(func=ast.Attribute(value=of, attr="get" | "setdefault"), args=[named, *_]):
            pass
        case ast.Subscript(value=of, slice=named) | ast.Compare(left=named, comparators=[of]):
            pass
        case _:
            return set()
    if isinstance(named, ast.Constant) and ast.unparse(of) in ("os.environ", "env", "environ"):
        return {str(named.value)}
    return set()


OUR_OWN = {
    "zeus.optimizer.pipeline_frequency.command.main",
    "zeus.utils.progress.progress_bar",
}
"""What examples import that is for this repository only."""


def test_every_public_name_is_there(site: Site) -> None:
    """The names that packages export, and those that a page or an example imports."""
    wanted: set[str] = set()
    for path in [*(ROOT / "zeus").rglob("__init__.py"), ROOT / "zeus_ipc/__init__.py"]:
        package = ".".join(path.parent.relative_to(ROOT).parts)
        module = importlib.import_module(package)
        wanted |= {f"{package}.{name}" for name in getattr(module, "__all__", ())}
    for source in _example_sources():
        for statement in ast.walk(ast.parse(source)):
            module = getattr(statement, "module", None) or ""
            if module.split(".")[0] in ("zeus", "zeus_ipc", "zeus_common"):
                wanted |= {f"{module}.{one.name}" for one in statement.names}
    ids = set().union(*(document.ids for document in site.documents.values()))
    aliases = {identity.rpartition(".")[2] for identity in ids if identity.startswith("zeus")}
    known = {name for name in wanted if name in ids or _same(name) in ids}
    assert len(known) > 80
    missing = {
        name
        for name in wanted - known
        if not name.endswith("__version__") and name.rpartition(".")[2] not in aliases
    }
    assert missing == OUR_OWN


def _same(name: str) -> str:
    """A name by where it is defined."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute, None)
    return f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"


def _example_sources() -> Iterator[str]:
    for path in (ROOT / "examples").rglob("*.py"):
        yield path.read_text()
    for page in snippets.pages():
        yield from (block.source for block in snippets.of(page))


def test_every_field_that_zeusd_answers_is_there(site: Site, daemon: RunningDaemon) -> None:
    text = site.text("reference/protocol/").split()
    transport = SocketTransport(daemon.socket)
    with daemon.client() as client, contextlib.closing(transport):
        uuid = client.node().gpus[0].uuid
        client.set_power_limit(uuid, 150_000)
        said: list[Any] = []
        for operation, arguments in (
            ("hello", {}),
            ("state", {"gpus": [uuid]}),
            ("energy", {"gpus": [uuid]}),
            ("power", {"gpus": [uuid]}),
            ("clocks", {"gpus": [uuid]}),
            ("processes", {"gpus": [uuid]}),
            ("leases", {}),
            ("policy", {}),
            ("audit", {}),
            ("metrics", {}),
            ("heartbeat", {}),
        ):
            message = {"v": 1, "op": operation, **arguments}
            said.append(transport.request(message, 5.0)["result"])
    names: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            names.update(key for key in value if re.fullmatch(r"[a-z]+(_[a-z]+)*", key))
            for one in value.values():
                collect(one)
        elif isinstance(value, list):
            for one in value:
                collect(one)

    collect(said)
    assert len(names) > 80
    assert names - set(text) == set()


def test_every_operation_is_there(site: Site, daemon: RunningDaemon) -> None:
    with contextlib.closing(SocketTransport(daemon.socket)) as transport:
        refused = transport.request({"v": 1, "op": "no such operation"}, 5.0)
    known = set(refused["error"]["details"]["operations"])
    assert len(known) > 20
    section = site.section("reference/protocol/", "operations").split()
    assert known <= set(section)


def test_every_field_of_every_report_is_there(site: Site) -> None:
    """As golden files have them."""
    text = set(site.text("reference/json/").split())
    for path in (ROOT / "tests/zeusctl/golden").glob("*.json"):
        names: set[str] = set()
        json.loads(path.read_text(), object_pairs_hook=lambda pairs: names.update(dict(pairs)))
        assert names - text == set(), path.name
