"""Interleaved timing: contenders in, seconds a step and peak memory of each out."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from lsg.bench.setting import Step


@dataclass
class Timing:
    """One contender's measurements. `error` is set where it could not run."""

    name: str
    samples: int
    first_seconds: float = 0.0  # build and first step: compilation, tuning, checks
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None  # in tensors and CUDA graphs
    reserved_bytes: int | None = None  # taken from the device, with the gaps between tensors
    error: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.median


def best_non_private(timings: Sequence[Timing]) -> Timing | None:
    """The fastest non-private contender of those that ran: what ratios are against."""
    ran = [t for t in timings if t.name.startswith("non-private") and t.error is None]
    return min(ran, key=lambda t: t.median, default=None)


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
            before = _memory(device)
            start = time.perf_counter()
            step = build()
            step()
            _wait(device)
            timing.first_seconds = time.perf_counter() - start
            step()
            _wait(device)
            gc.collect()
            timing.peak_bytes, timing.reserved_bytes = _peak(step, device, before)
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


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes in tensors and CUDA graphs, and bytes that the process has taken from the device."""
    if device.type != "cuda":
        return 0, 0
    gc.collect()
    torch.cuda.empty_cache()  # also what graphs that are gone had
    return torch.cuda.memory_allocated(device) + _graph_bytes(), torch.cuda.memory_reserved(device)


def _graph_bytes() -> int:
    """Memory of the graphs' private pools that no tensor has: they keep it to themselves."""
    private = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


def _peak(step: Step, device: torch.device, before: tuple[int, int]) -> tuple[int | None, int | None]:
    """The same at the peak of a step, less what was there before the contender. Its weights and optimizer state count.

    Tensors alone are what a step needs at least; between them the device's memory has gaps, which tensors may fill but
    graphs, once recorded, may not. So graphs count with their gaps on both sides. What was taken from the device comes
    out low where a contender finds room in gaps that earlier ones left.
    """
    if device.type != "cuda":
        return None, None  # a process has one peak, which contenders share
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    _wait(device)
    held = torch.cuda.max_memory_allocated(device) + _graph_bytes()
    return held - before[0], torch.cuda.max_memory_reserved(device) - before[1]
