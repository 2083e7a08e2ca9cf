"""Opacus's example programs, each rebuilt small from what it does: unchanged but for the import, or refused by name.

Those for images, texts, an LSTM over characters and LoRA with a target ε are in `test_opacus.py`, the GAN is in
`test_opacus_gan.py`. What each does, and what comes of it, stands in docs/from-opacus.md.
"""

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.data_loader import DPDataLoader
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset, random_split

from lsg import ConfigurationError, PrivacyError
from lsg.integrations.opacus import PrivacyEngine

PAGE = (Path(__file__).parents[2] / "docs" / "from-opacus.md").read_text()
# Of its folders examples/ and tutorials/, as of September 2025.
EXAMPLES = (
    "mnist", "cifar10", "imdb", "char-lstm-classification", "dcgan", "mnist_lightning",
    "vision_benchmark", "fsdp_example", "fsdp_llama3", "tensor_parallelism_toy",
    "tensor_parallelism_llama", "building_image_classifier", "building_text_classifier",
    "building_lstm_name_classifier", "ddp_tutorial", "guide_to_grad_sampler", "guide_to_module_validator",
    "intro_to_advanced_features",
)  # fmt: skip


def test_the_page_has_each_of_its_examples() -> None:
    assert not [name for name in EXAMPLES if f"`{name}`" not in PAGE]


def images(size: int, channels: int = 3, records: int = 40) -> TensorDataset:
    return TensorDataset(torch.randn(records, channels, size, size), torch.arange(records) % 10)


def convolutions(channels: int = 3) -> nn.Sequential:
    """Of its CIFAR-10 example, narrower."""
    blocks: list[nn.Module] = []
    for before, after in ((channels, 4), (4, 8), (8, 8)):
        blocks += [nn.Conv2d(before, after, 3, stride=1, padding=1), nn.ReLU(), nn.AvgPool2d(2, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(1, -1), nn.Linear(8, 10))


def private(module: nn.Module, data: Any, **options: Any) -> tuple[PrivacyEngine, nn.Module, Any, Any]:
    engine = options.pop("privacy_engine", None) or PrivacyEngine(accountant="rdp", secure_mode=False)
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(module.parameters(), lr=0.1, momentum=0)
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=10)
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    return engine, *engine.make_private(module=module, optimizer=optimizer, data_loader=loader, **settings)


def train(model: nn.Module, optimizer: Any, loader: Any) -> None:
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()


def test_mnist_several_runs_with_the_loader_of_the_first() -> None:
    loader: Any = DataLoader(images(8, channels=1), batch_size=10)
    for _ in range(2):
        engine, model, optimizer, loader = private(convolutions(1), loader)
        train(model, optimizer, loader)
        assert math.isfinite(engine.accountant.get_epsilon(delta=1e-3)) and len(engine.accountant) == 4


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_cifar_clipped_per_layer_scheduled_by_hand_saved_by_torch(mode: str, per_layer: bool) -> None:
    model = convolutions()
    trained = [p for p in model.parameters() if p.requires_grad]
    _, model, optimizer, loader = private(
        model,
        images(8),
        optimizer=torch.optim.RMSprop(model.parameters(), lr=0.01),
        max_grad_norm=[10.0 / math.sqrt(len(trained))] * len(trained) if per_layer else 10.0,
        clipping="per_layer" if per_layer else "flat",
        grad_sample_mode=mode,
    )
    for epoch in range(1, 3):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.5 * (1 + math.cos(math.pi * epoch / 3))
        train(model, optimizer, loader)
        model.eval()
        with torch.no_grad():
            assert model(torch.randn(5, 3, 8, 8)).shape == (5, 10)
    saved = io.BytesIO()
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    convolutions().load_state_dict(torch.load(saved)["state_dict"])


@pytest.mark.parametrize("mode", ["no_op", "ghost", "ghost_fsdp"])
def test_other_ways_to_gradients_are_refused_by_name(mode: str) -> None:
    with pytest.raises(ConfigurationError, match=f"grad_sample_mode='{mode}'.*Leave the argument out"):
        private(convolutions(), images(8), grad_sample_mode=mode)


class Sentiment(nn.Module):
    """Of its IMDb example, `squeeze()` without a dimension included, which fails for a batch of one record."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pool = nn.Embedding(50, 16), nn.AdaptiveAvgPool1d(1)
        self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(self.emb(x).transpose(1, 2)).squeeze()
        return self.fc2(F.relu(self.fc1(pooled)))


def padded(batch: list[Any]) -> tuple[Tensor, Tensor]:
    return pad_sequence([text for text, _ in batch], batch_first=True), torch.stack([label for _, label in batch])


def texts() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 9, (40,), generator=generator).tolist()
    return [(torch.randint(1, 50, (n,), generator=generator), torch.tensor(n % 2)) for n in lengths]


def test_imdb_without_poisson_sampling() -> None:
    loader = DataLoader(texts(), batch_size=10, collate_fn=padded, shuffle=True)
    engine, model, optimizer, loader = private(Sentiment(), loader, poisson_sampling=False)
    for data, label in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(data).squeeze(1), label).backward()
        optimizer.step()
    assert engine.accountant.history == [(1.0, 1.0, 1)]  # an epoch, in which each record is in one batch


@pytest.mark.parametrize("kind", [DPRNN, DPGRU, DPLSTM])
@pytest.mark.parametrize("layers", [1, 2])
def test_names_by_their_characters(kind: type[nn.Module], layers: int) -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 8)
            self.rnn = kind(8, 12, num_layers=layers, bidirectional=False, batch_first=True)
            self.out_layer = nn.Linear(12, 3)

        def forward(self, x: Tensor, hidden: Any = None) -> Tensor:
            return self.out_layer(self.rnn(self.embedding(x), hidden)[0][:, -1, :])

    part, _ = random_split(texts(), [32, 8])  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(part, batch_size=8, collate_fn=padded, pin_memory=False)
    engine, model, optimizer, loader = private(Names(), loader)
    train(model, optimizer, loader)
    assert len(engine.accountant) == 4


def test_its_vision_benchmark_steps_on_one_batch_outside_of_the_loader() -> None:
    engine, model, optimizer, loader = private(convolutions(), images(8), poisson_sampling=False)
    data, target = torch.randn(10, 3, 8, 8), torch.arange(10)
    with pytest.warns(UserWarning, match="did not hand out.*Iterate over the loader"):
        for _ in range(2):
            output = model(data)
            optimizer.zero_grad()
            F.cross_entropy(output, target).backward()
            optimizer.step()
    train(model, optimizer, loader)  # its other mode
    assert [rate for _, rate, _ in engine.accountant.history] == [1.0] * len(engine.accountant.history)


def lightning_module(L: Any) -> Any:
    class Classifier(L.LightningModule):
        """Its training step, and `make_private` on the module itself."""

        def __init__(self) -> None:
            super().__init__()
            self.fc, self.privacy_engine = nn.Linear(5, 2), PrivacyEngine(accountant="rdp")

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

        def make_private(self, loader: Any) -> Any:
            sgd = torch.optim.SGD(self.parameters(), lr=0.1)
            _, self.private_optimizer, loader = self.privacy_engine.make_private(
                module=self, optimizer=sgd, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
            )
            return loader

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            if not hasattr(self, "private_optimizer"):  # as there: the loader that comes back is dropped
                self.make_private(self.trainer.fit_loop._data_source.dataloader())
            return self.private_optimizer

    return Classifier()


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_its_lightning_example_is_refused_by_name_and_runs_with_the_callback() -> None:
    L = pytest.importorskip("lightning.pytorch")
    from lsg.integrations.lightning import PrivateTraining

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "enable_progress_bar": False, "max_epochs": 2}
    data = TensorDataset(torch.randn(40, 5), torch.randint(0, 2, (40,)))
    with pytest.raises(PrivacyError, match=r"Lightning trains on batches that its own sampler drew.*make_private"):
        L.Trainer(**quiet).fit(lightning_module(L), DPDataLoader.from_data_loader(DataLoader(data, batch_size=10)))
    module = lightning_module(L)
    loader = module.make_private(DPDataLoader.from_data_loader(DataLoader(data, batch_size=10)))
    callback = PrivateTraining(module.privacy_engine, module.private_optimizer, loader, delta=1e-3)
    L.Trainer(**quiet, callbacks=[callback]).fit(module, loader)
    assert len(module.privacy_engine.accountant) == 8
