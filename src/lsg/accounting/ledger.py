"""The privacy ledger: a file with one line for each step that counts, on disk before the step's noise is drawn.

So steps that a crash took away are known. Each line ends with a SHA-256 of itself and of the line before it. A last
line that is not whole (a crash while it was written) stands for a step that may have happened.

A line is no more secret than the released weights. It holds no seed. Of the sum without noise it holds a seal, a hash
whose key is the state of the noise generator: to check a guess of the sum one needs that state, and with it the noise
itself could be subtracted.
"""

import hashlib
import hmac
import json
import os
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lsg.accounting.phases import Phase
from lsg.distributed.group import Group
from lsg.distributed.sharding import compute_device, is_sharded, own
from lsg.errors import ConfigurationError, PrivacyError
from lsg.files.atomic import OWNER_ONLY, sync_folder
from lsg.files.foreign_values import json_value

FRESH = "fresh"  # the stream of noise that nobody can draw a second time
BEGINNING = "0" * 64  # the chain before the first line


@dataclass(frozen=True)
class Entry:
    """A step: its number, noise and rate, the noise stream it drew from, a fingerprint of the weights before it and a
    seal of the sum that the noise is added to."""

    step: int
    noise_multiplier: float
    sample_rate: float
    stream: str
    weights: str
    sum: str

    def chained(self, before: str) -> str:
        """The hash of this entry and all before it."""
        return hashlib.sha256(f"{before} {json.dumps(asdict(self))}".encode()).hexdigest()

    def line(self, before: str) -> bytes:
        return json.dumps(asdict(self) | {"chain": self.chained(before)}).encode() + b"\n"


@dataclass
class Record:
    """What a file says about the steps up to a position, and all that came later."""

    chain: str = BEGINNING  # at the position
    spent: Counter[tuple[float, float]] = field(default_factory=Counter)  # (noise, rate) -> steps up to it
    later: list[Entry] = field(default_factory=list)
    torn: bool = False  # the last line is not whole
    steps: int = 0  # whole lines
    end: str = BEGINNING  # the chain after them
    size: int = 0  # their bytes


class Ledger:
    """One run's ledger. `position` and `chain` say how far the run has come in it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: int | None = None
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ConfigurationError(f"ledger '{self.path}': there is no folder '{self.path.parent}'")
        self.position, self.chain = 0, BEGINNING
        self._replays: deque[Entry] = deque()  # recorded steps that this run is to take again
        self._size = 0

    def read(self, position: int | None = None) -> Record:
        """The file's content, checked line by line; all of it up to the position by default."""
        record = Record()
        if not self.path.exists():
            return record
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if record.torn:
                    raise PrivacyError(
                        f"ledger '{self.path}' was changed: line {number - 1} does not fit the lines before it"
                    )
                entry = _entry(line, number, record.end)
                if entry is None:
                    record.torn = True
                    continue
                record.end, record.size, record.steps = entry.chained(record.end), record.size + len(line), number
                if position is None or number <= position:
                    record.chain = record.end
                    record.spent[entry.noise_multiplier, entry.sample_rate] += 1
                else:
                    record.later.append(entry)
        return record

    def history(self) -> list[Phase]:
        """All steps on file, as an accountant's history."""
        return [Phase(noise, rate, steps) for (noise, rate), steps in self.read().spent.items()]

    def check(self, position: int, chain: str) -> Record:
        """The file as it goes on from a saved position; refuses one that is not the run's, or lacks a part."""
        record = self.read(position)
        if record.steps < position:
            raise PrivacyError(
                f"ledger '{self.path}' was cut: it has {record.steps} whole steps, but the saved run has recorded "
                f"{position}"
            )
        if record.chain != chain:
            raise PrivacyError(
                f"ledger '{self.path}' was changed, or is another run's: its first {position} steps are not those of "
                "the saved run"
            )
        return record

    def go_on(self, record: Record, *, replay: bool) -> None:
        """Continue from a checked position: take the steps recorded after it again, or leave them behind as lost."""
        self._replays = deque(record.later if replay else ())
        self.position = record.steps - len(self._replays)
        self.chain = record.chain if replay else record.end
        self._open(record)

    def record(self, *, noise_multiplier: float, sample_rate: float, stream: str, weights: str, sum: str) -> None:
        """Write a step down, safe on disk when this returns; or find it there, if it is one taken again."""
        if self._file is None:
            record = self.read()
            if record.steps or record.torn:
                raise PrivacyError(
                    f"ledger '{self.path}' has steps of an earlier run: continue that run with load_checkpoint, or "
                    "give a new run a ledger of its own"
                )
            self._open(record)
        entry = Entry(self.position + 1, noise_multiplier, sample_rate, stream, weights, sum)
        if not self._replays:
            self._append(entry.line(self.chain))
        elif self._replays[0] == entry:
            self._replays.popleft()
        else:
            recorded = asdict(self._replays[0])
            what = next(name for name, value in asdict(entry).items() if value != recorded[name])
            raise PrivacyError(
                f"ledger '{self.path}': step {entry.step} was to be repeated exactly, but '{what}' is not what "
                "was recorded, and the same noise on another sum protects nothing. Load the checkpoint with "
                "replay=False: the recorded steps are charged and all noise is new. (Kernels that are not "
                "deterministic are a likely cause on a GPU: see torch.use_deterministic_algorithms)"
            )
        self.position, self.chain = entry.step, entry.chained(self.chain)

    def _open(self, record: Record) -> None:
        """Ready to append: what a crash left of a line is cut off."""
        self.close()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, OWNER_ONLY)
        os.ftruncate(self._file, record.size)
        os.fsync(self._file)
        sync_folder(self.path.parent)
        self._size = record.size

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        if os.fstat(self._file).st_size != self._size:
            raise PrivacyError(f"ledger '{self.path}' is written by another process: a ledger serves one run at a time")
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(f"ledger '{self.path}' could not be written: no space left")
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()


def _entry(line: bytes, number: int, before: str) -> Entry | None:
    """The entry of a line, None if it is not the line that belongs here."""
    try:
        fields = json_value(line)
        del fields["chain"]
        entry = Entry(**fields)
    except (ValueError, TypeError, KeyError):
        return None
    return entry if entry.step == number and entry.line(before) == line else None


@torch.no_grad()
def fingerprint(parameters: Iterable[Tensor], group: Group | None = None) -> str:
    """Of the weights, bit by bit: sums of their bits as integers, one kernel each, which no order of adding changes, so
    that they are the same however weights are sharded.

    group: the ranks that sharded weights are on; then all of them have to call this."""
    parameters = list(parameters)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [own(p).view(integers[p.element_size()]).sum(dtype=torch.int64) for p in parameters]
    device = compute_device(parameters[0])
    together = torch.stack([total.to(device) for total in sums])
    if group is not None and not group.alone:
        sharded = torch.tensor([is_sharded(p) for p in parameters], device=device)
        together = torch.where(sharded, group.sum(together), together)
    return hashlib.sha256(together.cpu().numpy().tobytes()).hexdigest()[:16]


def seal(total: Tensor | None, noise_state: Tensor | None) -> str:
    """Tells the sum of a step from any other: a fingerprint, keyed with the state that the step's noise comes from.

    Noise that cannot be drawn again needs none.
    """
    if noise_state is None:
        return ""
    known = "" if total is None else fingerprint([total])
    return hmac.new(noise_state.cpu().numpy().tobytes(), known.encode(), "sha256").hexdigest()[:16]
