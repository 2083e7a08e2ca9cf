"""Settings for speed: they choose how the same numbers are computed. `cuda_graphs` says what it needs for that."""

from dataclasses import dataclass

from lsg.errors import ConfigurationError


@dataclass(frozen=True)
class PerfConfig:
    """compile: run the model's training forward and backward through torch.compile. None chooses: off, as a first
        compilation takes a minute or two that short runs never win back. The time it took is `engine.compile_seconds`.
    cuda_graphs: on a GPU, record the model's forward and backward and the refresh of the subspaces as CUDA graphs, one
        for each shape that comes a second time, and replay them: the CPU need not launch kernels one by one. Works with
        and without compile. Off unless asked for: what a model's forward does in Python beside its tensors (counting,
        drawing from Python's random numbers) happens only while recording, and tensors that it finds elsewhere than
        among its inputs, parameters and buffers (an attribute set before each batch) stay those of the recording. Pass
        them as inputs: a record's gradient must not come from another batch.
    pad: with either, round micro-batches up to a few sizes with rows that have no gradient, so that the varying sizes
        of Poisson batches are not compiled or recorded again and again.
    max_tokens: where the data set tells its records' lengths, a micro-batch has at most so many tokens (records times
        the longest of them), as long as it has several records: many short ones together, few long ones.
        `max_physical_batch_size` still holds.
    """

    compile: bool | None = None
    cuda_graphs: bool = False
    pad: bool = True
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.compile not in (None, True, False):
            raise ConfigurationError(f"{self}: compile must be None, True or False")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigurationError(f"{self}: max_tokens must be at least 1")

    @property
    def compiles(self) -> bool:
        return bool(self.compile)

    def fast(self, device_type: str) -> bool:
        """Whether the model's forward is replaced by a faster one."""
        return self.compiles or self.graphs(device_type)

    def graphs(self, device_type: str) -> bool:
        return self.cuda_graphs and device_type == "cuda"


def padded_size(size: int, largest: int | None) -> int:
    """The size that a micro-batch of `size` samples is rounded up to: quarters of the largest, or the grid's next."""
    if largest is None or size > largest:
        step = _grid_step(size)
        return -(-size // step) * step
    quarter = -(-largest // 4)
    return min(largest, -(-size // quarter) * quarter)


def grid_size(most: int) -> int:
    """The largest size of the grid that is not above `most`: one that `padded_size` leaves as it is."""
    step = _grid_step(most)
    return most // step * step


def _grid_step(size: int) -> int:
    """Of a grid of four sizes an octave: 64, 80, 96, 112, 128, 160, ..."""
    return max(1, (1 << (size - 1).bit_length()) // 8)
