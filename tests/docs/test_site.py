"""The site builds with warnings as errors, from these files alone, and everything that it links to is there."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer.main

import fedblur
from fedblur.cli.app import app
from fedblur.core.config import Config, LocalTraining
from fedblur.core.registry import KINDS, parts
from tests.docs.blocks import PAGES, ROOT, read_blocks
from website import api as api_page
from website import settings
from website.layout import BrokenLink, Target, resolve
from website.markdown import targets, translate

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ASSETS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """What a page links to, what it loads, its anchors, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := found.get(key))}
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag in ASSETS and found.get(ASSETS[tag]):
            self.assets.append(str(found[ASSETS[tag]]))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Every page of the site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # Not --quiet: it hides warnings from --strict as well.
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "WARNING" not in result.stdout + result.stderr
    return {path: Page(path) for path in sorted(folder.rglob("*.html"))}


@pytest.mark.slow
@pytest.mark.xdist_group("site")
class TestSite:
    def test_site__every_link_and_anchor_leads_somewhere(self, site: dict[Path, Page]) -> None:
        broken = []
        for path, page in site.items():
            for link in [*page.links, *page.assets]:
                parts = urlsplit(link)
                if parts.scheme or parts.netloc or path.name == "404.html":  # whose links start at the server's root
                    continue
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                missing_anchor = (
                    target in site and parts.fragment and unquote(parts.fragment) not in site[target].anchors
                )
                if not target.exists() or missing_anchor:
                    broken.append(f"{path.name}: {link}")
        assert not broken

    def test_site__loads_nothing_from_elsewhere(self, site: dict[Path, Page]) -> None:
        assert not [asset for page in site.values() for asset in page.assets if urlsplit(asset).netloc]

    def test_site__api_reference_has_every_public_name(self, site: dict[Path, Page]) -> None:
        anchors = page(site, "reference/api.html").anchors
        assert {f"{fedblur._HOMES[name]}.{name}" for name in fedblur.__all__} <= anchors

    def test_site__command_reference_has_every_command_and_option(self, site: dict[Path, Page]) -> None:
        text = page(site, "reference/cli.html").text
        commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
        while commands:
            name, command = commands.popitem()
            commands |= {f"{name} {inner}": value for inner, value in getattr(command, "commands", {}).items()}
            assert f"fedblur {name}" in text
            for option in command.params:
                assert option.opts[-1].startswith("--") is False or option.opts[0] in text, option.opts

    def test_site__settings_reference_has_every_key_and_part(self, site: dict[Path, Page]) -> None:
        text = page(site, "reference/settings.html").text
        for key in [*Config.__dataclass_fields__, *LocalTraining.__dataclass_fields__]:
            assert key in text
        for kind in KINDS:
            assert all(name in text for name in parts(kind))  # type: ignore[arg-type]
        assert "λ; inf: projection" in text

    def test_site__search_works_from_a_folder(self, site: dict[Path, Page]) -> None:
        """A page at file:// may fetch nothing and start no worker: index and shim are scripts, of the site itself."""
        folder = next(path.parent for path in site if path.name == "404.html")
        script = (folder / "search/search_index.js").read_text()
        assert script.startswith("var __index = ")
        index = json.loads(script.removeprefix("var __index = "))
        assert index == json.loads((folder / "search/search_index.json").read_text())
        assert {"index.html", "reference/settings.html"} <= {entry["location"] for entry in index["docs"]}
        assert (folder / "iframe-worker.js").exists()
        for path, found in site.items():
            shims = [asset for asset in found.assets if asset.endswith("iframe-worker.js")]
            assert len(shims) == 1, path
            bundle = next(asset for asset in found.assets if "/bundle." in asset)
            assert found.assets.index(shims[0]) < found.assets.index(bundle), path  # which starts the worker

    @pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
    def test_site__a_word_typed_from_a_folder_is_found(self, site: dict[Path, Page]) -> None:
        api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install -e '.[dev]')")
        home = next(path for path in site if path.name == "404.html").with_name("index.html")
        with api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            opened = browser.new_page()
            asked: list[str] = []
            opened.on("request", lambda request: asked.append(request.url))
            opened.goto(home.as_uri())
            opened.click("[data-md-component=search-query]")
            opened.keyboard.type("clipping")
            opened.wait_for_selector(".md-search-result__link")
            assert "matching documents" in opened.locator(".md-search-result__meta").inner_text()
            assert all(url.startswith(("file:", "data:")) for url in asked)
            browser.close()

    def test_site__shows_the_papers_results_and_the_benchmark(self, site: dict[Path, Page]) -> None:
        assert "Does it hold?" in page(site, "results/cheng2022.html").text
        assert "signal.svg" in " ".join(page(site, "results/cheng2022.html").assets)
        assert "plain PyTorch loop" in page(site, "comparison.html").text


def test_settings__every_key_has_a_default_and_a_meaning() -> None:
    rows = [line.strip("|").split("|") for line in settings.reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert not [row for row in rows if len(row) != 3 or not all(cell.strip() for cell in row)]
    assert "noqa" not in settings.reference()


def test_api__every_public_name_has_a_description() -> None:
    rows = [line for line in api_page.reference().splitlines() if line.startswith("| [`")]
    assert [row.split("`")[1] for row in rows] == fedblur.__all__
    for name, row in zip(fedblur.__all__, rows, strict=True):
        words = row.split(" | ")[1].removesuffix(" |")
        assert len(words) > 10, name
        assert not words.startswith(f"{name}("), name  # what a dataclass without a docstring gets
        rows = [line.strip("|").split("|") for line in api_page.fields(name).splitlines() if line.startswith("| `")]
        assert all(cell.strip() for row in rows for cell in row), name
        members = vars(found).items() if isinstance(found := getattr(fedblur, name), type) else ()
        public = [(key, value) for key, value in members if key[0] != "_" and hasattr(value, "__doc__")]
        assert not [
            key for key, value in public if (callable(value) or isinstance(value, property)) and not value.__doc__
        ]


def test_home__has_an_install_line_ten_lines_of_python_and_a_picture() -> None:
    text = (ROOT / "docs/index.md").read_text()
    assert "`pip install .`" in text
    assert len([block for block in read_blocks("docs/index.md") if block.language == "python"]) == 1
    code = next(block.text for block in read_blocks("docs/index.md") if block.language == "python")
    assert len(code.splitlines()) <= 10
    assert max(map(len, code.splitlines())) <= 72  # so that nothing is cut off beside the margins
    picture = re.search(r"!\[([^]]{20,})\]\((\S+\.svg)\)", text)
    assert picture is not None
    assert (ROOT / "docs" / picture[2]).exists()


def page(site: dict[Path, Page], name: str) -> Page:
    return next(found for path, found in site.items() if path.as_posix().endswith(f"/{name}"))


@pytest.mark.parametrize("name", PAGES)
def test_page__lines_of_code_that_links_quote_are_there(name: str) -> None:
    """A link like [`def clip_l2(`](clipping.py) quotes exactly one line of the file, or it raises BrokenLink."""
    list(targets((ROOT / name).read_text(encoding="utf-8"), name))


def tour_links() -> list[Target]:
    return list(targets((ROOT / "docs/tour.md").read_text(), "docs/tour.md"))


def test_tour__every_statement_of_the_round_is_linked() -> None:
    """Line by line, and no line is left out: each statement of `run_round` has a link into it."""
    lines = {target.line for target in tour_links() if target.path == "src/fedblur/training/round.py"}
    tree = ast.parse((ROOT / "src/fedblur/training/round.py").read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run_round")
    for statement in function.body[1:]:
        spanned = range(statement.lineno, (statement.end_lineno or 0) + 1)
        assert lines & {*spanned}, f"docs/tour.md does not mention round.py:{statement.lineno}"


def test_tour__links_are_in_the_order_of_the_code() -> None:
    text = (ROOT / "docs/tour.md").read_text()
    steps = [line for line in text.splitlines() if line[:1].isdigit()]
    lines = [next(targets(step, "docs/tour.md")).line for step in steps]
    assert len(lines) > 15
    assert lines == sorted(lines)  # type: ignore[type-var]


def test_tour__a_quoted_line_that_is_gone_is_an_error() -> None:
    with pytest.raises(BrokenLink, match="has 0 lines with"):
        resolve("../src/fedblur/training/round.py", "docs/tour.md", "`no such line`")
    with pytest.raises(BrokenLink, match=r"has \d+ lines with"):
        resolve("../src/fedblur/training/round.py", "docs/tour.md", "`protocol`")
    with pytest.raises(BrokenLink, match="has 0 lines with"):
        resolve("../src/fedblur/privacy/ledger.py", "docs/tour.md", "`Ledger.no_such_method`")


def test_tour__a_symbol_leads_to_its_definition() -> None:
    path = "src/fedblur/privacy/ledger.py"
    lines = (ROOT / path).read_text().splitlines()
    for symbol, begins in (("Ledger", "class Ledger"), ("Ledger.spend", "def spend("), ("read_budget", "def read_bud")):
        target = resolve(f"../{path}", "docs/tour.md", f"`{symbol}`")
        assert target is not None
        assert target.line is not None
        assert lines[target.line - 1].strip().startswith(begins)


@pytest.mark.parametrize(
    ("link", "becomes"),
    [
        ("[a](../benchmarks/README.md#memory)", "[a](results/benchmarks.md#memory)"),
        ("![d](../examples/quickstart.toml)", "![d](files/examples/quickstart.toml)"),
        ("[code](../src/fedblur/training/round.py)", "[code](source/training/round.md)"),
        ("[folder](../tests)", "`tests`"),
        ("[c](methods.md) [b](https://example.org)", "[c](methods.md) [b](https://example.org)"),
        ("[two\nlines](../CHANGELOG.md)", "[two\nlines](changelog.md)"),
        ("```\n[c](../CHANGELOG.md)\n- x\n```", "```\n[c](../CHANGELOG.md)\n- x\n```"),
    ],
)
def test_translate__links_of_the_repository_become_those_of_the_site(link: str, becomes: str) -> None:
    assert translate(link, "docs/tour.md", "tour.md") == becomes


def test_translate__lists_and_tables_get_their_blank_line() -> None:
    assert (
        translate("words\n- one\n- two\n| a |\n|---|", "docs/x.md", "x.md") == "words\n\n- one\n- two\n\n| a |\n|---|"
    )
