"""The user's generators in, one random stream each out: for noise, for samples, for the directions of subspaces."""

import torch

from lsg.errors import ConfigurationError
from lsg.sampling.random_sources import NoiseSource, TorchNoise, fresh_generator
from lsg.sampling.secure_source import SecureNoise


class Streams:
    """Makes each stream of the user's generators, derives it from them, or seeds it from the operating system.

    noise, sampling: generators that the user gave. secure: the cryptographic source, in secure mode.
    """

    def __init__(
        self,
        noise: torch.Generator | None,
        sampling: torch.Generator | None,
        secure: SecureNoise | None,
    ) -> None:
        if secure is not None and noise is not None:
            raise ConfigurationError("noise_generator is given, but secure_mode=True draws noise that nobody repeats")
        if secure is not None and sampling is not None:
            raise ConfigurationError(
                "data_loader has a generator of its own, but secure_mode=True draws samples that nobody can repeat: "
                "make the DataLoader without generator="
            )
        # One generator for both would be one stream, and going on from a saved state would draw other samples.
        self._noise, self._sampling, self._secure = noise, None if sampling is noise else sampling, secure
        self._state = None if noise is None else bytes(noise.get_state().tolist())

    def noise(self, device: torch.device) -> NoiseSource:
        return self._secure or (TorchNoise(self._noise) if self._noise else TorchNoise.fresh(device))

    def sampling(self) -> NoiseSource:
        if self._secure is not None:
            return self._secure
        generator = self._sampling or self._derived("sampling", torch.device("cpu"))
        return TorchNoise(generator) if generator else TorchNoise.fresh(torch.device("cpu"))

    def projection(self, device: torch.device) -> torch.Generator:
        """Not secret: what it decides is computed from the weights and shown in `engine.subspaces`."""
        return self._derived("projection", device) or fresh_generator(device)

    def _derived(self, purpose: str, device: torch.device) -> torch.Generator | None:
        if self._state is None:
            return None
        return fresh_generator(device, purpose.encode() + b":" + self._state)
