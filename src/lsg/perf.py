"""Settings for speed. None of them can change a guarantee: they only choose how the same numbers are computed."""

from dataclasses import dataclass

from lsg.errors import ConfigurationError


@dataclass(frozen=True)
class PerfConfig:
    """compile: run the model's training forward and backward through torch.compile. None chooses: off, as a first
        compilation takes a minute or two that short runs never win back. The time it took is `engine.compile_seconds`.
    cuda_graphs: on a GPU, with compile, replay the compiled model and the refresh of the subspaces as CUDA graphs: the
        CPU need not launch kernels one by one. None chooses: on.
    pad: with compile, round micro-batches up to a few sizes with rows that have no gradient, so that the varying
        sizes of Poisson batches do not compile again and again.
    """

    compile: bool | None = None
    cuda_graphs: bool | None = None
    pad: bool = True

    def __post_init__(self) -> None:
        if not all(value in (None, True, False) for value in (self.compile, self.cuda_graphs)):
            raise ConfigurationError(f"{self}: compile and cuda_graphs must be None, True or False")

    @property
    def compiles(self) -> bool:
        return bool(self.compile)

    def graphs(self, device_type: str) -> bool:
        return self.compiles and self.cuda_graphs is not False and device_type == "cuda"


def padded_size(size: int, largest: int | None) -> int:
    """The size that a micro-batch of `size` samples is rounded up to: quarters of the largest, or a power of two."""
    if largest is None or size > largest:
        return 1 << (size - 1).bit_length()
    quarter = -(-largest // 4)
    return min(largest, -(-size // quarter) * quarter)
