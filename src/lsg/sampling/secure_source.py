"""A cryptographic source of noise and samples: the operating system's entropy in, random numbers out.

Each draw has a key of its own: 256 bits from the operating system, used for one AES-256-CTR keystream (of the package
`cryptography`, which is OpenSSL) and then forgotten. So there is no state that a fork, a restart, another rank or a
checkpoint could repeat, and whoever sees some numbers, or the whole memory later on, learns nothing of others.
"""

import math
import os

import torch
from torch import Tensor

from lsg.errors import ConfigurationError

_BLOCK = 2**20  # normal numbers made at once, which bounds the memory taken
_MANTISSA = 53  # bits of a float64


class SecureNoise:
    """Numbers that nobody can predict, nor draw a second time."""

    replayable = False

    def __init__(self) -> None:
        try:
            import cryptography  # noqa: F401
        except ImportError:
            raise ConfigurationError(
                "secure_mode=True needs the package 'cryptography': pip install 'lsg-dp[secure]'"
            ) from None

    def normal(self, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """In float64, whatever is asked for: see `box_muller` for how exact they are."""
        blocks = []
        for start in range(0, count, _BLOCK):
            size = min(_BLOCK, count - start)
            words = random_words(3 * -(-size // 2)).to(device)  # only the arithmetic is left to the device
            blocks.append(box_muller(words)[:size])
        return torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.float64, device=device)

    def uniform(self, count: int) -> Tensor:
        return _integers(random_words(count)) * 2.0**-_MANTISSA

    def permutation(self, count: int) -> Tensor:
        return random_words(count).argsort()

    def state(self) -> None:
        return None

    def check_state(self, name: str, state: Tensor | None) -> None:
        if state is not None:
            raise ConfigurationError("the saved run has secure_mode=False, but this engine has secure_mode=True")

    def load_state(self, state: Tensor | None) -> None:
        assert state is None

    def renew(self, secret: bytes | None = None) -> None:
        """Every draw is new as it is."""


def box_muller(words: Tensor) -> Tensor:
    """Three random 64-bit words -> two standard normal numbers, in float64. Always the same work: no timing tells them.

    The radius comes from a uniform number of 106 bits, so that it is as finely spaced far out as near the middle, and
    numbers up to 12 standard deviations can come. The angle has 53 bits. With the rounding of log, sqrt, cos and sin
    (an ulp or two each) the result is within radius * 2^-50 of an exact normal number; for a tiny radius, which is
    rare, within 2^-54 / radius.
    """
    high, low, turn = _integers(words).view(3, -1)
    uniform = low.add_(0.5).mul_(2.0**-_MANTISSA).add_(high).mul_(2.0**-_MANTISSA)  # in (0, 1]
    radius = uniform.log_().mul_(-2).sqrt_()
    angle = turn.mul_(2 * math.pi * 2.0**-_MANTISSA)
    return torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)])


def _integers(words: Tensor) -> Tensor:
    """The upper 53 bits of each word, as a float64, which holds them exactly."""
    return words.bitwise_right_shift(64 - _MANTISSA).bitwise_and_(2**_MANTISSA - 1).double()


def random_words(count: int) -> Tensor:
    """Random 64-bit words from a new key. The nonce may be zero, as no key is used twice."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    stream = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
    buffer = bytearray(8 * count + 15)  # `update_into` asks for room for a block more
    stream.update_into(bytes(8 * count), buffer)
    return torch.frombuffer(buffer, dtype=torch.int64, count=count)
