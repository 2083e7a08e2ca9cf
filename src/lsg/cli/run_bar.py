"""What a run tells while it goes on, on a terminal and elsewhere: the events of a run in, a bar and lines out."""

import time
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from lsg.accounting.rounding import epsilon_text
from lsg.files.stop_signals import stop_if_asked
from lsg.files.terminal import Terminal, Words
from lsg.tasks.measures import MEASURES
from lsg.train.listener import Listener, RunStart

SECONDS_BETWEEN_LINES = 2.5  # about what is read, where no bar is shown


class RunBar(Listener):
    """A progress bar; where the output is not a terminal, one line an epoch."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._bar = Progress(
            Words("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            Words("{task.fields[state]}"),
            Words("ETA"),
            TimeRemainingColumn(compact=True),
            console=terminal,
        )
        self._epochs, self._batch_size = 0, 0
        self._task: TaskID | None = None
        self._steps, self._steps_done = 0, 0
        self._epsilon, self._epochs_done, self._measured = "0.00", 0, ""
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES

    def close(self) -> None:
        if self._bar.live.is_started:  # one that shows nothing yet would leave an empty line
            self._bar.stop()

    def position(self) -> str:
        """What a run is at, for those who wait and see no bar."""
        return f"training, step {self._steps_done:,} of {self._steps:,}" if self._steps else "preparing the run"

    def note(self, text: str) -> None:
        self._terminal.lines(text, style="dim")

    def warning(self, text: str) -> None:
        print_warning(self._terminal, text)

    def prepared(self, what: str, done: int, total: int) -> None:
        stop_if_asked()
        if not self._terminal.shows_bars:
            if time.monotonic() > self._next_line:
                self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
                self._terminal.print(f"{what}: {100 * done / total:.0f} %", style="dim", soft_wrap=True)
            return
        self._bar.start()
        if self._task is None:
            self._task = self._bar.add_task(what, total=total, state="")
        self._bar.update(self._task, completed=done)
        if done == total:
            self._bar.remove_task(self._task)
            self._task = None

    def started(self, start: RunStart) -> None:
        self._batch_size, self._epsilon = start.batch_size, epsilon_text(start.epsilon)
        self._epochs, self._epochs_done = start.epochs, start.epochs_done
        self._steps, self._steps_done = start.steps, start.steps_done
        self.note(
            f"{start.protected.counted}, {start.steps:,} steps of about {start.batch_size:,}, noise multiplier "
            f"{start.noise_multiplier:.4g} on {start.noise_dimensions:,} numbers for {start.trained_parameters:,} "
            "trained parameters"
        )
        self._bar.start()
        label = self._label(start.epochs_done + 1)
        self._task = self._bar.add_task(label, total=start.steps, completed=start.steps_done, state=self._state(None))

    def step(self, done: int) -> None:
        stop_if_asked()
        assert self._task is not None
        self._steps_done = done
        self._bar.update(self._task, completed=done, state=self._state(self._bar.tasks[0].speed))

    def epoch(self, row: dict[str, Any]) -> None:
        assert self._task is not None
        self._epsilon, self._epochs_done = epsilon_text(row["epsilon"]), row["epoch"]
        self._measured = _measured(row)
        label = self._label(min(row["epoch"] + 1, self._epochs))
        state = self._state(self._bar.tasks[0].speed)
        self._bar.update(self._task, completed=row["steps"], description=label, state=state)
        if not self._terminal.shows_bars:
            self._terminal.print(
                f"epoch {row['epoch']}: {MEASURES[row['measure']].labelled(row['score'])}, ε {self._epsilon}, "
                f"{row['samples_per_second']:,.0f} samples/s, {self._measured}",
                soft_wrap=True,
            )

    def sample(self, epoch: int, text: str) -> None:
        self._terminal.print(
            f"after epoch {epoch}, at ε {self._epsilon}, it writes: {text}", style="dim", soft_wrap=True
        )

    def _label(self, epoch: int) -> str:
        return f"epoch {epoch}/{self._epochs}"

    def _state(self, steps_per_second: float | None) -> str:
        speed = f"{steps_per_second * self._batch_size:,.0f}" if steps_per_second else "-"
        return f"ε {self._epsilon} after epoch {self._epochs_done}  {speed}/s  {self._measured}"


def print_warning(console: Terminal, text: str) -> None:
    console.print(f"WARNING: {text}", style="bold yellow", soft_wrap=True)


def _measured(row: dict[str, Any]) -> str:
    """What an epoch's row tells of the training data. The mark comes first, as a narrow terminal cuts the end off."""
    known = ["loss -" if row["loss"] is None else f"loss {row['loss']:.3f}"]
    if row["clip_share"] is not None:
        known.append(f"clipped {100 * row['clip_share']:.0f} %")
    if row["noise_norm"] and row["signal_norm"] is not None:
        known.append(f"signal/noise {row['signal_norm'] / row['noise_norm']:.2g}")
    return f"not private: {', '.join(known)}"
