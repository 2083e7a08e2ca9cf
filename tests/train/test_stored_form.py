"""A checkpoint whose checksum fits, and whose content somebody changed, is refused before training, in one line."""

import copy
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lsg.checkpoint import load_checkpoint
from lsg.errors import ConfigurationError
from lsg.train import training
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.run import run
from lsg.train.stored_form import check_form
from tests.support.threads import one_thread  # noqa: F401 - a fixture for all tests here

CONFIG = RunConfig(
    "digits",
    "small-cnn",
    noise_multiplier=1.0,
    delta=1e-4,
    device="cpu",
    accountant="rdp",
    epochs=2,
    batch_size=700,
    averaging=0.5,
)


class Stops(Listener):
    def step(self, done: int) -> None:
        if done == 3:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forged") / "run"
    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, folder, listener=Stops(), checkpoint_every=1)
    return folder


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("average", "steps"), [1]),
        (("average", "averages", 0), torch.zeros(3)),
        (("scheduler", "_step_count"), "3"),
        (("scheduler", "last_epoch"), 10**400),
        (("rows", 0, "epsilon"), "x"),
        (("rows", 0, "lr"), "x"),
        (("rows", 0, "loss"), {}),
        (("rows", 0, "scores"), {"another part": 0.5}),
        (("progress", "steps"), -1),
        (("progress", "seconds"), None),
        (("progress", "signals"), {"steps": "x"}),
    ],
)
def test_a_part_of_another_form_is_refused(begun: Path, tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    folder = Path(shutil.copytree(begun, tmp_path / "run"))

    def forged(*given: Any, **options: Any) -> dict[str, Any]:
        extra = copy.deepcopy(load_checkpoint(*given, **options))
        inside = extra
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value
        return extra

    with patch.object(training, "load_checkpoint", forged), pytest.raises(ConfigurationError, match="damaged") as told:
        run(CONFIG, folder, resume=True)
    assert len(str(told.value).splitlines()) == 1
    assert (folder / "checkpoint" / "state.safetensors").exists()  # nothing that existed is lost


@pytest.mark.parametrize("key", ["loss", "epsilon", "scores", "epoch"])
def test_a_row_without_a_part_is_refused(begun: Path, tmp_path: Path, key: str) -> None:
    folder = Path(shutil.copytree(begun, tmp_path / "run"))

    def forged(*given: Any, **options: Any) -> dict[str, Any]:
        extra = load_checkpoint(*given, **options)
        del extra["rows"][0][key]
        return extra

    with patch.object(training, "load_checkpoint", forged), pytest.raises(ConfigurationError, match="damaged"):
        run(CONFIG, folder, resume=True)


def test_the_same_form_passes_whatever_the_values() -> None:
    own = {"a": 1, "b": [0.5, None], "c": True, "d": torch.zeros(2)}
    check_form({"a": 7, "b": (3, None), "c": False, "d": torch.ones(2)}, own, "it")
    for other in ({"a": True}, {"b": [1]}, {"b": [1, 1]}, {"c": 1}, {"d": [0, 0]}, {"e": 1}, {"a": -1}, {"a": 1.5}):
        with pytest.raises(ValueError, match="it"):
            check_form(own | other, own, "it")
