"""Interleaved timing: contenders in, seconds a step and peak memory of each out."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lsg.bench.contenders import Step


@dataclass
class Timing:
    """One contender's measurements. `error` is set where it could not run."""

    name: str
    samples: int
    first_seconds: float = 0.0  # build and first step: compilation, tuning, checks
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    error: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.median


def measure(
    builders: dict[str, Callable[[], Step]],
    *,
    samples: int,
    rounds: int,
    device: torch.device,
    report: Callable[[str], None] = lambda line: None,
) -> list[Timing]:
    """Build each contender, warm it up, then time steps in turn, round by round."""
    timings, steps = [], {}
    for name, build in builders.items():
        timing = Timing(name, samples)
        timings.append(timing)
        try:
            before = _held(device)
            start = time.perf_counter()
            step = build()
            step()
            _wait(device)
            timing.first_seconds = time.perf_counter() - start
            step()
            _wait(device)
            gc.collect()
            timing.peak_bytes = _peak(step, device, before)
            steps[name] = step
            report(f"{name}: ready after {timing.first_seconds:.1f} s")
        except Exception as error:  # a contender that cannot run this workload is a result, not a failure of the bench
            timing.error = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            report(f"{name}: cannot run ({timing.error})")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for number in range(rounds):
        for timing in timings:
            if timing.name in steps:
                start = time.perf_counter()
                steps[timing.name]()
                _wait(device)
                timing.seconds.append(time.perf_counter() - start)
        report(f"round {number + 1} of {rounds}")
    return timings


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _held(device: torch.device) -> int:
    """Bytes in tensors, and what CUDA graphs keep to themselves, which belongs to no tensor."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device) + _graph_bytes()


def _graph_bytes() -> int:
    """Memory of the graphs' private pools that no tensor has."""
    private = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


def _peak(step: Step, device: torch.device, before: int) -> int | None:
    """Peak bytes of a step with all that belongs to the contender: its weights and optimizer state too."""
    if device.type != "cuda":
        return None  # a process has one peak, which contenders share
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    _wait(device)
    return torch.cuda.max_memory_allocated(device) + _graph_bytes() - before
