"""The house: every file stands in a row of docs/design.md's table of rooms, and imports go one way."""

import ast
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lsg
from lsg import LSG, PrivacyEngine

ROOT = Path(__file__).parents[1]
DESIGN = (ROOT / "docs" / "design.md").read_text()


def rows() -> list[list[str]]:
    """The table of rooms, low to high: the names in each row."""
    table = re.search(r"^\| room \|.*\n\|[-|]+\n((?:\|.*\n)+)", DESIGN, re.MULTILINE)
    assert table
    return [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in table[1].splitlines()]


class House:
    """The modules of a source tree (the folder that holds `lsg`), their levels and what they import."""

    def __init__(self, source: Path) -> None:
        self.files = {_dotted(file.relative_to(source)): file for file in sorted((source / "lsg").rglob("*.py"))}
        self._levels = {}
        for level, names in enumerate(rows()):
            for name in names:
                room = source / "lsg" / name
                assert room.exists(), f"docs/design.md names {name}"
                for file in room.rglob("*.py") if room.is_dir() else [room]:
                    self._levels[_dotted(file.relative_to(source))] = level
        self.imports = {name: set(self._imported(name)) - {name} for name in self.files}

    def _imported(self, name: str) -> Iterator[str]:
        """Modules of lsg, wherever in the file they are imported, as Python finds them."""
        package = name if self.files[name].name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(self.files[name].read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "lsg")
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                if base.split(".")[0] == "lsg":
                    inside = [f"{base}.{alias.name}" for alias in node.names]
                    yield from (found if found in self.files else base for found in inside)

    def faults(self) -> list[str]:
        """Files in no row, imports of what is not there, upward imports, cycles."""
        found = [f"{name} stands in no row of docs/design.md" for name in self.files if name not in self._levels]
        for name, imported in self.imports.items():
            for other in sorted(imported):
                if other not in self.files:
                    found.append(f"{name} imports {other}, which does not exist")
                elif self._levels.get(other, 0) > self._levels.get(name, 0):
                    found.append(f"{name} imports {other} from a higher room")
        return found + self._cycles()

    def _cycles(self) -> list[str]:
        found, done = [], set[str]()

        def visit(name: str, path: tuple[str, ...]) -> None:
            if name in path:
                found.append("a cycle: " + " > ".join([*path[path.index(name) :], name]))
            elif name not in done:
                for other in sorted(self.imports.get(name, ())):
                    visit(other, (*path, name))
                done.add(name)

        for name in self.files:
            visit(name, ())
        return found


def _dotted(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_go_one_way() -> None:
    assert House(ROOT / "src").faults() == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        (
            "layers/linear.py",
            "from lsg.step import noise",
            "lsg.layers.linear imports lsg.step.noise from a higher room",
        ),
        (
            "layers/linear.py",
            "from lsg import engine",
            "lsg.layers.linear imports lsg.engine from a higher room",
        ),
        ("files/atomic.py", "import lsg.model.recorder", "imports lsg.model.recorder from a higher room"),
        ("files/atomic.py", "from ..model import recorder", "imports lsg.model.recorder from a higher room"),
        ("methods.py", "def late():\n    from lsg.cli import app", "lsg.methods imports lsg.cli from a higher room"),
        ("subspace/space.py", "from lsg.subspace.decompose import x", "a cycle"),
        ("stray.py", "", "lsg.stray stands in no row"),
        ("attic/box.py", "", "lsg.attic.box stands in no row"),
        ("errors.py", "from lsg.gone import x", "lsg.errors imports lsg.gone, which does not exist"),
    ],
)
def test_the_guard_sees_planted_faults(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    place = tmp_path / "src" / "lsg" / file
    place.parent.mkdir(exist_ok=True)
    before = place.read_text() if place.exists() else ""
    place.write_text(f"{before}\n{line}\n")
    if complaint == "a cycle":
        other = place.with_name("decompose.py")
        other.write_text(other.read_text() + "\nfrom lsg.subspace.space import y\n")
    assert any(complaint in fault for fault in House(tmp_path / "src").faults())


def test_the_top_holds_public_words_alone() -> None:
    assert len(list((ROOT / "src" / "lsg").glob("*.py"))) <= 12


def test_everything_else_imports_without_reproduce(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "reproduce"))
    code = (
        "import importlib, pkgutil, lsg\n"
        "for module in pkgutil.walk_packages(lsg.__path__, 'lsg.'):\n"
        "    importlib.import_module(module.name)\n"
        "from typer.testing import CliRunner\n"
        "from lsg.cli import app\n"
        "shown = CliRunner().invoke(app, ['--help'])\n"
        "assert shown.exit_code == 0 and 'train' in shown.output and 'reproduce' not in shown.output, shown.output\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(tmp_path / "src"), "PATH": ""})


def test_tests_stand_in_the_same_rooms() -> None:
    rooms = {name.rstrip("/") for names in rows() for name in names if name.endswith("/")}
    beside = {"adversarial", "properties", "support"}  # of the whole, not of one room
    found = {folder.name for folder in (ROOT / "tests").iterdir() if (folder / "__init__.py").exists()}
    assert found <= rooms | beside


def test_files_and_functions_are_short() -> None:
    for name, file in House(ROOT / "src").files.items():
        text = file.read_text()
        assert text.count("\n") <= 350, f"{name} has {text.count(chr(10))} lines"
        if name.startswith("lsg.cli"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                assert lines <= 60, f"{name}.{node.name} has {lines} lines"


def test_the_walk_through_a_step_has_at_most_fifteen_files() -> None:
    section = DESIGN[DESIGN.index("## One step, file by file") :].partition("\n## ")[2]
    walk = DESIGN[DESIGN.index("## One step, file by file") : -len(section) or None]
    stations = re.findall(r"^\| \d+ \| `([^`]+)` \| `(\w+)` \|", walk, re.MULTILINE)
    files = [file for file, _ in stations]
    assert 10 <= len(files) == len(set(files)) <= 15
    assert all((ROOT / "src" / "lsg" / file).exists() for file in files)
    calls = list(dict.fromkeys(calls_of_a_step()))
    assert [call for call in calls if call in stations] == stations
    assert len({file for file, _ in calls}) - len(files) in range(33, 46)  # "some forty more files run"


def calls_of_a_step() -> list[tuple[str, str]]:
    """File and function of each call inside lsg, in order, of a step from the loader to the new weights."""
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    data = TensorDataset(torch.randn(60, 64), torch.randint(0, 32, (60,)))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=LSG(rank=4),
        noise_generator=torch.Generator().manual_seed(0),
    )
    batches, calls = iter(loader), list[tuple[str, str]]()
    inside = f"{Path(lsg.__file__).parent}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(inside):
            calls.append((file.removeprefix(inside), frame.f_code.co_name))

    for step in range(2):  # the first has the check
        if step == 1:
            sys.setprofile(note)
            threading.setprofile(note)  # a backward on a GPU runs in a thread of its own
        try:
            x, y = next(batches)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        optimizer.zero_grad()
    return calls
