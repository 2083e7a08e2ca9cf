"""Fixtures of `lsg train`'s tests."""

from pathlib import Path

import pytest

from lsg.train.config import RunConfig
from lsg.train.run import RunResult, run
from tests.support.threads import one_thread  # noqa: F401 - a fixture for all tests here
from tests.support.tiny import glue_sst2, tiny_bert
from tests.support.train_runs import DIGITS


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("texts")
    return RunConfig(
        task="sst2",
        data=str(glue_sst2(folder / "SST-2")),
        model=str(tiny_bert(folder / "bert")),
        noise_multiplier=0.5,
        delta=1e-3,
        accountant="rdp",
        lr=1e-2,
        batch_size=24,
        epochs=3,
        max_physical_batch_size=10,
        max_length=32,
        rank=2,
        device="cpu",
    )


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """One digits run that tests only look at."""
    folder = tmp_path_factory.mktemp("runs") / "deep" / "digits"
    return folder, run(DIGITS, folder)
