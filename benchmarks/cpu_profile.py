"""Where a step's time goes on one CPU core, in non-private training and in LSG, part by part.

    python benchmarks/cpu_profile.py [--rounds 15]      # writes results/bench/cpu-profile.json

Times are of the processor, not of the clock on the wall, and the least of all rounds; contenders take turns.
"""

import argparse
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from lsg.bench.contenders import attach
from lsg.bench.presets import workload
from lsg.bench.setting import Setting, Step
from lsg.bench.shapes import preset
from lsg.kernels import conv_reference
from lsg.kernels.factor_gradient import reference_factor_gradients
from lsg.layers import conv, linear
from lsg.methods import make_method
from lsg.parameters.subspaces import Subspaces
from lsg.step.clipping import Clipper
from lsg.step.gradients import PrivateGradients
from lsg.train.provenance import provenance

OUTPUT = Path(__file__).parents[1] / "results" / "bench" / "cpu-profile.json"
CPU = torch.device("cpu")
spent: defaultdict[str, float] = defaultdict(float)  # seconds by part, in this round


def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **settings: Any) -> Any:
        began = time.process_time()
        try:
            return function(*arguments, **settings)
        finally:
            spent[part] += time.process_time() - began

    return run


def watch_parts() -> None:
    """Put a clock around what lsg adds to a step; where one part is inside another, both have its time."""
    for owner, name, part in (
        (Subspaces, "refresh_if_stale", "subspaces"),
        (Clipper, "clip", "clip and sum"),
        (PrivateGradients, "release", "noise and lift"),
        (conv, "_convolution_backward", "gradients of inputs"),
        (conv, "_factor_gradients", "factor products"),
        (conv_reference, "patch_products", "factor products: of patches"),
        (linear, "factor_gradients", "factor products"),
    ):
        setattr(owner, name, timed(part, getattr(owner, name)))


def non_private_step(setting: Setting) -> Step:
    model = setting.workload.make_model()
    optimizer = setting.optimizer(model)
    forward, update = timed("forward", setting.workload.loss), timed("optimizer", optimizer.step)

    def step() -> None:
        for x, y in setting.workload.batches:
            loss = forward(model, x, y) / len(setting.workload.batches)
            timed("backward", loss.backward)()
        update()
        optimizer.zero_grad()

    return step


def lsg_step(setting: Setting) -> Step:
    model = setting.workload.make_model()
    method = make_method("lsg", rank=setting.preset.rank, sparsity=setting.preset.sparsity)
    _, optimizer = attach(setting, model, method, None)
    own = optimizer.original_optimizer
    own.step = timed("optimizer", own.step)  # type: ignore[method-assign]
    forward, last = timed("forward", setting.workload.loss), len(setting.workload.batches) - 1

    def step() -> None:
        epoch = optimizer.clock.enter_epoch()
        for number, (x, y) in enumerate(setting.workload.batches):
            optimizer.clock.begin_micro_batch(epoch, size=len(x), last=number == last)
            loss = forward(model, x, y)
            timed("backward", loss.backward)()
            optimizer.step()
            optimizer.zero_grad()

    return step


def profile(name: str, rounds: int) -> dict[str, dict[str, float]]:
    """Contender -> part -> milliseconds a step."""
    setting = Setting(preset(name), workload(preset(name), CPU), CPU, "fp32")
    steps = {"non-private": non_private_step(setting), "lsg": lsg_step(setting)}
    found: dict[str, defaultdict[str, list[float]]] = {who: defaultdict(list) for who in steps}
    for number in range(rounds + 2):
        for who, step in steps.items():
            spent.clear()
            timed("step", step)()
            for part, seconds in spent.items() if number >= 2 else ():
                found[who][part].append(1000 * seconds)
    return {who: {part: min(times) for part, times in parts.items()} for who, parts in found.items()}


def least(function: Callable[[], Any], rounds: int = 50) -> float:
    """Microseconds."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return 1e6 * min(times)


def of_convolution(channels: int, size: int) -> dict[str, float]:
    """Microseconds, for 16 samples, kernels 3 x 3 and rank 4."""
    x, kernel = torch.randn(16, channels, size, size), torch.randn(channels, channels, 3, 3)
    last = x.contiguous(memory_format=torch.channels_last)
    g, thin, h = torch.randn_like(x), torch.randn(4, channels, 3, 3), torch.randn(16, 4, size, size)
    as_groups = [t.reshape(1, -1, size, size) for t in (h, x)]
    where = conv.Geometry((1, 1), (1, 1), (1, 1))
    backward = conv._convolution_backward
    return {
        "forward": least(lambda: conv._convolve(x, kernel, None, where)),
        "gradient of the input": least(lambda: backward(g, x, kernel, where, (True, False))),
        "gradient of the kernel": least(lambda: backward(g, x, kernel, where, (False, True))),
        "conv(x, C)": least(lambda: conv._convolve(x, thin, None, where)),
        "products of patches": least(lambda: conv_reference.patch_products(h, x, (3, 3), *where[:3])),
        "the same, samples as groups": least(
            lambda: backward(*as_groups, thin.repeat(16, 1, 1, 1), where._replace(groups=16), (False, True))
        ),
        "F.unfold of x": least(lambda: F.unfold(x, 3, padding=1)),
        "group norm, channels first": least(lambda: F.group_norm(x, 16)),
        "group norm, channels last": least(lambda: F.group_norm(last, 16)),
    }


def of_linear(inputs: int, outputs: int) -> dict[str, float]:
    """Microseconds, for 16 samples of 64 tokens and rank 8."""
    x, g, matrix = torch.randn(16, 64, inputs), torch.randn(16, 64, outputs), torch.randn(outputs, inputs)
    rows, columns = torch.randn(8, outputs).mT, torch.randn(8, inputs)
    return {
        "forward": least(lambda: F.linear(x, matrix)),
        "gradient of the matrix": least(lambda: g.flatten(0, 1).mT @ x.flatten(0, 1)),
        "factor products": least(lambda: reference_factor_gradients(x, g, rows, columns, None, None)),
        "the same, factors on the right": least(lambda: ((x @ columns.mT).mT @ g, (g @ rows).mT @ x)),
    }


def operations() -> dict[str, dict[str, float]]:
    """Microseconds of what steps are made of."""
    images = {f"{c} channels, {n} x {n}": of_convolution(c, n) for c, n in ((16, 16), (32, 8), (64, 4))}
    tokens = {f"linear, {i} to {o}": of_linear(i, o) for i, o in ((384, 384), (384, 1536), (1536, 384))}
    return images | tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*a step on a batch that the private loader did not hand out")
    parts = operations()  # before clocks are around them
    watch_parts()
    profiles = {name: profile(name, rounds) for name in ("cpu-wrn", "cpu-encoder")}
    document = {"provenance": provenance(), "profiles": profiles, "operations": parts}
    OUTPUT.write_text(json.dumps(document, indent=1) + "\n")
    print(OUTPUT.read_text())
