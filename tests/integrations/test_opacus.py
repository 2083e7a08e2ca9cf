"""Programs written for Opacus, after Opacus's documentation, run with the import changed; and each of its names."""

from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import ConfigurationError, PrivacyError
from lsg.integrations.opacus import (
    BatchMemoryManager,
    ModuleValidator,
    PrivacyEngine,
    get_noise_multiplier,
    plain_state_dict,
)


def image_classifier() -> nn.Module:
    """The convolutional network of its MNIST example, smaller."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 4, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10),
    )  # fmt: skip


class TextClassifier(nn.Module):
    """The mean of embeddings, and linear layers, of its IMDb example."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.pool = nn.Embedding(50, 16), nn.AdaptiveAvgPool1d(1)
        self.hidden, self.out = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(self.embedding(x).transpose(1, 2)).squeeze(2)
        return self.out(F.relu(self.hidden(pooled)))


class NameClassifier(nn.Module):
    """The LSTM over characters of its names example, with Opacus's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(50, 8), DPLSTM(8, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(x))[0][:, -1])


class LoRALinear(nn.Module):
    """A frozen layer with a trained low-rank part, as of its LoRA example."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.down, self.up = nn.Linear(size, rank, bias=False), nn.Linear(rank, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def images() -> TensorDataset:
    return TensorDataset(torch.randn(60, 1, 12, 12), torch.randint(0, 10, (60,)))


def texts() -> TensorDataset:
    return TensorDataset(torch.randint(0, 50, (60, 9)), torch.randint(0, 2, (60,)))


def prepared() -> nn.Module:
    model = image_classifier()
    model(torch.zeros(1, 1, 12, 12))  # makes the lazy layer
    return model


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "images": (prepared, images),
    "text": (TextClassifier, texts),
    "lstm": (NameClassifier, texts),
    "lora": (lambda: nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(72, 8), LoRALinear(8, 2)), texts),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_example_programs_run_with_the_import_changed(name: str) -> None:
    make, data = PROGRAMS[name]
    model = ModuleValidator.fix(make())
    assert ModuleValidator.validate(model, strict=True) == []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    privacy_engine = PrivacyEngine(accountant="rdp")
    model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data(), batch_size=20),
        epochs=2,
        target_epsilon=8.0,
        target_delta=1e-3,
        max_grad_norm=1.2,
    )
    for _ in range(2):
        model.train()
        with BatchMemoryManager(
            data_loader=train_loader, max_physical_batch_size=8, optimizer=optimizer
        ) as memory_safe_loader:
            for x, y in memory_safe_loader:
                assert len(x) <= 8
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert train_loader.logical.max_size is None
    assert 0 < privacy_engine.get_epsilon(1e-3) <= 8.0
    assert privacy_engine.get_privacy_spent(1e-3)[0] == privacy_engine.get_epsilon(1e-3)


def start() -> tuple[PrivacyEngine, nn.Module, Any, Any]:
    torch.manual_seed(0)
    model, engine = TextClassifier(), PrivacyEngine(accountant="rdp")
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(texts(), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )


def test_checkpoints_by_opacus_names(tmp_path: Path) -> None:
    engine, model, optimizer, loader = start()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    path = tmp_path / "run"
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1})
    again, other, other_optimizer, _ = start()
    assert again.load_checkpoint(path=path, module=other, optimizer=other_optimizer) == {"epoch": 1}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert again.get_epsilon(1e-3) == engine.get_epsilon(1e-3)
    with pytest.raises(ConfigurationError, match="not the model"):
        engine.save_checkpoint(path=path, module=nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match="not the one"):
        engine.save_checkpoint(path=path, optimizer=other_optimizer)


def test_a_step_hook_sees_noisy_gradients_at_real_steps_alone() -> None:
    _, model, optimizer, loader = start()
    seen: list[bool] = []
    optimizer.attach_step_hook(lambda own: seen.append(own is optimizer and model.out.weight.grad is not None))
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as batches:
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert seen == [True] * 3


def test_the_memory_manager_takes_lsgs_loader_and_a_whole_number() -> None:
    *_, loader = start()
    for size, words in ((0, "max_physical_batch_size=0"), (2.5, "max_physical_batch_size=2.5")):
        with pytest.raises(ConfigurationError, match=words), BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=size
        ):  # fmt: skip
            pass
    with pytest.raises(ConfigurationError, match="make_private returned"), BatchMemoryManager(
        data_loader=DataLoader(texts()), max_physical_batch_size=4
    ):  # fmt: skip
        pass


def test_models_are_validated_and_fixed() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    assert not ModuleValidator.is_valid(model)
    assert "BatchNorm2d" in str(ModuleValidator.validate(model)[0])
    with pytest.raises(ConfigurationError, match="BatchNorm2d"):
        ModuleValidator.validate(model, strict=True)
    assert isinstance(ModuleValidator.fix_and_validate(model)[1], nn.GroupNorm)


def test_a_frozen_batch_norm_in_evaluation_mode_trains_around_it() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model[1].eval().requires_grad_(False)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(30, 5), torch.randint(0, 2, (30,))), batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.train()
    with pytest.raises(PrivacyError, match="BatchNorm1d"):
        model(torch.randn(3, 5))


@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")
@pytest.mark.parametrize(("accountant", "tolerance"), [("rdp", 0.01), ("prv", 0.02)])
def test_the_noise_multiplier_is_opacus(accountant: str, tolerance: float) -> None:
    given = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 0.01, "epochs": 5}
    theirs = opacus.accountants.utils.get_noise_multiplier(**given, accountant=accountant)
    assert get_noise_multiplier(**given, accountant=accountant) == pytest.approx(theirs, rel=tolerance)
    with pytest.raises(ConfigurationError, match="epochs or steps"):
        get_noise_multiplier(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.01)


def test_keys_of_its_state_dicts() -> None:
    wrapped = opacus.GradSampleModule(TextClassifier())
    state = plain_state_dict(wrapped.state_dict())
    TextClassifier().load_state_dict(state)


def test_every_public_name_of_opacus_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "from-opacus.md").read_text()
    import inspect

    names = set(opacus.__all__)
    for function in (
        opacus.PrivacyEngine.__init__,
        opacus.PrivacyEngine.make_private,
        opacus.PrivacyEngine.make_private_with_epsilon,
        opacus.PrivacyEngine.save_checkpoint,
        opacus.PrivacyEngine.load_checkpoint,
    ):
        names |= set(inspect.signature(function).parameters) - {"self", "kwargs"}
    names |= {name for name in vars(opacus.PrivacyEngine) if not name.startswith("_")}
    names |= {name for name in vars(opacus.optimizers.DPOptimizer) if not name.startswith("_")}
    names |= {"p.grad_sample", "model._module"}  # not of a class, but in many programs
    missing = sorted(name for name in names if f"`{name}`" not in page and f"`{name}(" not in page)
    assert not missing
