"""The built site, read as a browser reads it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE_URL = "https://zeusd-project.github.io/zeusd/"
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}


@dataclass
class Document:
    """The content of a built page.

    Attributes:
        ids: Everything a link can lead to.
        links: Where its links go.
        loads: What a browser fetches to show it.
        pictures: Of each its address and what is said in its place.
        texts: The text of each paragraph, without code.
        sections: The text below each heading, up to the next of its level or above, by id.
    """

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    sections: dict[str, str] = field(default_factory=dict)


class Reader(HTMLParser):
    """Reads a built page."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Document()
        self._inside: list[str] = []
        self._open: list[tuple[int, str]] = []
        self._paragraph: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag not in VOID:
            self._inside.append(tag)
        if "id" in values:
            self.found.ids.add(values["id"])
        if tag == "a" and "href" in values:
            self.found.links.append(values["href"])
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.found.loads += [values[name] for name in ("src", "srcset") if name in values]
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.found.loads.append(values["href"])
        if tag == "img":
            self.found.pictures.append((values["src"], values.get("alt", "")))
        if tag == "p":
            self._paragraph = []
        if re.fullmatch(r"h[1-6]", tag) and "id" in values:
            level = int(tag[1])
            self._open = [one for one in self._open if one[0] < level]
            self._open.append((level, values["id"]))
            self.found.sections[values["id"]] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            while self._inside.pop() != tag:
                pass
        if tag == "p" and self._paragraph is not None:
            self.found.texts.append("".join(self._paragraph))
            self._paragraph = None

    def handle_data(self, data: str) -> None:
        if {"script", "style"} & set(self._inside):
            return
        if self._paragraph is not None and "code" not in self._inside:
            self._paragraph.append(data)
        for _, name in self._open:
            self.found.sections[name] += data


class Site:
    """The built site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def documents(self) -> dict[str, Document]:
        """By address within the site, such as `operate/zeusd/`."""
        paths = (path.relative_to(self.folder) for path in sorted(self.folder.rglob("*.html")))
        addresses = [path.as_posix().removesuffix("index.html") for path in paths]
        return {address: self.document(address) for address in addresses}

    @functools.cache  # noqa: B019 - a test run has one site
    def document(self, address: str) -> Document:
        """One page: to parse all of them takes seconds."""
        path = self.folder / address
        reader = Reader()
        reader.feed((path / "index.html" if path.is_dir() else path).read_text(encoding="utf-8"))
        return reader.found

    def section(self, address: str, name: str) -> str:
        """The text of a section."""
        return self.document(address).sections[name]

    def text(self, address: str) -> str:
        """All text below a page's title."""
        return max(self.document(address).sections.values(), key=len)

    def leads_somewhere(self, address: str, link: str) -> bool:
        """Whether a link on a page has a target, if that is on the self."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return not link.startswith(SITE_URL)
        target = (self.folder / address / unquote(parts.path)).resolve()
        file = target / "index.html" if target.is_dir() else target
        if not file.exists():
            return False
        name = file.relative_to(self.folder).as_posix().removesuffix("index.html")
        anchor = unquote(parts.fragment)
        return anchor in ("", *self.document(name).ids) if file.suffix == ".html" else True

    def rows(self, address: str, section: str = "") -> set[str]:
        """The first cell of each row of a section's tables, without the heads."""
        html = (self.folder / address / "index.html").read_text()
        if section:
            begin = html.index(f'id="{section}"')
            end = re.search(r"<h[1-6] ", html[begin:])
            html = html[begin : begin + end.start() if end else None]
        return set(re.findall(r"<tr>\s*<td[^>]*>\s*<code>([^<]+)</code>", html))
