"""The running average of weights: what it weighs how, and that training goes on as if it were not there."""

import pytest
import torch
from torch import nn

from lsg import ConfigurationError, WeightAverage
from tests.support.small_run import METHODS, Training


class Walk:
    """One weight that a step sets to a value."""

    def __init__(self, share: float, dtype: torch.dtype = torch.float32) -> None:
        self.weight = nn.Parameter(torch.full((1,), 100.0, dtype=dtype))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.average = WeightAverage(self.optimizer, share)

    def to(self, *values: float) -> float:
        for value in values:
            self.weight.grad = self.weight.detach() - value
            self.optimizer.step()
        with self.average.applied():
            return self.weight.item()


def test_a_share_of_one_is_the_plain_mean_of_all_steps_without_the_start() -> None:
    assert Walk(1.0).to(1.0, 2.0, 6.0) == pytest.approx(3.0)


def test_a_small_share_is_the_last_weights() -> None:
    assert Walk(1e-9).to(1.0, 2.0, 6.0) == pytest.approx(6.0)


def test_a_tenth_is_nearly_the_warm_decay_of_de_et_al() -> None:
    walked = [float(step % 7) for step in range(500)]
    decayed = 0.0
    for step, value in enumerate(walked):
        decay = (1 + step) / (10 + step)
        decayed = decay * decayed + (1 - decay) * value
    assert Walk(1 / 9).to(*walked) == pytest.approx(decayed, abs=0.01)


def test_it_spans_the_same_share_of_a_run_of_any_length() -> None:
    """Weights that rise from 0 to 1: the average lags by share / (1 + share) of the run."""
    for steps in (100, 1000):
        assert Walk(0.25).to(*(step / steps for step in range(steps))) == pytest.approx(0.8, abs=0.01)


def test_half_precision_is_averaged_in_float32() -> None:
    walk = Walk(1.0, torch.bfloat16)
    walk.to(*[256.0] * 300, *[258.0] * 300)
    assert walk.average.state_dict()["averages"][0].item() == pytest.approx(257.0, abs=0.01)


def test_the_model_gets_its_own_weights_back_even_after_an_error() -> None:
    walk = Walk(1.0)
    walk.to(1.0, 3.0)
    place = walk.weight.data_ptr()
    with pytest.raises(RuntimeError, match="evaluation"), walk.average.applied():
        assert walk.weight.item() == 2.0 and walk.weight.data_ptr() == place  # CUDA graphs know the place
        raise RuntimeError("evaluation failed")
    assert walk.weight.item() == 3.0


def test_frozen_parameters_are_not_copied() -> None:
    assert len(Walk(0.1).average.state_dict()["averages"]) == 1


def test_a_continuation_is_the_same_to_the_bit() -> None:
    values = torch.randn(40).tolist()
    whole, first, second = Walk(0.1), Walk(0.1), Walk(0.1)
    first.to(*values[:17])
    second.average.load_state_dict({**first.average.state_dict()})
    assert second.to(*values[17:]) == whole.to(*values)


@pytest.mark.parametrize("method", METHODS)
def test_training_does_not_notice_it(method: str) -> None:
    """It is applied after each micro-batch, in the middle of logical batches too."""
    torch.manual_seed(0)
    plain = Training(method).finish().result()
    torch.manual_seed(0)
    averaged = Training(method)
    average = WeightAverage(averaged.optimizer, 0.1)
    for _ in averaged.loop:
        with average.applied():
            pass
    assert averaged.result() == plain
    with average.applied():
        assert averaged.result()[0] != plain[0]


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigurationError, match="share="):
        Walk(share)


def test_a_state_of_another_average_is_refused() -> None:
    state = Walk(0.1).average.state_dict()
    with pytest.raises(ConfigurationError, match="another share"):
        Walk(0.2).average.load_state_dict(state)
