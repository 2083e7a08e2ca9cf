"""Lightning's loop with the callback: all logical steps, schedules by logical steps, what was spent kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import ConfigurationError, PrivacyEngine

L = pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own


def setting(**options: Any) -> tuple[Any, Any, Any, Any]:
    from lsg.integrations.lightning import PrivateTraining

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Linear(5, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(40, 5, generator=generator), torch.randint(0, 2, (40,), generator=generator))
    module, engine = Module(), PrivacyEngine(accountant="rdp")
    planned = options.pop("planned", None)
    target = {"target_epsilon": 8.0, "target_delta": 1e-3, "epochs": planned}
    make = engine.make_private_with_epsilon if planned else engine.make_private
    _, optimizer, loader = make(
        **(target if planned else {"noise_multiplier": 1.0}),
        module=module.model,
        optimizer=torch.optim.SGD(module.model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=10),
        max_grad_norm=1.0,
        max_physical_batch_size=4,
        noise_generator=torch.Generator().manual_seed(5),
    )
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    settings |= {"accelerator": "cpu", "enable_progress_bar": False, "max_epochs": 3}
    callback = PrivateTraining(engine, optimizer, loader, delta=1e-3)
    return L.Trainer(**settings | options, callbacks=[callback]), module, engine, loader


def test_all_logical_steps_are_taken_and_schedules_count_them() -> None:
    trainer, module, engine, loader = setting()
    trainer.fit(module, loader)
    assert len(engine.accountant) == loader.steps(3) == 12
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**12)
    assert 0 < float(trainer.callback_metrics.get("epsilon", 1.0)) <= engine.get_epsilon(1e-3)


def test_a_checkpoint_knows_what_was_spent(tmp_path: Path) -> None:
    trainer, module, engine, loader = setting()
    trainer.fit(module, loader)
    half, other, first, batches = setting(max_epochs=2)
    half.fit(other, batches)
    half.save_checkpoint(tmp_path / "half.ckpt")
    rest, again, second, batches = setting(max_epochs=3)
    rest.fit(again, batches, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert second.get_epsilon(1e-3) == engine.get_epsilon(1e-3) > first.get_epsilon(1e-3)
    assert torch.equal(again.model.weight, module.model.weight)


@pytest.mark.parametrize(
    "option",
    [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}, {"limit_train_batches": 3}, {"max_steps": 5}],
    ids=str,
)
def test_settings_that_change_a_step_are_refused(option: dict[str, Any]) -> None:
    trainer, module, _, loader = setting(**option)
    with pytest.raises(ConfigurationError, match=next(iter(option))):
        trainer.fit(module, loader)


def test_another_loader_is_refused() -> None:
    trainer, module, _, loader = setting()
    with pytest.raises(ConfigurationError, match="another loader"):
        trainer.fit(module, DataLoader(loader.dataset, batch_size=10))


@pytest.mark.parametrize("epochs", [4, -1])
def test_more_epochs_than_the_noise_is_for_are_refused_before_the_first(epochs: int) -> None:
    trainer, module, engine, loader = setting(planned=3, max_epochs=epochs)
    with pytest.raises(ConfigurationError, match=rf"max_epochs={epochs}\): noise was calibrated for 3.*max_epochs=3"):
        trainer.fit(module, loader)
    assert len(engine.accountant) == 0
    trainer, module, engine, loader = setting(planned=3, max_epochs=3)
    trainer.fit(module, loader)
    assert len(engine.accountant) == 12
    trainer, module, engine, loader = setting(planned=3, max_epochs=4)
    engine.run.optimizer.noise_multiplier *= 2  # more than was planned lasts longer
    trainer.fit(module, loader)
    assert len(engine.accountant) == 16
