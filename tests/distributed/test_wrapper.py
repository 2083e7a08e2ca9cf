"""Models wrapped in DistributedDataParallel, and what travels between processes."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lsg import DPSGD, LSG, ConfigurationError, NonPrivate, PrivacyEngine
from lsg.errors import PrivacyError
from lsg.layers.parameter_treatments import treat_parameters
from lsg.methods import Method
from tests.support.ranks import on_ranks


class Net(nn.Module):
    """Tied weights, a frozen layer, positions and frozen statistics as buffers, a convolution with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.two.weight = self.one.weight
        self.head = nn.Linear(16, 3)
        self.register_buffer("position_ids", torch.arange(16)[None])
        for parameter in [*self.norm.parameters(), self.head.bias]:
            parameter.requires_grad_(False)
        self.norm.eval()

    def train(self, mode: bool = True) -> "Net":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).flatten(1) + self.position_ids / 16
        out: Tensor = self.head(self.two(torch.tanh(self.one(x))))
        return out


def data(count: int = 24) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 2, 4, 4, generator=draw), torch.arange(count) % 3)


def private(model: Any, loader: Any = None, method: Method | None = None, **options: Any) -> tuple[Any, ...]:
    engine = PrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9),
        data_loader=loader or DataLoader(data(), batch_size=5),
        method=method or LSG(rank=1, sparsity=0.5),
        **{
            "noise_multiplier": 0.7,
            "max_grad_norm": 1.0,
            "max_physical_batch_size": 2,
            "noise_generator": torch.Generator().manual_seed(3),
        }
        | options,
    )
    return (engine, *made)


def train(model: Any, optimizer: Any, loader: Any, *, no_sync: bool = False) -> int:
    count = 0
    for x, y in loader:
        if no_sync:
            with model.no_sync():
                nn.functional.cross_entropy(model(x), y).backward()
        else:
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if count == 0 and dist.get_rank() == 0:  # an evaluation through the wrapper on one rank alone
            with torch.no_grad():
                model(x)
        count += 1
    return count


WRAPPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "buckets": {"gradient_as_bucket_view": True, "broadcast_buffers": True},
}


def wrapped_runs() -> dict[str, list[Tensor]]:
    """The weights and buffers that each way of wrapping ends with."""
    found: dict[str, list[Tensor]] = {}
    for name in ("unwrapped", *WRAPPERS, "no_sync", "inside"):
        torch.manual_seed(dist.get_rank() if name == "unwrapped" else 0)  # replicas that begin with other weights
        inner = Net()
        if name == "unwrapped":
            assert not inner.conv.weight.is_contiguous()
            inner.norm.running_mean += dist.get_rank()
        model: Any = inner if name == "unwrapped" else DistributedDataParallel(inner, **WRAPPERS.get(name, {}))
        keys, forward = list(model.state_dict()), type(model).forward
        engine, same, optimizer, loader = private(model)
        assert same is model and list(model.state_dict()) == keys
        for _ in range(2):
            train(model.module if name == "inside" else model, optimizer, loader, no_sync=name == "no_sync")
        found[name] = [value.clone() for value in inner.state_dict().values()]
        engine.detach()
        assert type(model).forward is forward and "forward" not in vars(model)
        assert "forward" not in vars(inner) and list(model.state_dict()) == keys
        if name != "unwrapped":
            assert_trains_again(model)
    return found


def assert_trains_again(model: Any) -> None:
    """DDP's own all-reduce is at work again: each rank's gradients are those of both."""
    model.zero_grad()
    x, y = data(4).tensors
    own = slice(0, 2) if dist.get_rank() == 0 else slice(2, 4)
    alone = copy.deepcopy(model.module)
    nn.functional.cross_entropy(alone(x), y).backward()
    nn.functional.cross_entropy(model(x[own]), y[own]).backward()
    for (name, one), other in zip(model.module.named_parameters(), alone.parameters(), strict=True):
        if one.requires_grad:
            assert torch.allclose(one.grad, other.grad, atol=1e-6), name


def test_wrapped_models_train_as_the_model_inside_and_are_given_back() -> None:
    first, second = on_ranks(2, wrapped_runs)
    for name, ours in first.items():
        assert all(torch.equal(one, other) for one, other in zip(ours, second[name], strict=True)), name
        assert all(torch.equal(one, other) for one, other in zip(ours, first["unwrapped"], strict=True)), name


def loaders_and_refusals() -> None:
    rank, own = dist.get_rank(), None
    for replicas, good in ((2, True), (3, False)):
        sampler = DistributedSampler(data(), num_replicas=replicas, rank=rank)
        loader = DataLoader(data(), batch_size=3, sampler=sampler)
        if good:
            engine, _, optimizer, private_loader = private(Net(), loader)
            assert optimizer.expected_batch_size == 6 and private_loader.sample_rate == 6 / 24
            engine.detach()
        else:
            with pytest.raises(ConfigurationError, match=r"num_replicas=3.*2 process"):
                private(Net(), loader)
    with pytest.raises(ConfigurationError, match=r"DataParallel.*one process a GPU"):
        private(DataParallel(Net()))
    fully_sharded = type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2)
    with pytest.raises(ConfigurationError, match=r"FullyShardedDataParallel.*fully_shard"):
        private(fully_sharded, DataLoader(data(), batch_size=3))

    for number in range(2):
        group = dist.new_group([number])  # each rank a model of its own
        own = group if number == rank else own
    with pytest.raises(ConfigurationError, match=r"process group of 1 of the 2 processes.*one model on all"):
        private(DistributedDataParallel(Net(), process_group=own))


def wrapped_later() -> None:
    for method in (LSG(rank=1), NonPrivate()):
        model = Net()
        engine, _, optimizer, loader = private(
            model, method=method, noise_multiplier=0.7 if method != NonPrivate() else 0
        )
        with pytest.raises(PrivacyError, match=r"wrapped in DistributedDataParallel after make_private"):
            train(DistributedDataParallel(model), optimizer, loader)
        engine.detach()


def test_a_wrapper_that_comes_after_make_private_is_refused() -> None:
    """Its copies of buffers would meet other collectives, and ranks would wait for each other for ever."""
    on_ranks(2, wrapped_later)


def test_samplers_and_wrappers_of_other_kinds_are_refused_by_name() -> None:
    on_ranks(2, loaders_and_refusals)


def counted() -> dict[str, Any]:
    """Numbers that each collective moves while steps are taken, for several sizes of micro-batches."""
    found: dict[str, Any] = {}
    real = dist.all_reduce
    moved: list[int] = []

    def counting(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        moved.append(tensor.numel())
        return real(tensor, *arguments, **options)

    dist.all_reduce = counting
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all", "reduce", "gather", "scatter"):
        setattr(dist, name, None)  # nothing else that moves much
    torch.manual_seed(0)
    for physical in (1, 3, None):
        model = nn.Sequential(nn.Linear(40, 60, bias=False), nn.Tanh(), nn.Linear(60, 2))
        engine, _, optimizer, loader = private(
            model,
            DataLoader(TensorDataset(torch.randn(24, 40), torch.arange(24) % 2), batch_size=6),
            LSG(rank=4, sparsity=0.5),
            max_physical_batch_size=physical,
        )
        moved.clear()
        micro_batches = train(model, optimizer, loader)
        found[str(physical)] = (list(moved), micro_batches, len(engine.accountant))
        engine.detach()
    return found


def test_a_step_sums_one_vector_of_factors_however_many_micro_batches_it_has() -> None:
    for found in on_ranks(2, counted):
        assert found["1"][1] > found["None"][1]
        for moved, _, steps in found.values():
            # (1 - p) r (m + n), the head's weight and bias, and one number more: how many units were clipped.
            assert moved == [4 * (40 + 60) // 2 + 2 * 60 + 2 + 1] * steps


def test_a_step_of_roberta_base_moves_a_hundredth_of_its_gradient() -> None:
    """Fine-tuned as RoBERTa is, its embeddings too: numbers that are noised are numbers that travel."""
    transformers = pytest.importorskip("transformers")
    config = transformers.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    with torch.device("meta"):
        model = transformers.RobertaForSequenceClassification(config)
    dense = sum(p.numel() for p in model.parameters())
    sent = 1  # how many units were clipped
    for treatment in treat_parameters(model, LSG(rank=8, sparsity=0.5)).parameters:
        shape = treatment.parameter.shape
        sent += 8 * (shape[0] + shape[1]) // 2 if treatment.kind == "projected" else shape.numel()
    assert dense > 120e6 and sent * 100 <= dense


def world_of_one() -> list[Tensor]:
    torch.manual_seed(0)
    engine, model, optimizer, loader = private(Net())
    train(model, optimizer, loader)
    weights = [p.detach().clone() for p in model.parameters()]
    engine.detach()
    return weights


def test_a_process_group_of_one_is_as_none() -> None:
    (weights,) = on_ranks(1, world_of_one)
    torch.manual_seed(0)
    engine, model, optimizer, loader = private(Net())
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(weights, model.parameters(), strict=True))
    engine.detach()


def groups_that_change(folder: str) -> None:
    rank = dist.get_rank()
    dist.barrier()  # the other process may still be connecting to this one
    dist.destroy_process_group()
    engine, model, optimizer, loader = private(Net())
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/again", 2), rank=rank, world_size=2)
    with pytest.raises(PrivacyError, match="initialised with 2 processes after make_private"):
        train(model, optimizer, loader)
    engine.detach()
    engine, model, optimizer, loader = private(Net(), method=DPSGD())
    dist.destroy_process_group()
    with pytest.raises(PrivacyError, match=r"process group of 2 processes .* is gone"):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    engine.detach()


def test_process_groups_that_begin_or_end_after_make_private_are_refused(tmp_path: Any) -> None:
    on_ranks(2, groups_that_change, str(tmp_path))
