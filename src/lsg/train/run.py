"""One training run: a configuration in, an output folder with model, metrics and privacy statement out.

At any moment the folder is either resumable or complete; it is complete once `result.json` exists, which is written
last. All randomness follows from the seed, the noise too, so that a run can be repeated and resumed. Where the data are
secret the seed must be so as well; the privacy statement says it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from lsg.accounting.ledger import fingerprint
from lsg.distributed.group import Group
from lsg.errors import ConfigurationError, LsgError, ProcessLost, first_line
from lsg.tasks.encoded import Encoded, EncodedFeatures, EncodedLanguage, EncodedTexts
from lsg.tasks.models import ZOO
from lsg.tasks.readers.files import local_path
from lsg.train.config import RunConfig
from lsg.train.folder import RunFolder
from lsg.train.listener import Listener
from lsg.train.precision import choose_device, choose_precision, matmul_precision
from lsg.train.prepare_data import PreparedData, prepare_data
from lsg.train.prepare_features import features_once
from lsg.train.prepare_model import prepare_model
from lsg.train.result import RunResult
from lsg.train.shared_folder import SharedFolder
from lsg.train.training import Training

_T = TypeVar("_T")


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
    Processes of torch.distributed's default group train one model together: each calls this alike; the listener hears
    of it on rank 0 alone.
    """
    group = Group.current()
    folder = SharedFolder(RunFolder(output), group)
    heard = listener if listener is not None and group.first else Listener()
    if resume:
        config = folder.going_on(config)
    with folder.held(config, resume=resume):
        return _run(config, folder, heard, checkpoint_every, prepare)


def _run(
    config: RunConfig,
    folder: SharedFolder,
    listener: Listener,
    checkpoint_every: int,
    prepare: Callable[[RunConfig, torch.device, Listener], PreparedData],
) -> RunResult:
    finished = folder.result()
    if finished is not None:
        result = RunResult.from_dict(finished, str(folder.path / "result.json"))
        folder.drop_checkpoint()
        return result
    group = folder.group
    device = own_device(config, group)
    data = on_all(group, config.to_dict(), lambda: prepare(config, device, listener))
    _check_same_data(group, data)
    check_against_data(config, data)
    with matmul_precision(choose_precision(config.precision, device)):
        model = on_all(group, config.to_dict(), lambda: prepare_model(config, data, device, listener))
        trained, data = group.together(lambda: features_once(config, data, model, device, listener))
        training = Training(config, data, trained, device, folder, listener, whole=model)
        folder.create(config)
        try:
            rows = training.train(checkpoint_every)
        except Exception as error:
            if training.engine.accountant.history or isinstance(error, ProcessLost):
                raise
            folder.abandon()  # nothing was trained: the next try finds an empty place
            if isinstance(error, RuntimeError) and not isinstance(error, LsgError | torch.OutOfMemoryError):
                raise ConfigurationError(
                    f"--model {config.model} failed at its first step: {first_line(error)}"
                ) from error
            raise
        return training.finish(rows)


def own_device(config: RunConfig, group: Group) -> torch.device:
    """Where this process computes; of several each has a GPU of its own, the current one."""
    device = choose_device(config.device)
    if not group.alone and device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise ConfigurationError(
            f"--device {config.device}: of several processes each has a GPU of its own; leave --device out"
        )
    return device


def on_all(group: Group, settings: dict[str, Any], work: Callable[[], _T]) -> _T:
    """Each process reads data and model by itself; what rank 0 has to download first the others find on the disk.

    settings: of the run, as far as they are known."""
    data, model = settings.get("data"), settings.get("model")
    here = settings.get("task") == "digits" or (data is not None and local_path(str(data)) is not None)
    here = here and (model is None or model in ZOO or Path(str(model)).exists())
    return group.together(work) if here else group.first_then_others(work)


def _check_same_data(group: Group, data: PreparedData) -> None:
    if not group.alone:
        group.check_alike(
            {"the training data": fingerprint(_tensors(data.train))},
            "Every process must read the same files",
        )


def _tensors(data: Encoded) -> list[torch.Tensor]:
    if isinstance(data, EncodedLanguage):
        return data.parts
    if isinstance(data, EncodedTexts):
        return [data.ids, data.labels]
    return [data.features if isinstance(data, EncodedFeatures) else data.pixels, data.labels]


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
