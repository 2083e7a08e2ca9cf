"""Settings for speed: they choose how the same numbers are computed."""

from dataclasses import dataclass

from lsg.errors import ConfigurationError


@dataclass(frozen=True)
class PerfConfig:
    """No setting here can change a guarantee: a record's gradient is of that record and of nothing else, is clipped,
    and gets the same noise, however it is computed. What is fast is used where it was seen to compute the same. All are
    chosen if you set nothing.

    compile: run the model's training forward and backward through torch.compile. None chooses: on a GPU, where the
        number of steps is known (`make_private_with_epsilon`) and the first ones say that the minute or two that it
        takes will be won back twice. That is announced; the time it took is `engine.compile_seconds`.
    cuda_graphs: on a GPU, record the model's forward and backward and the refresh of the subspaces as CUDA graphs, one
        for each shape that comes a second time, and replay them: the CPU need not launch kernels one by one. None and
        True are the same: a model is recorded, with and without compile, if it is safe. A recording runs none of the
        model's Python, so a forward that reads tensors beside its inputs, parameters and buffers, or changes what its
        modules hold, or has hooks inside, is not recorded, and the first replays of each shape, and others now and
        then, are compared with the plain forward and backward by value. A model that is found out runs without
        recordings from then on, with one warning; the batch in which it was found out has the plain gradients. What a
        forward does beyond its modules (printing, writing to a file) happens only while it runs as usual.
    pad: with either, round micro-batches up to a few sizes with rows that have no gradient, so that the varying sizes
        of Poisson batches are not compiled or recorded again and again. A model that returns something else than a row
        for each sample (its loss, say) gets its micro-batches as they are.
    max_tokens: where the data set tells its records' lengths, a micro-batch has at most so many tokens (records times
        the longest of them), as long as it has several records: many short ones together, few long ones.
        `max_physical_batch_size` still holds.
    """

    compile: bool | None = None
    cuda_graphs: bool | None = None
    pad: bool = True
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("compile", "cuda_graphs"):
            if getattr(self, name) not in (None, True, False):
                raise ConfigurationError(f"{self}: {name} must be None, True or False")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigurationError(f"{self}: max_tokens must be at least 1")

    @property
    def compiles(self) -> bool:
        """Whether compilation was asked for. None may still choose it later."""
        return bool(self.compile)

    def fast(self, device_type: str) -> bool:
        """Whether the model's forward is replaced by a faster one."""
        return self.compiles or self.graphs(device_type)

    def graphs(self, device_type: str) -> bool:
        """Whether a safe model is recorded."""
        return self.cuda_graphs is not False and device_type == "cuda"


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
