"""A width in; what a record costs in a network so wide out: numbers noised, bytes, time, beside Opacus."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lsg.bench.contenders import contenders
from lsg.bench.presets import Workload
from lsg.bench.setting import Setting
from lsg.bench.shapes import Preset
from lsg.bench.timing import measure
from lsg.explain import explain
from lsg.methods import make_method
from lsg.models import small_cnn
from lsg.tasks.digits import digits

SAMPLES, ROUNDS = 32, 5
OPACUS = ("opacus hooks", "opacus ghost")


@dataclass(frozen=True)
class Cost:
    """Of one record in a step. noised, bytes: numbers that get noise, and the memory of its gradient; 0 without noise.

    milliseconds: median over ROUNDS steps, which contenders take in turn.
    """

    contender: str
    label: str
    noised: int
    bytes: int
    milliseconds: float


def wide_costs(methods: Sequence[str], width: int) -> list[Cost]:
    """Costs of those of the methods that `lsg bench` times, and of Opacus's faster mode, whose numbers are DPSGD's."""
    workload = _workload(width)
    model = workload.make_model()
    point = Preset("wide", "cnn", width=width, layers=2, tokens=8, micro_batch=SAMPLES, micro_batches=1)
    device = torch.device("cpu")
    builders = contenders(Setting(point, workload, device, "fp32"))
    known = [name for name in methods if name in builders]
    wanted = {name: builders[name] for name in (*known, *OPACUS)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus warns of its own hooks
        timings = {t.name: t for t in measure(wanted, samples=SAMPLES, rounds=ROUNDS, device=device)}
    costs = []
    for name in known:
        method = make_method(name, rank=point.rank, sparsity=point.sparsity)
        table = None if name == "non-private" else explain(model, method)
        noised, size = (table.dimensions_after, table.bytes_per_sample) if table else (0, 0)
        costs.append(Cost(name, str(method), noised, size, 1000 * timings[name].median / SAMPLES))
    opacus = [timings[name] for name in OPACUS if timings[name].error is None]
    if opacus:
        fastest = min(opacus, key=lambda timing: timing.median)
        numbers = sum(p.numel() for p in model.parameters())
        label = f"DPSGD, Opacus {fastest.name.split()[1]}"
        costs.append(Cost("opacus", label, numbers, 4 * numbers, 1000 * fastest.median / SAMPLES))
    return costs


def _workload(width: int) -> Workload:
    data = digits()

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return small_cnn(image_size=8, width=width)

    return Workload(model, [(data.train_images[:SAMPLES], data.train_labels[:SAMPLES])])
