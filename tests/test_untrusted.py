"""Loading anything untrusted never executes code: by what the source may call, and by files that try."""

import ast
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lsg
from lsg.errors import ConfigurationError, LsgError
from lsg.tasks.catalog import load_task
from lsg.tasks.models import (
    ImageShape,
    load_image_model,
    load_text_model,
    load_tokenizer,
    load_trained_image_model,
    save_image_model,
)
from lsg.train.config_file import read_settings
from lsg.train.folder import RunFolder
from tests.support.small_run import Training
from tests.support.tiny import tiny_bert

SOURCE = Path(__file__).parents[1] / "src" / "lsg"
FILES = sorted(SOURCE.rglob("*.py"))
# Modules that run what they read, or can.
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "jsonpickle",
    "imp",
    "runpy",
}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "torch.hub.load",
    "torch.jit.load",
}
FORBIDDEN_YAML = {"load", "load_all", "full_load", "unsafe_load"}


def called(node: ast.Call) -> str:
    """What is called, as it is written: a.b.c for names, "" for anything else."""
    parts: list[str] = []
    target: ast.expr = node.func
    while isinstance(target, ast.Attribute):
        parts.append(target.attr)
        target = target.value
    return ".".join(reversed([*parts, target.id])) if isinstance(target, ast.Name) else ""


def violations(source: str) -> Iterator[str]:
    """What in a source file could run code that it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module or ""]
        else:
            imported = []
        yield from (name for name in imported if name.split(".")[0] in FORBIDDEN_MODULES)
        if not isinstance(node, ast.Call):
            continue
        name = called(node)
        keywords = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        if name in FORBIDDEN_CALLS or keywords.get("shell") or keywords.get("allow_pickle"):
            yield name
        if name.startswith("yaml.") and name.removeprefix("yaml.") in FORBIDDEN_YAML:
            yield name
        if name.rpartition(".")[2] == "from_pretrained":
            if keywords.get("trust_remote_code") is not False:
                yield f"{name} without trust_remote_code=False"
            if "Model" in name and keywords.get("use_safetensors") is not True:
                yield f"{name} without use_safetensors=True"


def test_the_source_calls_nothing_that_runs_what_it_reads() -> None:
    assert len(FILES) > 80
    found = {str(file.relative_to(SOURCE)): list(violations(file.read_text())) for file in FILES}
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "eval(text)",
        "yaml.load(text, yaml.Loader)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "AutoConfig.from_pretrained(name)",
        "AutoModel.from_pretrained(name, trust_remote_code=False)",
    ],
)
def test_the_search_finds_each_of_them(line: str) -> None:
    assert list(violations(line))


def test_the_search_lets_harmless_lines_pass() -> None:
    assert not list(violations("model.eval()\nyaml.safe_load(text)\njson.load(file)\nre.compile('x')"))


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Writes a pickle that goes off when read; the test fails if any did."""
    mark = tmp_path / "went-off"

    def write(path: Path, *, as_torch: bool = False) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        if as_torch:
            torch.save({"weight": Bomb(mark)}, path)
        else:
            path.write_bytes(pickle.dumps(Bomb(mark)))
        return path

    yield write
    assert not mark.exists(), "a pickle was executed"
    with pytest.raises(FileExistsError):  # it would have gone off
        mark.mkdir()
        pickle.loads(pickle.dumps(Bomb(mark)))


@pytest.mark.parametrize("as_torch", [False, True])
def test_checkpoints_and_ledgers(bomb: Any, tmp_path: Path, as_torch: bool) -> None:
    file = bomb(tmp_path / "run.ckpt", as_torch=as_torch)
    with pytest.raises(ConfigurationError, match=r"run\.ckpt"):
        lsg.load_checkpoint(file, engine=Training().engine)
    with pytest.raises(LsgError, match=r"run\.ckpt"):
        Training(engine={"ledger": file}).finish()


@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".yml", ".pkl"])
def test_settings(bomb: Any, tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ConfigurationError, match="run"):
        read_settings(bomb(tmp_path / f"run{suffix}"))


def test_yaml_tags_that_build_objects_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"task: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n")
    with pytest.raises(ConfigurationError, match=r"run\.yaml"):
        read_settings(file)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl", ".parquet", ".pkl"])
def test_texts(bomb: Any, tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ConfigurationError, match="texts"):
        load_task("text", str(bomb(tmp_path / f"texts{suffix}")))


@pytest.mark.parametrize(
    ("task", "files"),
    [
        ("cifar10", ["data_batch_1", "test_batch"]),
        ("cifar10", [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]),
        ("fashion-mnist", [f"{p}-{k}-ubyte" for p in ("train", "t10k") for k in ("images-idx3", "labels-idx1")]),
        ("images", ["train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.png"]),
        ("sst2", ["train.tsv", "dev.tsv"]),
    ],
)
def test_data_sets(task: str, files: list[str], bomb: Any, tmp_path: Path) -> None:
    for name in files:
        bomb(tmp_path / "data" / name)
    with pytest.raises(ConfigurationError):
        load_task(task, str(tmp_path / "data"))


def test_models_whose_weights_are_pickles(bomb: Any, tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path / "bert")
    (folder / "model.safetensors").unlink()
    bomb(folder / "pytorch_model.bin", as_torch=True)
    with pytest.raises(ConfigurationError, match="cannot load its weights"):
        load_text_model(str(folder), ("no", "yes"))
    bomb(folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match="cannot load its weights"):
        load_text_model(str(folder), ("no", "yes"))


def test_models_that_bring_code(bomb: Any, tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path / "bert")
    code = f"import os\nos.mkdir({str(tmp_path / 'went-off')!r})\n"
    for name in ("configuration_own", "modeling_own", "tokenization_own"):
        (folder / f"{name}.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "configuration_own.Own", "AutoModel": "modeling_own.Own"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigurationError):
        load_text_model(str(folder), ("no", "yes"))
    with pytest.raises(ConfigurationError):
        load_tokenizer(str(folder))


def test_trained_image_models_and_run_folders(bomb: Any, tmp_path: Path) -> None:
    shape = ImageShape(classes=2, channels=1, height=8, width=8)
    save_image_model(tmp_path / "model", load_image_model("small-cnn", shape), "small-cnn", shape, {})
    bomb(tmp_path / "model" / "model.safetensors")
    with pytest.raises(Exception, match=r"(?i)header|safetensor"):
        load_trained_image_model(tmp_path / "model")
    bomb(tmp_path / "run" / "result.json")
    with pytest.raises((ValueError, LsgError)):
        RunFolder(tmp_path / "run").result()
    shutil.rmtree(tmp_path / "run")
