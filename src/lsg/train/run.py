"""One training run: a configuration in, an output folder with model, metrics and privacy statement out.

At any moment the folder is either resumable or complete; it is complete once `result.json` exists, which is written
last. All randomness follows from the seed, the noise too, so that a run can be repeated and resumed. Where the data are
secret the seed must be so as well; the privacy statement says it.
"""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lsg.checkpoint import load_checkpoint, save_checkpoint
from lsg.engine import PrivacyEngine
from lsg.errors import ConfigurationError, LsgError, first_line
from lsg.explain import explain
from lsg.files.atomic import OWNER_ONLY_FOLDER, errors_naming
from lsg.perf import PerfConfig
from lsg.sampling.random_sources import fresh_generator
from lsg.tasks.encoded import as_loader
from lsg.tasks.models import save_image_model, save_text_model
from lsg.train.config import RunConfig
from lsg.train.evaluation import Classifier, Evaluation
from lsg.train.folder import RunFolder
from lsg.train.listener import Listener, RunPlan
from lsg.train.loop import Epoch, Progress, train
from lsg.train.lr_schedule import attach_lr_schedule
from lsg.train.precision import choose_device, choose_precision, matmul_precision
from lsg.train.prepare import Prepared, make_optimizer, prepare_data, prepare_model
from lsg.train.privacy_statement import DataFacts, Spent, privacy_statement
from lsg.train.provenance import provenance
from lsg.train.tensorboard import TensorBoard

# After an epoch a checkpoint is written if this much time has gone by since the last one, and ten times what writing
# that one took: a run that is killed loses little, and one that is not spends little on it.
_CHECKPOINT_SECONDS = 30.0
_CHECKPOINT_SHARE = 0.1


@dataclass(frozen=True)
class RunResult:
    """What result.json holds. epsilon: None without privacy. seconds: of training. history: metrics.jsonl's rows."""

    config: RunConfig
    score: float
    scores: dict[str, float]
    epsilon: float | None
    noise_multiplier: float
    steps: int
    curve: list[float]
    seconds: float
    history: list[dict[str, Any]]
    privacy: dict[str, Any]
    provenance: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str) -> "RunResult":
        """The inverse of `to_dict`. `source` names the file in errors."""
        try:
            known = {key: value for key, value in values.items() if key != "secret"}
            return cls(**{**known, "config": RunConfig.from_dict(values["config"], source)})
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{source} is damaged: it is no result of a run ({error})") from None


def run(
    config: RunConfig,
    output: Path,
    *,
    resume: bool = False,
    listener: Listener | None = None,
    checkpoint_every: int = 0,
) -> RunResult:
    """Train as the configuration says, or with `resume` go on with what `output` holds of the same configuration.

    checkpoint_every: write a checkpoint after so many steps too. 0: after epochs alone, when it is worth it.
    """
    folder = RunFolder(output)
    with folder.held(config, resume=resume):
        return _run(config, folder, listener or Listener(), checkpoint_every)


def _run(config: RunConfig, folder: RunFolder, listener: Listener, checkpoint_every: int) -> RunResult:
    finished = folder.result()
    if finished is not None:
        result = RunResult.from_dict(finished, str(folder.path / "result.json"))
        folder.drop_checkpoint()
        return result
    device = choose_device(config.device)
    data = prepare_data(config, device, listener)
    _check_against_data(config, data)
    with matmul_precision(choose_precision(config.precision, device)):
        model = prepare_model(config, data, device, listener)
        training = _Training(config, data, model, device, folder, listener)
        folder.create(config)
        try:
            rows = training.go(checkpoint_every)
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


def _check_against_data(config: RunConfig, data: Prepared) -> None:
    records = len(data.train)
    if config.batch_size > records:
        raise ConfigurationError(
            f"--batch-size {config.batch_size} is more than the {records:,} training records: sampling would not "
            "protect anybody. Give a smaller --batch-size"
        )
    if config.method != "non-private" and config.delta >= 1 / records:
        raise ConfigurationError(
            f"--delta {config.delta:g} must be below 1/N = {1 / records:.3g} (N = {records:,} training records): a "
            "larger one allows publishing a record outright"
        )


class _Training:
    """Everything that one run holds on to, from the engine's first look at the model to the result."""

    def __init__(
        self,
        config: RunConfig,
        data: Prepared,
        model: nn.Module,
        device: torch.device,
        folder: RunFolder,
        listener: Listener,
    ) -> None:
        self.config, self.data, self.folder, self.listener = config, data, folder, listener
        method = config.make_method()
        private = config.method != "non-private"
        self.noise_dimensions = explain(model, method).dimensions_after if private else 0
        self.trained_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.engine = PrivacyEngine(accountant=config.accountant)
        inputs: dict[str, Any] = {
            "module": model,
            "optimizer": make_optimizer(config, model),
            "data_loader": as_loader(data.train, config.batch_size),
            "max_grad_norm": config.max_grad_norm,
            "method": method,
            "max_physical_batch_size": config.max_physical_batch_size,
            "clipping": config.clipping,
            "noise_generator": _noise_generator(config.seed, device),
            "perf": PerfConfig(
                compile=config.compile, cuda_graphs=config.cuda_graphs, max_tokens=config.max_physical_tokens
            ),
        }
        if config.epsilon is not None:
            self.model, self.optimizer, self.loader = self.engine.make_private_with_epsilon(
                **inputs, target_epsilon=config.epsilon, target_delta=config.delta, epochs=config.epochs
            )
        else:
            self.model, self.optimizer, self.loader = self.engine.make_private(
                **inputs, noise_multiplier=config.noise_multiplier or 0.0
            )
        self.steps = self.loader.logical.plan.steps(config.epochs)
        self.scheduler = attach_lr_schedule(self.optimizer, config.lr_schedule, self.steps)
        classifier = Classifier(choose_precision(config.precision, device), device)
        self.loss, self.evaluation = classifier.loss, Evaluation(classifier, data.evaluation)

    def go(self, checkpoint_every: int) -> list[dict[str, Any]]:
        """Train to the end, from the start or from the checkpoint; one row an epoch."""
        start, rows = self._restore()
        checkpoints = _Checkpoints(self, rows, checkpoint_every)
        self.folder.write_metrics(rows)
        board = TensorBoard(self.folder.tensorboard, rows)

        def on_epoch(epoch: Epoch) -> None:
            rows.append(self._row(epoch))
            self.folder.write_metrics(rows)
            board.write(rows[-1])
            self.listener.epoch(rows[-1])

        try:
            self.listener.started(self._plan(start, rows))
            train(
                self.model,
                self.optimizer,
                self.loader,
                self.engine,
                epochs=self.config.epochs,
                delta=self.config.delta,
                loss=self.loss,
                evaluate=self.evaluation,
                on_step=self.listener.step,
                on_epoch=on_epoch,
                start=start,
                save=checkpoints.save,
                save_every=checkpoint_every,
            )
        finally:
            board.close()
        return rows

    def finish(self, rows: list[dict[str, Any]]) -> RunResult:
        """Write model, privacy statement and, last, the result."""
        if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            self.listener.note("WARNING: training diverged, and weights are not finite: try a lower --lr")
        origin = provenance()
        spent = Spent(
            epsilon=math.inf if rows[-1]["epsilon"] is None else rows[-1]["epsilon"],
            noise_multiplier=self.optimizer.noise_multiplier,
            sample_rate=self.loader.sample_rate,
            expected_batch_size=self.optimizer.expected_batch_size,
            steps=len(self.engine.accountant),
            records=len(self.data.train),
            noise_dimensions=self.noise_dimensions,
            trained_parameters=self.trained_parameters,
        )
        privacy = privacy_statement(self.config, spent, self._facts(), origin["versions"])
        result = RunResult(
            config=self.config,
            score=rows[-1]["score"],
            scores=rows[-1]["scores"],
            epsilon=privacy["epsilon"],
            noise_multiplier=spent.noise_multiplier,
            steps=spent.steps,
            curve=[row["score"] for row in rows],
            seconds=sum(row["seconds"] for row in rows),
            history=rows,
            privacy=privacy,
            provenance=origin,
        )
        self.engine.detach()
        self.folder.write_model(self._save_model)
        self.folder.write_privacy(privacy)
        self.folder.write_result(result.to_dict())
        self.folder.drop_checkpoint()
        return result

    def _facts(self) -> DataFacts:
        data, shape = self.data, self.data.shape
        return DataFacts(
            data=data.data_name,
            model=data.model_name,
            used=data.used,
            classes=len(data.label_names),
            image_size=None if shape is None else (shape.channels, shape.height, shape.width),
            pairs=data.pairs,
        )

    def _restore(self) -> tuple[Progress, list[dict[str, Any]]]:
        """Where the checkpoint stands, or the very start without one."""
        if not self.folder.checkpoint.exists():
            return Progress(), []
        extra = load_checkpoint(self.folder.checkpoint, engine=self.engine)
        if extra.get("used", "") != self.data.used:
            raise ConfigurationError(
                f"--resume: the run in {self.folder.path} was begun by an lsg that chose its training records in "
                "another way, and cannot go on with these: begin it again in another folder"
            )
        self.scheduler.load_state_dict(extra["scheduler"])
        self.listener.note(f"going on after epoch {extra['progress']['epochs']}, step {extra['progress']['steps']}")
        return Progress(**extra["progress"]), extra["rows"]

    def _row(self, epoch: Epoch) -> dict[str, Any]:
        return {
            "epoch": epoch.number,
            "steps": len(self.engine.accountant),
            "epsilon": _finite(epoch.epsilon),
            "loss": _finite(epoch.loss),
            "score": epoch.score,
            "scores": self.evaluation.scores,
            "lr": epoch.lr,
            "seconds": epoch.seconds,
            "samples_per_second": epoch.samples / epoch.seconds,
        }

    def _plan(self, start: Progress, rows: list[dict[str, Any]]) -> RunPlan:
        return RunPlan(
            records=len(self.data.train),
            steps=self.steps,
            steps_done=start.steps,
            epochs_done=start.epochs,
            epsilon=rows[-1]["epsilon"] if rows else 0.0,
            batch_size=self.optimizer.expected_batch_size,
            noise_multiplier=self.optimizer.noise_multiplier,
            noise_dimensions=self.noise_dimensions,
            trained_parameters=self.trained_parameters,
        )

    def _save_model(self, folder: Path) -> None:
        if self.data.shape is None:
            save_text_model(folder, self.model, self.data.tokenizer)
        else:
            about = {"task": self.config.task, "label_names": list(self.data.label_names)}
            save_image_model(folder, self.model, self.config.model, self.data.shape, about)


class _Checkpoints:
    """Decides when a checkpoint is worth writing, and writes it."""

    def __init__(self, training: _Training, rows: list[dict[str, Any]], every: int) -> None:
        self._training, self._rows, self._every = training, rows, every
        self._last, self._cost = time.perf_counter(), 0.0

    def save(self, progress: Progress) -> None:
        training, started = self._training, time.perf_counter()
        if progress.epochs == training.config.epochs:
            return  # the result comes next
        worth = max(_CHECKPOINT_SECONDS, self._cost / _CHECKPOINT_SHARE)
        if not self._every and started - self._last < worth:
            return
        extra = {
            "progress": asdict(progress),
            "rows": self._rows,
            "scheduler": training.scheduler.state_dict(),
            "used": training.data.used,
        }
        with errors_naming(training.folder.checkpoint):
            training.folder.checkpoint.parent.mkdir(mode=OWNER_ONLY_FOLDER, exist_ok=True)
            save_checkpoint(training.folder.checkpoint, engine=training.engine, extra=extra)
        self._last = time.perf_counter()
        self._cost = self._last - started


def _noise_generator(seed: int, device: torch.device) -> torch.Generator:
    """A stream of its own: torch's global one, seeded by the seed itself, draws new weights and dropout."""
    return fresh_generator(device, f"noise:{seed}".encode())


def _finite(value: float) -> float | None:
    """JSON has neither infinity nor NaN."""
    return value if math.isfinite(value) else None
