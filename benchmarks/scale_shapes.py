"""What of a model is trained, and how large it is: a preset of `lsg bench` in, counts out. No weights are made.

The models are those of transformers on the device `meta`; what is projected and what is dense is what lsg says of them.
"""

from dataclasses import dataclass

import torch

from lsg import LSG
from lsg.bench.presets import workload
from lsg.bench.shapes import PRESETS, Preset
from lsg.layers.parameter_treatments import treat_parameters
from lsg.subspace.importance import kept_count

# Llama 3 70B: https://huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json. 8B: PRESETS["llama-8b"].
_LLAMA_70B = PRESETS["llama-8b"].scaled(name="llama-70b", width=8192, layers=80, feed_forward=28672, heads=64)
MODELS = {preset.name: preset for preset in (PRESETS["encoder"], PRESETS["llama-8b"], _LLAMA_70B)}


@dataclass(frozen=True)
class Shapes:
    """matrices: rows and columns of each projected weight. kept: of their factors, the numbers that a step trains.

    dense: trained numbers that are not projected. frozen: numbers that are not trained. tensors: trained parameters.
    """

    preset: Preset
    matrices: tuple[tuple[int, int], ...]
    kept: int
    dense: int
    frozen: int
    tensors: int

    @property
    def projected(self) -> int:
        return sum(m * n for m, n in self.matrices)

    @property
    def trained(self) -> int:
        return self.projected + self.dense

    @property
    def weights(self) -> int:
        return self.trained + self.frozen

    @property
    def summed(self) -> int:
        """The numbers of a record's gradient, and of the sum over records."""
        return self.kept + self.dense

    @property
    def weight_bytes(self) -> int:
        return 4 if self.preset.weights == "fp32" else 2

    @property
    def stacks(self) -> int:
        return len(set(self.matrices))

    @property
    def rows(self) -> int:
        return sum(m for m, _ in self.matrices)

    @property
    def columns(self) -> int:
        return sum(n for _, n in self.matrices)


def shapes(preset: Preset) -> Shapes:
    with torch.device("meta"):
        model = workload(preset, torch.device("meta")).make_model()
    rows = treat_parameters(model, LSG(rank=preset.rank, sparsity=preset.sparsity)).parameters
    matrices = tuple((row.shape[0], row.shape[1]) for row in rows if row.kind == "projected")
    sides = [side for matrix in matrices for side in matrix]
    return Shapes(
        preset=preset,
        matrices=matrices,
        kept=preset.rank * sum(kept_count(side, preset.sparsity) for side in sides),
        dense=sum(torch.Size(row.shape).numel() for row in rows if row.kind == "dense"),
        frozen=sum(torch.Size(row.shape).numel() for row in rows if row.kind == "frozen"),
        tensors=sum(row.kind != "frozen" for row in rows),
    )
