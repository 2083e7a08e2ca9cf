"""BatchNorms in evaluation mode are trained around, or trained; in training mode they are refused by name."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from lsg import DPSGD, LSG, ConfigurationError, PerfConfig, PrivacyEngine, PrivacyError
from tests.support.reference import assert_per_sample_gradients, attach


def network(*, trained: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    norm.running_mean.normal_()  # type: ignore[union-attr]
    norm.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    norm.weight.data.uniform_(0.5, 2.0)
    norm.requires_grad_(trained)
    return nn.Sequential(nn.Linear(6, 8), norm.eval(), nn.ReLU(), nn.Linear(8, 3)).double()


def x(size: int = 5) -> Tensor:
    return torch.randn(size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("method", [LSG(rank=2), DPSGD()], ids=str)
def test_a_frozen_one_in_evaluation_mode_is_trained_around(method: object) -> None:
    model = network()
    engine, optimizer, _ = attach(model, method)
    model(x()).square().mean(1).mean().backward()
    got = engine.per_sample_gradients()
    assert set(got) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    alone = network()
    alone(x()[:1]).square().mean(1).mean().backward()
    torch.testing.assert_close(got["3.bias"][0], alone[3].bias.grad)
    torch.testing.assert_close(got["0.bias"][0], alone[0].bias.grad)
    optimizer.step()


@pytest.mark.parametrize("spatial", [False, True])
def test_a_trained_one_in_evaluation_mode_equals_a_batch_of_one(spatial: bool) -> None:
    model, inputs = network(trained=True), x()
    if spatial:
        norm = nn.BatchNorm2d(6).double().eval()
        norm.running_mean.normal_()  # type: ignore[union-attr]
        model, inputs = nn.Sequential(nn.Conv2d(3, 6, 3), norm), torch.randn(5, 3, 5, 5, dtype=torch.float64)
        model = model.double()
    got = assert_per_sample_gradients(model, DPSGD(), inputs, 5, lambda m, b: m(b).square().flatten(1).mean(1).mean())
    assert "1.weight" in got


def test_training_mode_is_refused_by_name_when_it_runs() -> None:
    model = network()
    engine, _, _ = attach(model, DPSGD())
    statistics = copy.deepcopy(model[1].state_dict())
    model.train()  # as training loops do
    with pytest.raises(PrivacyError, match=r"'1' \(BatchNorm1d\).*eval\(\) after model.train\(\).*lsg.fix"):
        model(x())
    with torch.no_grad(), pytest.raises(PrivacyError, match="statistics"):  # it would write them all the same
        model(x())
    for name, value in model[1].state_dict().items():
        assert torch.equal(value, statistics[name])
    model[1].eval()
    model(x()).sum().backward()
    model.train()
    engine.detach()
    model(x())


def test_copies_and_pickles_are_plain_models() -> None:
    model = network()
    attach(model, DPSGD())
    for plain in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        plain.train()(x())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_runs_and_refuses() -> None:
    model = network()
    attach(model, DPSGD(), perf=PerfConfig(compile=True))
    model(x()).sum().backward()
    model.zero_grad()
    model.train()
    with pytest.raises(PrivacyError, match="BatchNorm1d"):
        model(x())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False).eval()])
def test_one_that_would_be_trained_or_has_no_statistics_is_refused_at_once(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 8), norm)
    with pytest.raises(ConfigurationError, match=r"'1' \(BatchNorm1d\) mixes the samples.*lsg.fix"):
        attach(model, DPSGD())
    assert not PrivacyEngine.is_compatible(model)
