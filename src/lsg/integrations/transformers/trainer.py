"""`PrivateTrainer`: transformers' Trainer, whose steps are private logical steps.

Trainer keeps what is Trainer's: arguments, callbacks, logs, evaluation, saving, the hub. Sampling, clipping, noise and
accounting are the engine's. One step of Trainer is one logical batch, in as many micro-batches as it needs.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import ProgressCallback, Seq2SeqTrainer, Trainer
from transformers.utils import is_datasets_available

from lsg.accounting.rounding import epsilon_text
from lsg.checkpoint import load_checkpoint, save_checkpoint
from lsg.engine import PrivacyEngine
from lsg.errors import AnotherRun, ConfigurationError, PrivacyError
from lsg.integrations.transformers.arguments import PrivacyArguments
from lsg.integrations.transformers.batches import Batches, count_units, logical_batches
from lsg.integrations.transformers.checkpoints import RUN_FILE, check_complete, last_complete
from lsg.integrations.transformers.epochs import EpochLoop
from lsg.integrations.transformers.losses import (
    LossOfRecords,
    PerSequenceSmoother,
    averages_over_tokens,
    base_model,
    is_causal,
    logits_of,
    with_decoder_inputs,
)
from lsg.integrations.transformers.private_run import PrivateRun
from lsg.integrations.transformers.refusals import check_data, check_threshold, check_training_arguments
from lsg.integrations.transformers.statement import Facts, add_to_card, write_statement
from lsg.losses import per_sequence

_NEEDED = ("_inner_training_loop", "_init_training_state", "_prepare_for_training", "_run_epoch")
_NOT_PUBLISHED = ("loss", "train_loss", "grad_norm", "mean_token_accuracy", "entropy")  # of training data, no noise

_MUST_BE_THE_SAME = (
    "num_train_epochs or max_steps (the noise is calibrated for all steps), per_device_train_batch_size, "
    "gradient_accumulation_steps, the number of processes, the data, and PrivacyArguments with target_epsilon and "
    "target_delta"
)

_TrainerLike: Any = object  # what the mixin is put before: a Trainer, whose attributes it uses


class PrivateTrainerMixin(_TrainerLike):
    """Put it before a Trainer's class: `class MyPrivateTrainer(PrivateTrainerMixin, MyTrainer)`.

    Takes what that class takes, and `privacy=PrivacyArguments(...)`. `engine` is the PrivacyEngine of the last run.
    """

    label_smoother: Any
    compute_loss_func: Any
    _batches: Batches  # of the run under way, or the last one
    lr_scheduler: Any
    _created_lr_scheduler: bool

    def __init__(self, *args: Any, privacy: PrivacyArguments, **kwargs: Any) -> None:
        if not isinstance(privacy, PrivacyArguments):
            raise ConfigurationError(f"privacy={privacy!r} must be PrivacyArguments(...)")
        missing = [name for name in _NEEDED if not hasattr(Trainer, name)]
        if missing:
            raise ConfigurationError(f"PrivateTrainer needs transformers 5: this Trainer has no {missing[0]}")
        self.privacy = privacy
        self.engine: PrivacyEngine | None = None
        self._run: PrivateRun | None = None
        super().__init__(*args, **kwargs)
        check_training_arguments(self.args)
        check_threshold(self.args, privacy.max_grad_norm)
        check_data(self.data_collator)
        self._refuse_own_sampler()
        if self.label_smoother is not None:
            self.label_smoother = PerSequenceSmoother(self.args.label_smoothing_factor)
        if self.compute_loss_func is not None:
            self.compute_loss_func = LossOfRecords(self.compute_loss_func)
        self._units = self._unit_ids()
        self.delta = 0.0
        if self.train_dataset is not None:
            self.delta = privacy.delta_for(count_units(self._units, self.train_dataset))

    # -- what a user calls -------------------------------------------------------------------------------------------
    def get_epsilon(self, delta: float | None = None) -> float:
        """The ε spent so far, at target_delta unless told otherwise."""
        return 0.0 if self.engine is None else self.engine.get_epsilon(self.delta if delta is None else delta)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. Goes on from a checkpoint bit by bit, with what was spent, or refuses."""
        if resume_from_checkpoint:
            folder = Path(self.args.output_dir if resume_from_checkpoint is True else resume_from_checkpoint)
            if resume_from_checkpoint is True:
                folder = last_complete(folder)
            check_complete(folder)
            resume_from_checkpoint = str(folder)
        elif self.engine is not None and len(self.engine.accountant):
            raise ConfigurationError(
                f"this trainer has spent {len(self.engine.accountant)} steps already, and another run would not count "
                "them: train(resume_from_checkpoint=True) goes on, a new PrivateTrainer begins a run of its own"
            )
        return super().train(resume_from_checkpoint or None, *args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigurationError(
            "hyperparameter_search: each trial spends privacy on the same records, and nobody would add it up. "
            "`lsg tune` finds settings on public data, on a part set aside, or at a price that epsilon includes"
        )

    # -- data and steps ------------------------------------------------------------------------------------------------
    def get_train_dataloader(self) -> DataLoader[Any]:
        """The records, how they are collated, and how many a device gets at once, as Trainer's own. Which of them enter
        a step is not its business: lsg samples."""
        dataset, collate = self.train_dataset, self.data_collator
        if dataset is None:
            raise ConfigurationError("PrivateTrainer: training needs a train_dataset")
        if is_datasets_available() and hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        workers = self.args.dataloader_num_workers
        return DataLoader(
            dataset,
            batch_size=self.args.train_batch_size,
            collate_fn=collate,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers and workers > 0,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(self.args, "dataloader_multiprocessing_context", None),
        )

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Trainer's numbers, in logical steps: epochs, steps of the first, records, records seen, batch size, steps of
        the first again, all steps."""
        self._batches = logical_batches(dataloader, self._units, args)
        plan = self._batches.plan
        self.delta = self.privacy.delta_for(plan.records)
        steps = args.max_steps if args.max_steps > 0 else max(1, round(args.num_train_epochs / plan.sample_rate))
        epochs = 1
        while plan.first_step(epochs) < steps:
            epochs += 1
        seen = steps * plan.expected_batch_size
        return epochs, plan.steps(1), plan.records, seen, plan.expected_batch_size, plan.steps(1), steps

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        super()._init_training_state(max_steps, *args, **kwargs)
        plan, done, epoch = self._batches.plan, self.state.global_step, 0
        while plan.first_step(epoch + 1) <= done:
            epoch += 1
        return epoch, done - plan.first_step(epoch)

    def _unit_ids(self) -> list[Any] | None:
        ids = self.privacy.unit_of
        if isinstance(ids, str):
            if ids not in (getattr(self.train_dataset, "column_names", None) or ()):
                raise ConfigurationError(f"PrivacyArguments(unit_of={ids!r}): the training data have no such column")
            ids = self.train_dataset[ids]
        return None if ids is None else (ids.tolist() if hasattr(ids, "tolist") else list(ids))

    def _refuse_own_sampler(self) -> None:
        for base in type(self).__mro__:
            if "_get_train_sampler" in vars(base) and base is not Trainer:
                raise ConfigurationError(
                    f"{base.__name__} has a sampler of its own (_get_train_sampler): epsilon holds for the Poisson "
                    "samples that lsg draws, so take it out"
                )
        if not hasattr(self.train_dataset, "__len__") and self.train_dataset is not None:
            raise ConfigurationError(
                f"train_dataset is a {type(self.train_dataset).__name__} without a length: Poisson sampling needs to "
                "know and to reach every record; use a map-style data set"
            )

    # -- training ------------------------------------------------------------------------------------------------------
    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Autocast is entered around the loss, not put into the model's forward, which has rules attached."""
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs | {"mixed_precision": "no"})
        return found

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            if self._run is not None:
                self._run.close()
                self.optimizer = self._run.optimizer.original_optimizer

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume: str | None) -> tuple[Any, Any]:
        """Make model, optimizer and loader private, once all else that belongs to them is there."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        model = self.accelerator.prepare_model(self.model)
        run = PrivateRun(self.privacy, self._units, self.delta, max_steps, self.args, self._batches)
        self.engine = run.engine
        loader = run.attach(model, self.optimizer)
        self._run = run  # there is one from here on: what attach refuses is told as it is
        self.optimizer = run.optimizer
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = model
        if resume is not None:
            self._load_optimizer_and_scheduler(resume)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        return model, loader

    def _run_epoch(
        self,
        *,
        model: nn.Module,
        epoch: int,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
        **_: Any,
    ) -> None:
        assert self._run is not None
        done = 0
        if resume_from_checkpoint is not None and epoch == epochs_trained:
            done = steps_trained_in_current_epoch
            self._load_rng_state(resume_from_checkpoint)
        EpochLoop(self, self._run, model, trial, ignore_keys_for_eval, start_time).run(epoch, done)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """A mean of the records' own losses. In training no number of other records' tokens enters it."""
        base, labels = base_model(model), inputs.get("labels")
        if not torch.is_grad_enabled() or self.compute_loss_func is not None or not self._loss_is_outside(base, labels):
            return super().compute_loss(model, inputs, return_outputs, None)
        assert isinstance(labels, Tensor)
        rest = with_decoder_inputs(base, {name: v for name, v in inputs.items() if name != "labels"}, labels)
        outputs = model(**rest)
        smoothing = self.label_smoother.epsilon if self.label_smoother is not None else 0.0
        loss = per_sequence(logits_of(outputs), labels, shift=is_causal(base), label_smoothing=smoothing)
        return (loss, outputs) if return_outputs else loss

    def _loss_is_outside(self, base: nn.Module, labels: Any) -> bool:
        """Whether the loss is computed here, and the model gets no labels."""
        return averages_over_tokens(base, labels)

    # -- checkpoints, logs, what is published --------------------------------------------------------------------------
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._run is None:
            raise PrivacyError("a checkpoint can be saved while the trainer trains; save_model() saves the model")
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_checkpoint(
            Path(output_dir) / RUN_FILE, engine=self._run.engine, extra={"scheduler": self.lr_scheduler.state_dict()}
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self._run is not None
        try:
            extra = load_checkpoint(Path(checkpoint) / RUN_FILE, engine=self._run.engine)
        except AnotherRun as error:
            raise ConfigurationError(f"{error}: {_MUST_BE_THE_SAME}") from None
        epoch, logical, _ = self._run.optimizer.clock.next_place
        if self._batches.plan.first_step(epoch) + logical != self.state.global_step:
            raise ConfigurationError(
                f"checkpoint '{checkpoint}': {RUN_FILE} stands in epoch {epoch} after step {logical} of it, and "
                f"trainer_state.json after step {self.state.global_step}: the files do not belong together"
            )
        self.lr_scheduler.load_state_dict(extra["scheduler"])

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The ε spent stands in every line of the log, and at the progress bar. The loss beside it is NOT private."""
        if self.engine is not None:
            logs["epsilon"] = self.get_epsilon()
            for callback in self.callback_handler.callbacks:
                bar = callback.training_bar if isinstance(callback, ProgressCallback) else None
                if bar is not None:
                    bar.set_postfix_str(f"epsilon {epsilon_text(logs['epsilon'])}")
        super().log(logs, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self._run is not None:
            write_statement(output_dir or self.args.output_dir, self._facts())

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The card of Trainer without what was computed from training records without noise, and with the statement."""
        history = self.state.log_history
        self.state.log_history = [{k: v for k, v in row.items() if k not in _NOT_PUBLISHED} for row in history]
        try:
            super().create_model_card(*args, **kwargs)
        finally:
            self.state.log_history = history
        if self._run is not None and self.is_world_process_zero():
            add_to_card(Path(self.args.output_dir) / "README.md", self._facts())

    def _facts(self) -> Facts:
        assert self._run is not None
        return Facts(
            self.privacy,
            self._batches.plan,
            self._run.engine,
            self.delta,
            self._batches.rows,
            self._run.optimizer.noise_multiplier,
            self._run.max_grad_norm,
        )


class PrivateTrainer(PrivateTrainerMixin, Trainer):
    """transformers' Trainer with `privacy=PrivacyArguments(...)`.

    per_device_train_batch_size x gradient_accumulation_steps x processes is the expected batch size; the first alone
    bounds memory. Steps, schedules, logs and the progress bar count logical steps.
    """


class PrivateSeq2SeqTrainer(PrivateTrainerMixin, Seq2SeqTrainer):
    """The same of Seq2SeqTrainer, which evaluates by generating."""
