"""Training loops: models changed after make_private, second backwards, scalers, other libraries' wrappers."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, PrivacyEngine
from tests.adversarial.cases.collection import Two, W, loop, vectors
from tests.adversarial.cases.training import C, expect, expect_influence, expect_update, private, weights
from tests.adversarial.oracle import WrongError


def _squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Two().double()


def _records(size: int = 4, seed: int = 0) -> Tensor:
    return vectors(size, seed=seed)[0].args[0]


def _checked_step(model: nn.Module, plain: nn.Module, optimizer: Any, x: Tensor) -> None:
    plain.load_state_dict(model.state_dict())
    before = weights(model)
    _squares(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()
    expect_update(plain, model, before, _squares, x)


@loop("refused")
def hook_added_after_make_private() -> None:
    """The first batch was clean."""
    model = _model()
    plain = copy.deepcopy(model)
    _, optimizer, _ = private(model)
    _checked_step(model, plain, optimizer, _records())
    model.first.register_forward_hook(lambda m, args, out: out - out.mean(0))
    x = _records(seed=1)
    before = weights(model)
    _squares(model, x).backward()
    optimizer.step()
    plain.first.register_forward_hook(lambda m, args, out: out - out.mean(0))
    expect_update(plain, model, before, _squares, x)


def _step_with_other_parameters(model: nn.Module, plain: nn.Module, optimizer: Any, x: Tensor) -> None:
    """Parameters that the optimizer does not have are not trained, as ever; but the model must compute with them."""
    plain.load_state_dict(model.state_dict())
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    output = model(x)
    expect(output.detach(), plain(x).detach(), "another output")
    output.square().sum().backward()
    optimizer.step()
    after = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    moved = torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)])
    if float(moved.norm()) > 1.001 * C * len(x):
        raise WrongError("influence: the weights moved by more than all records may move them")


@loop("right or refused")
def state_assigned_after_make_private() -> None:
    """Puts other parameter objects into the model than the optimizer and the rules know."""
    model = _model()
    plain = copy.deepcopy(model)
    _, optimizer, _ = private(model)
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
    _step_with_other_parameters(model, plain, optimizer, _records())


@loop("right or refused")
def state_assigned_between_steps() -> None:
    model = _model()
    plain = copy.deepcopy(model)
    _, optimizer, _ = private(model)
    _checked_step(model, plain, optimizer, _records())
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
    _step_with_other_parameters(model, plain, optimizer, _records(seed=1))


@loop("right or refused")
def parameter_replaced() -> None:
    model = _model()
    plain = copy.deepcopy(model)
    _, optimizer, _ = private(model)
    _checked_step(model, plain, optimizer, _records())
    model.first.weight = nn.Parameter(model.first.weight.detach() * 2)
    _step_with_other_parameters(model, plain, optimizer, _records(seed=1))


@loop("right or refused")
def layer_replaced() -> None:
    """The new layer has no rule."""
    model = _model()
    plain = copy.deepcopy(model)
    _, optimizer, _ = private(model)
    _checked_step(model, plain, optimizer, _records())
    model.first = nn.Linear(W, W).double()
    _step_with_other_parameters(model, plain, optimizer, _records(seed=1))


@loop("right or refused")
def weights_loaded() -> None:
    """Copied into the parameters that are there: fine."""
    model = _model()
    plain = copy.deepcopy(model)
    _, optimizer, _ = private(model)
    for seed in range(2):
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        _checked_step(model, plain, optimizer, _records(seed=seed))


@loop("warned")
def second_backward_on_other_records() -> None:
    """A batch of the loader, then a backward on records that the loader did not hand out, then one step."""
    model = _model()
    data = DataLoader(TensorDataset(torch.randn(16, W, dtype=torch.float64)), batch_size=4)
    engine = PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), data_loader=data, method=DPSGD(),
        noise_multiplier=0.0, max_grad_norm=C, loss_reduction="sum",
    )  # fmt: skip
    for (x,) in loader:
        _squares(model, x).backward()
        _squares(model, torch.randn_like(x)).backward()
        optimizer.step()
        raise WrongError("two batches in one: records of both were clipped as one")


@loop("right or refused")
def backward_twice_on_one_batch() -> None:
    """Two losses of the same records: one gradient, their sum."""
    model = _model()
    plain = copy.deepcopy(model)
    _, optimizer, _ = private(model)
    x, before = _records(), weights(model)
    _squares(model, x).backward()
    model(x).abs().sum().backward()
    optimizer.step()
    expect_update(plain, model, before, lambda m, x: _squares(m, x) + m(x).abs().sum(), x)


@loop("right or refused")
def gradient_scaler() -> None:
    """A loss scale is in the gradients when they are clipped."""
    model = _model()
    plain = copy.deepcopy(model)
    _, optimizer, _ = private(model)
    scaler, x, before = torch.amp.GradScaler("cpu", init_scale=1024.0), _records(), weights(model)
    scaler.scale(_squares(model, x) * 1e-2).backward()
    scaler.step(optimizer)
    scaler.update()
    expect_update(plain, model, before, lambda m, x: _squares(m, x) * 1e-2, x)


@loop("right or refused")
def gradients_written_by_hand() -> None:
    """Into `.grad`, past clipping and noise."""
    model = _model()
    plain = copy.deepcopy(model)
    _, optimizer, _ = private(model)
    x, before = _records(), weights(model)
    _squares(model, x).backward()
    for p in model.parameters():
        p.grad = torch.full_like(p, 100.0)
    optimizer.step()
    expect_update(plain, model, before, _squares, x)


@loop("refused")
def opacus_module() -> None:
    from opacus import GradSampleModule

    private(GradSampleModule(_model()))
    raise WrongError("accepted: a module that Opacus records on")


@loop("refused")
def opacus_optimizer() -> None:
    from opacus.optimizers import DPOptimizer

    model = _model()
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4
    )
    PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(torch.zeros(16, 1)), batch_size=4),
        noise_multiplier=0.0, max_grad_norm=C, method=DPSGD(),
    )  # fmt: skip
    raise WrongError("accepted: an optimizer of Opacus, which clips and adds noise again")


@loop("right or refused")
def a_record_that_comes_twice() -> None:
    """As two rows of one batch: each row is a record. Removing one moves the sum by C at most."""
    sums = []
    for rows in (2, 1):
        model = _model()
        _, optimizer, _ = private(model)
        x, before = _records(1).repeat(rows, 1), weights(model)
        _squares(model, x * 10).backward()
        optimizer.step()
        sums.append(before - weights(model))
    expect_influence(sums)
