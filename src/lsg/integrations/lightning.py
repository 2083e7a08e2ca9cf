"""`PrivateTraining`: a callback that makes Lightning's loop fit for a private model, optimizer and loader.

    model, optimizer, loader = engine.make_private(module=lightning_module.model, ...)
    trainer = Trainer(callbacks=[PrivateTraining(engine, optimizer, loader, delta=1e-5)], ...)
    trainer.fit(lightning_module, loader)  # whose configure_optimizers returns `optimizer`

The class is made when it is asked for: Lightning is imported then, and not before.
"""

import functools
from typing import Any

from lsg.engine import PrivacyEngine
from lsg.errors import ConfigurationError
from lsg.extras import needs_extra
from lsg.sampling.loader import PrivateDataLoader
from lsg.step.optimizer import PrivateOptimizer

_KEY = "lsg"  # of the engine's state in a checkpoint of Lightning's


def __getattr__(name: str) -> Any:
    if name == "PrivateTraining":
        return _private_training()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _private_training() -> type:
    with needs_extra("lightning", "lsg.integrations.lightning"):
        from lightning.pytorch import Callback

    class PrivateTraining(Callback):
        """engine, optimizer, loader: of one make_private. Logs ε at `delta`, steps schedulers at logical steps alone,
        has the length of each epoch read anew, and keeps what was spent in Lightning's checkpoints. Save those at the
        end of epochs, and keep them secret: they can undo the noise."""

        def __init__(
            self, engine: PrivacyEngine, optimizer: PrivateOptimizer, loader: PrivateDataLoader, *, delta: float
        ) -> None:
            self.engine, self.optimizer, self.loader, self.delta = engine, optimizer, loader, delta

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage == "fit":
                _refuse_settings(trainer)
                trainer.reload_dataloaders_every_n_epochs = 1  # epochs of Poisson batches differ in length
                _step_schedulers_at_logical_steps(pl_module, self.optimizer)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.train_dataloader is not self.loader:
                raise ConfigurationError(
                    "Lightning trains on another loader than the one that make_private returned: give that one to "
                    "trainer.fit, with Trainer(use_distributed_sampler=False)"
                )
            given = [getattr(held, "optimizer", held) for held in trainer.optimizers]
            if given != [self.optimizer]:
                raise ConfigurationError(
                    "configure_optimizers must return the one optimizer that make_private returned, and no other"
                )
            _refuse_more_epochs_than_planned(trainer, self.engine, self.loader)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
            if self.optimizer.stepped and len(self.engine.accountant) % trainer.log_every_n_steps == 0:
                pl_module.log("epsilon", self.engine.get_epsilon(self.delta), prog_bar=True, batch_size=1)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.loader.finish_epoch()  # Lightning counts batches, and does not ask for one after the last

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint[_KEY] = self.engine.state_dict()

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            if _KEY not in checkpoint:
                raise ConfigurationError("the checkpoint does not say what its run has spent: it cannot be continued")
            self.engine.load_state_dict(checkpoint[_KEY])

    return PrivateTraining


def _refuse_settings(trainer: Any) -> None:
    """Settings of Lightning's Trainer with which a private run would not be what it says."""
    refused = {
        "accumulate_grad_batches": (trainer.accumulate_grad_batches, 1, "max_physical_batch_size of make_private"),
        "gradient_clip_val": (trainer.gradient_clip_val, None, "max_grad_norm of make_private"),
        "limit_train_batches": (trainer.limit_train_batches, 1.0, "max_epochs"),
        "overfit_batches": (trainer.overfit_batches, 0.0, "a smaller data set"),
    }
    for name, (value, plain, instead) in refused.items():
        if value not in (plain, 0, None, 0.0) and value != plain:
            raise ConfigurationError(f"Lightning's Trainer({name}={value!r}) changes what a step is: use {instead}")
    if str(trainer.precision).startswith("16"):
        raise ConfigurationError(
            f"Lightning's Trainer(precision={trainer.precision!r}) scales gradients and skips steps because of the "
            "data: use 'bf16-mixed'"
        )
    if trainer.max_steps not in (-1, None):
        raise ConfigurationError(
            f"Lightning's Trainer(max_steps={trainer.max_steps}) counts micro-batches: use max_epochs"
        )


def _refuse_more_epochs_than_planned(trainer: Any, engine: PrivacyEngine, loader: PrivateDataLoader) -> None:
    """Of a run with a target: it would end in the middle of fit, with an error and without what follows training."""
    target, plan, epochs = engine.run.step_accounting.target, loader.logical.plan, trainer.max_epochs
    if target is None or engine.run.optimizer.noise_multiplier > target.planned.noise_multiplier:
        return  # with more noise than was planned more steps fit
    if epochs in (None, -1) or plan.accounted(epochs)[1] > target.planned.steps:
        planned = 1
        while plan.accounted(planned + 1)[1] <= target.planned.steps:
            planned += 1
        raise ConfigurationError(
            f"Lightning's Trainer(max_epochs={epochs}): noise was calibrated for {planned}, and target_epsilon would "
            f"end training with an error there: give max_epochs={planned}, or raise make_private's epochs"
        )


def _step_schedulers_at_logical_steps(pl_module: Any, optimizer: PrivateOptimizer) -> None:
    """Lightning steps a scheduler of interval "step" after each micro-batch."""
    plain = pl_module.lr_scheduler_step

    def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
        if optimizer.stepped:
            plain(scheduler, metric)

    pl_module.lr_scheduler_step = lr_scheduler_step
