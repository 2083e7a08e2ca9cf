"""Trial runs of a model on a few records: repeatable, recorded, and without a trace."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from lsg.check.kept_state import changed_state, put_back
from lsg.check.quiet import eagerly, without_dropout
from lsg.check.recording import Decisions, Recording
from lsg.distributed.launch import writes
from lsg.files.foreign_text import say
from lsg.layers.patched_module import Batch, PatchedModule

# The first numbers drawn from one are small, from the other large: a branch at random is taken once, and once not.
LOW, HIGH = 1902, 1710
_SLOW = 1.0  # seconds from which on the check says what it does
_RUNS = 16  # about as many forwards of a few records as the check takes


class TrialRuns:
    """Runs a model by `forward`, its own. The weights are on `devices` (CUDA's, by number)."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        patched_modules: Sequence[PatchedModule],
        batch: Batch,
        devices: Sequence[int],
    ) -> None:
        self.model, self.forward, self._patched_modules, self.batch = model, forward, patched_modules, batch
        self._devices, self._told = devices, False
        self.seed = LOW
        self.draws = False  # whether a run has drawn random numbers
        self.dropout: without_dropout | None = None

    @contextmanager
    def quietly(self, is_eager: bool) -> Iterator[None]:
        """Nothing that a run here does is left behind: random numbers, what a model keeps, calls of weights."""
        with ExitStack() as stack:
            if is_eager:
                stack.enter_context(eagerly())
                self.dropout = stack.enter_context(without_dropout())  # of which a compiler knows nothing
            stack.enter_context(torch.random.fork_rng(devices=self._devices))
            stack.callback(random.setstate, random.getstate())
            stack.callback(np.random.set_state, np.random.get_state())
            stack.enter_context(torch.enable_grad())
            # To try all of cuDNN's algorithms for a few records takes longer than the check.
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = False
            stack.enter_context(put_back(self.model))
            yield

    def run(self, inputs: tuple[Any, Any], seed: int | None = None) -> Any:
        """One forward, with the same random numbers as any other of that seed."""
        seed = self.seed if seed is None else seed
        for patched in self._patched_modules:
            patched.restart()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = self._random_states()
        began = time.perf_counter()
        args, kwargs = inputs
        output = self.forward(*args, **kwargs)
        self._tell((time.perf_counter() - began) * _RUNS)
        self.draws = self.draws or self._random_states() != before
        return output

    def _random_states(self) -> list[Any]:
        """Others after a random number was drawn."""
        devices = [torch.cuda.get_rng_state(device).numpy().tobytes() for device in self._devices]
        state = np.random.get_state(legacy=False)
        position, words = state["state"]["pos"], state["state"]["key"].tobytes()
        return [torch.get_rng_state().numpy().tobytes(), random.getstate(), position, words, *devices]

    def _tell(self, seconds: float) -> None:
        if seconds > _SLOW and not self._told and writes():
            self._told = True
            say(
                f"lsg: checking on a few records that samples stay apart, once before the first batch of its kind "
                f"(about {seconds:.0f} s)",
            )

    def record(self, recording: Recording, inputs: tuple[Any, Any], seed: int | None = None) -> dict[str, Any]:
        """A run without rules, whose places are recorded. Returns what the model keeps of it."""
        self.batch.watch = recording
        try:
            with put_back(self.model), changed_state(self.model) as kept:
                with Decisions(recording.decide):
                    output = self.run(inputs, seed)
                recording.finish(output)
        finally:
            self.batch.watch = None
            recording.settle()  # also what a forward that failed has shown
        return kept

    @contextmanager
    def without_rules(self) -> Iterator[None]:
        """Layers run their own forwards, and nothing is recorded."""
        self.batch.watch = lambda module, patched, args, kwargs: patched.own_forward(*args, **kwargs)
        try:
            with put_back(self.model):
                yield
        finally:
            self.batch.watch = None
