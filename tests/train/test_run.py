"""One run: what it writes, that a seed repeats it, and which records it trains on."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lsg import ConfigurationError, __version__
from lsg.tasks.models import load_trained_image_model
from lsg.train import prepare_data as preparation
from lsg.train.config import RunConfig
from lsg.train.config_file import read_settings
from lsg.train.listener import Listener, RunStart
from lsg.train.prepare_data import prepare_data
from lsg.train.privacy_statement import DataFacts, Spent, privacy_statement
from lsg.train.protected import Protected
from lsg.train.run import RunResult, run
from tests.support.train_runs import CPU, DIGITS, CrashAt, CrashError, rows, same, scalars, strict

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
        "not_private/clip_share",
        "not_private/signal_norm",
        "not_private/noise_norm",
        "not_private/update_norm",
        "evaluation/score",
        "evaluation/test",
        "training/lr",
        "training/samples_per_second",
    }
    assert [seen["evaluation/score", epoch] for epoch in (1, 2, 3)] == pytest.approx(finished[1].curve)


def test_a_text_model_trains_and_is_saved_for_transformers(texts: RunConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    class Notes(Listener):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def note(self, text: str) -> None:
            self.lines.append(text)

        def started(self, start: RunStart) -> None:
            assert start.protected.counted == "96 records" and start.steps == 48 and start.batch_size == 24

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


def test_a_run_that_diverged_says_so(tmp_path: Path) -> None:
    config = replace(DIGITS, method="non-private", epsilon=None, noise_multiplier=None, lr=1e30, epochs=1)
    result = run(config, tmp_path / "run")
    assert "diverged" in result.warnings[0] and "loss is not finite" in result.warnings[1]
    released = strict(tmp_path / "run" / "privacy.json")["warnings"]
    assert "diverged" in released[0] and not any("loss" in warning for warning in released)


def test_a_huge_epsilon_has_a_statement() -> None:
    spent = Spent(
        epsilon=4986.0,
        noise_multiplier=0.1,
        sample_rate=0.1,
        expected_batch_size=10,
        steps=10,
        protected=Protected(100),
        noise_dimensions=10,
        trained_parameters=10,
    )
    facts = DataFacts(data="data", model="model", used="", classes=2)
    config = replace(DIGITS, epsilon=None, noise_multiplier=0.1)
    assert "e^4986" in privacy_statement(config, spent, facts, {})["statement"]


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
        patched.setattr(preparation, "_divided", lambda *given: replace(divided(*given), used=""))
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
