"""Hooks of mkdocs, which keep one source for the repository's view and the site.

    repository ──on_files──► pages and figures outside docs/, under their own paths
    mkdocs.yml ──on_config──► nav: folders written out
    a page     ──on_page_markdown──► links as the repository has them ─► links of the site

A page links to any file of the repository by a relative path. On the site, what lies in docs/ is at the
top, and everything else keeps its path. A file that is no page is copied, so that the site needs no network.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OVERVIEW = "overview.md"
"""Place on the site of the README of the repository, because that of docs/ is the site's first page."""
OUTSIDE = ("*.md", "benchmarks/**/*.md", "benchmarks/**/*.svg", "examples/**/*.md")
"""What the site has besides docs/."""
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)#:\s]+)(#[^)\s]*)?\)")
CODE = re.compile(r"(^ *```.*?^ *```|^    .*?$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write the folders of the nav out."""
    if config.nav is not None:
        named: set[str] = set()
        _collect(config.nav, named)
        config.nav = _written_out(config.nav, named)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and figures outside docs/, and the files that any page links to."""
    wanted = {path for pattern in OUTSIDE for path in ROOT.glob(pattern)}
    pages = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    for page in [*pages, *(path for path in wanted if path.suffix == ".md")]:
        for _, target, _ in LINK.findall(page.read_text(encoding="utf-8")):
            found = (page.parent / target).resolve()
            if found.is_file() and not found.is_relative_to(ROOT / "docs"):
                wanted.add(found)
    for path in sorted(wanted):
        uri = _site_path(path.relative_to(ROOT))
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    files.append(File.generated(config, "ten_keys.md", content=_ten_keys()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site; a link to a folder becomes its words."""
    here = page.file.src_uri
    if here == "ten_keys.md":
        return markdown
    source = _source_of(here)

    def mend(match: re.Match[str]) -> str:
        words, target, anchor = match.groups()
        found = Path(os.path.normpath(source.parent / target))
        if not (ROOT / found).exists():
            raise PluginError(f"{source}: the link to {target} leads nowhere")
        if (ROOT / found).is_dir():
            index = found / "README.md"
            if not (ROOT / index).is_file():
                return words[1:-1]
            found = index
        to = os.path.relpath(_site_path(found), os.path.dirname(here) or ".")
        return f"{words}({to}{anchor or ''})"

    pieces = CODE.split(markdown)
    return "".join(piece if index % 2 else LINK.sub(mend, piece) for index, piece in enumerate(pieces))


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Say how many pages the site has."""
    print(f"documentation: {len(nav.pages)} pages")
    return nav


def _ten_keys() -> str:
    """Return the first section of the configuration page, as a page of its own."""
    sections = (ROOT / "docs/configuration.md").read_text(encoding="utf-8").split("\n## ")
    return f"# {sections[1]}\nThe [configuration page](configuration.md) has all other keys.\n"


def _source_of(uri: str) -> Path:
    """Return the path in the repository of a page of the site."""
    if uri == OVERVIEW:
        return Path("README.md")
    if (ROOT / "docs" / uri).is_file():
        return Path("docs") / uri
    return Path(uri)


def _site_path(path: Path) -> str:
    """Return the path on the site of a file of the repository."""
    if path == Path("README.md"):
        return OVERVIEW
    if path.parts[0] == "docs":
        return Path(*path.parts[1:]).as_posix()
    return path.as_posix()


def _collect(entry: Any, named: set[str]) -> None:
    if isinstance(entry, str):
        named.add(entry)
        return
    for part in entry.values() if isinstance(entry, dict) else entry:
        _collect(part, named)


def _written_out(entries: list[Any], named: set[str]) -> list[Any]:
    result: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, value),) = entry.items()
            result.append({title: value if isinstance(value, str) else _written_out(value, named)})
        elif entry.endswith("/*"):
            folder = ROOT / _source_of_folder(entry[:-2])
            pages = sorted(path.relative_to(ROOT).as_posix() for path in folder.rglob("*.md"))
            result += [uri for uri in map(_site_path, map(Path, pages)) if uri not in named]
        else:
            result.append(entry)
    return result


def _source_of_folder(name: str) -> str:
    if (ROOT / "docs" / name).is_dir():
        return f"docs/{name}"
    return name
