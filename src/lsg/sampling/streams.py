"""The user's generators in, one random stream each out: for noise, for samples, for the directions of subspaces."""

import hashlib
import secrets

import torch

from lsg.distributed.group import Group
from lsg.errors import ConfigurationError
from lsg.sampling.random_sources import NoiseSource, TorchNoise, fresh_generator
from lsg.sampling.secure_source import SecureNoise
from lsg.sampling.shared_source import FromFirst


class Streams:
    """Makes each stream of the user's generators, derives it from them, or seeds it from the operating system.

    noise, sampling: generators that the user gave. secure: the cryptographic source, in secure mode. group: all of its
    ranks get the same streams, and draw the same numbers from them.
    """

    def __init__(
        self,
        noise: torch.Generator | None,
        sampling: torch.Generator | None,
        secure: SecureNoise | None,
        group: Group | None = None,
    ) -> None:
        if secure is not None and noise is not None:
            raise ConfigurationError("noise_generator is given, but secure_mode=True draws noise that nobody repeats")
        if secure is not None and sampling is not None:
            raise ConfigurationError(
                "data_loader has a generator of its own, but secure_mode=True draws samples that nobody can repeat: "
                "make the DataLoader without generator="
            )
        self._group = group or Group()
        self._group.check_alike(
            {"the state of noise_generator": _digest(noise), "the state of data_loader's generator": _digest(sampling)},
            "Seed generators alike on every rank (torch.Generator().manual_seed(...)), or give none",
        )
        # One generator for both would be one stream, and going on from a saved state would draw other samples.
        self._noise, self._sampling, self._secure = noise, None if sampling is noise else sampling, secure
        self._state = None if noise is None else bytes(noise.get_state().tolist())

    def noise(self, device: torch.device) -> NoiseSource:
        if self._secure is not None:
            return self._cryptographic()
        return TorchNoise(self._noise) if self._noise else self._fresh(device)

    def sampling(self) -> NoiseSource:
        if self._secure is not None:
            return self._cryptographic()
        cpu = torch.device("cpu")
        generator = self._sampling or self._derived("sampling", cpu)
        return TorchNoise(generator) if generator else self._fresh(cpu)

    def projection(self, device: torch.device) -> torch.Generator:
        """Not secret: what it decides is computed from the weights and shown in `engine.subspaces`."""
        return self._derived("projection", device) or fresh_generator(device, self._secret())

    def _cryptographic(self) -> NoiseSource:
        assert self._secure is not None
        return self._secure if self._group.alone else FromFirst(self._secure, self._group)

    def _fresh(self, device: torch.device) -> NoiseSource:
        """A stream that nobody has drawn from, the same on all ranks."""
        return TorchNoise.fresh(device, self._secret())

    def _secret(self) -> bytes:
        """Rank 0's entropy, another at each call."""
        secret: bytes = self._group.on_first(lambda: secrets.token_bytes(64))
        return secret

    def _derived(self, purpose: str, device: torch.device) -> torch.Generator | None:
        if self._state is None:
            return None
        return fresh_generator(device, purpose.encode() + b":" + self._state)


def _digest(generator: torch.Generator | None) -> str | None:
    """What tells one generator's state from another's, and nothing of the numbers that it will give."""
    if generator is None:
        return None
    return hashlib.sha256(bytes(generator.get_state().tolist())).hexdigest()[:12]
