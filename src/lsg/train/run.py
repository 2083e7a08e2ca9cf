"""One training run: a configuration in, an output folder with model, metrics and privacy statement out.

At any moment the folder is either resumable or complete; it is complete once `result.json` exists, which is written
last. All randomness follows from the seed, the noise too, so that a run can be repeated and resumed. Where the data are
secret the seed must be so as well; the privacy statement says it.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from lsg.errors import ConfigurationError, LsgError, first_line
from lsg.train.config import RunConfig
from lsg.train.folder import RunFolder
from lsg.train.listener import Listener
from lsg.train.precision import choose_device, choose_precision, matmul_precision
from lsg.train.prepare_data import PreparedData, prepare_data
from lsg.train.prepare_features import features_once
from lsg.train.prepare_model import prepare_model
from lsg.train.result import RunResult
from lsg.train.training import Training


def run(
    config: RunConfig,
    output: Path,
    *,
    resume: bool = False,
    listener: Listener | None = None,
    checkpoint_every: int = 0,
    prepare: Callable[[RunConfig, torch.device, Listener], PreparedData] = prepare_data,
) -> RunResult:
    """Train as the configuration says, or with `resume` go on with what `output` holds of the same configuration.

    checkpoint_every: write a checkpoint after so many steps too. 0: after epochs alone, when it is worth it.
    prepare: reads and divides the data; `lsg tune` trains on a part of its own.
    """
    folder = RunFolder(output)
    if resume:
        config = folder.going_on(config)
    with folder.held(config, resume=resume):
        return _run(config, folder, listener or Listener(), checkpoint_every, prepare)


def _run(
    config: RunConfig,
    folder: RunFolder,
    listener: Listener,
    checkpoint_every: int,
    prepare: Callable[[RunConfig, torch.device, Listener], PreparedData],
) -> RunResult:
    finished = folder.result()
    if finished is not None:
        result = RunResult.from_dict(finished, str(folder.path / "result.json"))
        folder.drop_checkpoint()
        return result
    device = choose_device(config.device)
    data = prepare(config, device, listener)
    check_against_data(config, data)
    with matmul_precision(choose_precision(config.precision, device)):
        model = prepare_model(config, data, device, listener)
        trained, data = features_once(config, data, model, device, listener)
        training = Training(config, data, trained, device, folder, listener, whole=model)
        folder.create(config)
        try:
            rows = training.train(checkpoint_every)
        except Exception as error:
            if training.engine.accountant.history:
                raise
            folder.abandon()  # nothing was trained: the next try finds an empty place
            if isinstance(error, RuntimeError) and not isinstance(error, LsgError | torch.OutOfMemoryError):
                raise ConfigurationError(
                    f"--model {config.model} failed at its first step: {first_line(error)}"
                ) from error
            raise
        return training.finish(rows)


def check_against_data(config: RunConfig, data: PreparedData) -> None:
    """Refuse batches and a delta that are too large for the number of records, or persons."""
    protected = data.protected(config)
    noun, count = protected.noun, protected.units
    if config.batch_size > count:
        raise ConfigurationError(
            f"--batch-size {config.batch_size} is more than the {count:,} training {noun}s: give that number or less"
        )
    if config.method != "non-private" and config.delta >= 1 / count:
        raise ConfigurationError(
            f"--delta {config.delta:g} must be below 1/N = {1 / count:.3g} (N = {count:,} training {noun}s): a "
            f"larger one allows publishing {'a record' if noun == 'record' else 'all records of a person'} outright"
        )
