"""A seeded fuzzer of the command line: a number in, one case of hostile input out, and what is wrong with the answer.

In one process, with training left out: a case reads its options, settings and data as `lsg train` does, and stops where
training would begin. What counts as a fault: a traceback, ten seconds without an end, a control character on the
terminal, a message of more than a few lines, a file written outside of the output folder, a file lost or changed.
"""

import contextlib
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.main import get_command
from typer.testing import CliRunner

from lsg.checkpoint import _KEY, _NO_DIGEST, _PLACE, _digest, load_checkpoint
from lsg.cli import app
from lsg.errors import ConfigurationError, LsgError
from lsg.files.foreign_text import visible_lines
from lsg.train.config import RunConfig
from lsg.train.folder import RunFolder
from lsg.train.listener import Listener
from lsg.train.prepare_data import _read
from tests.support.small_run import Training

PATIENCE = 10  # seconds a case
IDLE = 0.1  # seconds of work in so many seconds: less is waiting
LONGEST = 20_000  # characters of an answer of which nothing is a page or a table
TEXTS = (
    *("", " ", "x", "é", "漢字", "[/]", "[bold red]x[/y]", "\x1b[2J\x1b[31m", "a\nb", "a\tb", "\u202egpj.exe"),
    *("\u2028", "\ufeff", "\ud83d", "\udce9", "\x00", "\x7f", "%s%n", "{0}", "{{x}}", "$x$", "../../x", "/", "."),
    *("..", "~", "~nobody/x", "-", "--help", "null", "true", "nan", "inf", "-inf", "1e400", "0x10", "1_000"),
    *("9" * 5000, "x" * 100_000, "con", "CON.png", "<script>", ":smile:", "'", '"', "\\", "`id`", "$(id)", "a" * 300),
    *("/dev/null", "/dev/zero", "/proc/self/mem", "file:///etc/passwd"),
)
NUMBERS = (
    *("0", "-0", "1", "-1", "2", "0.5", "1e-320", "1e-30", "1e30", "1e300", "1e308", "nan", "inf", "-inf"),
    *("1000000000", "9" * 20, "9" * 400, "9" * 5000, "1e-5", "3", "100", "0.1", "٣", "1,5", "1e", "0x1f", "true"),
)
VALUES = (
    *(None, True, False, 0, 1, -1, 2**63, 10**400, 1e308, 1e-320, 0.5, -5, "x", "", [], {}, [[]], {"a": 1}),
    *TEXTS[:20],
)
SUFFIXES = (".toml", ".yaml", ".yml", ".json", "", ".txt", ".TOML")


class Found(Exception):  # noqa: N818  (a case's fault, not an error of its own)
    """What is wrong with an answer."""


class Clock:
    """Ten seconds of work, or of waiting for nothing: on a machine with other work a wall clock tells neither."""

    def start(self) -> None:
        self._used = time.process_time()
        self._last = self._used
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE, PATIENCE)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _look(self, number: int, frame: Any) -> None:
        now = time.process_time()
        if now - self._used > PATIENCE or now - self._last < IDLE:
            raise Found(f"no end after {PATIENCE} seconds at {''.join(traceback.format_stack(frame, 4))}")
        self._last = now


def stand_in(config: RunConfig, output: Path, *, resume: bool = False, listener: Any = None, **_: Any) -> Any:
    """What `lsg.train.run.run` does until training begins."""
    folder = RunFolder(output)
    with folder.held(config, resume=resume):
        folder.result()
        data = _read(config, listener or Listener())
        (listener or Listener()).note(f"{data.source}: {', '.join(data.label_names[:10])}")
        folder.create(config)
        folder.abandon()
    raise ConfigurationError("here training would begin")


class Fuzzer:
    """Cases by number. folder: to work in; it begins empty."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.kinds: tuple[Callable[[random.Random], tuple[list[str], str]], ...] = (
            self._options,
            self._settings_file,
            self._data_file,
            self._run_folder,
            self._other_commands,
        )
        self._seed_run, self._checkpoint = folder / "seed-run", folder / "seed.safetensors"
        write_run(self._seed_run)
        training = Training()
        for _ in zip(range(3), training.loop, strict=False):
            pass
        training.save(self._checkpoint)
        self._trainings = 0
        self._training = training
        self._clock = Clock()
        self._app = get_command(app)  # made once: typer takes long for it
        for name in ("pyarrow.parquet", "PIL.Image", "sklearn.datasets", "lsg.report", "lsg.engine", "transformers"):
            importlib.import_module(name)  # their time is no case's

    def case(self, number: int) -> dict[str, Any] | None:
        """None where all is well, or what was given and what came of it."""
        choose = random.Random(f"{self.seed}/{number}")
        place = self.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        (place / "kept").mkdir(parents=True)
        (place / "kept" / "precious.txt").write_text("kept", encoding="utf-8")
        before = Path.cwd()
        os.chdir(place)
        self._clock.start()
        given: Any = "?"
        try:
            if number % 6 == 5:
                given = "a checkpoint"
                self._forged(choose, place)
            else:
                given, told = self.kinds[number % 6](choose)
                self._command(given, place, told)
        except Found as fault:
            return {"case": number, "given": repr(given)[:2000], "fault": str(fault)[:3000]}
        finally:
            self._clock.stop()
            os.chdir(before)
        return None

    def _command(self, arguments: list[str], place: Path, output: str) -> None:
        kept = state_of(place, output)
        with patch("lsg.train.run.run", stand_in), patch("typer.testing._get_command", lambda app: self._app):
            answer = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})
        self._clock.stop()
        if answer.exception is not None and not isinstance(answer.exception, SystemExit):
            if isinstance(answer.exception, Found):
                raise answer.exception
            raise Found("".join(traceback.format_exception(answer.exception)[-6:]))
        shown = answer.output
        if visible_lines(shown) != shown:
            raise Found(f"a harmful character on the terminal: {shown[-500:]!r}")
        if answer.exit_code and len(answer.stderr) > LONGEST:
            raise Found(f"a message of {len(answer.stderr):,} characters")
        after = state_of(place, output)
        if after != kept:
            raise Found(f"changed: {sorted(kept.items() ^ after.items())[:4]}")

    # --- cases ----------------------------------------------------------------------------------------------------

    def _options(self, choose: random.Random) -> tuple[list[str], str]:
        """`lsg train` with options of any value."""
        words = [f"--{name.replace('_', '-')}" for name in RunConfig.__dataclass_fields__]
        given = ["--task", "digits", "--recipe", "paper", "--device", "cpu"]
        given += ["--epsilon", "3"] if choose.random() < 0.7 else []
        for _ in range(choose.choice([0, 1, 1, 1, 2, 3])):
            values = NUMBERS if choose.random() < 0.6 else TEXTS
            given += [choose.choice(words), choose.choice(values)]
        name = choose.choice(["out", "out", "x[/y]", "a/b/c", *TEXTS])
        if name.startswith(("/", "..", "~", ".")) or not name.strip(" ./-"):
            name = "out"
        return ["train", *given, "--output", name], name

    def _settings_file(self, choose: random.Random) -> tuple[list[str], str]:
        """`lsg train --config` with a file of settings, valid or not."""
        suffix = choose.choice(SUFFIXES)
        lines = {"task": "digits", "recipe": "paper", "device": "cpu", "epsilon": 3.0, "model": "small-cnn"}
        for _ in range(choose.randint(0, 3)):
            lines[choose.choice([*RunConfig.__dataclass_fields__, choose.choice(TEXTS)])] = choose.choice(VALUES)
        text = "\n".join(f"{key} {'=' if suffix == '.toml' else ':'} {_written(value)}" for key, value in lines.items())
        Path(f"settings{suffix}").write_bytes(mutated(choose, text.encode(errors="replace")))
        return ["train", "--config", f"settings{suffix}", "--output", "out"], "out"

    def _data_file(self, choose: random.Random) -> tuple[list[str], str]:
        """`lsg train --task text` or images with data of any content."""
        given = [
            "train",
            "--output",
            "out",
            "--epsilon",
            "3",
            "--recipe",
            "paper",
            "--device",
            "cpu",
            "--delta",
            "1e-4",
        ]
        if choose.random() < 0.25:
            for label in ("a", choose.choice(TEXTS).replace("/", "").replace("\x00", "").strip(".")[:100] or "b"):
                folder = Path("images") / label
                with contextlib.suppress(OSError, UnicodeEncodeError):
                    folder.mkdir(parents=True, exist_ok=True)
                    for number in range(3):
                        write_image(choose, folder / f"{number}.png")
            return [*given, "--task", "images", "--data", "images", "--model", "small-cnn"], "out"
        suffix = choose.choice([".csv", ".tsv", ".jsonl", ".parquet"])
        Path(f"data{suffix}").write_bytes(mutated(choose, table(choose, suffix)))
        if choose.random() < 0.3:
            given += [choose.choice(["--text-column", "--label-column", "--unit-column"]), choose.choice(TEXTS)]
        return [*given, "--task", "text", "--model", "any/model", "--data", f"data{suffix}"], "out"

    def _run_folder(self, choose: random.Random) -> tuple[list[str], str]:
        """`lsg report` on, and `lsg train --resume` in, a run folder of which one file is another."""
        shutil.copytree(self._seed_run, "run")
        name = choose.choice(["result.json", "metrics.jsonl", "config.toml", "privacy.json"])
        path = Path("run") / name
        if choose.random() < 0.2 and name != "result.json":
            Path("run/result.json").unlink()
        if choose.random() < 0.1:
            path.unlink(missing_ok=True)
            (os.mkfifo if choose.random() < 0.5 else os.mkdir)(path)
        elif choose.random() < 0.6 and name.endswith(".json") and path.exists():
            path.write_text(json.dumps(changed(choose, json.loads(path.read_text()))), encoding="utf-8")
        elif path.exists():
            path.write_bytes(mutated(choose, path.read_bytes()))
        if choose.random() < 0.3:
            return ["train", "--resume", "--output", "run"], "run"
        page = choose.choice(["page.html", "x[/y].html", "a\nb.html", "\u202e.html"])
        return ["report", "run", "--output", page, "--title", choose.choice(TEXTS)], page

    def _other_commands(self, choose: random.Random) -> tuple[list[str], str]:
        """Planning, explaining, and words that are no command."""
        which = choose.random()
        if which < 0.5:
            given = ["budget", "--accountant", "rdp"]
            for name in ("--records", "--epochs", "--batch-size", "--noise-multiplier", "--epsilon", "--delta"):
                if choose.random() < 0.6:
                    given += [name, choose.choice([*NUMBERS, *NUMBERS, *TEXTS])]
            return given, "nowhere"
        if which < 0.7:
            given = ["explain", "--model", choose.choice(["small-cnn", "small-cnn", *TEXTS[:30]])]
            for name in ("--rank", "--sparsity", "--batch-size", "--noise-multiplier", "--methods"):
                if choose.random() < 0.4:
                    given += [name, choose.choice(NUMBERS)]
            return given, "nowhere"
        return [choose.choice(["train", "report", *TEXTS]), choose.choice(TEXTS), choose.choice(TEXTS)], "nowhere"

    def _forged(self, choose: random.Random, place: Path) -> None:
        """A checkpoint of other content whose checksum fits, or of other bytes."""
        path = place / "forged.safetensors"
        if choose.random() < 0.3:
            path.write_bytes(mutated(choose, self._checkpoint.read_bytes()))
        else:
            with safe_open(self._checkpoint, framework="pt") as file:
                content = json.loads(file.metadata()[_KEY][len(_NO_DIGEST) :])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            content = changed(choose, content)
            if tensors and choose.random() < 0.2:
                name = choose.choice(sorted(tensors))
                tensors[name] = choose.choice([torch.zeros(3), torch.zeros(0), torch.full((2, 2), torch.nan)])
            save_file(tensors, path, {_KEY: f"{_NO_DIGEST.decode()} {json.dumps(content)}"})
            whole = bytearray(path.read_bytes())
            whole[_PLACE : _PLACE + len(_NO_DIGEST)] = _digest(path)
            path.write_bytes(whole)
        if self._trainings % 10 == 0:
            self._training = Training()
        self._trainings += 1
        try:
            load_checkpoint(path, engine=self._training.engine)
            self._trainings = 0  # loaded: begin anew with the next
        except (LsgError, OSError) as error:
            if len(str(error)) > LONGEST or "\n" in str(error).strip():
                raise Found(f"a message of several lines: {str(error)[:300]!r}") from None
        except Found:
            raise
        except Exception as error:
            raise Found("".join(traceback.format_exception(error)[-6:])) from None


# --- hostile content --------------------------------------------------------------------------------------------------


def write_run(folder: Path) -> None:
    """As `lsg train` leaves one, without a model."""
    config = RunConfig("digits", "small-cnn", epsilon=3.0, delta=1e-4, device="cpu", accountant="rdp").to_dict()
    row = {"epoch": 1, "steps": 3, "epsilon": 1.5, "loss": 0.5, "score": 0.5, "scores": {"test": 0.5}, "lr": 0.1}
    row |= {"clip_share": 0.5, "signal_norm": 0.5, "noise_norm": 0.5, "update_norm": 0.1}
    row |= {"seconds": 1.0, "samples_per_second": 10.0}
    privacy = {"statement": "private", "epsilon": 1.5, "delta": 1e-4, "caveats": ["x"]}
    result = {
        **{
            "config": config,
            "score": 0.5,
            "scores": {"test": 0.5},
            "epsilon": 1.5,
            "noise_multiplier": 1.0,
            "steps": 3,
        },
        **{"curve": [0.5], "seconds": 1.0, "history": [row], "privacy": privacy, "provenance": {}, "warnings": []},
    }
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    (folder / "privacy.json").write_text(json.dumps(privacy), encoding="utf-8")
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    RunFolder(folder).create(RunConfig.from_dict(config, "fuzz"))
    (folder / "model").mkdir()


def mutated(choose: random.Random, content: bytes) -> bytes:
    """Bytes changed, left out, repeated or put in; or as they are."""
    if choose.random() < 0.3:
        return content
    changing = bytearray(content)
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(len(changing) + 1)
        kind = choose.randrange(6)
        if kind == 0:
            del changing[at : at + choose.choice([1, 5, 10**6])]
        elif kind == 1:
            changing[at:at] = choose.choice(TEXTS).encode(errors="surrogatepass")
        elif kind == 2:
            changing[at:at] = bytes(choose.randrange(256) for _ in range(4))
        elif kind == 3:
            changing[at:at] = choose.choice([b"[", b"{", b"- ", b"a.", b'{"a":', b"&a [*a,", b"\n", b",", b"\t"]) * 5000
        elif kind == 4 and at < len(changing):
            changing[at] ^= 1 << choose.randrange(8)
        elif content:
            changing[at:at] = content[choose.randrange(len(content)) :]
    return bytes(changing)


def changed(choose: random.Random, value: Any) -> Any:
    """A value of JSON, one part of it left out, or another."""
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        for key, inner in part.items() if isinstance(part, dict) else enumerate(part):
            places.append((part, key))
            if isinstance(inner, dict | list):
                walk(inner)

    walk(value)
    for _ in range(choose.randint(1, 2)):
        part, key = choose.choice(places)
        with contextlib.suppress(KeyError, IndexError):
            if choose.random() < 0.3:
                del part[key]
            else:
                part[key] = choose.choice(VALUES)
    return value


def table(choose: random.Random, suffix: str) -> bytes:
    """Texts with labels, in one of the formats."""
    rows = [(f"text {number}", choose.choice(["a", "b", "c"])) for number in range(40)]
    for _ in range(choose.randint(0, 3)):
        rows[choose.randrange(40)] = (choose.choice(TEXTS), choose.choice(TEXTS))
    if suffix == ".jsonl":
        return "\n".join(json.dumps({"text": text, "label": label}) for text, label in rows).encode()
    if suffix == ".parquet":
        import io

        import pyarrow
        from pyarrow import parquet

        clean = [
            (text.encode(errors="replace").decode(), label.encode(errors="replace").decode()) for text, label in rows
        ]
        sink = io.BytesIO()
        columns = {"text": [text for text, _ in clean], "label": [label for _, label in clean]}
        parquet.write_table(pyarrow.table(columns), sink)
        return sink.getvalue()
    separator = "," if suffix == ".csv" else "\t"
    many = [f"c{number}" for number in range(choose.choice([0, 0, 0, 2000]))]
    lines = [separator.join(["text", "label", *many]), *(separator.join([*row, *many]) for row in rows)]
    return "\n".join(lines).encode(errors="surrogatepass")


def write_image(choose: random.Random, path: Path) -> None:
    from PIL import Image

    if choose.random() < 0.1:
        os.mkfifo(path)
        return
    Image.new("RGB", (8, choose.choice([8, 8, 8, 8, 9]))).save(path)
    if choose.random() < 0.2:
        path.write_bytes(mutated(choose, path.read_bytes()))


def state_of(place: Path, output: str) -> dict[str, str]:
    """Of every file but the output, a hash of its content."""
    left_out = (place / Path(output).parts[0]) if Path(output).parts else place / "nowhere"
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
        for path in sorted(place.rglob("*"))
        if left_out != path and left_out not in path.parents
    }


def _written(value: Any) -> str:
    return value if isinstance(value, str) and random.random() < 0.5 else json.dumps(value, default=str)


def faults(folder: Path, seed: int, numbers: range) -> Iterator[dict[str, Any]]:
    """Of those cases whose answer is wrong."""
    fuzzer = Fuzzer(folder, seed)
    for number in numbers:
        fault = fuzzer.case(number)
        if fault is not None:
            yield fault
