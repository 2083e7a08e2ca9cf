"""Every program of `examples/` runs, at a tiny size."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples"
SIZES: dict[str, dict[str, int]] = {
    "text_classifier": {"count": 64, "epochs": 1},
    "llama_lora": {"count": 40, "epochs": 1},
    "image_views": {"records": 300, "epochs": 1},
    "user_level": {"epochs": 1},
    "lightning_classifier": {"records": 240, "epochs": 2},
    "accelerate_loop": {"records": 80, "epochs": 1},
    "custom_layer": {"epochs": 1},
}
NEEDS = {
    "llama_lora": ("peft", "trl"),
    "lightning_classifier": ("lightning",),
    "accelerate_loop": ("accelerate",),
}


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*(litlogger|num_workers|isinstance|log_every_n).*")
def test_it_runs(name: str) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert 0 < example(name).main(**SIZES[name]) <= 8.0


def test_two_processes_end_with_the_same_weights() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(FOLDER / "two_processes.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    said = re.findall(r"rank \d: (\w+, epsilon \d+\.\d\d)", done.stdout)  # one process may write into another's line
    assert len(said) == 2 and len(set(said)) == 1


def test_the_notebook_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((FOLDER / "step_by_step.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] for cell in cells), "outputs are not committed: they would grow stale"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        for cell in cells:
            exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
    assert "test digits at ε = 2.9" in capsys.readouterr().out


def test_every_example_is_listed_and_run() -> None:
    files = {file.name for file in FOLDER.iterdir()} - {"README.md", "__pycache__"}
    assert files == {f"{name}.py" for name in (*SIZES, "two_processes")} | {"step_by_step.ipynb"}
    page = (FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in page for name in files)
