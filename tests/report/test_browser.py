"""Reports in a real browser: no errors, every chart drawn, both themes, accessible, a phone's width, and live.

Debian's chromium, driven by Playwright without a browser of its own; where either is missing the tests skip by name.
FEDBLUR_SCREENSHOTS=DIR keeps the pictures.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commandline import invoke

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ROOT = Path(__file__).resolve().parents[2]
SERIOUS = ("serious", "critical")
WIDTHS = {"wide": 1280, "phone": 375}
COLOUR = "getComputedStyle(document.body).backgroundColor"
COLOUR_OF = {"light": "rgb(246, 247, 249)", "dark": "rgb(17, 19, 22)"}

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install -e '.[dev]')")
    with api.sync_playwright() as playwright:
        # A container's root has no sandbox to put pages in; these pages are our own files.
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report of the quickstart table, and of one of its kind of runs."""
    folder = tmp_path_factory.mktemp("browser")
    invoke("table", ROOT / "examples/quickstart.toml", "--set", "rounds=6", "--out", folder / "table", "--quiet")
    invoke("run", "--rounds", 8, "--clients", 80, "--sample-rate", 0.3, "--quiet", "--out", folder / "run")
    for name in ("table", "run"):
        invoke("report", folder / name)
    return {name: folder / name / "report.html" for name in ("table", "run")}


class Opened:
    """A page with all that it complained about or asked for."""

    def __init__(self, browser: Any, url: str, theme: str, width: int) -> None:
        # Axe is put into the page, which the page's own policy would not allow.
        context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 900}, bypass_csp=True)
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)


@pytest.fixture
def opened(browser: Any, reports: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Opened]:
    name, theme, width = request.param
    made = Opened(browser, reports[name].as_uri(), theme, WIDTHS[width])
    if folder := os.environ.get("FEDBLUR_SCREENSHOTS"):
        made.page.screenshot(path=str(Path(folder) / f"{name}-{theme}-{width}.png"), full_page=True)
    yield made
    made.page.context.close()


BOTH = [(name, theme, "wide") for name in ("table", "run") for theme in ("light", "dark")]
ALL = [*BOTH, *((name, "light", "phone") for name in ("table", "run"))]


@pytest.mark.parametrize("opened", ALL, indirect=True, ids="-".join)
def test_browser__no_errors_and_nothing_loaded_but_the_file(opened: Opened) -> None:
    assert opened.complaints == []
    assert [url for url in opened.asked if not url.startswith("data:")] == opened.asked[:1]


@pytest.mark.parametrize("opened", ALL, indirect=True, ids="-".join)
def test_browser__every_chart_is_drawn_and_seen(opened: Opened) -> None:
    charts = opened.page.evaluate(
        """() => [...document.querySelectorAll("figure")].map((figure) => {
            const svg = figure.querySelector("svg.chart");
            const marks = [...svg.querySelectorAll(".line, .bar, .dot")].filter((mark) => {
                const box = mark.getBoundingClientRect(), style = getComputedStyle(mark);
                const seen = style.stroke !== "none" || style.fill !== "none";
                return (box.width > 0 || box.height > 0) && seen;
            });
            const box = svg.getBoundingClientRect();
            return [figure.id, marks.length, box.width, box.height, svg.querySelectorAll("text").length];
        })"""
    )
    assert len(charts) in (7, 18)
    for key, marks, width, height, words in charts:
        assert marks >= 1, key
        assert width > 200, key
        assert height > 120, key
        assert words >= 5, key


@pytest.mark.parametrize("opened", BOTH, indirect=True, ids="-".join)
def test_browser__axe_finds_nothing_serious(opened: Opened) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    opened.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    found = axe.Axe().run(opened.page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in SERIOUS] == []


@pytest.mark.parametrize("opened", ALL, indirect=True, ids="-".join)
def test_browser__no_sideways_scrolling_also_with_everything_open(opened: Opened) -> None:
    opened.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    wide, seen = opened.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= seen


@pytest.mark.parametrize("opened", [("table", "light", "phone")], indirect=True, ids="-".join)
def test_browser__the_comparison_scrolls_on_a_phone_and_keeps_its_first_column(opened: Opened) -> None:
    wide, seen, before, after, over = opened.page.evaluate(
        """() => {
            const box = document.querySelector("[data-part=comparison] .scroll"), name = box.querySelector("tbody th");
            const left = () => name.getBoundingClientRect().left, before = left();
            box.scrollLeft = 1e4;
            const right = (element) => element.getBoundingClientRect().right;
            const over = right(box.querySelector("tbody td:last-child")) - right(box);
            return [box.scrollWidth, box.clientWidth, before, left(), over];
        }"""
    )
    assert wide > seen  # there is something to scroll
    assert after == before
    assert over <= 1  # the last column can be reached


@pytest.mark.parametrize("opened", BOTH, indirect=True, ids="-".join)
def test_browser__the_button_switches_the_theme_and_stores_it(opened: Opened) -> None:
    before = opened.page.evaluate(COLOUR)
    opened.page.click("#theme")
    after = opened.page.evaluate(COLOUR)
    assert {before, after} == set(COLOUR_OF.values())
    assert COLOUR_OF[opened.page.evaluate("localStorage.getItem('fedblur-theme')")] == after


@pytest.mark.parametrize("theme", COLOUR_OF)
def test_browser__a_stored_theme_comes_before_the_system_s(browser: Any, reports: dict[str, Path], theme: str) -> None:
    # Stored in this very page before its script runs: what a browser keeps from load to load lies in another process,
    # and on a busy machine a page loaded again now and then came before it.
    context = browser.new_context(color_scheme="dark" if theme == "light" else "light")
    page = context.new_page()
    page.add_init_script(f"localStorage.setItem('fedblur-theme', '{theme}')")
    page.goto(reports["run"].as_uri())
    assert page.evaluate(COLOUR) == COLOUR_OF[theme]
    assert page.locator("#theme").inner_text() == {"light": "Dark", "dark": "Light"}[theme]
    context.close()


@pytest.mark.parametrize("opened", [("run", "light", "wide")], indirect=True, ids="-".join)
def test_browser__numbers_are_reached_by_keyboard_and_values_by_pointer(opened: Opened) -> None:
    page = opened.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#by-round-data summary")
    page.keyboard.press("Enter")
    assert page.locator("#by-round-data table").is_visible()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.locator("#by-round .hit").last.hover()
    assert re.fullmatch(r"round 8: DP-FedAvg [\d.]+ %", page.locator("#tip").inner_text())


def test_browser__without_scripts_all_is_there(browser: Any, reports: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(reports["run"].as_uri())
    assert page.locator("svg.chart").count() == 7
    assert page.locator("#theme").is_hidden()
    context.close()


def test_browser__the_page_s_own_policy_lets_nothing_in(browser: Any, reports: dict[str, Path]) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(reports["run"].as_uri())
    assert page.locator("#theme").is_visible()  # its own script ran
    page.evaluate(
        """async () => {
            window.refused = [];
            addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
            document.body.insertAdjacentHTML("beforeend", '<p style="color:red"></p><img src="http://127.0.0.1:9/x">');
            document.body.append(Object.assign(document.createElement("script"), { text: "window.hit = 1" }));
            await fetch("http://127.0.0.1:9/").catch(() => null);
        }"""
    )
    page.wait_for_function("new Set(refused).size >= 4")
    assert set(page.evaluate("refused")) == {"script-src-elem", "style-src-attr", "img-src", "connect-src"}
    context.close()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "fedblur", "watch", str(tmp_path / "run"), "--port", "0"]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs are born deaf
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        assert process.stdout is not None
        found = re.search(r"http://[\d.:]+/\?token=[\w-]+", process.stdout.readline())
        assert found is not None
        yield found[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 0


RUN_IN_STEPS = """
import sys, time
from pathlib import Path
import fedblur

def wait(row):
    while row["round"] in (10, 20) and not Path(sys.argv[1], f"after-{row['round']}").exists():
        time.sleep(0.02)

config = fedblur.Config(clients=80, rounds=30, sample_rate=0.2, eval_every=2)
fedblur.train(config, out=Path(sys.argv[1], "run"), watch=wait)
"""


def test_browser__watch_follows_a_run_without_loading_the_page_again(
    browser: Any, watched: str, tmp_path: Path
) -> None:
    opened = Opened(browser, watched, "light", 1280)
    page, status = opened.page, opened.page.locator(".status")
    assert "waiting for" in status.inner_text()
    page.evaluate("window.sameDocument = true")
    command = [sys.executable, "-c", RUN_IN_STEPS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        page.wait_for_selector("#by-round .line", timeout=300_000)
        page.click("#by-round-data summary")
        first, line = status.inner_text(), page.locator("#by-round .line").get_attribute("d")
        assert re.fullmatch(r"round \d+ of 30", first)
        (tmp_path / "after-10").touch()
        page.wait_for_function("(old) => document.querySelector('#by-round .line').getAttribute('d') !== old", arg=line)
        assert run.poll() is None  # it waits
        assert status.inner_text() != first
        assert page.locator("#by-round-data table").is_visible()  # what was open stays open
        (tmp_path / "after-20").touch()
        page.wait_for_function("document.querySelector('.status').textContent === 'Complete'", timeout=300_000)
        assert run.wait(timeout=300) == 0
    assert page.evaluate("window.sameDocument") is True
    assert page.locator("#g0-clients").count() == 1
    assert "ledger verified" in page.locator(".lead").inner_text()
    assert opened.complaints == []
    page.context.close()
