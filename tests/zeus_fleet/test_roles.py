"""Certificates and roles of etcd, as docs/operate/fleet_security.md sets them up."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.zeus_fleet.etcd import Certificates, running_etcd
from zeus_fleet.allocator import Commit
from zeus_fleet.connection import Tls
from zeus_fleet.messages import Budget, BudgetDomain, GrantPlan, NodeReport
from zeus_fleet.store import FleetStore, StoreUnavailable

pytestmark = pytest.mark.needs("etcd")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate" / "fleet_security.md"
BUDGET = Budget(
    (BudgetDomain("site", 700_000, frozenset({"n01", "n02"})),), {"n01": 200_000, "n02": 200_000}
)
BEAT = NodeReport(1, 0, 200_000, 200_000, 500_000, 500_000)


@dataclass(frozen=True)
class Site:
    """An etcd with the page's roles."""

    endpoint: str
    certificates: Certificates

    def __call__(self, user: str, use: Callable[[FleetStore], Awaitable[Any]]) -> Any:
        """Does something as a user."""
        tls = Tls(self.certificates.ca, *self.certificates.sign(user))
        return self.run(tls, use)

    def run(self, tls: Tls | None, use: Callable[[FleetStore], Awaitable[Any]]) -> Any:
        async def play() -> Any:
            store = FleetStore([self.endpoint], tls=tls, timeout_s=20.0 if tls else 1.0)
            try:
                return await use(store)
            finally:
                await store.close()

        return asyncio.run(play())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    certificates = Certificates(tmp_path_factory.mktemp("certificates"))
    with running_etcd(certificates) as endpoint:
        cert, key = certificates.sign("root")
        section = PAGE.read_text(encoding="utf-8").partition("## Roles")[2]
        block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
        assert block is not None
        environment = {
            **os.environ,
            "ETCDCTL_API": "3",
            "ETCDCTL_ENDPOINTS": f"https://{endpoint}",
            "ETCDCTL_CACERT": str(certificates.ca),
            "ETCDCTL_CERT": str(cert),
            "ETCDCTL_KEY": str(key),
        }
        done = subprocess.run(
            ["bash", "-euc", block[1]], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        yield Site(endpoint, certificates)


def refused(site: Site, user: str, use: Callable[[FleetStore], Awaitable[Any]]) -> None:
    with pytest.raises(StoreUnavailable, match="refuses this user; grant it the role"):
        site(user, use)


def test_each_role_does_its_work_and_nothing_else(site: Site) -> None:
    assert site("operator", lambda store: store.set_budget(BUDGET, 0))
    for node in ("n01", "n02"):
        assert site(node, lambda store, node=node: store.newest_number(node)) == 0
    answer = site("n01", lambda store: store.beat("n01", BEAT, ()))
    assert answer.budget == BUDGET
    refused(site, "n01", lambda store: store.beat("n02", BEAT))
    refused(site, "n01", lambda store: store.set_budget(BUDGET, 0))
    refused(site, "n01", lambda store: store.campaign("n01", None))

    token, _ = site("allocator", lambda store: store.campaign("l0", None))
    snapshot, revisions = site("allocator", lambda store: store.read())
    plan = GrantPlan(token, dict(BUDGET.spare_mw), {})
    commit = Commit(plan, token, 0, snapshot.budget_revision, {"n01": 1})
    refused(site, "n01", lambda store: store.commit(commit, revisions))
    refused(site, "operator", lambda store: store.commit(commit, revisions))
    assert site("allocator", lambda store: store.commit(commit, revisions))
    site("allocator", lambda store: store.advise({"n01": {0: 150_000}}))
    refused(site, "allocator", lambda store: store.beat("n02", BEAT))
    refused(site, "n01", lambda store: store.advise({"n01": {0: 150_000}}))

    snapshot, _ = site("reader", lambda store: store.read())
    assert snapshot.plan == plan
    refused(site, "reader", lambda store: store.set_budget(BUDGET, snapshot.budget_revision))


def test_nobody_gets_in_without_a_certificate_of_the_authority(site: Site, tmp_path: Path) -> None:
    for tls in (None, Tls(site.certificates.ca)):
        with pytest.raises(StoreUnavailable, match="does not answer"):
            site.run(tls, lambda store: store.read())
    other = Certificates(tmp_path)
    with pytest.raises(StoreUnavailable, match="does not answer"):
        site.run(Tls(site.certificates.ca, *other.sign("root")), lambda store: store.read())
    with pytest.raises(ValueError, match="missing cannot be read"):
        site.run(Tls(tmp_path / "missing"), lambda store: store.read())


def test_a_file_that_cannot_be_used_is_named(site: Site, tmp_path: Path) -> None:
    ca, (cert, key) = site.certificates.ca, site.certificates.sign("reader")
    _, another = site.certificates.sign("another")
    text = tmp_path / "text"
    text.write_text("no certificate")
    with pytest.raises(ValueError, match="text has no certificate in PEM format"):
        FleetStore([site.endpoint], tls=Tls(text))
    for wrong in (another, text, cert):
        with pytest.raises(
            ValueError, match=f"reader.crt and .*{wrong.name} are not a certificate"
        ):
            FleetStore([site.endpoint], tls=Tls(ca, cert, wrong))
    FleetStore([site.endpoint], tls=Tls(ca, cert, key))


def test_a_certificate_may_be_renewed_while_a_store_is_used(site: Site, tmp_path: Path) -> None:
    cert, key = (tmp_path / name for name in ("node.crt", "node.key"))

    def put(pair: tuple[Path, Path]) -> None:
        cert.write_bytes(pair[0].read_bytes())
        key.write_bytes(pair[1].read_bytes())

    async def play(store: FleetStore) -> None:
        await store.read()
        await store.close()
        cert.write_bytes(site.certificates.sign("another")[0].read_bytes())  # its key follows
        with pytest.raises(StoreUnavailable, match=r"node.crt and .*node.key are not"):
            await store.read()
        cert.unlink()
        with pytest.raises(StoreUnavailable, match=r"node.crt cannot be read"):
            await store.read()
        put(site.certificates.sign("reader"))
        await store.read()

    put(site.certificates.sign("reader"))
    site.run(Tls(site.certificates.ca, cert, key), play)
