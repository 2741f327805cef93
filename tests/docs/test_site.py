"""The site as it is built: links, what it loads, and how it looks."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tests import browser, snippets
from tests.browser import Page
from tests.docs.built import SITE_URL, Site
from tests.snippets import ROOT

pytestmark = pytest.mark.timeout(300)  # the first waits for the build


def test_every_page_is_in_the_navigation_once() -> None:
    configuration = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    found: list[str] = []

    def collect(entry: Any) -> None:
        if isinstance(entry, str):
            found.append(entry)
        else:
            for one in entry.values() if isinstance(entry, dict) else entry:
                collect(one)

    collect(configuration["nav"])
    here = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(found) == sorted(set(found))
    assert here <= set(found)


def test_all_links_on_the_site_lead_somewhere(site: Site) -> None:
    lost = [
        f"{address}: {link}"
        for address, document in site.documents.items()
        if address != "404.html"
        for link in document.links
        if not site.leads_somewhere(address, link)
    ]
    assert lost == []


def test_links_to_the_repository_are_to_what_is_there(site: Site) -> None:
    lost, begin = set(), "https://github.com/zeusd-project/zeusd/"
    for document in site.documents.values():
        for link in document.links:
            kind, _, rest = link.removeprefix(begin).partition("/main/")
            if link.startswith(begin) and kind in ("blob", "tree"):
                target = ROOT / urlsplit(rest).path
                if not (target.is_dir() if kind == "tree" else target.is_file()):
                    lost.add(link)
    assert lost == set()


def test_nothing_is_fetched_from_elsewhere(site: Site) -> None:
    fetched = {load for one in site.documents.values() for load in one.loads if _elsewhere(load)}
    for sheet in site.folder.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import\s+)[\"']?([^\"')]+)", sheet.read_text())
        fetched |= {load for load in found if _elsewhere(load)}
    for picture in site.folder.rglob("*.svg"):
        found = re.findall(r"(?:href|src)=[\"']([^\"']+)|url\(([^)]+)\)", picture.read_text())
        fetched |= {load for pair in found for load in pair if _elsewhere(load.strip("\"' "))}
    assert fetched == set()


def _elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc) and not address.startswith(SITE_URL)


def test_pictures_have_a_text_in_their_place(site: Site) -> None:
    found = [
        (address, source)
        for address, document in site.documents.items()
        for source, text in document.pictures
        if len(text) < 5
    ]
    assert found == []


def test_lists_and_tables_have_become_lists_and_tables(site: Site) -> None:
    """GitHub needs no empty line before them, Python-Markdown does."""
    found = [
        (address, text)
        for address, document in site.documents.items()
        for text in document.texts
        if re.search(r"^(- |\* |\d+\. |\|.*\|)", text, re.MULTILINE)
    ]
    assert found == []


def test_the_search_index_has_every_page(site: Site) -> None:
    index = json.loads((site.folder / "search/search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"] if entry["text"]}
    assert site.documents.keys() - {"404.html"} - found == set()
    assert any(entry["location"].endswith("#zeusctl-quiesce") for entry in index["docs"])


# --------------------------------------------------------------------------------------- on GitHub


def sources() -> list[Path]:
    """Pages that are read on GitHub, too."""
    more = ("CHANGELOG.md", "SECURITY.md", "docker/README.md", "packaging/README.md")
    return [*snippets.pages(), *(ROOT / name for name in more if (ROOT / name).exists())]


@pytest.mark.parametrize("page", sources(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_work_on_github(page: Path, site: Site) -> None:
    lost = [link for link in _links(page) if not _works_on_github(page, link, site)]
    assert lost == []


def _links(page: Path) -> list[str]:
    text = re.sub(r"(`+)[^`]+\1", "", snippets.without_fences(page))
    inline = re.findall(r"\]\(([^()\s]+(?:\([^()\s]*\))?)(?:\s+\"[^\"]*\")?\)", text)
    return [*inline, *re.findall(r"^\[[^\]]+\]:\s+(\S+)", text, re.MULTILINE)]


def _works_on_github(page: Path, link: str, site: Site) -> bool:
    if link.startswith(SITE_URL):
        return site.leads_somewhere("", link.removeprefix(SITE_URL))
    parts = urlsplit(link)
    if parts.scheme:
        return True
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.exists():
        return False
    return not parts.fragment or target.suffix != ".md" or parts.fragment in _slugs(target)


@functools.lru_cache
def _slugs(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    found: dict[str, int] = {}
    slugs = set()
    for heading in re.findall(r"^#+ +(.*?)\s*$", snippets.without_fences(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        slugs.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return slugs


# -------------------------------------------------------------------------------------- in Chromium


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # all files of a page are requested at once

    handler = functools.partial(Quiet, directory=str(site.folder))
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser.browser(tmp_path_factory.mktemp("chromium")) as one:
        yield one


WIDE = (
    "",
    "tutorial/",
    "operate/zeusctl/",
    "operate/zeusd/",
    "train/pipeline_frequency/",
    "explain/reliability/",
    "reference/errors/",
    "reference/protocol/",
    "reference/configuration/",
    "reference/api/pipeline_frequency/",
)
"""Pages with the widest tables, commands and pictures."""


SEARCH_INDEX = "*/search_index.json"
"""To index it takes longer than to show a page."""


def test_pages_fit_a_phone_and_come_from_here(page: Page, address: str) -> None:
    page.without(SEARCH_INDEX)
    page.see(390, 800)
    for path in WIDE:
        page.open(address + path)
        page.wait_for("document.querySelector('[data-md-color-scheme]') !== null")
        assert page.run("document.documentElement.scrollWidth") == 390, path
        elsewhere = page.run(
            "performance.getEntriesByType('resource').map((one) => one.name)"
            f".filter((name) => !name.startsWith({address!r}))"
        )
        assert elsewhere == []


def test_search_finds_an_option_and_an_error_code(page: Page, address: str) -> None:
    found = "document.querySelector('.md-search-result__item a[href*={}]') !== null"
    page.without()
    page.see(1400, 900)
    page.open(f"{address}?q=lease_expired")
    page.wait_for(found.format("reference"))
    page.run(
        "(() => { const field = document.querySelector('.md-search__input');"
        "field.value = 'confirm-within'; field.dispatchEvent(new Event('keyup')); })()"
    )
    page.wait_for(found.format("zeusctl"))


def test_links_and_text_are_legible_in_both_schemes(page: Page, address: str) -> None:
    """WCAG's 4.5 to 1."""
    contrast = """((selector) => {
        const light = ([r, g, b]) => {
            const part = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
            return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
        };
        // A canvas knows every way to write a colour.
        const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        const numbers = (below, colour) => {
            for (const fill of [below, colour]) { pen.fillStyle = fill; pen.fillRect(0, 0, 1, 1); }
            return pen.getImageData(0, 0, 1, 1).data;
        };
        const one = document.querySelector(selector);
        let under = one, behind;
        do {
            behind = getComputedStyle(under).backgroundColor;
            under = under.parentElement;
        } while (under && /^rgba\\(0, 0, 0, 0\\)$|transparent/.test(behind));
        const a = light(numbers(behind, behind));
        const b = light(numbers(behind, getComputedStyle(one).color));
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    })"""
    page.without(SEARCH_INDEX)
    for scheme in ("light", "dark"):
        page.see(1400, 900, scheme)
        page.open(f"{address}operate/zeusctl/")
        for selector in (
            *(".md-content h1", ".md-content p", ".md-content p a", ".md-content pre code"),
            *(".md-tabs__link", ".md-nav__link--active", ".md-header__topic"),
        ):
            found = page.run(f"{contrast}({selector!r})")
            assert found >= 4.5, f"{scheme}: {selector}: {found:.1f}"
