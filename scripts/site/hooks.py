"""What `mkdocs build` is taught about this repository (see mkdocs.yml).

The reference is made from the code. Links in pages are written as they work on GitHub; those that
lead out of docs/ go to the repository, and those to the site's own address, for pages that are only
there, stay within it. Headings have the anchors that they have on GitHub.
"""

from __future__ import annotations

import gc
import posixpath
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify
from reference import pages

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
BRANCH = "main"

SENTENCE = 40
"""Characters of a table's cell that should not be broken after each word."""


class Links(Treeprocessor):
    """Rewrites the links of one page.

    Args:
        md: The Markdown parser.
        site_url: Of the site, ending with a slash.
        repo_url: Of the repository.
    """

    def __init__(self, md: Markdown, site_url: str, repo_url: str) -> None:
        super().__init__(md)
        self._site_url = site_url
        self._repo_url = repo_url.rstrip("/")
        self.page = ""

    def run(self, root: Element) -> None:
        """All links and pictures below an element."""
        for element in root.iter():
            for attribute in ("href", "src"):
                link = element.get(attribute)
                if link:
                    element.set(attribute, self.rewritten(link))

    def rewritten(self, link: str) -> str:
        """A link as the site needs it."""
        if link.startswith(self._site_url):
            return self._on_site(link.removeprefix(self._site_url))
        parts = urlsplit(link)
        if parts.scheme or parts.netloc or not parts.path or parts.path.startswith("/"):
            return link
        place = posixpath.normpath(posixpath.join("docs", posixpath.dirname(self.page), parts.path))
        target = ROOT / place
        if place.startswith("docs/") and not target.is_dir():
            return link
        if not target.exists():
            return link  # which mkdocs complains about
        kind = "tree" if target.is_dir() else "blob"
        fragment = f"#{parts.fragment}" if parts.fragment else ""
        return f"{self._repo_url}/{kind}/{BRANCH}/{place}{fragment}"

    def _on_site(self, rest: str) -> str:
        path, mark, fragment = rest.partition("#")
        path = path.rstrip("/")
        page = "index.md" if not path else f"{path}.md"
        if page.removesuffix(".md") == "reference":
            page = "reference/index.md"
        return posixpath.relpath(page, posixpath.dirname(self.page) or ".") + mark + fragment


class Tables(Treeprocessor):
    """Marks the columns that hold sentences, so that they are not squeezed to a word's width."""

    def run(self, root: Element) -> None:
        """All tables below an element."""
        for table in root.iter("table"):
            rows = [[*row] for row in table.iter("tr")]
            for number, head in enumerate(rows[0] if rows else []):
                cells = [row[number] for row in rows[1:] if number < len(row)]
                if any(len("".join(cell.itertext())) > SENTENCE for cell in cells):
                    head.set("class", "sentences")


class _Extension(Extension):
    """The link rewriter for every page and docstring.

    Args:
        site_url: Of the site, ending with a slash.
        repo_url: Of the repository.

    Attributes:
        page: Path of the current page within the documentation.
    """

    def __init__(self, site_url: str, repo_url: str) -> None:
        super().__init__()
        self._urls = site_url, repo_url
        self.links: Links | None = None
        self.page = ""

    def extendMarkdown(self, md: Markdown) -> None:
        links = Links(md, *self._urls)
        links.page = self.page
        # After links are found, before mkdocs makes relative ones the site's.
        md.treeprocessors.register(links, "repository_links", 5)
        md.treeprocessors.register(Tables(md), "tables", 4)


_extension: _Extension | None = None


def on_startup(command: str, **_: Any) -> None:
    """Collects no garbage in a build: that takes an eighth of it, and finds next to nothing."""
    if command == "build":
        gc.disable()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Has Markdown rewrite links."""
    global _extension
    _extension = _Extension(config.site_url or "", config.repo_url or "")
    config.markdown_extensions.append(_extension)
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")  # anchors as on GitHub
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the reference."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Sets the current page."""
    assert _extension is not None
    _extension.page = page.file.src_uri
    if page.is_homepage:  # added here, because GitHub would show it in the page
        page.meta["hide"] = ["navigation", "toc"]
    return markdown
