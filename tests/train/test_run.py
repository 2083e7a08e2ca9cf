"""One run: what it writes, that a seed repeats it, that a kill costs nothing, and what it refuses before it starts."""

import errno
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lsg import ConfigurationError, __version__
from lsg.files.atomic import atomic_path, create_secret
from lsg.tasks.models import load_trained_image_model
from lsg.train import prepare_data as preparation
from lsg.train.config import RunConfig
from lsg.train.config_file import read_settings
from lsg.train.folder import RunFolder
from lsg.train.listener import Listener, RunStart
from lsg.train.prepare_data import prepare_data
from lsg.train.privacy_statement import DataFacts, Spent, privacy_statement
from lsg.train.run import RunResult, run
from tests.support.tiny import glue_sst2, tiny_bert

CPU = torch.device("cpu")
DIGITS = RunConfig(
    task="digits",
    model="small-cnn",
    noise_multiplier=1.0,
    delta=1e-4,
    accountant="rdp",
    optimizer="sgd",
    lr=0.2,
    batch_size=479,
    epochs=3,
    max_physical_batch_size=128,
    device="cpu",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("texts")
    return RunConfig(
        task="sst2",
        data=str(glue_sst2(folder / "SST-2")),
        model=str(tiny_bert(folder / "bert")),
        noise_multiplier=0.5,
        delta=1e-3,
        accountant="rdp",
        lr=1e-2,
        batch_size=24,
        epochs=3,
        max_physical_batch_size=10,
        max_length=32,
        rank=2,
        device="cpu",
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """One digits run that tests only look at."""
    folder = tmp_path_factory.mktemp("runs") / "deep" / "digits"
    return folder, run(DIGITS, folder)


def strict(path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def rows(folder: Path, *, times: bool = False) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    hidden = () if times else ("seconds", "samples_per_second")
    return [{key: value for key, value in row.items() if key not in hidden} for row in found]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def same(folder: Path, other: Path) -> None:
    """Everything but times and provenance is equal, to the last bit."""
    assert rows(folder) == rows(other)
    assert weights(folder) == weights(other)
    assert (folder / "privacy.json").read_bytes() == (other / "privacy.json").read_bytes()


# --- what comes out -------------------------------------------------------------------------------------------------


def test_the_folder_holds_what_was_promised(finished: tuple[Path, RunResult]) -> None:
    folder, result = finished
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.toml",
        "metrics.jsonl",
        "model",
        "privacy.json",
        "result.json",
        "tensorboard",
    ]
    assert RunConfig.from_dict(read_settings(folder / "config.toml"), "") == DIGITS
    stored = strict(folder / "result.json")
    assert "seed" in stored.pop("secret") and stored == json.loads(json.dumps(result.to_dict()))
    assert RunResult.from_dict(stored, "") == result
    assert stored["history"] == rows(folder, times=True) and stored["privacy"] == strict(folder / "privacy.json")


def test_metrics_have_one_row_an_epoch(finished: tuple[Path, RunResult]) -> None:
    folder, result = finished
    found = rows(folder, times=True)
    assert [row["epoch"] for row in found] == [1, 2, 3] and [row["steps"] for row in found] == [3, 6, 9]
    epsilons = [row["epsilon"] for row in found]
    assert 0 < epsilons[0] < epsilons[1] < epsilons[2] == result.epsilon
    assert [row["lr"] for row in found] == pytest.approx([0.2 * (1 - step / 9) for step in (2, 5, 8)])
    for row in found:
        assert set(row["scores"]) == {"test"} and row["score"] == row["scores"]["test"]
        assert row["seconds"] > 0 and row["samples_per_second"] > 0 and row["loss"] > 0
    assert result.curve == [row["score"] for row in found] and result.score == result.curve[-1]
    assert result.seconds == pytest.approx(sum(row["seconds"] for row in found))


def test_the_privacy_statement_says_what_was_done(finished: tuple[Path, RunResult]) -> None:
    statement = strict(finished[0] / "privacy.json")
    assert statement["epsilon"] == finished[1].epsilon and statement["delta"] == 1e-4
    assert statement["sample_rate"] == 479 / 1437 and statement["steps"] == 9 and statement["records"] == 1437
    assert statement["noise_multiplier"] == 1.0 and statement["expected_batch_size"] == 479
    assert statement["neighbouring_relation"] == "add or remove one record"
    assert statement["noise_dimensions"] < statement["trained_parameters"]
    assert statement["versions"]["lsg"] == __version__
    assert "1,437 records" in statement["statement"] and "0.0001)-differential privacy" in statement["statement"]
    told = " ".join(statement["caveats"])
    for word in ("other runs", "seed", "not private", "evaluation data", "several rows"):
        assert word in told, word
    assert "seed" not in statement  # it would undo the noise, and the statement is made to be released


def test_the_privacy_statement_lists_what_counts_as_public(
    finished: tuple[Path, RunResult], texts: RunConfig, tmp_path: Path
) -> None:
    images = " ".join(strict(finished[0] / "privacy.json")["public_by_assumption"])
    for fact in ("1,437", "classes, 10,", "8 x 8 in 1 channels", "weights that training began with"):
        assert fact in images, fact
    run(replace(texts, epochs=1, validation=0.3, batch_size=12), tmp_path / "run")
    statement = strict(tmp_path / "run" / "privacy.json")
    told = " ".join(statement["public_by_assumption"])
    for fact in ("classes, 2,", "one text", "lengths of the texts", "vocabulary"):
        assert fact in told, fact
    assert "30 %, held out for validation, chosen by a hash of each record" in statement["trained_part"]
    assert statement["trained_part"] in statement["statement"] and "number of records" in statement["statement"]


def test_what_is_released_names_no_path_person_or_machine(texts: RunConfig, tmp_path: Path) -> None:
    result = run(replace(texts, epochs=1), tmp_path / "run")
    released = [tmp_path / "run" / "privacy.json", *(tmp_path / "run" / "model").iterdir()]
    folder = Path(texts.model).parent
    for path in released:
        content = path.read_bytes()
        if path.suffix == ".safetensors":  # all but the numbers
            content = content[8 : 8 + int.from_bytes(content[:8], "little")]
        for secret in (str(folder), folder.name, str(tmp_path), str(Path.home()) + "/", socket.gethostname()):
            assert secret.encode() not in content, f"{path.name} names {secret}"
    assert result.privacy["model"] == result.privacy["data"] == "local, not named here"


def test_the_model_comes_back_with_the_score_it_had(finished: tuple[Path, RunResult]) -> None:
    folder, result = finished
    model = load_trained_image_model(folder / "model").eval()
    test = prepare_data(DIGITS, CPU, Listener()).evaluation["test"]
    images, labels = test.__getitems__(range(len(test)))
    assert (model(images).argmax(1) == labels).double().mean().item() == result.score
    assert strict(folder / "model" / "model.json")["label_names"] == list("0123456789")


def test_tensorboard_can_read_its_file(finished: tuple[Path, RunResult]) -> None:
    seen = scalars(finished[0])
    assert {tag for tag, _ in seen} == {
        "privacy/epsilon",
        "not_private/loss",
        "evaluation/score",
        "evaluation/test",
        "training/lr",
        "training/samples_per_second",
    }
    assert [seen["evaluation/score", epoch] for epoch in (1, 2, 3)] == pytest.approx(finished[1].curve)


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """Every scalar of the run's one event file, which must not repeat any."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (folder / "tensorboard").iterdir()
    data, place = path.read_bytes(), 0
    found: dict[tuple[str, int], float] = {}
    while place < len(data):  # length (8 bytes), its checksum (4), the event, its checksum (4)
        length = int.from_bytes(data[place : place + 8], "little")
        event = Event.FromString(data[place + 12 : place + 12 + length])
        for value in event.summary.value:
            assert (value.tag, event.step) not in found
            found[value.tag, event.step] = value.simple_value
        place += 16 + length
    return found


def test_a_text_model_trains_and_is_saved_for_transformers(texts: RunConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    class Notes(Listener):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def note(self, text: str) -> None:
            self.lines.append(text)

        def started(self, start: RunStart) -> None:
            assert start.records == 96 and start.steps == 48 and start.batch_size == 24

    notes = Notes()
    config = replace(texts, method="non-private", noise_multiplier=None, trainable="all", epochs=12)
    result = run(config, tmp_path / "run", listener=notes)
    assert result.score > 0.9 and set(result.scores) == {"dev"}
    assert result.epsilon is None and strict(tmp_path / "run" / "privacy.json")["epsilon"] is None
    assert "no privacy guarantee" in result.privacy["statement"]
    assert "new, seeded weights for classifier.bias, classifier.weight" in " ".join(notes.lines)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.config.num_labels == 2


@pytest.mark.parametrize("method", ["lsg", "rgp", "sparse-dpsgd", "dpsgd"])
def test_every_method_runs_on_texts_and_images(method: str, texts: RunConfig, tmp_path: Path) -> None:
    for name, config in (("texts", texts), ("digits", DIGITS)):
        result = run(replace(config, method=method, epochs=1), tmp_path / name)
        assert (result.epsilon or 0) > 0 and 0 <= result.score <= 1


def test_a_target_epsilon_is_kept(texts: RunConfig, tmp_path: Path) -> None:
    result = run(replace(texts, noise_multiplier=None, epsilon=4.0, epochs=2), tmp_path / "run")
    assert 3.9 < (result.epsilon or 0) <= 4.0


def test_bf16_trains(texts: RunConfig, tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    assert run(replace(texts, precision="bf16", epochs=1), tmp_path / "run").history[0]["loss"] > 0
    assert torch.get_float32_matmul_precision() == before


def test_a_seed_repeats_a_run_and_another_does_not(texts: RunConfig, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(replace(texts, seed=seed, epochs=1), tmp_path / name)
    same(tmp_path / "a", tmp_path / "b")
    assert rows(tmp_path / "a") != rows(tmp_path / "c")


# --- which records --------------------------------------------------------------------------------------------------


def test_validation_is_held_out_of_training_and_the_same_for_every_seed() -> None:
    undivided = prepare_data(DIGITS, CPU, Listener())
    parts = prepare_data(replace(DIGITS, train_limit=0.6, validation=0.2), CPU, Listener())
    again = prepare_data(replace(DIGITS, train_limit=0.6, validation=0.2, seed=9), CPU, Listener())
    assert list(parts.evaluation) == ["validation"]
    held_out, kept = parts.evaluation["validation"], parts.train
    assert len(undivided.train) == 1437
    assert abs(len(held_out) - 287) < 60 and abs(len(kept) - 690) < 75  # four standard deviations
    for left, right in ((kept, again.train), (held_out, again.evaluation["validation"])):
        assert torch.equal(left.labels, right.labels)
    everything = [tuple(image.flatten().tolist()) for image in undivided.train.pixels]  # type: ignore[union-attr]
    chosen = [tuple(i.flatten().tolist()) for part in (kept, held_out) for i in part.pixels]  # type: ignore[union-attr]
    assert set(chosen) <= set(everything)
    assert not {*chosen[: len(kept)]} & {*chosen[len(kept) :]}


def test_a_run_begun_with_another_choice_of_records_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(DIGITS, validation=0.2, batch_size=300)
    divided = preparation._divided
    with monkeypatch.context() as patched:  # as many records as now, but not chosen by the rule of today
        patched.setattr(preparation, "_divided", lambda data, config: replace(divided(data, config), used=""))
        preparation._CACHE.clear()
        with pytest.raises(CrashError):
            run(config, tmp_path / "run", listener=CrashAt(step=3), checkpoint_every=1)
        preparation._CACHE.clear()
    before = (tmp_path / "run" / "checkpoint" / "state.safetensors").read_bytes()
    with pytest.raises(ConfigurationError, match="begun by an lsg that chose its training records in another way"):
        run(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "checkpoint" / "state.safetensors").read_bytes() == before


def test_data_are_encoded_once_for_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_data(DIGITS, CPU, Listener())
    monkeypatch.setattr(preparation, "_encode", None)
    prepare_data(replace(DIGITS, seed=5, rank=2, method="rgp"), CPU, Listener())


# --- a run that is cut off ------------------------------------------------------------------------------------------


class CrashError(Exception):
    pass


class CrashAt(Listener):
    """Raises at a step, or after an epoch."""

    def __init__(self, *, step: int = 0, epoch: int = 0) -> None:
        self._step, self._epoch = step, epoch

    def step(self, done: int) -> None:
        if done == self._step:
            raise CrashError

    def epoch(self, row: dict[str, Any]) -> None:
        if row["epoch"] == self._epoch:
            raise CrashError


@pytest.mark.parametrize(
    ("crash", "every"),
    [
        (CrashAt(step=1), 2),  # before the first checkpoint
        (CrashAt(step=5), 2),  # in the middle of an epoch
        (CrashAt(step=6), 1),  # just before an epoch's end
        (CrashAt(epoch=2), 1),  # between an epoch's row and its checkpoint
        (CrashAt(epoch=3), 3),  # after the last epoch, before the result
    ],
)
def test_a_crash_costs_nothing(crash: CrashAt, every: int, finished: tuple[Path, RunResult], tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        run(DIGITS, tmp_path / "run", listener=crash, checkpoint_every=every)
    assert not (tmp_path / "run" / "result.json").exists()
    run(DIGITS, tmp_path / "run", resume=True, checkpoint_every=every)
    same(tmp_path / "run", finished[0])
    assert scalars(tmp_path / "run").keys() == scalars(finished[0]).keys()
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_sigkill_in_the_middle_of_an_epoch_and_resume_end_as_an_uninterrupted_run(
    texts: RunConfig, tmp_path: Path
) -> None:
    program = f"""
import os, signal, torch
from pathlib import Path
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.run import run
class Kill(Listener):
    def step(self, done):
        if done == 6:
            os.kill(os.getpid(), signal.SIGKILL)
torch.set_num_threads(1)
run(RunConfig(**{texts.to_dict()!r}), Path({str(tmp_path / "killed")!r}), listener=Kill(), checkpoint_every=3)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert answer.returncode == -signal.SIGKILL, answer.stderr
    assert (tmp_path / "killed" / "checkpoint").exists() and len(rows(tmp_path / "killed")) == 1
    run(texts, tmp_path / "killed", resume=True)
    run(texts, tmp_path / "whole")
    same(tmp_path / "killed", tmp_path / "whole")


def test_resuming_a_complete_run_gives_its_result(finished: tuple[Path, RunResult], tmp_path: Path) -> None:
    shutil.copytree(finished[0], tmp_path / "run")
    (tmp_path / "run" / "checkpoint").mkdir()  # killed just before it was removed
    assert run(DIGITS, tmp_path / "run", resume=True, listener=CrashAt(step=1)) == finished[1]
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_resuming_nothing_starts_a_run(tmp_path: Path) -> None:
    assert len(run(replace(DIGITS, epochs=1), tmp_path / "run", resume=True).history) == 1


def test_checkpoints_after_epochs_are_written_when_they_are_worth_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CrashError):
        run(DIGITS, tmp_path / "quick", listener=CrashAt(epoch=3))
    assert not (tmp_path / "quick" / "checkpoint").exists()
    monkeypatch.setattr("lsg.train.checkpoints.SECONDS_BETWEEN", 0.0)
    with pytest.raises(CrashError):
        run(DIGITS, tmp_path / "slow", listener=CrashAt(epoch=3))
    assert (tmp_path / "slow" / "checkpoint").exists()


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_refused_without_resume(finished: tuple[Path, RunResult]) -> None:
    before = sorted(finished[0].rglob("*"))
    with pytest.raises(ConfigurationError, match="holds a run already: go on with it by --resume"):
        run(DIGITS, finished[0])
    assert sorted(finished[0].rglob("*")) == before


def test_resuming_another_configuration_names_what_differs(finished: tuple[Path, RunResult]) -> None:
    with pytest.raises(ConfigurationError, match=r"begun with --lr 0.2 \(now 0.1\), --pair-column None \(now x\)"):
        run(replace(DIGITS, lr=0.1, pair_column="x"), finished[0], resume=True)


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="file is not a folder"):
        run(DIGITS, tmp_path / "file" / "below")
    with pytest.raises(ConfigurationError, match="is not empty and holds no run"):
        run(DIGITS, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 1438}, "--batch-size 1438 is more than the 1,437 training records"),
        ({"delta": 1 / 1437}, "--delta 0.000695894 must be below 1/N"),
        ({"validation": 1e-9}, "its part 'validation' has no records"),
        ({"device": "cuda:99"}, "--device cuda:99 cannot be used"),
        ({"device": "toaster"}, "--device toaster cannot be used"),
        ({"task": "sst3"}, "--task 'sst3' is not known"),
        ({"model": "resnet50"}, "--model 'resnet50' must be one of"),
        ({"data": "/nowhere"}, "digits"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(replace(DIGITS, **settings), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 64}, "--max-length 64 is more than the 40 tokens"),
        ({"max_length": 2}, "--max-length 2: --model .* needs at least 3"),
        ({"model": "/nowhere/at/all"}, "--model /nowhere/at/all: cannot load"),
        ({"data": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_texts_that_cannot_work_are_refused_too(
    settings: dict[str, Any], message: str, texts: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(replace(texts, **settings), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_knows_more_tokens_than_the_model_is_refused(texts: RunConfig, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    shutil.copytree(texts.model, tmp_path / "small")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=10, **shape)).save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigurationError, match="its tokenizer knows 16 tokens and its model 10"):
        run(replace(texts, model=str(tmp_path / "small")), tmp_path / "run")


def test_more_tokens_than_positions_are_refused(texts: RunConfig, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    shutil.copytree(texts.model, tmp_path / "short")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=16, max_position_embeddings=3, **shape)).save_pretrained(tmp_path / "short")
    with pytest.raises(ConfigurationError, match=r"the longest text has \d+ tokens, and --model .* has 3 positions"):
        run(replace(texts, model=str(tmp_path / "short")), tmp_path / "run")


def test_a_model_that_fails_at_its_first_step_is_told_in_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes cannot be multiplied\nat length")

    monkeypatch.setattr("lsg.train.evaluation.Classifier.loss", fails)
    with pytest.raises(
        ConfigurationError, match=r"--model small-cnn failed at its first step: shapes cannot be mul\w+$"
    ):
        run(DIGITS, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"config": 1}', '{"score": 1, "score": 2}', "deep"])
def test_a_damaged_result_is_named_and_costs_no_checkpoint(
    content: str, finished: tuple[Path, RunResult], tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint" / "state.safetensors"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"hours of training")
    (tmp_path / "run" / "result.json").write_text("[" * 100_000 if content == "deep" else content)
    with pytest.raises(ConfigurationError, match=r"result\.json is damaged"):
        run(DIGITS, tmp_path / "run", resume=True)
    assert checkpoint.read_bytes() == b"hours of training"


def test_a_result_without_its_model_costs_no_checkpoint(finished: tuple[Path, RunResult], tmp_path: Path) -> None:
    shutil.copytree(finished[0], tmp_path / "run")
    (tmp_path / "run" / "checkpoint").mkdir()
    shutil.rmtree(tmp_path / "run" / "model")
    run(DIGITS, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "checkpoint").exists()


def test_an_earlier_model_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    def save(text: str) -> Any:
        def write(target: Path) -> None:
            target.mkdir()
            (target / "weights").write_text(text)
            if text == "half":
                raise CrashError

        return write

    folder.write_model(save("first"))
    with pytest.raises(CrashError):
        folder.write_model(save("half"))
    assert (tmp_path / "model" / "weights").read_text() == "first"
    folder.write_model(save("second"))
    assert (tmp_path / "model" / "weights").read_text() == "second" and len(list(tmp_path.iterdir())) == 1


# --- secrets, and one process at a time ------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_secret_files_are_their_owners_from_the_first_byte(tmp_path: Path) -> None:
    target = tmp_path / "secret"
    for before in (None, 0o644):  # a new file, and one that an older lsg let everybody read
        if before is not None:
            target.chmod(before)
        with atomic_path(target, secret=True) as partial:
            assert mode(partial) == 0o600 and partial.stat().st_size == 0
            partial.write_text("x")
        assert mode(target) == 0o600


def test_what_holds_the_seed_or_losses_is_the_owners_alone_and_says_so(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with pytest.raises(CrashError):
            run(DIGITS, tmp_path / "run", listener=CrashAt(step=2), checkpoint_every=1)
        modes = {str(p.relative_to(tmp_path)): mode(p) for p in tmp_path.rglob("*")}
        run(DIGITS, tmp_path / "run", resume=True)
        modes |= {str(p.relative_to(tmp_path)): mode(p) for p in tmp_path.rglob("*")}
    finally:
        os.umask(before)
    for name in ("config.toml", "metrics.jsonl", "result.json", "checkpoint/state.safetensors"):
        assert modes[f"run/{name}"] == 0o600, name
    for name in ("run", "run/checkpoint", "run/tensorboard"):
        assert modes[name] == 0o700, name
    assert modes["run/privacy.json"] == 0o666  # as the umask says: it is made to be released
    assert "SECRET" in (tmp_path / "run" / "config.toml").read_text().splitlines()[0]
    assert "SECRET" in strict(tmp_path / "run" / "result.json")["secret"]


HOLD = """
import sys, time, torch
from pathlib import Path
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.run import run
class Wait(Listener):
    def step(self, done):
        print("training", flush=True)
        time.sleep(600)
torch.set_num_threads(1)
run(RunConfig(**{settings!r}), Path({folder!r}), listener=Wait(), checkpoint_every=1)
"""


def test_a_folder_serves_one_process_at_a_time_and_a_killed_one_lets_go(
    finished: tuple[Path, RunResult], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    program = HOLD.format(settings=DIGITS.to_dict(), folder=str(folder))
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "training\n"
        before = sorted(folder.rglob("*"))
        with pytest.raises(ConfigurationError, match=rf"--output {folder}: process {other.pid} is at work there"):
            run(DIGITS, folder, resume=True)
        assert sorted(folder.rglob("*")) == before
    finally:
        other.kill()
        other.communicate()
    run(DIGITS, folder, resume=True)
    same(folder, finished[0])
    assert not (folder / "lock").exists()


def test_two_new_runs_in_one_folder_are_refused_before_either_writes(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with (
        first.held(DIGITS, resume=False),
        pytest.raises(ConfigurationError, match=rf"process {os.getpid()} is at work there"),
        second.held(replace(DIGITS, seed=2), resume=False),
    ):
        pass
    assert list(tmp_path.iterdir()) == []  # the first one wrote nothing, and leaves nothing


def test_a_run_that_ended_while_another_waited_for_its_lock_is_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, check = RunFolder(tmp_path / "run"), RunFolder.check

    def after_check(self: RunFolder, config: RunConfig, *, resume: bool) -> None:
        check(self, config, resume=resume)
        if not (tmp_path / "run").exists():  # another process begins and stops between the first check and the lock
            monkeypatch.setattr(RunFolder, "check", check)
            other = RunFolder(tmp_path / "run")
            with other.held(DIGITS, resume=False):
                other.create(DIGITS)

    monkeypatch.setattr(RunFolder, "check", after_check)
    with (
        pytest.raises(ConfigurationError, match="holds a run already"),
        folder.held(replace(DIGITS, seed=2), resume=False),
    ):
        pass


def test_a_run_that_diverged_says_so(tmp_path: Path) -> None:
    class Notes(Listener):
        def __init__(self) -> None:
            self.notes: list[str] = []

        def note(self, text: str) -> None:
            self.notes.append(text)

    listener = Notes()
    config = replace(DIGITS, method="non-private", epsilon=None, noise_multiplier=None, lr=1e30, epochs=1)
    run(config, tmp_path / "run", listener=listener)
    assert any("diverged" in note for note in listener.notes)


def test_a_huge_epsilon_has_a_statement() -> None:
    spent = Spent(
        epsilon=4986.0,
        noise_multiplier=0.1,
        sample_rate=0.1,
        expected_batch_size=10,
        steps=10,
        records=100,
        noise_dimensions=10,
        trained_parameters=10,
    )
    facts = DataFacts(data="data", model="model", used="", classes=2)
    config = replace(DIGITS, epsilon=None, noise_multiplier=0.1)
    assert "e^4986" in privacy_statement(config, spent, facts, {})["statement"]


# --- a full disk ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file on a disk that is always full")
@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "privacy.json", "result.json"])
def test_a_full_disk_is_told_in_one_line_and_leaves_no_half_of_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    def fill(path: Path) -> None:
        if path.name != f"{name}.partial":
            create_secret(path)
        elif name != "metrics.jsonl" or (folder / name).exists():  # metrics without rows are written first
            path.symlink_to("/dev/full")

    class Fill(Listener):
        def started(self, start: RunStart) -> None:
            if name == "privacy.json":  # it is no secret
                (folder / f"{name}.partial").symlink_to("/dev/full")

    config = replace(DIGITS, epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr("lsg.files.atomic.create_secret", fill)
        with pytest.raises(OSError, match=rf"cannot write .*{name} \(No space left on device\)"):
            run(config, folder, listener=Fill())
    assert name == "metrics.jsonl" or not (folder / name).exists()
    assert not (folder / "result.json").exists()
    assert not list(folder.glob("*.partial"))
    assert len(run(config, folder, resume=True).history) == 1  # there is room again


def test_a_full_disk_while_the_model_is_written_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = replace(DIGITS, epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr("safetensors.torch.save_file", full)
        with pytest.raises(OSError, match=r"cannot write .*model \(No space left on device\)"):
            run(config, tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.toml", "metrics.jsonl", "tensorboard"]
    run(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "result.json").exists()
