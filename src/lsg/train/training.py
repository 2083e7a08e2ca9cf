"""One run while it trains: configuration, data and model in, rows of metrics and the folder's files out."""

import contextlib
import hashlib
import math
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lsg.checkpoint import load_checkpoint
from lsg.engine import PrivacyEngine
from lsg.explain import explain
from lsg.files.sign_of_life import doing
from lsg.methods import Method
from lsg.perf import PerfConfig
from lsg.sampling.random_sources import fresh_generator
from lsg.step.averaging import WeightAverage
from lsg.tasks.encoded import as_loader
from lsg.tasks.measures import measure_of
from lsg.train.checkpoints import CheckpointWriter
from lsg.train.config import RunConfig
from lsg.train.continuing import Continuing, Standing
from lsg.train.evaluation import Evaluation
from lsg.train.listener import Listener, RunStart
from lsg.train.loop import Epoch, LoopState, evaluated, train
from lsg.train.lr_schedule import attach_lr_schedule
from lsg.train.prepare_data import PreparedData
from lsg.train.prepare_images import with_views
from lsg.train.prepare_model import make_optimizer
from lsg.train.privacy_statement import DataFacts, Spent, privacy_statement
from lsg.train.provenance import provenance
from lsg.train.result import RunResult
from lsg.train.run_warnings import RunFacts, RunWarning, ended_early, find_warnings, weight_warnings
from lsg.train.save_model import save_trained
from lsg.train.scorers import samples_of, scorer_of
from lsg.train.shared_folder import SharedFolder


class Training:
    """One run: the constructor makes the model private, `train` trains it, `finish` writes what is kept of it.

    Several processes that train together do all of it alike. Rank 0 has the folder, and keeps a ledger there: with
    another number of them, steps that a crash lost cannot be repeated, and have to be counted.

    whole: the model that is saved; `model` is it, or that part of it which is trained on features (`features_once`).
    """

    def __init__(
        self,
        config: RunConfig,
        data: PreparedData,
        model: nn.Module,
        device: torch.device,
        folder: SharedFolder,
        listener: Listener,
        whole: nn.Module,
    ) -> None:
        self.config, self.data, self.folder, self.listener, self.whole = config, data, folder, listener, whole
        self.group = folder.group
        self.protected = data.protected(config)
        method = config.make_method()
        private = config.method != "non-private"
        self.noise_dimensions = explain(model, method).dimensions_after if private else 0
        self.trained_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.keeps_ledger = private and (not self.group.alone or folder.has(folder.ledger))
        self.engine = PrivacyEngine(accountant=config.accountant, ledger=folder.ledger if self.keeps_ledger else None)
        inputs = self._inputs(model, method, device)
        if config.epsilon is not None:
            self.model, self.optimizer, self.loader = self.engine.make_private_with_epsilon(
                **inputs, target_epsilon=config.epsilon, target_delta=config.delta, epochs=config.epochs
            )
        else:
            self.model, self.optimizer, self.loader = self.engine.make_private(
                **inputs, noise_multiplier=config.noise_multiplier or 0.0
            )
        self.steps = self.loader.logical.plan.steps(config.epochs)
        self.scheduler = attach_lr_schedule(self.optimizer, config.lr_schedule, self.steps, config.warmup)
        self.average = WeightAverage(self.optimizer, config.averaging) if config.averaging else None
        self.continuing = Continuing(
            folder.checkpoint,
            self.group,
            self.scheduler,
            self.average,
            used=data.used,
            epochs=config.epochs,
            parts=data.evaluation.keys(),
        )
        if not self.group.first:  # dropout and views of its own; rank 0 has those of a process alone
            torch.manual_seed(_seed_of_rank(config.seed, self.group.rank))
        # Kernels of a GPU may round otherwise the next time: then lost steps cannot be repeated to the bit.
        self.repeats = device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        scorer = scorer_of(config, data, device, self.group)
        self.loss, self.evaluation = scorer.loss, Evaluation(scorer, data.evaluation)
        self.samples = samples_of(config, data, device)
        one_answer = self.evaluation.one_answer()
        self.run_facts = RunFacts(
            self.steps, config.epochs, config.max_grad_norm, one_answer, data.scored_apart(config)
        )

    def _inputs(self, model: nn.Module, method: Method, device: torch.device) -> dict[str, Any]:
        """What `make_private` takes, but for how much noise."""
        config = self.config
        return {
            "module": model,
            "optimizer": make_optimizer(config, self.whole),
            "data_loader": as_loader(with_views(self.data.train, config), config.batch_size),
            "views": config.views,
            "max_grad_norm": config.max_grad_norm,
            "method": method,
            "max_physical_batch_size": config.max_physical_batch_size,
            "clipping": config.clipping,
            "unit_of": self.protected.persons,
            "max_records_per_unit": self.protected.most,
            "noise_generator": _noise_generator(config.seed, device),
            "perf": PerfConfig(
                compile=config.compile, cuda_graphs=config.cuda_graphs, max_tokens=config.max_physical_tokens
            ),
        }

    def train(self, checkpoint_every: int) -> list[dict[str, Any]]:
        """Train to the end, from the start or from the checkpoint; one row an epoch."""
        start, rows = self._restore()
        checkpoints = CheckpointWriter(
            self.folder.checkpoint,
            self.engine,
            epochs=self.config.epochs,
            every=checkpoint_every,
            extra=lambda state: self.continuing.stored(Standing(state, rows, self.run_facts.untrained)),
        )
        if self.keeps_ledger:  # nothing could go on from its steps without a checkpoint before the first of them
            checkpoints.write(start)
        metrics = self.folder.metrics(rows)
        told = {warning.name for warning in find_warnings(rows, self.run_facts)}

        def on_epoch(epoch: Epoch) -> None:
            rows.append(self._row(epoch))
            metrics.write(rows)
            self.listener.epoch(rows[-1])
            self._show_sample(epoch.number)
            if epoch.number < self.config.epochs:  # the last one's belong to the result
                self._warn_once(rows, told)

        try:
            self._score_untrained(start)
            self.listener.started(self._run_start(start, rows))
            train(
                self.model,
                self.optimizer,
                self.loader,
                self.engine,
                epochs=self.config.epochs,
                delta=self.config.delta,
                loss=self.loss,
                evaluate=self._score,
                on_step=self.listener.step,
                on_epoch=on_epoch,
                start=start,
                save=checkpoints.save,
                save_every=checkpoint_every,
                end_at_budget=True,
            )
        finally:
            metrics.close()
        return rows

    def _score_untrained(self, start: LoopState) -> None:
        """The perplexity of a language model as it was pretrained, which training is to lower."""
        if self.samples is not None and self.run_facts.untrained is None and not start.steps:
            untrained = evaluated(self.model, self.evaluation)
            self.run_facts = replace(self.run_facts, untrained=untrained)
            self.listener.note(f"before training: {measure_of(self.config.task).labelled(untrained)}")

    def _show_sample(self, epoch: int) -> None:
        if self.samples is None or not self.samples.due(epoch):
            return
        samples, model = self.samples, self.model
        with self._averaged():
            self.listener.sample(epoch, self.group.on_first(lambda: samples.draw(model)))

    def _warn_once(self, rows: list[dict[str, Any]], told: set[str]) -> None:
        """Tell of what has become clear; told: the names of warnings that were given before."""
        for warning in find_warnings(rows, self.run_facts):
            if warning.name not in told:
                self.listener.warning(warning.text)
                told.add(warning.name)

    def finish(self, rows: list[dict[str, Any]]) -> RunResult:
        """Write model, privacy statement and, last, the result."""
        with self._averaged():
            return self._finish(rows)

    def _finish(self, rows: list[dict[str, Any]]) -> RunResult:
        warnings = self._final_warnings(rows)
        origin = self.group.on_first(provenance)
        spent = Spent(
            epsilon=math.inf if rows[-1]["epsilon"] is None else rows[-1]["epsilon"],
            noise_multiplier=self.optimizer.noise_multiplier,
            sample_rate=self.loader.sample_rate,
            expected_batch_size=self.optimizer.expected_batch_size,
            steps=len(self.engine.accountant),
            protected=self.protected,
            noise_dimensions=self.noise_dimensions,
            trained_parameters=self.trained_parameters,
        )
        privacy = {
            "warnings": [warning.text for warning in warnings if warning.releasable],
            **privacy_statement(self.config, spent, self._facts(), origin["versions"]),
            **({} if self.group.alone else {"processes": self.group.size}),
        }
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
            warnings=[warning.text for warning in warnings],
            processes=self.group.size,
            measure=measure_of(self.config.task).name,
            untrained=self.run_facts.untrained,
        )
        self.engine.detach()
        with doing("saving the model"):
            self.folder.write_model(lambda folder: save_trained(folder, self.whole, self.config, self.data))
        self.folder.write_privacy(privacy)
        self.folder.write_result(result.to_dict())
        self.folder.drop_checkpoint()
        return result

    def _averaged(self) -> AbstractContextManager[None]:
        """Within, the model has the weights that are scored and saved."""
        return contextlib.nullcontext() if self.average is None else self.average.applied()

    def _score(self, model: nn.Module) -> float:
        with self._averaged():
            return self.evaluation(model)

    def _final_warnings(self, rows: list[dict[str, Any]]) -> list[RunWarning]:
        found = weight_warnings(self.model.parameters())
        taken = self.scheduler.last_epoch
        if taken < self.steps:
            found.append(ended_early(taken, self.steps))
        return found + find_warnings(rows, self.run_facts)

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

    def _restore(self) -> tuple[LoopState, list[dict[str, Any]]]:
        """Where the checkpoint stands, or the very start without one."""
        if not self.folder.has(self.folder.checkpoint):
            return LoopState(), []
        replay = self.repeats or not self.keeps_ledger
        found = self.continuing.restored(load_checkpoint(self.folder.checkpoint, engine=self.engine, replay=replay))
        self.run_facts = replace(self.run_facts, untrained=found.untrained)
        self.listener.note(f"going on after epoch {found.start.epochs}, step {found.start.steps}")
        return found.start, found.rows

    def _row(self, epoch: Epoch) -> dict[str, Any]:
        signals = epoch.signals
        return {
            "epoch": epoch.number,
            "steps": len(self.engine.accountant),
            "epsilon": _finite(epoch.epsilon),
            "loss": _finite(epoch.loss),
            "clip_share": signals and signals.clip_share,
            "signal_norm": signals and _finite(signals.signal_norm),
            "noise_norm": signals and _finite(signals.noise_norm),
            "update_norm": signals and _finite(signals.update_norm),
            "measure": measure_of(self.config.task).name,
            "score": epoch.score,
            "scores": self.evaluation.scores,
            "lr": epoch.lr,
            "seconds": epoch.seconds,
            "samples_per_second": epoch.samples / epoch.seconds,
        }

    def _run_start(self, start: LoopState, rows: list[dict[str, Any]]) -> RunStart:
        return RunStart(
            protected=self.protected,
            steps=self.steps,
            epochs=self.config.epochs,
            steps_done=start.steps,
            epochs_done=start.epochs,
            epsilon=rows[-1]["epsilon"] if rows else 0.0,
            batch_size=self.optimizer.expected_batch_size,
            noise_multiplier=self.optimizer.noise_multiplier,
            noise_dimensions=self.noise_dimensions,
            trained_parameters=self.trained_parameters,
        )


def _noise_generator(seed: int, device: torch.device) -> torch.Generator:
    """A stream of its own: torch's global one, seeded by the seed itself, draws new weights and dropout."""
    return fresh_generator(device, f"noise:{seed}".encode())


def _seed_of_rank(seed: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"rank {rank}:{seed}".encode()).digest()[:8], "big") >> 1


def _finite(value: float) -> float | None:
    """JSON has neither infinity nor NaN."""
    return value if math.isfinite(value) else None
