"""The page: complete in itself, whatever a run's files say; and in a browser, where there is one."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from lsg.files.foreign_text import in_script
from lsg.report import find_runs, render
from tests.report.chromium import EXECUTABLE, Chromium
from tests.report.run_folders import write_grid, write_run

ATTACK = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\"><!--{{data}}"


class Elements(HTMLParser):
    """What an HTML parser sees: the elements with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "grid.html").write_text(render(find_runs([write_grid(folder / "runs")]), "A grid of runs"))
    return folder / "grid.html"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose every text is an attack on the page."""
    folder = tmp_path_factory.mktemp("report")
    run = write_run(folder / "runs" / "<img src=x onerror=alert(1)>", complete=True)
    write_run(folder / "runs" / "plain")
    result = json.loads((run / "result.json").read_text())
    for key in ("task", "model", "method", "rank", "sparsity", "epsilon", "seed", "lr", ATTACK):
        result["config"][key] = ATTACK
    result["privacy"] = {"statement": ATTACK, "caveats": [ATTACK, {ATTACK: [ATTACK]}], ATTACK: {ATTACK: ATTACK}}
    result["provenance"], result["warnings"] = {ATTACK: [ATTACK]}, [ATTACK]
    result["scores"] = {ATTACK: 0.5}
    (run / "result.json").write_text(json.dumps(result))
    (folder / "hostile.html").write_text(render(find_runs([folder / "runs"]), ATTACK))
    return folder / "hostile.html"


def test_the_page_asks_for_nothing(grid: Path) -> None:
    page = grid.read_text()
    elements = Elements(page).seen
    addresses = [value for _, attributes in elements for key, value in attributes.items() if key in ("src", "href")]
    assert addresses and all(address.startswith("#") for address in addresses if address)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", page)
    policy = next(a["content"] for tag, a in elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none'") and "unsafe" not in policy


def test_tables_say_what_the_runs_did(grid: Path) -> None:
    page = grid.read_text()
    assert "39 runs, 1 incomplete" in page
    assert re.search(r"lsg r=8 p=0.5, ε=3.3</th><td[^>]*>3.30</td><td[^>]*>\d\d\.\d\d ± \d\.\d\d</td>", page)
    assert "where the training data are secret, so is this page" in page  # it holds losses and seeds
    assert "No privacy is claimed." in page and "loss (not private)" in page
    assert page.count("<details id=") == 39 and "No privacy statement yet" in page


def test_warnings_stand_at_the_top_of_their_run(tmp_path: Path) -> None:
    write_run(tmp_path / "bad", score=0.6)
    write_run(tmp_path / "good")
    page = render(find_runs([tmp_path]), "Two runs")
    assert "2 runs, 1 with warnings" in page
    assert re.search(r'<summary>bad · 1 warning</summary><p class="warning">Warning: noise drowns the signal</p>', page)
    assert "<summary>good</summary><p>The model is" in page


def test_hostile_texts_stay_texts(hostile: Path) -> None:
    elements = Elements(hostile.read_text()).seen
    assert [tag for tag, _ in elements if tag in ("img", "iframe", "object")] == []
    assert len([tag for tag, _ in elements if tag == "script"]) == 2
    assert not [key for _, attributes in elements for key in attributes if key.startswith("on")]


def test_json_cannot_end_its_script_element() -> None:
    value = {"a": "</script><!-- & \u2028 ε"}
    text = in_script(value)
    assert not set("<>&\u2028") & set(text) and json.loads(text) == value


def test_the_parts_cannot_end_their_elements() -> None:
    parts = files("lsg.report")
    assert "</" not in parts.joinpath("page.js").read_text()
    assert "</" not in parts.joinpath("page.css").read_text()


# --- in a browser -----------------------------------------------------------------------------------------------------

DRAWN = """[...document.querySelectorAll("figure > svg")].map((plot) => {
  const marks = [...plot.querySelectorAll("path.line, rect")].filter((mark) => {
    const box = mark.getBoundingClientRect();
    return box.width > 0 && Math.max(box.width, box.height) > 20;
  });
  return marks.length;
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    if EXECUTABLE is None:
        pytest.skip("no Chromium on this machine (apt install chromium): the page is not opened in a browser")
    with Chromium() as opened:
        yield opened


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_plots_are_drawn_without_complaint_or_request(browser: Chromium, grid: Path, width: int, dark: bool) -> None:
    browser.open(grid, width=width, dark=dark)
    drawn = browser.run(DRAWN)
    assert len(drawn) == 8 and all(drawn)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.getElementById('failed').hidden")
    assert browser.complaints == [] and browser.requests == [grid.resolve().as_uri()]


def test_pointing_at_a_plot_shows_values_and_names_hide_series(browser: Chromium, grid: Path) -> None:
    browser.open(grid)
    x, y = browser.run(
        """(() => { const plot = document.querySelectorAll("figure > svg")[3]; plot.scrollIntoView({block: "center"});
        const box = plot.getBoundingClientRect(); return [box.x + box.width / 2, box.y + 20] })()"""
    )
    browser.move_mouse(x, y)
    values = browser.run("""document.querySelectorAll(".values")[3].innerText""")
    assert "epoch" in values and "non-private" in values and "more" in values
    shown = """document.querySelectorAll("figure > svg")[3].querySelectorAll("path.line").length"""
    before = browser.run(shown)
    browser.run("""document.querySelectorAll(".legend")[3].querySelector("[aria-pressed]").click()""")
    assert browser.run(shown) == before - 1
    assert browser.complaints == []


def test_keys_move_through_a_plot_and_tables_stand_in_for_it(browser: Chromium, grid: Path) -> None:
    browser.open(grid)
    browser.run("""document.querySelector("figure > svg").focus()""")
    for _ in range(2):
        browser.send("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert browser.run("""document.querySelector(".values").innerText""").startswith("epoch 2")
    browser.run("""document.querySelector("figure details").open = true""")
    browser.run("new Promise((done) => setTimeout(done, 50))")
    assert browser.run("""document.querySelectorAll("figure details tbody tr").length""") == 6


def test_tables_sort_by_number_and_links_open_details(browser: Chromium, grid: Path) -> None:
    browser.open(grid)
    spent = """[...document.querySelectorAll("#runs tbody tr")].map((row) => row.cells[6].textContent)"""
    assert browser.run("""document.querySelectorAll("#runs thead th")[6].textContent""") == "ε spent"
    click = """document.querySelectorAll("#runs thead button")[6].click()"""
    browser.run(click)
    rising = browser.run(spent)
    assert rising[0] == "0.80" and rising[-1] == "∞"
    browser.run(click)
    assert browser.run(spent)[0] == "∞"
    browser.run("""document.querySelector("#runs tbody a").click()""")
    browser.run("new Promise((done) => setTimeout(done, 50))")
    assert browser.run("""document.querySelectorAll("#details details[open]").length""") == 1


def test_hostile_texts_run_nothing(browser: Chromium, hostile: Path) -> None:
    browser.open(hostile)
    assert browser.run("document.title") == ATTACK
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert all(browser.run(DRAWN))
    assert browser.complaints == [] and browser.requests == [hostile.resolve().as_uri()]


def test_the_policy_stops_a_script_that_got_in(browser: Chromium, grid: Path, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text(grid.read_text().replace("</main>", "<script>document.title = 'owned'</script></main>"))
    browser.open(page)
    assert browser.run("document.title") == "A grid of runs"
    assert "Content Security Policy" in "".join(browser.complaints)
