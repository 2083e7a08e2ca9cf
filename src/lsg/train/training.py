"""One run while it trains: configuration, data and model in, rows of metrics and the folder's files out."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lsg.checkpoint import load_checkpoint
from lsg.engine import PrivacyEngine
from lsg.errors import ConfigurationError
from lsg.explain import explain
from lsg.perf import PerfConfig
from lsg.sampling.random_sources import fresh_generator
from lsg.tasks.encoded import as_loader
from lsg.tasks.models import save_image_model, save_text_model
from lsg.train.checkpoints import CheckpointWriter
from lsg.train.config import RunConfig
from lsg.train.evaluation import Classifier, Evaluation
from lsg.train.folder import RunFolder
from lsg.train.listener import Listener, RunStart
from lsg.train.loop import Epoch, LoopState, train
from lsg.train.lr_schedule import attach_lr_schedule
from lsg.train.precision import choose_precision
from lsg.train.prepare_data import PreparedData
from lsg.train.prepare_images import with_views
from lsg.train.prepare_model import make_optimizer
from lsg.train.privacy_statement import DataFacts, Spent, privacy_statement
from lsg.train.provenance import provenance
from lsg.train.result import RunResult
from lsg.train.tensorboard import TensorBoard


class Training:
    """One run: the constructor makes the model private, `train` trains it, `finish` writes what is kept of it."""

    def __init__(
        self,
        config: RunConfig,
        data: PreparedData,
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
            "data_loader": as_loader(with_views(data.train, config), config.batch_size),
            "views": config.views,
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

    def train(self, checkpoint_every: int) -> list[dict[str, Any]]:
        """Train to the end, from the start or from the checkpoint; one row an epoch."""
        start, rows = self._restore()
        checkpoints = CheckpointWriter(
            self.folder.checkpoint,
            self.engine,
            epochs=self.config.epochs,
            every=checkpoint_every,
            extra=lambda state: self._extra(state, rows),
        )
        self.folder.write_metrics(rows)
        board = TensorBoard(self.folder.tensorboard, rows)

        def on_epoch(epoch: Epoch) -> None:
            rows.append(self._row(epoch))
            self.folder.write_metrics(rows)
            board.write(rows[-1])
            self.listener.epoch(rows[-1])

        try:
            self.listener.started(self._run_start(start, rows))
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

    def _extra(self, state: LoopState, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """What a checkpoint holds beside the engine's state; `_restore` reads it."""
        return {
            "progress": asdict(state),
            "rows": rows,
            "scheduler": self.scheduler.state_dict(),
            "used": self.data.used,
        }

    def _restore(self) -> tuple[LoopState, list[dict[str, Any]]]:
        """Where the checkpoint stands, or the very start without one."""
        if not self.folder.checkpoint.exists():
            return LoopState(), []
        extra = load_checkpoint(self.folder.checkpoint, engine=self.engine)
        if extra.get("used", "") != self.data.used:
            raise ConfigurationError(
                f"--resume: the run in {self.folder.path} was begun by an lsg that chose its training records in "
                "another way, and cannot go on with these: begin it again in another folder"
            )
        self.scheduler.load_state_dict(extra["scheduler"])
        self.listener.note(f"going on after epoch {extra['progress']['epochs']}, step {extra['progress']['steps']}")
        return LoopState(**extra["progress"]), extra["rows"]

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

    def _run_start(self, start: LoopState, rows: list[dict[str, Any]]) -> RunStart:
        return RunStart(
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


def _noise_generator(seed: int, device: torch.device) -> torch.Generator:
    """A stream of its own: torch's global one, seeded by the seed itself, draws new weights and dropout."""
    return fresh_generator(device, f"noise:{seed}".encode())


def _finite(value: float) -> float | None:
    """JSON has neither infinity nor NaN."""
    return value if math.isfinite(value) else None
