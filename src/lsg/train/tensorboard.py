"""TensorBoard logs: rows of metrics.jsonl in, one event file out."""

import shutil
import time
from pathlib import Path
from typing import Any

from lsg.extras import needs_extra
from lsg.files.atomic import OWNER_ONLY_FOLDER, create_secret, errors_naming

TAGS = {
    "epsilon": "privacy/epsilon",
    "loss": "not_private/loss",  # of the training data, without noise
    "clip_share": "not_private/clip_share",
    "signal_norm": "not_private/signal_norm",
    "noise_norm": "not_private/noise_norm",  # it would be, but belongs beside the signal
    "update_norm": "not_private/update_norm",
    "score": "evaluation/score",
    "lr": "training/lr",
    "samples_per_second": "training/samples_per_second",
}


class TensorBoard:
    """Writes and flushes row by row, in this thread: an error (a full disk) is raised here, not lost in another one."""

    def __init__(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        """rows: of the epochs before. They are written again, so that a resumed run has one file without repeats."""
        with needs_extra("train", "a TensorBoard log"):
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.record_writer import RecordWriter

        self._folder = folder
        file = folder / f"events.out.tfevents.{time.time():.0f}.lsg"  # TensorBoard's own names tell the host's
        with errors_naming(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=OWNER_ONLY_FOLDER, parents=True)
            create_secret(file)  # losses are not private
            self._writer = RecordWriter(str(file))
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        for row in rows:
            self.write(row)

    def write(self, row: dict[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        known = {tag: row.get(key) for key, tag in TAGS.items()}  # rows of older versions have no signals
        shown = [Summary.Value(tag=tag, simple_value=value) for tag, value in known.items() if value is not None]
        parts = [Summary.Value(tag=f"evaluation/{part}", simple_value=score) for part, score in row["scores"].items()]
        event = Event(wall_time=time.time(), step=row["epoch"], summary=Summary(value=shown + parts))
        self._append(event)

    def _append(self, event: Any) -> None:
        with errors_naming(self._folder):
            self._writer.write(event.SerializeToString())
            self._writer.flush()

    def close(self) -> None:
        with errors_naming(self._folder):
            self._writer.close()
