"""Where randomness comes from: a count in, random numbers out. Noise and sampling each have a source of their own."""

import hashlib
import os
import secrets
from typing import Protocol

import torch
from torch import Tensor

from lsg.errors import ConfigurationError, PrivacyError

# Where the Mersenne twister's 624 words, 8 bytes each, lie in the state of torch's generator on a CPU.
_TWISTER_START, _TWISTER_WORDS = 24, 624


class NoiseSource(Protocol):
    """A stream of random numbers. No two calls give the same ones, in whatever process."""

    replayable: bool  # whether its state can be saved, and its numbers be drawn again

    def normal(self, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Independent standard normal numbers, in `dtype` or better."""

    def uniform(self, count: int) -> Tensor:
        """Independent float64 numbers, uniform on the multiples of 2^-53 in [0, 1)."""

    def permutation(self, count: int) -> Tensor:
        """The numbers from 0 to count - 1 in a random order."""

    def state(self) -> Tensor | None:
        """What `load_state` continues from; None where nothing can."""

    def check_state(self, name: str, state: Tensor | None) -> None:
        """Refuse a state that is not of this kind of source. `name`: what the source is for."""

    def load_state(self, state: Tensor | None) -> None:
        """Draw from here on what was drawn after the state was taken, where that is possible."""

    def renew(self, secret: bytes | None = None) -> None:
        """Draw from here on what nobody has drawn before. secret: entropy that all ranks have alike, where they draw
        the same numbers."""


class TorchNoise:
    """PyTorch's generator: fast and repeatable, but not cryptographic: who sees enough of it can compute the rest.

    from_os: the seed came from the operating system, to be like no other. A process forked from this one would draw
        the same numbers as this one: it is stopped with PrivacyError. A seed of the user's is there to repeat.
    """

    replayable = True

    def __init__(self, generator: torch.Generator, *, from_os: bool = False) -> None:
        self.generator = generator
        self._process = os.getpid() if from_os else None

    @classmethod
    def fresh(cls, device: torch.device, secret: bytes | None = None) -> "TorchNoise":
        """secret: the operating system's entropy, where it was drawn already."""
        return cls(fresh_generator(device, secret), from_os=True)

    def normal(self, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.randn(count, generator=self._own(), device=self.generator.device, dtype=dtype).to(device)

    def uniform(self, count: int) -> Tensor:
        # float64: a float32 uniform has only 2^24 values, which would bend small sampling rates.
        return torch.rand(count, generator=self._own(), dtype=torch.float64)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._own())

    def state(self) -> Tensor:
        return self.generator.get_state()

    def check_state(self, name: str, state: Tensor | None) -> None:
        if state is None:
            raise ConfigurationError("the saved run has secure_mode=True, but this engine was made without it")
        try:
            torch.Generator(self.generator.device).set_state(state)
        except (RuntimeError, TypeError):
            raise ConfigurationError(
                f"the saved state of the {name} generator does not fit a generator on {self.generator.device}: "
                "continue on the kind of device that the run began on"
            ) from None

    def load_state(self, state: Tensor | None) -> None:
        assert state is not None
        self.generator.set_state(state)

    def renew(self, secret: bytes | None = None) -> None:
        self.generator.set_state(fresh_generator(self.generator.device, secret).get_state())
        self._process = os.getpid()

    def _own(self) -> torch.Generator:
        if self._process is not None and self._process != os.getpid():
            raise PrivacyError(
                "this process was forked after make_private: its noise would be that of the process it came from, and "
                "the difference of the two results would have none. Call make_private in the process that trains, or "
                "use PrivacyEngine(secure_mode=True)"
            )
        return self.generator


def fresh_generator(device: torch.device, secret: bytes | None = None) -> torch.Generator:
    """A stream of its own on a device, from the operating system's entropy unless a secret is given.

    All bits of the secret count. `manual_seed` would take 32 of them on a CPU (and 64 on a GPU), and 2^32 streams can
    be tried one by one against released weights.
    """
    digest = hashlib.sha512(secrets.token_bytes(64) if secret is None else secret).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    if generator.device.type == "cpu":
        state = generator.get_state()
        numbers = bytearray(hashlib.shake_256(digest).digest(4 * _TWISTER_WORDS))
        words = torch.frombuffer(numbers, dtype=torch.int32).long().bitwise_and_(2**32 - 1)
        state[_TWISTER_START : _TWISTER_START + 8 * _TWISTER_WORDS] = words.view(torch.uint8)
        generator.set_state(state)
    return generator
