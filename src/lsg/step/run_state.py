"""What continues a run bit by bit, beside the weights and the optimizer's state: taken out, checked, put back.

A state is made of plain tensors, numbers, strings, lists and dicts. It holds the random streams of the run (but for
secure ones, which have nothing to hold) and sums without noise, so keep it as secret as the data.
"""

import dataclasses
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lsg.accounting.step_accounting import StepAccounting
from lsg.distributed.group import Group
from lsg.distributed.sharding import compute_device
from lsg.errors import AnotherRun, ConfigurationError
from lsg.methods import Method
from lsg.sampling.clock import Clock, Position
from lsg.sampling.poisson_batches import LogicalBatches
from lsg.sampling.random_sources import TorchNoise
from lsg.step.gradients import PrivateGradients
from lsg.step.optimizer import PrivateOptimizer

VERSION = 2


@dataclass(frozen=True)
class RunState:
    """The parts of a run that have a state: takes it out of them, checks it, puts it back.

    settings: what a continuation must be made with, too, by the names that users know. group: the processes that train
    together.
    """

    module: nn.Module
    optimizer: PrivateOptimizer
    sampler: LogicalBatches
    clock: Clock
    step_accounting: StepAccounting
    settings: dict[str, Any]
    group: Group

    def state_dict(self) -> dict[str, Any]:
        position = self.clock.position()
        if position.micro and not self.group.alone:  # told here: other ranks may have no part of the batch left
            raise ConfigurationError(
                "a logical batch is under way: with several processes save where optimizer.stepped is true, as what "
                "was summed of a part is another sum on each of them. optimizer.on_logical_step(...) calls after "
                "every logical step, also on a rank that has no share of it"
            )
        private = self._private()
        return {
            "version": VERSION,
            "plan": dict(self.settings),
            "books": self.step_accounting.state_dict(),
            "progress": {field.name: getattr(position, field.name) for field in dataclasses.fields(position)},
            "sampling": self.sampler.state(),
            "projection": private and private.recorder.state_dict(),
            "noise": private and private.noise.state(),
            "noise_multiplier": self.optimizer.noise_multiplier,
            "max_grad_norm": private and private.clipper.max_grad_norm,
            "random": self._random_states(),
            **({} if self.group.alone else {"ranks": self.group.size, "rank": self.group.rank}),
        }

    def state_of_all_ranks(self) -> dict[str, Any]:
        """The same with the random states of every rank in place of this one's. Every rank has to call this, after the
        same logical step."""
        if self.group.alone:
            return self.state_dict()
        state = self.state_dict()
        place = [state["progress"]["epochs"], state["progress"]["logical"]]
        self.group.check_alike(
            {"the place (epoch, step) at which a state is saved": place}, "Save on all ranks after the same step"
        )
        return state | {"random": self.group.everyones(state["random"])}

    def check(self, state: Any) -> None:
        """Refuse, by name, a state that does not continue this run. Nothing is changed."""
        self.clock.check_idle()
        known = {*_KEYS, "version"}
        if not isinstance(state, Mapping) or set(state) - {"ranks", "rank"} != known or state["version"] != VERSION:
            raise ConfigurationError(
                f"this is not an engine state of version {VERSION}: pass what engine.state_dict() returned"
            )
        for name in {**self.settings, **state["plan"]}:  # what is not set has no name there
            own, saved = self.settings.get(name), state["plan"].get(name)
            if saved != (list(own) if isinstance(own, tuple) else own):
                raise AnotherRun(
                    f"the saved run has {name}={saved!r}, but this engine was made with {name}={own!r}: "
                    "a saved run goes on with the arguments that it began with"
                )
        self.step_accounting.check(state["books"])
        self.sampler.source.check_state("sampling", state["sampling"])
        private = self._private()
        if private is not None:
            TorchNoise(private.recorder.generator).check_state("projection", state["projection"]["generator"])
            private.noise.check_state("noise", state["noise"])

    def load_state_dict(self, state: Any, *, replay: bool) -> None:
        """Of a run on another number of ranks, too: it goes on from the last logical step, with new dropout streams. A
        state that one rank took and others load has their dropout not: no step after it can be repeated."""
        self.check(state)
        position, saved = Position(**state["progress"]), state["random"]
        of_another = isinstance(saved, Mapping) and state.get("rank", self.group.rank) != self.group.rank
        of_another = self.group.any(of_another, "the loading of a state")
        replay = replay and not of_another
        other_ranks = of_another or state.get("ranks", 1) != self.group.size
        if other_ranks:  # a part of a logical batch is summed again, by other ranks
            position = replace(position, micro=0, partial_sum=None)
        self.sampler.load_state(state["sampling"])
        self.optimizer.noise_multiplier = state["noise_multiplier"]
        private = self._private()
        if private is not None:
            private.recorder.load_state_dict(state["projection"])
            private.noise.load_state(state["noise"])
            self.optimizer.max_grad_norm = state["max_grad_norm"]
        if not self.step_accounting.load_state_dict(
            state["books"], state["noise_multiplier"], replay=replay, other_ranks=other_ranks
        ):
            # Lost steps were charged as what they are: noise of their own on samples of their own.
            position = replace(position, micro=0, partial_sum=None)
            for source in (self.sampler.source, *([private.noise] if private else [])):
                source.renew(self.group.on_first(lambda: secrets.token_bytes(64)))
        self.clock.load(position)
        self.optimizer.mark_continued()
        if other_ranks:
            self._seed_anew(saved if isinstance(saved, Mapping) else saved[0])
        else:
            self._load_random_states(saved if isinstance(saved, Mapping) else saved[self.group.rank])

    def _load_random_states(self, states: Mapping[str, Tensor]) -> None:
        """A GPU's state is loaded into the one that the model is on, whatever its number was."""
        own = [device for device in self._random_states() if device != "cpu"]
        for device, random_state in states.items():
            if device == "cpu":
                torch.set_rng_state(random_state)
            elif own:
                torch.cuda.set_rng_state(random_state, device if device in own else own[0])

    def _seed_anew(self, states: Mapping[str, Tensor]) -> None:
        """Dropout streams of as many ranks as there are now: new ones, which follow from the saved one."""
        seen = f"{self.group.rank} of {self.group.size} ".encode() + states["cpu"].numpy().tobytes()
        torch.manual_seed(int.from_bytes(hashlib.sha256(seen).digest()[:8], "big") >> 1)

    def _random_states(self) -> dict[str, Tensor]:
        """torch's default generators (dropout) of the processor and of the devices that the model is on."""
        devices = {compute_device(parameter) for parameter in self.module.parameters()}
        devices = {device for device in devices if device.type == "cuda"}
        return {"cpu": torch.get_rng_state(), **{str(device): torch.cuda.get_rng_state(device) for device in devices}}

    def _private(self) -> PrivateGradients | None:
        gradients = self.optimizer.gradients
        return gradients if isinstance(gradients, PrivateGradients) else None


_KEYS = ("plan", "books", "progress", "sampling", "projection", "noise", "noise_multiplier", "max_grad_norm", "random")


def describe(method: Method) -> str:
    """A method in words that are the same in another process: objects without a repr of their own show an address."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(method))
