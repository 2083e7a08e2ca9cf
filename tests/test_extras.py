"""With the base packages alone the library trains; whatever needs an extra says so in one line."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lsg
from lsg.extras import MissingExtraError, needs_extra
from lsg.train.tensorboard import TensorBoard

ROOT = Path(__file__).parents[1]
OPTIONAL = {
    "train": ("typer", "rich", "matplotlib", "sklearn", "PIL", "tensorboardX", "yaml"),
    "transformers": ("transformers", "datasets", "accelerate", "peft", "pyarrow"),
    "secure": ("cryptography",),
}
EVERY = tuple(name for names in OPTIONAL.values() for name in names)
BLOCKER = """
import importlib.machinery, sys
class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        missing = name.partition(".")[0] in {names}
        return None if missing else importlib.machinery.PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
"""
TRAINING = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lsg
model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2))
lsg.explain(model, lsg.LSG(rank=2))
engine = lsg.PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(TensorDataset(torch.randn(20, 40), torch.randint(2, (20,))), batch_size=5),
    noise_multiplier=1.0, max_grad_norm=1.0, method=lsg.LSG(rank=2),
)
for x, y in loader:
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
lsg.save_checkpoint(FILE, engine=engine)
print(0 < engine.get_epsilon(delta=1e-5) < 100)
try:
    lsg.PrivacyEngine(secure_mode=True)
except lsg.ConfigurationError as error:
    print(error)
"""
COMMANDS = """
from lsg.__main__ import main
for arguments in COMMANDS:
    sys.argv = ["lsg", *arguments]
    try:
        main()
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""


def without(names: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "150"}
    command = [sys.executable, "-c", BLOCKER.format(names=names) + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def commands_without(names: tuple[str, ...], *commands: tuple[str, ...]) -> str:
    """What the commands, one after the other in one process, write to stderr, each with its exit code."""
    return without(names, COMMANDS.replace("COMMANDS", repr(commands))).stderr


def install(extra: str) -> str:
    return f"needs the extra '{extra}': pip install 'lsg-dp[{extra}]'\n"


def test_the_library_trains_without_any_extra(tmp_path: Path) -> None:
    answer = without(EVERY, TRAINING.replace("FILE", repr(str(tmp_path / "checkpoint"))))
    assert answer.returncode == 0, answer.stderr
    said = "secure_mode=True needs the package 'cryptography': pip install 'lsg-dp[secure]'\n"
    assert answer.stdout == "True\n" + said


@pytest.mark.parametrize("names", [EVERY, ("rich",)], ids=["everything", "rich"])
def test_the_command_says_which_extra_it_needs(names: tuple[str, ...]) -> None:
    assert commands_without(names, ("--version",)) == f"lsg: the command line {install('train')}2\n"


def test_one_line_for_each_missing_package(tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("task: digits\n")
    plan = ("--records", "2000", "--noise-multiplier", "2", "--epochs", "1", "--batch-size", "100")
    output = ("--output", str(tmp_path / "run"))
    needs_transformers = "the package transformers: pip install 'lsg-dp[transformers]'\n"
    expected = {
        ("budget", *plan, "--accountant", "rdp", "--plot", str(tmp_path / "plan.png")): "a figure " + install("train"),
        ("train", *output, "--task", "digits", "--epsilon", "3"): "the task digits " + install("train"),
        ("train", *output, "--config", str(config)): f"--config {config}: YAML " + install("train"),
        ("explain", "--model", "roberta-base"): "tasks of texts need " + needs_transformers,
        ("bench", "--preset", "cpu-encoder"): "preset 'cpu-encoder' needs " + needs_transformers,
    }
    imported_with_the_command = ("typer", "rich", "PIL")
    missing = tuple(name for name in EVERY if name not in imported_with_the_command)
    told = commands_without(missing, *expected)
    assert told.splitlines() == [line for message in expected.values() for line in (f"Error: {message.strip()}", "2")]


def test_one_line_for_readers_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboardX"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingExtraError, match=f"^a TensorBoard log {re.escape(install('train').strip())}$"):
        TensorBoard(tmp_path, [])
    answer = without(("PIL",), "import lsg.tasks.readers.image_folder")
    assert answer.stderr.endswith(f"MissingExtraError: reading images {install('train')}")


def test_python_dash_m_lsg_is_the_command() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    shown = subprocess.check_output([sys.executable, "-m", "lsg", "--version"], env=environment, text=True)
    assert shown == f"lsg {lsg.__version__}\n"


def test_a_missing_file_of_our_own_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match="lsg"), needs_extra("train", "a figure"):
        importlib.import_module("lsg.gone")


def test_every_package_of_an_extra_is_known_here() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    imported = {"scikit-learn": "sklearn", "pillow": "PIL", "pyyaml": "yaml"}
    for extra, names in OPTIONAL.items():
        packages = [re.split(r"[<>=]", text)[0] for text in declared[extra]]
        assert {imported.get(package, package) for package in packages} | {"pyarrow"} == {*names, "pyarrow"}
