"""The documentation runs: every Python example, every table of options, every file and test that is named."""

import ast
import csv
import dataclasses
import importlib.util
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import lsg
from lsg import PerfConfig, PrivacyEngine, losses
from lsg.cli import app
from lsg.methods import Method
from lsg.step.optimizer import PrivateOptimizer
from lsg.step.signals import StepSignals
from lsg.train.epoch_signals import EpochSignals
from lsg.train.loop import Epoch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README, PRIVACY = (ROOT / "README.md").read_text(), (ROOT / "docs" / "privacy.md").read_text()
API = (ROOT / "docs" / "api.md").read_text()
CONTINUED = "# continued"  # first line of a block that goes on from the block before it


def examples() -> dict[str, tuple[Path, list[tuple[int, str]]]]:
    """Name of an example ("page:line") -> its page and the blocks, with their lines, that run in one namespace."""
    found: dict[str, tuple[Path, list[tuple[int, str]]]] = {}
    for page in PAGES:
        text = page.read_text()
        assert text.count("```") % 2 == 0, f"{page.name} has an open block"
        key = ""
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line, code = text.count("\n", 0, match.start(1)), match[1]
            if code.startswith(CONTINUED):
                assert key, f"{page.name}:{line} continues nothing"
            else:
                key = f"{page.name}:{line + 1}"
                found[key] = (page, [])
            found[key][1].append((line, code))
    return found


EXAMPLES = examples()


@pytest.mark.parametrize("key", EXAMPLES)
def test_example_runs(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, blocks = EXAMPLES[key]
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for line, code in blocks:
            # Blank lines before it, so that a traceback shows the page's own line.
            exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_every_page_has_an_example() -> None:
    assert {page for page, _ in EXAMPLES.values()} == set(PAGES)


def first_column(text: str, heading: str) -> set[str]:
    """The names in backticks in the first column of the table whose first heading this is."""
    rows = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert rows, f"no table headed {heading!r}"
    return {name for row in rows[1].splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_the_tables_of_arguments_are_the_signatures() -> None:
    functions = (PrivacyEngine.make_private, PrivacyEngine.make_private_with_epsilon)
    names = {name for function in functions for name in inspect.signature(function).parameters} - {"self"}
    assert first_column(API, "argument") == names
    assert first_column(API, "engine argument") == inspect.signature(PrivacyEngine).parameters.keys()


def test_the_tables_of_options_are_the_fields() -> None:
    assert first_column(API, "option") == {field.name for field in dataclasses.fields(Method)}
    for call in first_column(API, "method"):  # each is shown with its defaults
        assert eval(call, vars(lsg)) == eval(call.partition("(")[0] + "()", vars(lsg))
    assert first_column(API, "setting") == {field.name for field in dataclasses.fields(PerfConfig)}


def test_what_is_said_of_losses_is_their_signature() -> None:
    section = API.partition("\n## Losses\n")[2].partition("\n## ")[0]
    for loss in (losses.per_sequence, losses.per_token):
        for name in inspect.signature(loss).parameters:
            shown = re.search(rf"`{name}(=[^`]+)?`", section) or re.search(rf"\b{name}\b[^`]*\)`", section)
            assert shown, f"{loss.__name__}: {name}"
        assert inspect.signature(loss).parameters["shift"].default is False
    assert inspect.signature(losses.per_token).parameters["length"].default is inspect.Parameter.empty


def test_every_public_name_is_shown() -> None:
    block = next(code for key in EXAMPLES for _, code in EXAMPLES[key][1] if "# sparsity schedules" in code)
    names = set(re.findall(r"[A-Za-z]\w+", re.sub(r"#.*", "", block))) - {"from", "import", "lsg"}
    assert names == set(lsg.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name} links to {target}#{anchor}, which does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_exist(page: Path) -> None:
    later = re.search(r"^- Not built: (.*(?:\n  .*)*)", page.read_text(), re.MULTILINE)  # says so of its files
    text = page.read_text() if later is None else page.read_text().replace(later[0], "")
    for name in re.findall(r"`((?:[\w.]+/)*\w+\.py|(?:\w+/)+)(?:::\w+)?`", text):
        assert (ROOT / name).exists() or (ROOT / "src" / "lsg" / name).exists(), f"{page.name} names {name}"
    for name in re.findall(r"`([\w/]+(?:\.py)?)`", later[1] if later else ""):
        assert not (ROOT / "src" / "lsg" / name).exists(), f"{page.name} says that {name} is not built"


def test_tests_named_exist() -> None:
    found = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        functions = [n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)]
        found[file.relative_to(ROOT).as_posix()] = set(functions)
    named = 0
    for page in PAGES:
        for file_name, test in re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", page.read_text()):
            assert test in found[file_name or "tests/test_privacy_rules.py"], f"{page.name} names {file_name}::{test}"
            named += 1
    assert named > 20


def test_every_rule_names_its_tests() -> None:
    rows = re.findall(r"^\| (\d+)\. .*\|([^|]*)\|([^|]*)\|$", PRIVACY, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 13))
    assert all(".py`" in where and "test_" in tests for _, where, tests in rows)


def test_what_is_not_private_is_said_to_be_so() -> None:
    """Rule 10, where numbers of single samples can be had."""
    for place in (PrivacyEngine.per_sample_gradients, PrivateOptimizer.signals, StepSignals, EpochSignals, Epoch):
        assert "not private" in (place.__doc__ or "").lower()
    for word in ("loss", "per-sample gradients", "norms", "clip fractions", "hyperparameters"):
        assert re.search(rf"\*\*Not private:\*\*[^*]*\b{word}\b", README), word


def module_at(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)  # as for a script
        spec.loader.exec_module(module)
    return module


def test_generated_parts_are_what_the_code_and_the_files_say(capsys: pytest.CaptureFixture[str]) -> None:
    """Mended by `python docs/render.py`."""
    render = module_at(ROOT / "docs" / "render.py")
    assert {"../README.md", "audit.md", "performance.md", "reproduce.md", "train.md"} <= set(render.PARTS)
    assert render.main(["--check"]) == 0, capsys.readouterr().out


def test_a_generated_part_that_is_out_of_date_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    render = module_at(ROOT / "docs" / "render.py")
    monkeypatch.setitem(render.PARTS, "audit.md", {"bar": lambda: "another table"})
    assert render.main(["--check"]) == 1
    assert capsys.readouterr().out == "docs/audit.md is out of date: run python docs/render.py\n"


def command_lines() -> list[tuple[str, list[str]]]:
    """("page:line", words) of every `lsg ...` in a block of bash."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            first = text.count("\n", 0, match.start(1)) + 1
            for number, line in enumerate(match[1].splitlines(), start=first):
                words = shlex.split(line, comments=True)
                if words[:1] == ["lsg"]:
                    found.append((f"{page.name}:{number}", words[1:]))
    return found


COMMAND_LINES = command_lines()
COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]


@pytest.mark.parametrize(("place", "words"), COMMAND_LINES, ids=[place for place, _ in COMMAND_LINES])
def test_commands_parse(place: str, words: list[str]) -> None:
    """Options exist, their values are of the right type and none that is needed is missing."""
    COMMANDS[words[0]].make_context(words[0], words[1:])


def test_every_command_is_shown() -> None:
    assert {words[0] for _, words in COMMAND_LINES} | {"demo"} == COMMANDS.keys()  # demo: in a comment beside make


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_named_in_text_exist(page: Path) -> None:
    for text in re.findall(r"`lsg ([a-z][^`\n]*)`", page.read_text()):
        command, *words = text.split()
        known = {option for parameter in COMMANDS[command].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= {*known, "--help"}, f"{page.name}: lsg {text}"


def test_the_front_page_is_what_the_results_say(tmp_path: Path) -> None:
    """Mended by `python docs/render.py`."""
    front, render = module_at(ROOT / "docs" / "front_figure.py"), module_at(ROOT / "docs" / "render.py")
    for page in ("../README.md", "performance.md"):
        assert render.rendered(page) == (ROOT / "docs" / page).read_text()
    assert front.PICTURE.read_bytes().startswith(b"\x89PNG")
    front.draw(tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 10_000


def test_the_front_page_is_short_and_tells_no_history() -> None:
    assert len(README.splitlines()) <= 140
    for words in ("older code", "used to", "no longer", "formerly", "earlier version"):
        assert words not in README.lower(), words


def test_figures_in_the_front_pages_prose_are_in_the_results() -> None:
    front = module_at(ROOT / "docs" / "front_figure.py")
    for machine in ("CPU cores", "H200"):
        timed = [front.timings(stem) for stem, workload in front.ROWS if machine in workload]
        pairs = [(front.speed(found["lsg"]), front.best(found, "opacus")) for found in timed]
        over_opacus = [own / other for own, other in pairs if other is not None]
        assert f"{min(over_opacus):.1f} to {max(over_opacus):.1f} times" in README
    found = {stem: front.timings(stem) for stem in ("encoder-bf16-cuda", "wrn28-4-bf16-cuda")}
    compiled = [front.speed(one["lsg compiled graphs"]) / front.best(one, "non-private") for one in found.values()]
    told = re.search(r"lsg is (\S+) times .*?, and (\S+) on WRN28-4", README, re.DOTALL)
    assert told is not None and list(told.groups()) == [f"{ratio:.2f}" for ratio in compiled]
    folder, shown = ROOT / "results" / "reproduce" / "gpu-hour", []
    for name in ("figure-epsilon.csv", "table2.csv"):
        for row in csv.DictReader((folder / name).read_text().splitlines()):
            if row["method"] in ("lsg", "dpsgd"):
                shown.append(f"{float(row['accuracy_mean']):.1f} %")
    assert len(shown) == 6
    assert sorted(re.findall(r"\d\d\.\d %", README)) == sorted(shown)
