"""Bytes, memory and time of a step on 8 to 512 GPUs: sizes of models and speeds of one GPU in, JSON out.

    python benchmarks/scale_simulator.py [OUTPUT]      # results/scale/simulation.json

Arithmetic; needs no GPU. What is assumed: docs/scale.md. `scale_shapes.py`: sizes. `scale_speeds.py`: one GPU.
`scale_links.py`: links. `scale_ways.py`: what is sent and held. Here: time, and what breaks first.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from scale_links import ETHERNET, GPUS_A_NODE, INFINIBAND, Collective, Network
from scale_shapes import MODELS, Shapes, shapes
from scale_speeds import Speed, speeds
from scale_ways import (
    BUCKET,
    GPU_BYTES,
    WAYS,
    Way,
    bytes_of_step,
    gather_collective,
    largest_micro_batch,
    memory,
    refresh_collectives,
    scatter_collective,
    update_collective,
)

from lsg.train.provenance import provenance

OUTPUT = Path(__file__).parents[1] / "results" / "scale" / "simulation.json"
GPUS = tuple(GPUS_A_NODE * 2**power for power in range(7))  # 8 to 512
LOOKED_AT = tuple(GPUS_A_NODE * 2**power for power in range(14))  # for what breaks first: 8 to 65,536
BREAKS = 0.1  # a part of a step that takes more of it than this breaks the scaling
HBM_BYTES = 0.8 * 4.8e12  # a second: H200's data sheet, of which four fifths are assumed to be reached
# Bytes moved for each number: a refresh by three passes (docs/performance.md); a lift is written and read in float32.
REFRESH_TRAFFIC, LIFT_TRAFFIC = 34, 8
# The encoder's refresh is many small kernels: 1.6 ms, `refresh_ms` in results/bench/gpu-trials.json. No refresh is
# assumed to take less.
REFRESH_LEAST = 1.62e-3
ADAMW_ACCESSES = 7  # of a weight's size: weight, gradient and two states are read, weight and states written
# Records of a logical batch that stays the same however many GPUs there are.
FIXED_BATCH = {"encoder": 8192, "llama-8b": 4096, "llama-70b": 4096}


def own_work(shape: Shapes, way: Way, gpus: int) -> dict[str, float]:
    """Seconds of what a GPU does once a step, whatever the number of its records."""
    among = way.over(gpus)
    once = {"optimizer": ADAMW_ACCESSES * shape.weight_bytes * shape.trained / among / HBM_BYTES}
    if way.method == "lsg":
        once["optimizer"] += LIFT_TRAFFIC * shape.projected / among / HBM_BYTES
        once["refresh"] = max(REFRESH_LEAST, REFRESH_TRAFFIC * shape.projected / among / HBM_BYTES)
    return once


def record_seconds(shape: Shapes, method: str, speed: Speed) -> float:
    """Of one record's forward and backward, clip and sum: what a measured step leaves beside `own_work`."""
    records = shape.preset.micro_batch * shape.preset.micro_batches
    return 1 / speed.records - sum(own_work(shape, Way("", method), 1).values()) / records


def step(
    shape: Shapes, way: Way, gpus: int, records: float, speed: Speed, network: Network = INFINIBAND
) -> dict[str, float]:
    """Seconds of a step with so many records on each GPU, part by part. Traffic counts where nothing hides it."""
    micro_batches = max(1, math.ceil(records / shape.preset.micro_batch))
    compute = records * record_seconds(shape, way.method, speed)
    parts = {"compute": compute, **own_work(shape, way, gpus)}
    forward, backward = _halves(shape, way.method, compute / micro_batches)
    update = update_collective(shape, way).seconds(gpus, network)
    if not way.sharded:
        if way.method == "plain":  # buckets go while the last backward runs, but for the last one
            update = max(update - backward, Collective("all_reduce", BUCKET).seconds(gpus, network))
        return parts | {"all-reduce": update}
    among, gather, scatter = way.over(gpus), gather_collective(shape), 0.0
    there = gather.seconds(among, network)
    if way.method == "lsg":
        parts["refresh"] += sum(each.seconds(among, network) for each in refresh_collectives(shape))
        parts["all-reduce"] = update
    else:
        scatter = scatter_collective(shape).seconds(among, network)
    shown = max(0.0, there - forward) + max(0.0, there + scatter - backward)
    first = (2 * there + scatter) / gather.calls  # the first layer of each direction, and the last gradient
    return parts | {"gathers": micro_batches * (first + shown)}


def _halves(shape: Shapes, method: str, seconds: float) -> tuple[float, float]:
    """Of a micro-batch: forward and backward, by products of a weight (forward, again, for input, for weight)."""
    products = 2 + shape.preset.checkpointing + (method != "lsg")
    return seconds / products, seconds * (products - 1) / products


def efficiency(
    shape: Shapes, way: Way, gpus: int, records: float, speed: Speed, network: Network = INFINIBAND
) -> float:
    """A GPU's speed among others over its speed alone, with as many records a step, were its memory large enough."""
    alone = sum(step(shape, Way("", way.method), 1, records, speed).values())
    return alone / sum(step(shape, way, gpus, records, speed, network).values())


def first_break(shape: Shapes, way: Way, speed: Speed, logical_batch: int | None) -> dict[str, Any]:
    """fits_from: the first number of GPUs with memory for it. gpus, part, share: where a part first exceeds `BREAKS`.

    logical_batch: records of a step of all GPUs together; None for the preset's number on each GPU.
    """
    batch = shape.preset.micro_batch
    fits_from = None
    for gpus in LOOKED_AT:
        if logical_batch is not None and logical_batch < gpus:
            return _found(fits_from, gpus, "fewer records than GPUs") if fits_from else _found(None, None, "memory")
        records = logical_batch / gpus if logical_batch else batch * shape.preset.micro_batches
        if sum(memory(shape, way, gpus, min(records, batch), speed.peak).values()) > GPU_BYTES:
            continue
        fits_from = fits_from or gpus
        parts = step(shape, way, gpus, records, speed)
        part = max(parts.keys() - {"compute"}, key=lambda name: parts[name])
        share = parts[part] / sum(parts.values())
        if share > BREAKS:
            return _found(fits_from, gpus, part, share)
    return _found(fits_from, None, None if fits_from else "memory")


def _found(fits_from: int | None, gpus: int | None, part: str | None, share: float | None = None) -> dict[str, Any]:
    return {"fits_from": fits_from, "gpus": gpus, "part": part, "share": share}


def simulate() -> dict[str, Any]:
    known = speeds()
    return {name: _model(shapes(preset), known[name], FIXED_BATCH[name]) for name, preset in MODELS.items()}


def _model(shape: Shapes, known: dict[str, Speed], logical_batch: int) -> dict[str, Any]:
    settings = ("tokens", "micro_batch", "micro_batches", "rank", "sparsity")
    return {
        "sizes": {name: getattr(shape, name) for name in ("weights", "trained", "summed", "tensors", "weight_bytes")},
        "step": {name: getattr(shape.preset, name) for name in settings},
        "logical_batch": logical_batch,
        "ways": {way.title: _way(shape, way, known[way.method], logical_batch) for way in WAYS},
    }


def _way(shape: Shapes, way: Way, speed: Speed, logical_batch: int) -> dict[str, Any]:
    breaks = {
        "same work on each GPU": first_break(shape, way, speed, None),
        "same logical batch": first_break(shape, way, speed, logical_batch),
    }
    rows = [_row(shape, way, speed, gpus) for gpus in GPUS]
    return {"records_per_second_alone": speed.records, "source": speed.source, "breaks": breaks, "rows": rows}


def _row(shape: Shapes, way: Way, speed: Speed, gpus: int) -> dict[str, Any]:
    batch, several = shape.preset.micro_batch, shape.preset.micro_batches
    parts = memory(shape, way, gpus, batch, speed.peak)
    return {
        "gpus": gpus,
        "bytes": bytes_of_step(shape, way, gpus, several),
        "memory": parts,
        "fits": sum(parts.values()) <= GPU_BYTES,
        "largest_micro_batch": largest_micro_batch(shape, way, gpus, speed.peak),
        "seconds": step(shape, way, gpus, several * batch, speed),
        "efficiency": {
            network.name: {
                str(number): efficiency(shape, way, gpus, number * batch, speed, network) for number in (several, 1)
            }
            for network in (INFINIBAND, ETHERNET)
        },
    }


def main(output: str = str(OUTPUT)) -> None:
    Path(output).write_text(json.dumps({"provenance": provenance(), "models": simulate()}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
