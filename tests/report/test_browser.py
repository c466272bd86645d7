"""The pages in a real browser: nothing from elsewhere, nothing too wide, dark is dark, sorting."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.browser import Page, browser
from tests.test_report import EVIL, build_results

LONG = "a_class_with_a_very_long_name_that_never_ends_" * 3


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Index and report of a lake with hostile and very long names."""
    lake = tmp_path_factory.mktemp("reports")
    build_results(lake, (*"abcdefgh", LONG, EVIL))
    return lake / "reports"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.mark.parametrize("name", ["index", "toy"])
def test_loads_nothing_and_complains_about_nothing(page: Page, reports: Path, name: str) -> None:
    path = reports / f"{name}.html"
    page.open(path)
    asked = {event["request"]["url"] for event in page.named("Network.requestWillBeSent")}
    assert {url for url in asked if not url.startswith("data:image/")} == {path.as_uri()}
    assert page.named("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled") == []
    # That the page would tell of a script which is not its own:
    page.run(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
        " document.body.append(s); })()"
    )
    assert page.run("window.ran") is None
    assert any(
        "Content Security Policy" in e["entry"]["text"] for e in page.named("Log.entryAdded")
    )


@pytest.mark.parametrize("name", ["index", "toy"])
@pytest.mark.parametrize("pixels", [400, 1280])
def test_nothing_is_wider_than_the_page(page: Page, reports: Path, name: str, pixels: int) -> None:
    page.width(pixels)
    page.open(reports / f"{name}.html")
    page.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.run("window.innerWidth") == pixels
    root = "document.documentElement"
    assert page.run(f"{root}.scrollWidth") == page.run(f"{root}.clientWidth") > pixels - 20


def test_dark_is_dark(page: Page, reports: Path) -> None:
    page.open(reports / "toy.html")
    script = (
        "(() => { const s = getComputedStyle(document.body),"
        " t = document.querySelector('svg text');"
        " return [s.backgroundColor, s.color, getComputedStyle(t).fill].map("
        "(c) => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)); })()"
    )
    seen = {}
    for scheme in ("light", "dark"):
        page.colours(scheme)
        seen[scheme] = page.run(script)
    (paper, ink, drawn), (dark_paper, light_ink, light_drawn) = seen["light"], seen["dark"]
    assert paper > 600 and ink < 200 and drawn < 200
    assert dark_paper < 150 and light_ink > 600 and light_drawn > 600


def test_every_picture_has_words(page: Page, reports: Path) -> None:
    page.open(reports / "toy.html")
    silent = "[...document.querySelectorAll('main svg, main img')].filter("
    silent += "(e) => !(e.getAttribute('aria-label') || e.alt)).length"
    assert page.run("document.querySelectorAll('main svg').length") > 0
    assert page.run(silent) == 0


def test_contents_lead_to_sections(page: Page, reports: Path) -> None:
    page.open(reports / "toy.html")
    links = page.run("[...document.querySelectorAll('nav a')].map((a) => a.hash.slice(1))")
    there = page.run("[...document.querySelectorAll('main > section')].map((s) => s.id)")
    assert links == there and len(links) >= 5


def test_a_click_sorts_and_another_turns_round(page: Page, reports: Path) -> None:
    page.open(reports / "toy.html")
    page.run(
        "window.column = (n) => [...document.querySelectorAll('.test tbody tr')].map("
        "(r) => r.cells[n].textContent)"
    )
    page.run(
        "(() => { const t = document.querySelector('table.sortable'); t.classList.add('test');"
        " t.tBodies[0].innerHTML = [['b', '1,200'], ['a', '9 kB'], ['c', '–'], ['d', '0.5 ± 0.1'],"
        " ['E', '-3'], ['f', '2 MB']].map(([x, y]) => `<tr><td>${x}</td><td>${y}</td></tr>`)"
        ".join(''); })()"
    )
    click = "document.querySelectorAll('.test thead tr:last-child button')[{}].click()"
    page.run(click.format(0))
    assert page.run("column(0)") == list("abcdEf")
    page.run(click.format(1))
    assert page.run("column(1)") == ["-3", "0.5 ± 0.1", "1,200", "9 kB", "2 MB", "–"]
    page.run(click.format(1))
    assert page.run("column(1)") == ["2 MB", "9 kB", "1,200", "0.5 ± 0.1", "-3", "–"]
    state = "[...document.querySelectorAll('.test [aria-sort]')].map((h) => h.ariaSort)"
    assert page.run(state) == ["descending"]
