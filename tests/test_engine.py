"""The public API: what users of Opacus rely on, and what must not surprise them."""

import copy
import inspect
import io
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, LSG, ConfigurationError, NonPrivate, PerfConfig, PrivacyEngine, PrivacyError, SwitchOn, explain
from lsg.methods import Method
from tests.support.reference import attach

N, BATCH = 60, 20


def data(n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 10, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 2))


def private(model: nn.Module | None = None, **options: Any) -> tuple[PrivacyEngine, nn.Module, Any, Any]:
    engine, model = PrivacyEngine(), model or network()
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "method": LSG(rank=2)} | options
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    loader = settings.pop("data_loader", DataLoader(data(), batch_size=BATCH))
    return engine, *engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **settings)


def train_epoch(model: nn.Module, optimizer: Any, loader: Any) -> int:
    batches = 0
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        batches += 1
    return batches


def test_three_line_adoption_reaches_the_target_epsilon() -> None:
    model = network()
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=BATCH),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=4,
        max_grad_norm=1.0,
    )
    for _ in range(4):
        train_epoch(model, optimizer, loader)
    assert len(engine.accountant) == 12
    assert 2.99 <= engine.get_epsilon(delta=1e-3) <= 3.0
    assert engine.accountant.history == [(optimizer.noise_multiplier, BATCH / N, 12)]


def test_model_stays_the_same_object_and_detach_restores_it_fully() -> None:
    model = network()
    keys, attributes = list(model.state_dict()), {n: set(vars(m)) for n, m in model.named_modules()}
    forwards = {n: m.forward for n, m in model.named_modules()}
    engine, returned, optimizer, loader = private(model)
    assert returned is model and type(model) is nn.Sequential
    assert list(model.state_dict()) == keys
    train_epoch(model, optimizer, loader)
    engine.detach()
    assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes
    assert {n: m.forward for n, m in model.named_modules()} == forwards
    assert not model._forward_pre_hooks and not model._forward_hooks
    model.zero_grad()
    model(torch.randn(3, 10)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    private(model)  # and can be made private again, by another engine
    with pytest.raises(ConfigurationError, match="another PrivacyEngine"):
        private(model)


def test_copies_and_pickles_are_plain_models() -> None:
    engine, model, optimizer, loader = private()
    train_epoch(model, optimizer, loader)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    x = torch.randn(3, 10)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(x), model(x))
        twin(x).sum().backward()
        assert all(p.grad is not None for p in twin.parameters())
        again, twin, twin_optimizer, twin_loader = private(twin)
        train_epoch(twin, twin_optimizer, twin_loader)
        with torch.no_grad():
            twin(x)
        again.detach()
        assert twin(x).shape == (3, 2)
    assert all(slot.pending is False for slot in engine._recorder.slots.values())


def test_evaluation_is_untouched() -> None:
    _engine, model, _, _ = private()
    plain = network()
    x = torch.randn(5, 10)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), plain(x))


def test_thresholds_of_layers_read_as_in_opacus() -> None:
    engine, _, optimizer, _ = private(nn.Linear(10, 2), clipping="per_layer", max_grad_norm=[0.3, 0.4])
    assert optimizer.max_grad_norm == pytest.approx(0.5) and optimizer.max_grad_norms == [0.3, 0.4]
    optimizer.max_grad_norm *= 2  # as a scheduler would
    assert optimizer.max_grad_norms == pytest.approx([0.6, 0.8])
    optimizer.max_grad_norm = [3, 4]
    assert optimizer.max_grad_norm == 5
    with pytest.raises(ConfigurationError, match="max_grad_norm=-1"):
        optimizer.max_grad_norm = -1
    engine.detach()
    _, _, optimizer, _ = private(max_grad_norm=0.7)
    with pytest.raises(AttributeError, match="flat clipping has one threshold"):
        _ = optimizer.max_grad_norms


def test_what_belongs_to_the_plan_cannot_be_set() -> None:
    engine, _, optimizer, _ = private()
    with pytest.raises(AttributeError):
        optimizer.expected_batch_size = 1000
    with pytest.raises(ConfigurationError, match="cannot be replaced"):
        engine.accountant = PrivacyEngine().accountant


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"max_physical_batch_size": 2.5}, "max_physical_batch_size=2.5"),
        ({"max_physical_batch_size": True}, "max_physical_batch_size=True"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size=0"),
        ({"noise_generator": 5}, "noise_generator=5"),
        ({"perf": 3}, "perf=3"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(options: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ConfigurationError, match=culprit):
        private(**options)


def test_a_batch_from_elsewhere_is_told_of() -> None:
    engine, model, optimizer, _ = private()
    model(torch.randn(4, 10)).sum(1).mean().backward()
    with pytest.warns(UserWarning, match="the private loader did not hand out"):
        optimizer.step()
    assert engine.accountant.history == [(1.0, 1.0, 1)]


def test_optimizer_reads_as_in_opacus() -> None:
    _, model, optimizer, loader = private(noise_multiplier=1.3, max_grad_norm=0.7)
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm, optimizer.expected_batch_size) == (1.3, 0.7, BATCH)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer.original_optimizer, torch.optim.SGD)
    assert loader.sample_rate == BATCH / N and len(loader) == 3
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train_epoch(model, optimizer, loader)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)


def test_zero_grad_never_drops_the_accumulated_sum() -> None:
    _engine, model, optimizer, _ = private(noise_multiplier=0.0, method=DPSGD(), max_grad_norm=1e9)
    x = torch.randn(4, 10)
    epoch = optimizer.clock.enter_epoch()
    optimizer.clock.begin_micro_batch(epoch, size=2, last=False)
    model(x[:2]).sum(1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.clock.begin_micro_batch(epoch, size=2, last=True)
    model(x[2:]).sum(1).mean().backward()
    optimizer.step()
    found = model[3].bias.grad.clone()
    assert torch.allclose(found, torch.full((2,), 4 / BATCH))
    optimizer.clock.leave_epoch(epoch)
    model(x).sum(1).mean().backward()
    optimizer.zero_grad()  # before the step: this batch is forgotten, and the step is one of noise alone
    optimizer.step()
    assert not model[3].bias.grad.any()


def test_user_code_never_sees_an_empty_batch_but_its_step_is_taken() -> None:
    engine, model, optimizer, loader = private(
        data_loader=DataLoader(data(40), batch_size=1, generator=torch.Generator().manual_seed(0))
    )
    before = model[0].weight.detach().clone()
    batches = train_epoch(model, optimizer, loader)
    assert len(engine.accountant) == 40  # each record's share of an epoch is 1/40, so an epoch is 40 steps
    assert 15 < batches < 35  # about 1/e of the draws are empty
    assert not torch.equal(before, model[0].weight)


def test_loops_that_would_make_the_books_wrong_are_stopped() -> None:
    engine, model, optimizer, loader = private(max_physical_batch_size=4)
    with pytest.raises(PrivacyError, match=r"optimizer\.step"):
        for x, _ in loader:
            model(x).sum().backward()
    for skipped in (model, lambda x: None):  # a batch without its step is no better than one without backward
        with pytest.raises(PrivacyError, match=r"optimizer\.step"):
            for x, _ in loader:
                skipped(x)
    with pytest.raises(PrivacyError, match="called again"):
        for x, y in loader:
            for _ in range(2):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    for wrong in (lambda x: torch.cat([x, x]), lambda x: x.unsqueeze(0)):
        engine.detach()
        engine, model, optimizer, loader = private(max_physical_batch_size=4, method=DPSGD())
        with pytest.raises(PrivacyError, match="the loader handed out"):
            for x, _ in loader:
                model(wrong(x)).sum().backward()
                optimizer.step()
    engine, model, optimizer, loader = private()
    with pytest.raises(ConfigurationError, match="added"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(PrivacyError, match=r"after loss\.backward"):
        engine.per_sample_gradients()


def test_an_epoch_left_in_the_middle_leaves_nothing_behind() -> None:
    engine, model, optimizer, loader = private(max_physical_batch_size=4, noise_multiplier=0.0)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        break
    assert optimizer.gradients.sum is None
    with pytest.warns(
        UserWarning, match=r"left after 0 of the 3 logical steps.*was dropped, and now another epoch begins"
    ):
        for x, y in loader:
            assert optimizer.gradients.sum is None
            F.cross_entropy(model(x), y).backward()
            break
    assert engine.per_sample_gradients()
    optimizer.step()
    assert optimizer.stepped
    # A step on a batch that did not come from the loader is accounted for without amplification.
    assert engine.accountant.history[-1].sample_rate == 1.0


def test_two_iterators_over_the_loader_cannot_mix_their_batches() -> None:
    _, model, optimizer, loader = private(max_physical_batch_size=4)
    first, second = iter(loader), iter(loader)
    x, y = next(first)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    next(second)
    optimizer.step()
    with pytest.raises(PrivacyError, match="newer epoch"):
        next(first)


def test_gradients_of_an_earlier_batch_do_not_reach_the_next_one() -> None:
    _, model, optimizer, loader = private(poisson_sampling=False, method=DPSGD(), max_grad_norm=1e9)
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    late = F.cross_entropy(model(x), y)
    x2, y2 = next(batches)
    now = F.cross_entropy(model(x2), y2)
    (late + now).backward()
    optimizer.gradients.collect(None)
    wanted = torch.zeros(2)
    for i in range(len(x2)):
        twin = copy.deepcopy(model)
        F.cross_entropy(twin(x2[i : i + 1]), y2[i : i + 1]).backward()
        wanted += twin[3].bias.grad
    assert torch.allclose(optimizer.gradients.sum.vector[-2:], wanted, atol=1e-5)
    optimizer.step()
    F.cross_entropy(model(x2), y2).backward()
    x3, y3 = next(batches)
    F.cross_entropy(model(x3), y3).backward()
    with pytest.raises(PrivacyError, match="were left"):
        optimizer.step()


@pytest.mark.parametrize("forget", ["optimizer", "model"])
def test_gradients_that_are_not_for_the_step_can_be_forgotten(forget: str) -> None:
    """A discriminator through which a generator's loss went after its own step."""
    _, model, optimizer, loader = private(poisson_sampling=False, noise_multiplier=0.0)
    for x, y in loader:
        (optimizer if forget == "optimizer" else model).zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model(torch.randn_like(x)).sum().backward()
    assert optimizer.clock.epochs_done == 1


def test_zero_grad_of_the_model_forgets_per_sample_gradients() -> None:
    wanted, x = network(), torch.randn(5, 10)
    models = [copy.deepcopy(wanted) for _ in range(2)]
    for number, model in enumerate(models):
        engine, _, optimizer, _ = private(model, method=DPSGD(), noise_multiplier=0.0)
        if number:
            model(x + 1).sum().backward()  # to see what it does to x, say
            model.zero_grad()
            with pytest.raises(PrivacyError, match="no per-sample gradients"):
                engine.per_sample_gradients()
        model(x).sum().backward()
        optimizer.step()
        engine.detach()
        assert "zero_grad" not in vars(model)
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_a_copy_of_a_private_model_zeroes_its_own_gradients() -> None:
    engine, model, _, _ = private()
    model(torch.randn(5, 10)).sum().backward()
    twin = copy.deepcopy(model)
    twin(torch.randn(5, 10)).sum().backward()
    twin.zero_grad()
    assert all(p.grad is None for p in twin.parameters()) and engine.per_sample_gradients()


def test_a_backward_that_comes_too_late_to_count_is_refused() -> None:
    _, model, optimizer, loader = private()
    with pytest.raises(PrivacyError, match=r"under torch\.no_grad"):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            model.eval()
            model(torch.randn(len(x) + 3, 10))
            model.train()
            loss.backward()
            optimizer.step()


def test_the_sampler_serves_no_other_loader() -> None:
    _, model, optimizer, loader = private()
    for _ in range(2):
        with pytest.raises(PrivacyError, match="no other"):
            list(DataLoader(loader.dataset, batch_sampler=loader.batch_sampler))
        train_epoch(model, optimizer, loader)


def test_looking_at_a_batch_is_no_epoch() -> None:
    """With 2.5 batches an epoch the second one is a step longer, which the budget of one has no room for."""
    engine, model = PrivacyEngine(accountant="rdp"), network()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(50), batch_size=20),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=1.0,
    )
    held = iter(loader)
    next(held)
    next(iter(loader))
    assert loader.epoch == 0
    train_epoch(model, optimizer, loader)
    assert loader.epoch == 1 and len(engine.accountant) == loader.steps(1) == 2 and loader.steps(2) == 5
    with pytest.raises(PrivacyError, match="newer epoch"):
        next(held)


def test_an_epoch_whose_step_fails_after_its_release_counts() -> None:
    """Without Poisson sampling an epoch is one release: each that was begun costs, whatever became of it."""
    engine, model, optimizer, loader = private(poisson_sampling=False)

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = optimizer.register_step_post_hook(fails)
    for number in range(3):
        with pytest.raises(KeyboardInterrupt):
            train_epoch(model, optimizer, loader)
        assert len(engine.accountant) == loader.epoch == number + 1
    handle.remove()
    train_epoch(model, optimizer, loader)
    assert len(engine.accountant) == loader.epoch == 4


def test_forwards_of_many_sizes_without_a_step_leave_little_behind() -> None:
    engine, model, *_ = private()
    for size in range(2, 60):
        model(torch.randn(size, 10))
    assert all(len(slot._replaced) < 9 for slot in engine._recorder.slots.values())


def test_numbers_of_numpy_are_numbers() -> None:
    engine, model = PrivacyEngine(accountant="rdp"), network()
    _, optimizer, _ = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=BATCH),
        target_epsilon=np.float64(3),
        target_delta=np.float32(1e-3),
        epochs=np.int64(2),
        max_grad_norm=np.float32(1),
        method=LSG(rank=np.int64(2), sparsity=np.float32(0.5)),
    )
    assert type(optimizer.max_grad_norm) is float and str(LSG(rank=np.int64(2))) == str(LSG(rank=2))
    engine.detach()
    *_, optimizer, _ = private(noise_multiplier=np.float32(1))
    assert type(optimizer.noise_multiplier) is float


@pytest.mark.parametrize("given", [{"grad_sample_mode": "hooks"}, {"criterion": nn.CrossEntropyLoss()}])
def test_arguments_of_opacus_that_change_nothing_are_accepted(given: dict[str, Any]) -> None:
    private(**given)


def test_other_arguments_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="grad_sample_mode='ghost'"):
        private(grad_sample_mode="ghost")
    with pytest.raises(ConfigurationError, match="rand_on_empty"):
        private(rand_on_empty=True)
    with pytest.raises(TypeError, match="'noise'"):
        private(noise=1.0)


def test_a_compiled_models_forward_keeps_its_signature() -> None:
    """transformers' `generate` asks it what the model takes."""
    wanted = inspect.signature(network().forward)
    engine, model, *_ = private(perf=PerfConfig(compile=True))
    assert inspect.signature(model.forward) == wanted
    twin = copy.deepcopy(model)
    engine.detach()
    assert "forward" not in vars(model)
    engine, *_ = private(twin, perf=PerfConfig(compile=True))
    assert inspect.signature(twin.forward) == wanted
    engine.detach()
    assert "forward" not in vars(twin)


def test_a_linear_layers_output_can_be_written_to() -> None:
    for shape in ((5, 10), (5, 3, 10)):
        model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
        engine, *_ = private(model, method=DPSGD())
        x = torch.randn(shape)
        model(x).square().mean().backward()
        got = engine.per_sample_gradients()["0.weight"].mean(0)
        engine.detach()
        model(x).square().mean().backward()
        assert torch.allclose(got, model[0].weight.grad, atol=1e-6)


def test_lengths_that_mean_something_else_are_left_alone() -> None:
    for lengths in ([3, 4], ["a"] * N, torch.ones(N, 2), lambda: None):
        records = data()
        records.lengths = lengths
        *_, loader = private(data_loader=DataLoader(records, batch_size=BATCH))
        assert loader.logical.lengths is None


@pytest.mark.parametrize("workers", [{"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_workers_change_nothing(workers: dict[str, Any]) -> None:
    runs = []
    for options in ({}, workers):
        source = DataLoader(data(10), batch_size=4, generator=torch.Generator().manual_seed(1), **options)
        engine, model, optimizer, loader = private(data_loader=source)
        seen = []
        for _ in range(3):
            for x, y in loader:
                seen.append(x)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            seen.append(torch.tensor([float(len(engine.accountant))]))
        runs.append(seen)
    assert len(runs[0]) == len(runs[1]) and all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_detached_engines_optimizer_takes_no_more_steps() -> None:
    engine, model, optimizer, _ = private()
    model(torch.randn(3, 10)).sum().backward()
    engine.detach()
    with pytest.raises(PrivacyError, match="detached"):
        optimizer.step()


def test_freezing_a_trained_parameter_later_is_refused_by_name() -> None:
    _, model, _, _ = private()
    model[3].bias.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"3\.bias"):
        model(torch.randn(3, 10))


def test_same_seeds_give_the_same_run_and_fresh_engines_do_not() -> None:
    def run(seed: int | None) -> Tensor:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        _, model, optimizer, loader = private(noise_generator=generator)
        torch.manual_seed(0)  # a user's seed must not make the noise predictable
        train_epoch(model, optimizer, loader)
        return model[0].weight.detach().clone()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert not torch.equal(run(None), run(None))


def test_non_private_training_in_the_same_loop() -> None:
    engine, model, optimizer, loader = private(
        method=NonPrivate(), noise_multiplier=0.0, max_physical_batch_size=7, optimizer=None
    )
    plain = network()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    collected: list[tuple[Tensor, Tensor]] = []
    for x, y in loader:
        collected.append((x, y))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if optimizer.stepped:
            xs, ys = (torch.cat(parts) for parts in zip(*collected, strict=True))
            sgd.zero_grad()
            (F.cross_entropy(plain(xs), ys, reduction="sum") / BATCH).backward()
            sgd.step()
            collected = []
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)
    assert engine.get_epsilon(1e-5) == math.inf


def test_sampling_without_poisson_is_accounted_for_what_it_is() -> None:
    engine, model, optimizer, loader = private(poisson_sampling=False)
    seen: list[Tensor] = []
    for _ in range(2):
        for x, y in loader:
            seen.append(x)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert sum(len(x) for x in seen) == 2 * N
    assert engine.accountant.history == [(1.0, 1.0, 2)]  # one full-rate Gaussian mechanism an epoch
    with pytest.warns(UserWarning, match="and now another epoch begins"):
        for _ in range(2):  # an epoch left after its first step has used some record once, too
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                break
    assert len(engine.accountant) == 4
    with pytest.warns(UserWarning, match="and now another epoch begins"):
        batches = iter(loader)
        first = [next(batches)]
    for x, y in itertools.chain(first, batches):  # other noise in the middle of an epoch is accounted for as well
        optimizer.noise_multiplier *= 0.5
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(engine.accountant) == 7


def test_sparsity_schedule_switches_the_masks_on() -> None:
    engine, model, optimizer, _ = private(method=LSG(rank=2, sparsity=0.5, schedule=SwitchOn(step=1)))
    x = torch.randn(4, 10)
    kept = []
    for _ in range(2):
        model(x).sum().backward()
        kept.append(int(engine.subspaces["0.weight"].left_mask.sum()))
        optimizer.step()
    assert kept == [10, 5]


@pytest.mark.parametrize("importance", ["weight", "random", "factor", "direct"])
def test_importances_train_and_differ(importance: Any) -> None:
    engine, model, optimizer, loader = private(method=LSG(rank=2, sparsity=0.5, importance=importance))
    train_epoch(model, optimizer, loader)
    space = engine.subspaces["0.weight"]
    if importance == "direct":
        assert space.left_mask.all() and space.right_mask.all()
        largest = model[0].weight.detach().abs().flatten().argsort()[-120:]
        model(torch.randn(4, 10)).sum().backward()
        optimizer.step()
        changed = model[0].weight.grad.flatten().nonzero().flatten()
        assert set(changed.tolist()) <= set(largest.tolist()) and len(changed) == 120
    else:
        assert int(space.left_mask.sum()) == 5 and int(space.right_mask.sum()) == 12


def test_dense_and_project_options_and_head_scale() -> None:
    model = network()
    kinds = {row.name: row.kind for row in explain(model, LSG(rank=2, dense=("0.*",))).rows}
    assert kinds["0.weight"] == "dense" and kinds["3.weight"] == "dense"
    kinds = {row.name: row.kind for row in explain(model, LSG(rank=2, dense=(nn.Linear,))).rows}
    assert set(kinds.values()) == {"dense"}
    kinds = {row.name: row.kind for row in explain(model, LSG(rank=50, project=("3.weight",))).rows}
    assert kinds["3.weight"] == "projected" and kinds["0.weight"] == "dense"
    engine, model, _, _ = private(method=LSG(rank=2, head_scale=0.1))
    assert {n: s.scale for n, s in engine._recorder.slots.items()}["3.bias"] == 0.1
    assert {n: s.scale for n, s in engine._recorder.slots.items()}["0.bias"] == 1.0
    model(torch.randn(4, 10)).sum(1).mean().backward()
    assert torch.allclose(engine._recorder.slots["3.bias"].parts()[0] * 4, torch.full((4, 2), 0.1))


def test_rank_above_the_layers_size_is_cut_to_it() -> None:
    engine, model, optimizer, loader = private(method=LSG(rank=50, sparsity=0.0, project=("3.weight",)))
    assert engine.subspaces["3.weight"].rank == 2
    train_epoch(model, optimizer, loader)


@pytest.mark.parametrize("kind", ["attention", "conv1d"])
def test_split_query_key_value(kind: str) -> None:
    from transformers.pytorch_utils import Conv1D

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind == "attention":
                self.layer: nn.Module = nn.MultiheadAttention(12, 2, batch_first=True)
            else:
                self.layer = Conv1D(36, 12)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x, x, x)[0] if kind == "attention" else self.layer(x)
            assert isinstance(y, Tensor)
            return y

    model = Net().double()
    plain = copy.deepcopy(model)
    engine, optimizer, _ = attach(model, LSG(rank=2, sparsity=0.0, fused_qkv="split"))
    name = "layer.in_proj_weight" if kind == "attention" else "layer.weight"
    assert {f"{name}[{i}]" for i in range(3)} <= set(engine.subspaces)
    x = torch.randn(4, 3, 12, dtype=torch.float64)
    assert torch.allclose(model(x), plain(x))
    (model(x) ** 2).mean().backward()
    found = engine.per_sample_gradients()
    for i in range(4):
        plain.zero_grad()
        (plain(x[i : i + 1]) ** 2).mean().backward()
        whole = dict(plain.named_parameters())[name].grad
        assert whole is not None
        thirds = whole.chunk(3, dim=0 if kind == "attention" else 1)
        for j, third in enumerate(thirds):
            space = engine.subspaces[f"{name}[{j}]"]
            w = third.T if space.transposed else third
            assert torch.allclose(found[f"{name}[{j}]"][0][i], w @ space.right.T, atol=1e-12)
    optimizer.step()
    assert dict(model.named_parameters())[name].grad.count_nonzero() > 0


def test_parts_of_a_model_called_alone_are_refused() -> None:
    """Nobody could see what is done with samples between them."""
    _, model, _, _ = private()
    with pytest.raises(PrivacyError, match="layer '0' ran outside of the model's forward"):
        model[0](torch.randn(4, 10))
    with torch.no_grad():
        assert model[0](torch.randn(4, 10)).shape == (4, 24)


def test_a_forward_called_by_its_name_is_checked() -> None:
    class Mixes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.mean(0))

    _, model, _, _ = private(nn.Sequential(Mixes(10, 2)))
    with pytest.raises(PrivacyError, match="influence each other"):
        model.forward(torch.randn(4, 10))


def test_gradients_of_two_batch_sizes_are_not_mixed() -> None:
    _, model, _, _ = private()
    model(torch.randn(4, 10)).sum().backward()
    with pytest.raises(PrivacyError, match=r"call optimizer\.step"):
        model(torch.randn(5, 10))


def test_frozen_parameters_and_parameters_not_in_the_optimizer_are_left_alone() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="'3.weight' and 1 more requires a gradient but is not in the optimizer"):
        engine, model, optimizer, loader = private(model, optimizer=optimizer)
    before = copy.deepcopy(model.state_dict())
    train_epoch(model, optimizer, loader)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"1.weight", "1.bias"} == set(engine._recorder.slots)


def test_explain_tells_why_a_model_would_be_refused() -> None:
    assert explain(network(), LSG()).problems == ()
    table = explain(nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4)), LSG())
    assert "'1' (BatchNorm1d) mixes the samples" in table.problems[0] and table.problems[0] in str(table)


def test_explain_adds_up() -> None:
    table = explain(network(), LSG(rank=2, sparsity=0.5))
    row = {r.name: r for r in table.rows}["0.weight"]
    assert (row.kind, row.dimensions_before, row.dimensions_after) == ("projected", 240, 2 * (5 + 12))
    assert row.bytes_per_sample == 4 * row.dimensions_after
    assert table.dimensions_before == sum(p.numel() for p in network().parameters())
    text = str(table)
    assert "0.weight" in text and "signal-to-noise" in text and "projected" in text


@pytest.mark.parametrize("method", [LSG(rank=8, sparsity=0.5), LSG(rank=4, sparsity=0.75)], ids=str)
def test_memory_of_a_large_layer_grows_as_kept_rank_times_sides(method: Method) -> None:
    """Bar 5: bytes of per-sample storage of a 4096 x 4096 layer, and no per-sample m x n tensor on the way."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class LargestTensor(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for leaf in out if isinstance(out, tuple | list) else (out,):
                if isinstance(leaf, Tensor):
                    self.largest = max(self.largest, leaf.numel())
            return out

    model = nn.Linear(4096, 4096, bias=False)
    engine, optimizer, _ = attach(model, method)
    assert method.rank is not None
    x = torch.randn(8, 2, 4096)
    with LargestTensor() as seen:
        model(x).sum().backward()
    slot = engine._recorder.slots["weight"]
    stored = sum(g.untyped_storage().nbytes() for g in slot.gradients())
    assert stored == 8 * 4 * (1 - method.sparsity) * method.rank * (4096 + 4096)
    assert seen.largest <= 4096 * 4096  # the weight itself, never one for each sample
    optimizer.step()


REFUSED_MODELS = {
    "batch_norm": (lambda: nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4)), r"'1' \(BatchNorm1d\).*lsg.fix"),
    "running_stats": (lambda: nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True), nn.Linear(3, 3)), "'0'"),
    "lstm": (lambda: nn.Sequential(nn.LSTM(10, 4)), r"'0' \(LSTM\)"),
    "attention": (lambda: nn.MultiheadAttention(8, 2), "batch_first=True"),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2), "batch_first=True"),
    "max_norm": (lambda: nn.Embedding(9, 4, max_norm=1.0), "max_norm"),
    "bag_max_norm": (lambda: nn.EmbeddingBag(9, 4, max_norm=1.0), "max_norm"),
    "bag_by_frequency": (lambda: nn.EmbeddingBag(9, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "bag_sparse": (lambda: nn.EmbeddingBag(9, 4, sparse=True), "sparse=True"),
    "by_frequency": (lambda: nn.Embedding(9, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "parametrized"),
    "old_weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(4, 4)), "weight_g"),
    "spectral_norm": (lambda: nn.utils.spectral_norm(nn.Conv2d(4, 4, 1)), "weight_orig"),
    "prune": (lambda: torch.nn.utils.prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5), "weight_orig"),
    "frozen_max_norm": (lambda: nn.Sequential(nn.Embedding(9, 4, max_norm=1.0).requires_grad_(False)), "max_norm"),
    "frozen": (lambda: nn.Linear(4, 4).requires_grad_(False), "nothing to train"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_models_that_cannot_be_private_are_refused_by_name(case: str) -> None:
    make, message = REFUSED_MODELS[case]
    with pytest.raises(ConfigurationError, match=message):
        private(make())


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="lazy"):
        private(nn.LazyLinear(4))


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter([])


def weighted() -> DataLoader[Any]:
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * N, N)
    return DataLoader(data(), batch_size=4, sampler=sampler)


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "noise": ({"noise_multiplier": -1.0}, "noise_multiplier"),
    "noise_nan": ({"noise_multiplier": math.nan}, "noise_multiplier"),
    "norm": ({"max_grad_norm": 0.0}, "max_grad_norm"),
    "norms": ({"max_grad_norm": [1.0, 1.0]}, "per_layer"),
    "norms_count": ({"max_grad_norm": [1.0, 1.0], "clipping": "per_layer"}, "2 thresholds for 6"),
    "clipping": ({"clipping": "ghost"}, "clipping"),
    "reduction": ({"loss_reduction": "none"}, "loss_reduction"),
    "physical": ({"max_physical_batch_size": 0}, "max_physical_batch_size"),
    "batch_first": ({"batch_first": False}, "batch first"),
    "method": ({"method": "lsg"}, "method"),
    "stream": ({"data_loader": DataLoader(Stream(), batch_size=2)}, "no length"),
    "weighted": ({"data_loader": weighted()}, "WeightedRandomSampler.*not Poisson"),
    "unbatched": ({"data_loader": DataLoader(data(), batch_size=None)}, "batch_size"),
    "not_a_loader": ({"data_loader": [1]}, "DataLoader"),
    "foreign": ({"optimizer": torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=1)}, r"number 0, of shape \(2, 3\)"),
    "lbfgs": ({"optimizer": "lbfgs"}, "LBFGS"),
    "not_private": ({"method": NonPrivate()}, "NonPrivate"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_by_name(case: str) -> None:
    options, message = BAD_ARGUMENTS[case]
    model = network()
    if options.get("optimizer") == "lbfgs":
        options = {"optimizer": torch.optim.LBFGS(model.parameters())}
    with pytest.raises(ConfigurationError, match=message):
        private(model, **options)
    assert not hasattr(model[0], "_lsg")


@pytest.mark.parametrize(
    ("epsilon", "delta", "epochs", "message"),
    [(0, 1e-3, 1, "epsilon"), (-1, 1e-3, 1, "epsilon"), (math.nan, 1e-3, 1, "epsilon"), (1, 0, 1, "delta"),
     (1, 1, 1, "delta"), (1, 1e-3, 0, "epochs")],
)  # fmt: skip
def test_bad_budgets_are_refused_by_name(epsilon: float, delta: float, epochs: int, message: str) -> None:
    model = network()
    with pytest.raises(ConfigurationError, match=message):
        PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=BATCH),
            target_epsilon=epsilon,
            target_delta=delta,
            epochs=epochs,
            max_grad_norm=1.0,
        )


def test_a_delta_that_allows_publishing_a_record_is_warned_about() -> None:
    engine, model, optimizer, loader = private()
    train_epoch(model, optimizer, loader)
    with pytest.warns(UserWarning, match="1/N"):
        engine.get_epsilon(delta=0.1)


@pytest.mark.parametrize(
    "make",
    [lambda: LSG(rank=0), lambda: LSG(rank=2.5), lambda: LSG(sparsity=1.0), lambda: LSG(sparsity=-0.1),
     lambda: LSG(importance="big"), lambda: LSG(dense="head"), lambda: LSG(fused_qkv="no"), lambda: LSG(head_scale=0),
     lambda: SwitchOn(-1)],
)  # fmt: skip
def test_bad_methods_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()
