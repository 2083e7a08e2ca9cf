"""What a run refuses before it starts, and that it leaves nothing behind then."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lsg import ConfigurationError
from lsg.train.config import RunConfig
from lsg.train.folder import RunFolder
from lsg.train.run import RunResult, run
from tests.support.train_runs import DIGITS, CrashError


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
