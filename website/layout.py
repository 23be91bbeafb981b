"""Where everything of the site comes from: pages below docs/, pages beside it, pages of source code, plain files.

In: a link as it stands in a file of the repository. Out: the same link as it must stand in the site's page. Pages are
written to be read in the repository as well, so their links are those of the repository.
"""

from __future__ import annotations

import ast
import posixpath
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
CODE = "src/fedblur/"
# Pages that live elsewhere in the repository, by their place in the site.
BESIDE = {
    "results/cheng2022.md": "papers/cheng2022/README.md",
    "results/beyond.md": "papers/beyond/README.md",
    "results/benchmarks.md": "benchmarks/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
_PLACES = {path: uri for uri, path in BESIDE.items()}


class BrokenLink(Exception):
    """A link to a line of code that is not there, or is there twice."""


@dataclass(frozen=True)
class Target:
    """What a link means: a page or file of the site, or (without a place) something that the site does not hold."""

    path: str  # in the repository
    uri: str | None  # in the site
    line: int | None = None  # of a page of source code

    @property
    def is_code(self) -> bool:
        return self.uri is not None and self.uri.startswith("source/")


def home(uri: str) -> str:
    """The file of the repository that a page of the site shows."""
    return BESIDE.get(uri, f"docs/{uri}")


def resolve(link: str, page: str, text: str) -> Target | None:
    """What a link on a page of the repository means; None: not ours (a URL, an anchor, nothing that exists)."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), parts.path))
    if path.startswith("..") or not (ROOT / path).exists():
        return None
    if path.startswith(CODE) and path.endswith(".py"):
        return Target(path, f"source/{path[len(CODE) :].removesuffix('.py')}.md", _line(path, text))
    return Target(path, _uri(path))


def _uri(path: str) -> str | None:
    whole = f"{path}/README.md" if (ROOT / path).is_dir() else path
    if whole in _PLACES:
        return _PLACES[whole]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return None if (ROOT / path).is_dir() else f"files/{path}"


def _line(path: str, text: str) -> int | None:
    """Return the line that a link's text quotes in backquotes: a symbol (`Ledger.spend`) or a piece of the line."""
    quoted = text.strip()
    if not (quoted.startswith("`") and quoted.endswith("`")) or quoted.strip("`").endswith(".py"):
        return None
    quoted, source = quoted.strip("`"), (ROOT / path).read_text()
    if found := symbols(source).get(quoted):
        return found
    lines = [n for n, line in enumerate(source.splitlines(), 1) if quoted in line]
    if len(lines) != 1:
        raise BrokenLink(f"{path} has {len(lines)} lines with `{quoted}`; a link's text must quote exactly one")
    return lines[0]


def symbols(source: str) -> dict[str, int]:
    """Return the line of each function, class and method (`Class.method`) of a file."""
    tree = ast.parse(source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = {node.name: node.lineno for node in tree.body if isinstance(node, kinds)}
    for part in tree.body:
        if isinstance(part, ast.ClassDef):
            found |= {f"{part.name}.{node.name}": node.lineno for node in part.body if isinstance(node, kinds)}
    return found
