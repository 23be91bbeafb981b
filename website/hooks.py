"""mkdocs' hooks: more pages, links, and the references. mkdocs loads this file; the work is in the files beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # mkdocs starts as a command of its own, from anywhere

from mkdocs.config.defaults import MkDocsConfig  # noqa: E402
from mkdocs.exceptions import PluginError  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402
from mkdocs.structure.pages import Page  # noqa: E402

from website import api, commands, settings, source  # noqa: E402
from website.layout import BESIDE, BrokenLink, Target, home  # noqa: E402
from website.markdown import targets, translate  # noqa: E402

GENERATED: dict[str, Callable[[], str]] = {
    "<!-- made from the command line -->": commands.reference,
    "<!-- made from __all__ -->": api.reference,
    "<!-- made from the settings -->": settings.reference,
    "<!-- made from benchmarks/results/cpu.md -->": lambda: _tables(ROOT / "benchmarks/results/cpu.md"),
}


def on_config(config: MkDocsConfig) -> None:
    """Patterns in the navigation stand for the pages that there are: decisions/*.md."""
    config.nav = _expanded(config.nav, Path(config.docs_dir))


def _expanded(nav: Any, docs: Path) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(inner, docs) for title, inner in nav.items()}
    if not isinstance(nav, list):
        return sorted(path.relative_to(docs).as_posix() for path in docs.glob(nav)) if "*" in nav else nav
    expanded: list[Any] = []
    for entry in nav:
        found = _expanded(entry, docs)
        expanded.extend(found if isinstance(found, list) else [found])
    return expanded


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages beside docs/, and whatever pages link to: source code and plain files."""
    for uri, path in BESIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    for page in list(files.documentation_pages()):
        try:
            for target in targets(page.content_string, home(page.src_uri)):
                if target.uri is not None and files.get_file_from_path(target.uri) is None:
                    files.append(_file(target, config))
        except BrokenLink as error:
            raise PluginError(f"{home(page.src_uri)}: {error}") from None


def _tables(path: Path) -> str:
    """What a file of results says, without its own heading and picture."""
    return "\n".join(line for line in path.read_text().splitlines() if not line.startswith(("#", "![")))


def _file(target: Target, config: MkDocsConfig) -> File:
    assert target.uri is not None
    path = ROOT / target.path
    if target.is_code:
        return File.generated(config, target.uri, content=source.page(path, target.path.removeprefix("src/")))
    return File.generated(config, target.uri, abs_src_path=str(path))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated, and turn the repository's links into the site's."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    for mark, made in GENERATED.items():
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return translate(markdown, home(uri), uri)
