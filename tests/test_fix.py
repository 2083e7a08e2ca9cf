"""fix(): BatchNorm becomes GroupNorm, everything else stays as it was."""

import copy

import pytest
import torch
from torch import nn

from lsg import DPSGD, PrivacyEngine, PrivacyError
from lsg.errors import ConfigurationError
from lsg.fix import fix
from tests.support.reference import assert_per_sample_gradients, attach


def trained(norm: nn.Module) -> nn.Module:
    """`norm` with parameters that are neither ones nor zeros."""
    generator = torch.Generator().manual_seed(0)
    for p in norm.parameters():
        nn.init.normal_(p, generator=generator)
    return norm


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norm_becomes_group_norm_with_its_parameters(kind: type[nn.Module]) -> None:
    old = trained(kind(12, eps=1e-3))
    new = fix(nn.Sequential(nn.Identity(), old))[1]
    assert type(new) is nn.GroupNorm
    assert (new.num_channels, new.eps, new.affine) == (12, 1e-3, True)
    assert torch.equal(new.weight, old.weight) and new.weight is not old.weight
    assert torch.equal(new.bias, old.bias) and new.bias is not old.bias
    assert list(new.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (16, 16), (31, 31), (37, 1), (48, 24), (64, 32), (100, 25)])
def test_groups_are_the_largest_divisor_up_to_32(channels: int, groups: int) -> None:
    assert fix(nn.BatchNorm2d(channels)).num_groups == groups


@pytest.mark.parametrize(("channels", "groups"), [(3, 1), (32, 2), (512, 32)])
def test_one_dimensional_groups_keep_16_channels(channels: int, groups: int) -> None:
    new = fix(nn.BatchNorm1d(channels))
    assert new.num_groups == groups
    # One channel a group would give zeros here, whatever the input: a dead layer.
    assert new(torch.randn(5, channels)).abs().min() > 0


def test_the_model_itself_may_be_a_batch_norm() -> None:
    assert type(fix(nn.BatchNorm2d(4))) is nn.GroupNorm


def test_the_original_is_not_changed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.InstanceNorm2d(8, track_running_stats=True))
    before = copy.deepcopy(model.state_dict())
    fixed = fix(model)
    nn.init.zeros_(fixed[0].weight)
    assert type(model[1]) is nn.BatchNorm2d and model[2].track_running_stats
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_flags_dtype_and_device_are_kept() -> None:
    frozen = nn.BatchNorm2d(8, dtype=torch.float64).eval()
    frozen.weight.requires_grad_(False)
    new = fix(nn.Sequential(frozen, nn.BatchNorm2d(8, device="meta"), nn.BatchNorm2d(8, affine=False)))
    assert not new[0].training and new[1].training and new[2].training
    assert new[0].weight.dtype == torch.float64
    assert not new[0].weight.requires_grad and new[0].bias.requires_grad
    assert new[1].weight.device.type == new[1].bias.device.type == "meta"
    assert (new[2].affine, new[2].weight, new[2].bias) == (False, None, None)


def test_shared_modules_and_parameters_stay_shared() -> None:
    norm, tied = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    tied.weight = norm.weight
    fixed = fix(nn.Sequential(norm, nn.Sequential(norm), norm, tied))
    assert type(fixed[0]) is nn.GroupNorm
    assert fixed[0] is fixed[1][0] and fixed[0] is fixed[2]
    assert fixed[3] is not fixed[0] and fixed[3].weight is fixed[0].weight


def test_fixed_samples_do_not_see_each_other() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), trained(nn.BatchNorm2d(8)), nn.ReLU()).double()
    x = torch.randn(4, 3, 6, 6, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    fixed = fix(model)
    torch.testing.assert_close(fixed(x)[:1], fixed(x[:1]))
    assert not torch.allclose(model(x)[:1], model(x[:1]))


def test_instance_norm_forgets_its_running_statistics() -> None:
    norm = trained(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    norm(torch.randn(2, 4, 5, 5) + 3)
    new = fix(norm)
    assert type(new) is nn.InstanceNorm2d and not new.track_running_stats
    assert list(new.buffers()) == [] and list(new.state_dict()) == ["weight", "bias"]
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(new.eval()(x), new.train()(x))


def test_other_layers_are_copied_as_they_are() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    fixed = fix(nn.ModuleDict({"encoder": model, "attention": nn.MultiheadAttention(8, 2)}))
    assert str(fixed["encoder"]) == str(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fixed["encoder"].parameters(), strict=True))
    assert type(fixed["attention"]) is nn.MultiheadAttention


def test_a_lazy_batch_norm_is_refused_until_it_has_run() -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity(), nn.LazyBatchNorm2d()))
    with pytest.raises(ConfigurationError, match=r"'0\.1': LazyBatchNorm2d .* forward pass"):
        fix(model)
    model(torch.randn(2, 6, 3, 3))
    assert type(fix(model)[0][1]) is nn.GroupNorm


def test_a_subclass_of_batch_norm_is_refused_by_name() -> None:
    class BatchNormThenRelu(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    with pytest.raises(ConfigurationError, match=r"the model: BatchNormThenRelu .* by hand"):
        fix(BatchNormThenRelu(4))


class Recurrent(nn.Module):
    """Takes what an RNN returns in both places: step by step, and of the last step (batch second)."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(5, 6, num_layers=2, bidirectional=True, batch_first=True).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps, state = self.rnn(x)
        return steps.mean(1) + (state[0] if isinstance(state, tuple) else state)[-1].repeat(1, 2)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_trained_rnns_become_ones_that_compute_the_same_and_can_be_trained(kind: type[nn.RNNBase]) -> None:
    model, x = Recurrent(kind), torch.randn(3, 4, 5).double()
    assert not PrivacyEngine.is_compatible(model)
    fixed = PrivacyEngine.get_compatible_module(model)
    assert PrivacyEngine.is_compatible(fixed)
    assert torch.allclose(fixed(x), model(x))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    assert_per_sample_gradients(fixed, DPSGD(), x, 3, loss)


def test_packed_sequences_are_refused() -> None:
    """An RNN sorts their rows, and what comes after it does not: a record's gradient would be in two rows."""

    class Packs(Recurrent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lengths = torch.tensor([3, 4])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.rnn(packed)[1][0][-1]

    model = fix(Packs(nn.LSTM))
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match="DPLSTM got a packed sequence"):
        model(torch.randn(2, 4, 5).double())


def test_frozen_rnns_stay() -> None:
    assert type(fix(nn.LSTM(5, 6).requires_grad_(False))) is nn.LSTM
