"""Ways to train on several GPUs: a model's sizes in; collectives, bytes sent and memory of a GPU out."""

import math
from dataclasses import dataclass

from scale_links import GPUS_A_NODE, Collective
from scale_shapes import Shapes

GPU_BYTES = 141e9  # H200 (https://www.nvidia.com/en-us/data-center/h200/)
MIB = 2**20
CHUNK, BUCKET = 256 * MIB, 25 * MIB  # lsg's, of weights (parameters/matrix_chunks.py); DDP's, of gradients
BOOKKEEPING = 1  # number that lsg reduces beside the sum (step/gradients.py)
COMPUTED = 2  # bytes of a number in bfloat16, which all of them compute in


@dataclass(frozen=True)
class Way:
    """method: plain, lsg or opacus. sharded: weights are cut among all GPUs; within_node: among those of a node."""

    title: str
    method: str
    sharded: bool = False
    within_node: bool = False

    def over(self, gpus: int) -> int:
        """The GPUs that hold one set of weights together."""
        return (min(gpus, GPUS_A_NODE) if self.within_node else gpus) if self.sharded else 1


WAYS = (
    Way("lsg, replicas", "lsg"),
    Way("lsg, FSDP2", "lsg", sharded=True),
    Way("lsg, FSDP2 within a node", "lsg", sharded=True, within_node=True),
    Way("non-private, DDP", "plain"),
    Way("non-private, FSDP2", "plain", sharded=True),
    Way("Opacus, DPDDP", "opacus"),
)


# --- bytes ------------------------------------------------------------------------------------------------------------


def update_collective(shape: Shapes, way: Way) -> Collective:
    """What replicas exchange once a logical step, so that all make the same update."""
    if way.method == "lsg":
        return Collective("all_reduce", 4.0 * (shape.summed + BOOKKEEPING))
    size = float(shape.weight_bytes * shape.trained)
    if way.method == "opacus":  # one call a parameter: DistributedDPOptimizer.reduce_gradients
        return Collective("all_reduce", size, shape.tensors)
    return Collective("all_reduce", size, math.ceil(size / BUCKET))


def gather_collective(shape: Shapes) -> Collective:
    """Under FSDP, all weights once: in a forward, and again in the backward. A call a layer, and one for the rest."""
    return Collective("all_gather", float(shape.weight_bytes * shape.weights), shape.preset.layers + 1)


def scatter_collective(shape: Shapes) -> Collective:
    """Gradients under non-private FSDP, in each backward."""
    return Collective("reduce_scatter", float(shape.weight_bytes * shape.trained), shape.preset.layers + 1)


def refresh_collectives(shape: Shapes) -> list[Collective]:
    """Of subspaces whose weights' rows are spread over GPUs: sketches and scores of rows; of columns, summed."""
    r = shape.preset.rank
    return [
        Collective("all_gather", 4.0 * (r + 1) * shape.rows, 2 * shape.stacks),
        Collective("all_reduce", 4.0 * (r + 1) * shape.columns, 2 * shape.stacks),
    ]


def step_collectives(shape: Shapes, way: Way, gpus: int, micro_batches: int) -> list[tuple[Collective, int, int]]:
    """(collective, how often a step, among how many GPUs)."""
    among = way.over(gpus)
    if not way.sharded:
        return [(update_collective(shape, way), 1, gpus)]
    found = [(gather_collective(shape), 2 * micro_batches, among)]
    if way.method == "lsg":
        found += [(each, 1, among) for each in refresh_collectives(shape)]
        return [*found, (update_collective(shape, way), 1, gpus)]
    return [*found, (scatter_collective(shape), micro_batches, among)]


def bytes_of_step(shape: Shapes, way: Way, gpus: int, micro_batches: int) -> dict[str, float]:
    """payload: of the tensors. sent: by each GPU."""
    every = step_collectives(shape, way, gpus, micro_batches)
    sent = sum(times * collective.sent(among) for collective, times, among in every)
    return {
        "payload": sum(times * collective.payload for collective, times, _ in every),
        "sent": sent,
        "sent_a_record": sent / (micro_batches * shape.preset.micro_batch),
    }


# --- memory -----------------------------------------------------------------------------------------------------------


def memory(shape: Shapes, way: Way, gpus: int, records: float, peak: float | None = None) -> dict[str, float]:
    """Bytes on a GPU for micro-batches of so many records, part by part, by docs/performance.md.

    peak: what one GPU was measured to need for the preset's micro-batch; activations are then what the formulas leave.
    """
    parts = _state(shape, way, gpus) | {"gradients": _gradients(shape, way, gpus, records)}
    if peak is not None:
        alone, batch = Way("", way.method), shape.preset.micro_batch
        known = sum(_state(shape, alone, 1).values()) + _gradients(shape, alone, 1, batch)
        return parts | {"activations": (peak - known) * records / batch}
    tokens = records * shape.preset.tokens
    largest = max(m * n for m, n in shape.matrices) / way.over(gpus)
    lift = max(CHUNK, 4.0 * largest) + CHUNK if way.method == "lsg" else 0.0
    logits = 4.0 * tokens * shape.preset.vocabulary + CHUNK if shape.preset.kind == "causal" else 0.0
    return parts | {"activations": tokens * _activation_bytes(shape), "logits or lift": max(lift, logits)}


def _state(shape: Shapes, way: Way, gpus: int) -> dict[str, float]:
    w = shape.weight_bytes
    parts = {"weights and optimizer": (w * shape.weights + 2.0 * w * shape.trained) / way.over(gpus)}
    if way.sharded:
        root, layer = _gathered(shape)
        parts["gathered weights"] = root + 2 * layer  # one is computed with while the next one comes
    if way.method == "lsg":
        parts["subspaces"] = 4.0 * shape.preset.rank * (shape.rows + shape.columns)  # L and R, on every GPU
    return parts


def _gradients(shape: Shapes, way: Way, gpus: int, records: float) -> float:
    w = shape.weight_bytes
    if way.method == "lsg":  # of each record; their sum; the buffer that is reduced
        return 4.0 * shape.summed * (records + 2)
    if way.method == "opacus":  # of each record; their sum; what the optimizer reads
        return COMPUTED * shape.trained * records + 2.0 * w * shape.trained
    return w * shape.trained / way.over(gpus) + (max(_gathered(shape)) if way.sharded else 0.0)


def _gathered(shape: Shapes) -> tuple[float, float]:
    """Bytes of embedding tables and head, which FSDP holds together, and of a layer."""
    w, preset = shape.weight_bytes, shape.preset
    root = float(w * preset.vocabulary * preset.width * (2 if preset.kind == "causal" else 1))
    return root, (w * shape.weights - root) / preset.layers


def _activation_bytes(shape: Shapes) -> float:
    """Of a token: each layer's input, and one layer computed again (assumed: what autograd saves in a layer)."""
    preset = shape.preset
    inner = preset.feed_forward or 4 * preset.width
    keys = preset.width * (preset.kv_heads or 1) // (preset.heads or 1)
    return COMPUTED * (preset.layers * preset.width + 8 * preset.width + 2 * keys + 4 * inner)


def largest_micro_batch(shape: Shapes, way: Way, gpus: int, peak: float | None) -> int:
    """Records that fit; 0 where not even one does."""

    def fits(records: int) -> bool:
        return sum(memory(shape, way, gpus, records, peak).values()) <= GPU_BYTES

    found, stride = 0, 2**20
    while stride:
        found += stride if fits(found + stride) else 0
        stride //= 2
    return found
