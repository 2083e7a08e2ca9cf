"""What would break the guarantee without a word, refused or warned of by name."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import LSG, ConfigurationError, PrivacyEngine, PrivacyError

N, BATCH = 24, 6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def data() -> TensorDataset:
    x = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(N) % 3)


def private(model: Any = None, **options: Any) -> tuple[PrivacyEngine, Any, Any, Any]:
    engine, model = PrivacyEngine(accountant="rdp"), network() if model is None else model
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "method": LSG(rank=1)} | options
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    loader = settings.pop("data_loader", None) or DataLoader(data(), batch_size=BATCH)
    return engine, *engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **settings)


X = torch.randn(4, 5)


def test_parameters_that_are_replaced_are_refused_by_name() -> None:
    def assign(model: nn.Module) -> None:
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    def put(model: Any) -> None:
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())

    def replace(model: Any) -> None:
        model[2] = nn.Linear(8, 3)

    def empty(model: nn.Module) -> None:
        model.to("meta")
        model.to_empty(device="cpu")

    for change in (assign, put, replace, empty):
        _, model, optimizer, _ = private()
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        change(model)
        with pytest.raises(PrivacyError, match=r"parameter '\d\.weight' was replaced after make_private.*assign=True"):
            model(X)
        with pytest.raises(PrivacyError, match="was replaced"):
            optimizer.step()


def test_a_tied_parameter_that_is_untied_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    _, model, _, _ = private(model)
    model[1].weight = nn.Parameter(torch.randn(7, 4))
    with pytest.raises(PrivacyError, match=r"'1\.weight' was replaced"):
        model(torch.arange(6).view(3, 2))


def test_values_that_are_loaded_and_modules_that_are_wrapped_are_let_through() -> None:
    _, model, optimizer, _ = private()
    model(X).sum().backward()
    optimizer.step()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model[2] = nn.Sequential(model[2])  # as compilers do
    for _ in range(2):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_backward_hooks_are_warned_of_by_name() -> None:
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        model = network()
        getattr(model[0], register)(lambda *args: None)
        with pytest.warns(UserWarning, match=r"module '0' \(Linear\) has a backward hook"):
            private(model)
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = network()
        getattr(model[2].weight, register)(lambda *args: None)
        with pytest.warns(UserWarning, match=r"parameter '2.weight' has a gradient hook.*register_step_pre_hook"):
            private(model)


def test_a_model_made_private_again_has_no_hooks_left() -> None:
    engine, model, _, _ = private()
    engine.detach()
    engine, model, _, _ = private(model)
    private(copy.deepcopy(model))


def test_grad_scaler_is_refused_by_name() -> None:
    _, model, optimizer, _ = private()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(X).sum()).backward()
    with pytest.raises(ConfigurationError, match=r"GradScaler.*bfloat16"):
        scaler.step(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(X).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(ConfigurationError, match="GradScaler"):
        scaler.step(optimizer)
    off = torch.amp.GradScaler("cpu", enabled=False)
    optimizer.zero_grad()
    off.scale(model(X).sum()).backward()
    off.step(optimizer)
    assert optimizer.stepped


def test_what_opacus_made_private_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"GradSampleModule.*to_standard_module"):
        private(GradSampleModule(network()))
    with pytest.raises(ConfigurationError, match=r"module '0' \(GradSampleModule\)"):
        private(nn.Sequential(GradSampleModule(network())))
    with pytest.raises(ConfigurationError, match=r"module 'model' \(Sequential\) carries Opacus's"):
        private(GradSampleModule(network())._module)
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DPOptimizer(plain, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=BATCH)
    with pytest.raises(ConfigurationError, match=r"DPOptimizer.*original_optimizer"):
        private(model, optimizer=optimizer)
    private(GradSampleModule(model).to_standard_module(), optimizer=plain)


def test_opacus_poisson_loader_is_taken_for_what_it_is() -> None:
    *_, loader = private(data_loader=DPDataLoader(data(), sample_rate=0.25))
    assert loader.sample_rate == 0.25 and type(loader.logical).__module__ == "lsg.sampling.poisson_batches"


def train(forward: Any, **options: Any) -> None:
    """An epoch of a loss of `forward`."""
    _, model, optimizer, loader = private(**options)
    for x, y in loader:
        forward(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_other_records_than_the_loaders_are_warned_of() -> None:
    def mixed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + model(torch.randn(len(x), 5)).square().mean()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(mixed)
    assert len(seen) == 1  # once is enough
    assert "two forwards with different inputs" in str(seen[0].message)


def test_several_forwards_of_the_same_records_are_let_through() -> None:
    def twice(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            model(torch.randn(len(x), 5))
        return F.cross_entropy(model(x), y) + F.cross_entropy(model(x.view_as(x)), y)

    train(twice)  # warnings are errors here
    train(twice, max_physical_batch_size=2)
