"""One epoch of a private Trainer: logical batches in; steps, logs, evaluations and checkpoints in Trainer's order."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lsg.errors import PrivacyError
from lsg.integrations.transformers.first_step import FirstStep
from lsg.integrations.transformers.private_run import PrivateRun


class EpochLoop:
    """trainer: whose callbacks, loss, logs and checkpoints are called. model: as Trainer runs it, wrapped if it is."""

    def __init__(
        self, trainer: Any, run: PrivateRun, model: nn.Module, trial: Any, ignore_keys: Any, start_time: float
    ) -> None:
        self._trainer, self._run, self._model = trainer, run, model
        self._trial, self._ignore_keys, self._start_time = trial, ignore_keys, start_time

    def run(self, epoch: int, done: int) -> None:
        """done: logical steps of the epoch that were taken before."""
        trainer, loader, plan = self._trainer, self._run.loader, self._run.loader.logical.plan
        steps = max(1, plan.first_step(epoch + 1) - plan.first_step(epoch))
        self._finish_loaded_epochs(epoch)
        rate: float | None = None
        batches = loader.logical_batches()
        try:
            for number, micro_batches in enumerate(batches, start=done + 1):
                rate = self._step(micro_batches)
                trainer.state.global_step += 1
                trainer.state.epoch = epoch + number / steps
                self._call("on_step_end")
                self._after(epoch, rate)
                if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                    break
        finally:
            batches.close()
        self._call("on_epoch_end")
        self._after(epoch, rate)

    def _finish_loaded_epochs(self, epoch: int) -> None:
        """A run that was saved right after the last step of an epoch has nothing left of it."""
        while self._run.loader.epoch < epoch:
            for _ in self._run.loader.logical_batches():
                raise PrivacyError(
                    f"the loader is in epoch {self._run.loader.epoch}, and the trainer in epoch {epoch}: the "
                    "checkpoint's files do not belong together"
                )

    def _step(self, micro_batches: Iterator[Any]) -> float:
        """One logical step; returns the learning rate that it was taken with."""
        trainer, optimizer = self._trainer, self._run.optimizer
        self._call("on_step_begin")
        trainer.current_gradient_accumulation_steps = 1  # nothing is divided: the clip sees each record's own loss
        clock = optimizer.clock
        total: Tensor | float = 0.0
        rows, last = 0, False
        first = self._first_step()
        for inputs in micro_batches:
            size, last = clock.batch.size or 0, clock.batch.last
            loss = trainer.training_step(self._model, inputs, None)
            total, rows = total + loss * size, rows + size
            trainer.current_flos += float(trainer.floating_point_ops(inputs))
            trainer._track_num_input_tokens(inputs)
            if not last:
                optimizer.step()
                optimizer.zero_grad()
                self._call("on_substep_end")
        self._call("on_pre_optimizer_step")
        optimizer.step()
        self._call("on_optimizer_step")
        if first is not None:
            first.check()
        rate: float = trainer._get_learning_rate()
        if not isinstance(trainer.lr_scheduler, ReduceLROnPlateau) and not _is_greedy(trainer.lr_scheduler):
            trainer.lr_scheduler.step()
        optimizer.zero_grad()
        self._note_loss(total / rows if rows else None)
        return rate

    def _first_step(self) -> FirstStep | None:
        """Before the first step that is to move weights: one with a learning rate, and with noise."""
        optimizer, trainer = self._run.optimizer, self._trainer
        moves = all(float(group["lr"]) for group in optimizer.param_groups) and optimizer.noise_multiplier
        if not moves or getattr(trainer, "_weights_have_moved", False):
            return None
        trainer._weights_have_moved = True
        return FirstStep(self._run.trained())

    def _note_loss(self, loss: Tensor | float | None) -> None:
        """Adds to what is logged next. Not private. A step without records on this rank adds what the others had."""
        trainer = self._trainer
        steps = trainer.state.global_step - trainer._globalstep_last_logged
        unusable = trainer.args.logging_nan_inf_filter and isinstance(loss, Tensor) and not torch.isfinite(loss)
        if loss is None or unusable:
            loss = trainer._tr_loss / max(1, steps)
        trainer._tr_loss = trainer._tr_loss + loss

    def _call(self, event: str) -> None:
        trainer = self._trainer
        trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)

    def _after(self, epoch: int, rate: float | None) -> None:
        trainer = self._trainer
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            None,
            self._model,
            self._trial,
            epoch,
            self._ignore_keys,
            self._start_time,
            learning_rate=rate,
        )


def _is_greedy(scheduler: Any) -> bool:
    """transformers' GreedyLR is stepped by what an evaluation finds, as ReduceLROnPlateau is."""
    return type(scheduler).__name__ == "GreedyLR"
