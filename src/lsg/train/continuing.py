"""What a checkpoint holds of a run beside the engine's state: where loop, schedule and averages stand in, and back."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lsg.checkpoint import damage_named
from lsg.distributed.group import Group
from lsg.errors import ConfigurationError
from lsg.step.averaging import WeightAverage
from lsg.train.checkpoints import restored_progress
from lsg.train.loop import LoopState
from lsg.train.stored_form import check_form, check_number


@dataclass(frozen=True)
class Standing:
    """start: where the loop goes on. rows: of metrics so far. untrained: a language model's score before training."""

    start: LoopState
    rows: list[dict[str, Any]]
    untrained: float | None = None


@dataclass(frozen=True)
class Continuing:
    """What is put into a checkpoint and taken out of it. checkpoint: its path, for errors. used: which part of the data
    is trained on. epochs: of the whole run. parts: of the evaluation data."""

    checkpoint: Path
    group: Group
    scheduler: LRScheduler
    average: WeightAverage | None
    used: str
    epochs: int
    parts: Collection[str]

    def stored(self, standing: Standing) -> dict[str, Any]:
        """Every process has to call this."""
        state = standing.start
        return {
            "progress": asdict(state),
            **({} if self.group.alone else {"shares": self.group.everyones([state.loss, state.samples])}),
            "rows": standing.rows,
            "scheduler": self.scheduler.state_dict(),
            "used": self.used,
            "untrained": standing.untrained,
            **({} if self.average is None else {"average": self.average.state_dict()}),
        }

    def restored(self, stored: dict[str, Any]) -> Standing:
        """Schedule and averages go on from it, too."""
        if stored.get("used", "") != self.used:
            raise ConfigurationError(
                f"--resume: the run in {self.checkpoint.parents[1]} was begun by an lsg that chose its training "
                "records in another way, and cannot go on with these: begin it again in another folder"
            )
        start, rows = restored_progress(stored, self.epochs, self.parts, self.checkpoint)
        with damage_named(self.checkpoint):
            untrained = stored.get("untrained")
            if untrained is not None:
                check_number(untrained, "its score before training")
            own = self.scheduler.state_dict()  # PyTorch's versions differ in what stands there
            known = {key: value for key, value in stored["scheduler"].items() if key in own}
            check_form(known, {key: own[key] for key in known}, "its scheduler")
            self.scheduler.load_state_dict(known)
            if self.average is not None:
                check_form(stored["average"], self.average.state_dict(), "its average")
                self.average.load_state_dict(stored["average"])
            return Standing(self._own_share(start, stored.get("shares")), rows, untrained)

    def _own_share(self, start: LoopState, shares: list[list[Any]] | None) -> LoopState:
        """With what this rank has summed up of the epoch in progress; where there were other ranks, rank 0 has all."""
        found = shares or [[start.loss, start.samples]]
        if len(found) == self.group.size:
            loss, samples = found[self.group.rank]
        elif self.group.first:
            loss, samples = (sum(values) for values in zip(*found, strict=True))
        else:
            loss, samples = 0.0, 0
        return replace(start, loss=loss, samples=samples)
