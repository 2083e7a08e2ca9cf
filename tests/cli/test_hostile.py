"""What stands in a file, a name or an option never gives a traceback, and reaches the terminal as text alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from PIL import Image
from typer.testing import CliRunner

from lsg.cli import app
from lsg.errors import ConfigurationError
from lsg.files.foreign_text import visible_lines
from lsg.tasks.models import load_trained_image_model
from lsg.train.config import RunConfig
from lsg.train.config_file import read_settings, to_toml
from tests.support.fuzz import stand_in, write_run
from tests.support.threads import one_thread  # noqa: F401 - a fixture for all tests here

DIGITS = ("--task", "digits", "--recipe", "paper", "--device", "cpu", "--accountant", "rdp", "--epsilon", "3")
TEXTS = ("train", "--task", "text", "--model", "any/model", "--recipe", "paper", "--epsilon", "3", "--output", "out")


def lsg(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "150"})


def stopped(*arguments: str | Path) -> str:
    """What is shown by a command that stops where training would begin."""
    with patch("lsg.train.run.run", stand_in):
        answer = lsg(*arguments)
    assert answer.exit_code == 2 and isinstance(answer.exception, SystemExit), answer.output
    assert visible_lines(answer.output) == answer.output
    return str(answer.output)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_folder_with_brackets_and_controls_in_its_name_is_trained_into() -> None:
    name = "x[/y]\n\x1b[2J"
    answer = lsg("train", *DIGITS, "--epochs", "1", "--batch-size", "700", "--lr", "1e30", "--output", name)
    assert answer.exit_code == 0, answer.output
    assert "x[/y]\\n\\x1b[2J: model/" in answer.stdout and "\x1b" not in answer.output
    # and a run that cannot have learned says so, first of all
    result = json.loads((Path(name) / "result.json").read_text())
    assert "weights are as large as" in result["warnings"][0] and "loss is not finite" in result["warnings"][1]
    assert "weights are as large as" in json.loads((Path(name) / "privacy.json").read_text())["warnings"][0]
    lines = [line for line in answer.stdout.partition("epoch 1: ")[2].splitlines()[1:] if "WARNING" in line]
    assert lines[0].startswith("WARNING: training diverged")
    assert lsg("report", name, "--output", "page.html").exit_code == 0
    assert "weights are as large as" in Path("page.html").read_text()


@pytest.mark.parametrize("label", ["[/]", "\x1b[2J", "\u202ex", "[bold]b"])
def test_labels_are_shown_as_they_are(label: str) -> None:
    rows = [{"text": f"a text {number}", "label": ("a", label)[number % 2]} for number in range(60)]
    Path("data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shown = stopped(*TEXTS, "--data", "data.jsonl")
    assert "here training would begin" in shown and visible_lines(label) in shown


def test_names_of_files_keep_to_their_line() -> None:
    Path("a\nError: b.csv").write_text("text,label\n")
    shown = stopped(*TEXTS, "--data", "a\nError: b.csv")
    assert shown == "Error: a\\nError: b.csv: no rows\n"


@pytest.mark.parametrize("given", [("--lr", "\x1b[31mx\ny"), ("--epochs", "9" * 6000), ("--no\x1b[31m", "x")])
def test_errors_of_usage_show_no_controls_and_are_short(given: tuple[str, str]) -> None:
    shown = stopped("train", *DIGITS, "--output", "out", *given)
    assert len(shown) < 3000


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--max-grad-norm", "1e-320"), "--max-grad-norm 9.99989e-321 must be between 1e-30 and 1e+30"),
        (("--epochs", "1000000000"), "--epochs 1,000,000,000 must be at most 1,000,000"),
        (("--epochs", "9" * 400), "--epochs is a number of more than 18 digits"),
        (("--text-column", "caf\udce9"), "--text-column 'caf\\xe9' is not UTF-8 text"),
    ],
)
def test_settings_beyond_arithmetic_are_refused(given: tuple[str, str], reason: str) -> None:
    assert reason in stopped("train", *DIGITS, "--output", "out", *given)


def test_noise_beyond_arithmetic_is_refused() -> None:
    for command in (("train", *DIGITS[:-2], "--output", "out"), ("budget", "--records", "900", "--epochs", "3")):
        answer = lsg(*command, "--noise-multiplier", "1e300", "--batch-size", "30")
        assert answer.exit_code == 2 and "must be between 1e-06 and 1e+09" in answer.stderr


def images(labels: tuple[bytes, ...]) -> Path:
    for label in labels:
        folder = os.path.join(b"images", label)
        os.makedirs(folder)
        for number in range(30):
            Image.new("L", (8, 8), number).save(os.path.join(folder, b"%d.png" % number))
    return Path("images")


IMAGES = ("train", "--task", "images", "--model", "small-cnn", "--data", "images", *DIGITS[2:])


def test_a_class_that_is_not_utf8_is_refused_before_training() -> None:
    images((b"a", b"caf\xe9"))
    shown = stopped(*IMAGES, "--output", "out")
    assert "the name of the class 'caf\\xe9' is not UTF-8 text" in shown and not Path("out").exists()


def test_a_class_of_other_letters_has_a_model_in_any_locale() -> None:
    code = (
        "from pathlib import Path\n"
        "from lsg.tasks.models import ImageShape, load_image_model, save_image_model\n"
        "shape = ImageShape(2, 1, 8, 8)\n"
        "about = {'label_names': ['\\u00e9', 'b']}\n"
        "save_image_model(Path('model'), load_image_model('small-cnn', shape), 'small-cnn', shape, about)\n"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert json.loads(Path("model/model.json").read_text(encoding="utf-8"))["label_names"] == ["é", "b"]
    load_trained_image_model(Path("model"))


def test_a_class_of_other_letters_is_read_in_any_locale() -> None:
    images((b"a", "\u00e9".encode()))
    code = "from lsg.tasks.readers.image_folder import read_image_folder\n"
    code += "print(ascii(read_image_folder('images').label_names))"
    for locale in ("C", "C.ISO-8859-1"):
        environment = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
        assert done.stdout == "('a', '\\xe9')\n"


def test_images_that_no_memory_holds_are_refused_before_they_are_read() -> None:
    images((b"a", b"b"))
    with patch("lsg.tasks.readers.image_folder.physical_memory", lambda: 3 * 64 * 60 - 1):
        assert "60 images of 8 x 8 pixels take 11,520 bytes" in stopped(*IMAGES, "--output", "out")


@pytest.mark.parametrize("device", ["bogus", "meta", "cuda:99"])
def test_a_device_that_cannot_train_is_refused_by_each_command(device: str) -> None:
    for command in (("bench", "--preset", "cpu-llama"), ("train", *DIGITS, "--output", "out")):
        answer = lsg(*command, "--device", device)
        assert answer.exit_code == 2 and f"--device {device} cannot be used" in answer.stderr, answer.output


@pytest.mark.parametrize(
    ("given", "code", "reason"),
    [
        (("explain", "--model", "small-cnn", "--classes", "2000000000"), 1, "out of memory"),
        (("explain", "--model", "small-cnn", "--channels", "9" * 18), 2, "100000"),
        (("audit", "--trials", "1000000000000"), 2, "trials=1000000000000 must be at most"),
        (("audit", "--seeds", "9" * 30), 2, "--seeds is a number of more than 18 digits"),
    ],
)
def test_sizes_that_no_machine_has_are_refused(given: tuple[str, ...], code: int, reason: str) -> None:
    answer = lsg(*given)
    assert answer.exit_code == code and isinstance(answer.exception, SystemExit), answer.output
    assert reason in answer.stderr and len(answer.stderr) < 1000


def test_a_folder_that_cannot_be_made_is_named() -> None:
    Path("file").write_text("")
    for command in ("audit", "bench"):
        answer = lsg(command, "--output", "file")
        assert answer.exit_code == 1 and answer.stderr == "Error: cannot write file (File exists)\n"


def test_a_pipe_that_is_named_as_an_image_is_refused_at_once() -> None:
    os.mkfifo(images((b"a", b"b")) / "a" / "00.png")
    assert "00.png: not a regular file" in stopped(*IMAGES, "--output", "out")


def test_a_million_columns_are_told_in_a_few() -> None:
    Path("data.csv").write_text(",".join(f"c{number}" for number in range(1_000_000)) + "\n")
    shown = stopped(*TEXTS, "--data", "data.csv")
    assert "and 999,990 more" in shown and len(shown) < 500


def test_settings_that_grow_are_refused_and_written_ones_come_back(tmp_path: Path) -> None:
    Path("laughs.yaml").write_text("a: &a [1]\nb: [*a, *a]\n")
    assert "aliases (*name) are not read" in stopped("train", "--config", "laughs.yaml", "--output", "out")
    Path("large.toml").write_text("#" * 100_000)
    with pytest.raises(ConfigurationError, match="100,000 bytes"):
        read_settings(Path("large.toml"))
    config = RunConfig("digits", "\u202ex\x1b\x7f\U000e0041é", epsilon=3.0).to_dict()
    Path("config.toml").write_text(to_toml(config), encoding="utf-8")
    assert read_settings(Path("config.toml")) == config
    assert visible_lines(Path("config.toml").read_text(encoding="utf-8")) == to_toml(config)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("epsilon", -5, "'epsilon' must be 0 or more"),
        ("noise_multiplier", -1, "'noise_multiplier' must be 0 or more"),
        ("privacy", {"epsilon": -5}, "'epsilon' must be 0 or more"),
        ("privacy", {"delta": 2}, "'delta' must be a fraction"),
    ],
)
def test_a_report_shows_no_privacy_that_cannot_be(key: str, value: Any, reason: str) -> None:
    write_run(Path("run"))
    result = json.loads(Path("run/result.json").read_text())
    Path("run/result.json").write_text(json.dumps(result | {key: value}))
    assert reason in stopped("report", "run")


def test_a_report_holds_no_override_of_the_direction() -> None:
    write_run(Path("run"))
    result = json.loads(Path("run/result.json").read_text())
    result["privacy"]["statement"] = result["config"]["task"] = "\u202e5 = ε\x1b"
    Path("run/result.json").write_text(json.dumps(result))
    assert lsg("report", "run", "--output", "page.html", "--title", "\u2066t").exit_code == 0
    page = Path("page.html").read_text()
    assert not {"\u202e", "\u2066", "\x1b"} & set(page) and "\\u202e5 = ε\\x1b" in page


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "> /dev/full"])
@pytest.mark.parametrize("words", ["--help", "train --no-such-option", "report run", "report nowhere"])
def test_streams_that_take_nothing_give_no_traceback(closed: str, words: str) -> None:
    write_run(Path("run"))
    command = f"{sys.executable} -m lsg {words} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if words == "report run":
        assert Path("report.html").exists() and (done.returncode == 0) == (closed != "> /dev/full")
