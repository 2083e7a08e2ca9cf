"""`lsg train --task generate`, end to end on tiny models: gradients, scores, samples, files, resuming, refusals."""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from typer.testing import CliRunner

from lsg import DPSGD, ConfigurationError, PrivacyEngine
from lsg.cli import app
from lsg.distributed.group import Group
from lsg.report import find_runs, render
from lsg.tasks.encoded import EncodedLanguage, as_loader
from lsg.tasks.measures import LARGEST
from lsg.train.config import RunConfig
from lsg.train.language import LanguageScorer
from lsg.train.listener import Listener
from lsg.train.prepare_data import prepare_data
from lsg.train.prepare_model import prepare_model
from lsg.train.run import run
from lsg.train.samples import Samples
from tests.support.language import tiny_gpt2, tiny_llama, tiny_t5, written
from tests.support.train_runs import CPU, CrashAt, CrashError, same, strict

MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2, "t5": tiny_t5}


class Shown(Listener):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.samples: dict[int, str] = {}

    def note(self, text: str) -> None:
        self.notes.append(text)

    def sample(self, epoch: int, text: str) -> None:
        self.samples[epoch] = text


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunConfig]:
    folder = tmp_path_factory.mktemp("generate")
    for name, make in MODELS.items():
        make(folder / name)
    yield RunConfig(
        task="generate",
        data=str(written(folder / "data")),
        model=str(folder / "llama"),
        noise_multiplier=0.5,
        delta=1e-3,
        accountant="rdp",
        lr=1e-2,
        batch_size=12,
        epochs=2,
        max_physical_batch_size=5,
        max_length=24,
        rank=2,
        device="cpu",
    )


def of(base: RunConfig, name: str, **settings: Any) -> RunConfig:
    return replace(base, model=str(Path(base.model).parent / name), **settings)


def private(config: RunConfig) -> tuple[Any, EncodedLanguage, LanguageScorer]:
    data = prepare_data(config, CPU, Listener())
    model = prepare_model(config, data, CPU, Listener()).eval()
    assert isinstance(data.train, EncodedLanguage)
    causal = not config.model.endswith("t5")
    return model, data.train, LanguageScorer("fp32", CPU, 64, causal=causal, group=Group())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lora", [None, 2])
def test_gradients_of_a_batch_are_those_of_batches_of_one(name: str, lora: int | None, base: RunConfig) -> None:
    if lora:
        pytest.importorskip("peft")
    model, train, scorer = private(of(base, name, method="dpsgd", lora=lora))
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    wanted = []
    for record in range(5):
        scorer.loss(model, train.__getitems__([record])).backward()
        wanted.append({key: p.grad.clone() for key, p in trained.items()})
        model.zero_grad()
    engine = PrivacyEngine(accountant="rdp")
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained.values(), lr=0.1),
        data_loader=as_loader(train, 12),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=DPSGD(),
    )
    scorer.loss(model, train.__getitems__(range(5))).backward()
    found = engine.per_sample_gradients()
    assert found.keys() == trained.keys()
    for key in trained:
        reference = torch.stack([row[key] for row in wanted])
        torch.testing.assert_close(found[key], reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_perplexity_is_that_of_a_plain_computation(name: str, base: RunConfig) -> None:
    """Of the model's own loss, record by record, in a loop without batches."""
    config = of(base, name)
    data = prepare_data(config, CPU, Listener())
    model, _, scorer = private(config)
    (dev,) = data.evaluation.values()
    total, tokens = 0.0, 0
    for record in range(len(dev)):
        batch = dev.__getitems__([record])
        labels = batch.pop("labels")[0]
        logits = model(**batch).logits[0]
        if name != "t5":
            logits, labels = logits[:-1], labels[1:]
        for row, label in zip(logits, labels, strict=True):
            if label != -100:
                total -= F.log_softmax(row.double(), 0)[label].item()
                tokens += 1
    with torch.no_grad():
        assert scorer.scores(model, data.evaluation) == {"dev": pytest.approx(math.exp(total / tokens), rel=1e-5)}


def test_a_prompt_fills_all_and_the_record_counts_with_a_gradient_of_zero(base: RunConfig, tmp_path: Path) -> None:
    config = of(base, "llama", data=str(tmp_path / "data"), method="dpsgd", noise_multiplier=0.0)
    train = written(tmp_path / "data", train=20) / "train.jsonl"
    train.write_text(train.read_text().replace('"the story was"', f'"{"very " * 30}"'))  # every second prompt
    shown = Shown()
    result = run(config, tmp_path / "run", listener=shown)
    assert "10 prompts leave no room for their texts, and teach nothing (not private)" in shown.notes
    assert result.privacy["records"] == 20 and math.isfinite(result.history[0]["loss"])
    model, records, scorer = private(config)
    empty = int(records.lengths.argmax())
    loss = scorer.loss(model, records.__getitems__([empty]))
    loss.backward()
    assert loss == 0 and all(not p.grad.any() for p in model.parameters() if p.requires_grad)


@pytest.fixture(scope="module")
def done(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Shown]:
    """With persons, dropout and averaged weights."""
    folder, shown = tmp_path_factory.mktemp("runs") / "persons", Shown()
    run(_persons(base), folder, listener=shown)
    return folder, shown


def _persons(base: RunConfig) -> RunConfig:
    return of(base, "gpt2", unit_column="who", max_records_per_unit=2, averaging=0.5, sample_prompt="the film")


def test_a_resumed_run_is_the_same(base: RunConfig, done: tuple[Path, Shown], tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        run(_persons(base), tmp_path / "run", listener=CrashAt(step=4), checkpoint_every=3)
    run(_persons(base), tmp_path / "run", resume=True)
    same(tmp_path / "run", done[0])
    untrained = [strict(folder / "result.json")["untrained"] for folder in (tmp_path / "run", done[0])]
    assert untrained[0] == untrained[1] > 1


def test_samples_change_nothing_and_are_in_no_file(base: RunConfig, done: tuple[Path, Shown], tmp_path: Path) -> None:
    folder, shown = done
    assert list(shown.samples) == [1, 2] and all(text.startswith("the film") for text in shown.samples.values())
    (told,) = [note for note in shown.notes if note.startswith("before training: perplexity")]
    assert "lower is better" in told
    other = Shown()
    run(replace(_persons(base), sample_prompt=""), tmp_path / "run", listener=other)
    assert other.samples == {}
    same(tmp_path / "run", folder)
    for path in folder.rglob("*"):
        assert path.is_dir() or shown.samples[2].encode() not in path.read_bytes()


def test_the_statement_is_about_persons_and_tells_no_number_of_tokens(done: tuple[Path, Shown]) -> None:
    statement = strict(done[0] / "privacy.json")
    assert statement["units"] == 30 and statement["records"] == 60 and statement["task"] == "generate"
    text = json.dumps(statement)
    assert "secret name" not in text and "classes" not in text and "repeat what stands in" in text
    assert not any("token" in key for key in statement)


def test_scores_are_perplexities_everywhere(done: tuple[Path, Shown]) -> None:
    result = strict(done[0] / "result.json")
    assert result["measure"] == "perplexity" and all(row["measure"] == "perplexity" for row in result["history"])
    assert result["score"] > 1
    page = render(find_runs([done[0]]), "runs")
    assert "perplexity (lower is better)" in page and "Perplexity over epochs" in page
    assert "Scores are those of" in page and "ccuracy over" not in page and "accuracy %" not in page


@pytest.mark.parametrize("name", MODELS)
def test_adapters_and_merged_weights_compute_the_same(name: str, base: RunConfig, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = of(base, name, method="dpsgd", lora=2, noise_multiplier=1.0, averaging=0.5)
    results = [run(replace(config, merge=merge), tmp_path / str(merge)) for merge in (False, True)]
    assert results[0].score == results[1].score and results[0].privacy["lora"] == 2
    kind = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    adapters = tmp_path / "False" / "model"
    files = {path.name for path in adapters.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files and "README.md" not in files
    assert str(Path(config.model).parent) not in (adapters / "adapter_config.json").read_text()
    adapted = peft.PeftModel.from_pretrained(kind.from_pretrained(config.model), adapters).eval()
    merged = kind.from_pretrained(tmp_path / "True" / "model").eval()
    plain = kind.from_pretrained(config.model).eval()
    tokens = dict(AutoTokenizer.from_pretrained(adapters)(["the film was very good"], return_tensors="pt"))
    if name == "t5":
        tokens["decoder_input_ids"] = torch.tensor([[0, 5]])
    with torch.no_grad():
        one, other, before = (model(**tokens).logits for model in (adapted, merged, plain))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(one, before, atol=1e-3)


def test_whole_weights_are_saved_as_transformers_reads_them(base: RunConfig, tmp_path: Path) -> None:
    result = run(of(base, "llama", epochs=1), tmp_path / "run")
    model, _, scorer = private(base)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    with torch.no_grad():
        assert scorer.scores(loaded, prepare_data(base, CPU, Listener()).evaluation)["dev"] == pytest.approx(
            result.score
        )
    assert loaded.config._name_or_path == str(tmp_path / "run" / "model") and type(loaded) is type(model)


def test_without_noise_and_privacy_a_model_learns(base: RunConfig, tmp_path: Path) -> None:
    shown = Shown()
    config = of(base, "llama", method="non-private", noise_multiplier=None, epochs=8, trainable="all", lr=0.03)
    result = run(config, tmp_path / "run", listener=shown)
    assert (
        result.untrained is not None
        and result.score < 4 < result.untrained
        and list(shown.samples) == list(range(1, 9))
    )
    assert not any("not clearly better" in text or "before training" in text for text in result.warnings)


def test_a_run_that_diverges_has_a_finite_score(base: RunConfig, tmp_path: Path) -> None:
    result = run(of(base, "gpt2", lr=1e30, optimizer="sgd"), tmp_path / "run")
    assert result.score == LARGEST and "weights are" in result.warnings[0]
    assert any("the perplexity, 1e+30, is no lower than before training" in text for text in result.warnings)
    assert "1e+30" in render(find_runs([tmp_path]), "runs") or find_runs([tmp_path])[0].score == LARGEST


def test_samples_are_drawn_a_few_times_and_harm_no_run(base: RunConfig) -> None:
    model, _, _ = private(base)
    tokenizer = prepare_data(base, CPU, Listener()).tokenizer
    samples = Samples(replace(base, epochs=50), tokenizer, CPU, causal=True)
    assert [epoch for epoch in range(1, 51) if samples.due(epoch)] == [1, 10, 20, 30, 40, 50]
    before = torch.get_rng_state()
    assert samples.draw(model) == samples.draw(model) and torch.equal(before, torch.get_rng_state())
    assert samples.draw(torch.nn.Linear(1, 1)).startswith("none (")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": None}, "--task generate needs --data"),
        ({"model": "scatter-linear"}, "--model scatter-linear is for images"),
        ({"trainable": "head"}, "--trainable head: a language model has no new head"),
        ({"head_lr": 2.0}, "--head-lr 2.0: a language model has no new head"),
        ({"pooling": "mean"}, "--pooling mean: a language model has no new head"),
        ({"views": 2}, "only images have views"),
        ({"merge": True}, "--merge adds adapters to the weights: it needs --lora"),
        ({"lora": 0}, "--lora 0 must be at least 1"),
        ({"lora": 2, "trainable": "all"}, "--trainable all: with --lora 2 adapters alone are trained"),
        ({"max_length": 65}, "--max-length 65: --model .* can read 64 tokens: give it so many or fewer"),
        ({"max_length": 3}, "prompts of its part 'train' fill all of the 3 tokens of --max-length"),
        ({"max_length": 1}, "--max-length 1: --model .* needs at least 2"),
        ({"sample_prompt": "very " * 30}, "--sample-prompt: 30 tokens, where there must be one or more, and fewer"),
        ({"label_column": "who"}, "--label-column who: --task generate has no such column"),
        ({"prompt_column": "nothing"}, "no column 'nothing'; it has 'prompt', 'completion', 'who'"),
        ({"batch_size": 61}, "--batch-size 61 is more than the 60 training records"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    settings: dict[str, Any], message: str, base: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(replace(base, **settings), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "file", "keys", "value", "message"),
    [
        ("llama", "tokenizer.json", ("model", "vocab", "good"), 500, "its last token is number 500, and its model has"),
        ("t5", "config.json", ("decoder_start_token_id",), 10**6, "its decoder_start_token_id is number 1000000"),
        ("llama", "tokenizer_config.json", ("model_max_length",), "many", "its tokenizer's model_max_length is no num"),
    ],
)
def test_a_models_files_that_do_not_fit_together_are_refused(
    name: str, file: str, keys: tuple[str, ...], value: Any, message: str, base: RunConfig, tmp_path: Path
) -> None:
    folder = MODELS[name](tmp_path / "model")
    content = json.loads((folder / file).read_text())
    part = content
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=message):
        run(replace(base, model=str(folder)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_encoder_needs_prompts_and_other_tasks_have_none_of_these_options(base: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a t5 model has an encoder, which reads a prompt: name its column"):
        run(of(base, "t5", text_column="completion"), tmp_path / "run")
    with pytest.raises(ConfigurationError, match="--lora is for --task generate, and not for digits"):
        run(replace(base, task="digits", data=None, model="small-cnn", lora=2), tmp_path / "run")


def test_a_missing_peft_is_one_line(base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigurationError, match="--lora needs the extra 'transformers': pip install"):
        run(replace(base, lora=2), tmp_path / "run")


def test_the_command_chooses_a_recipe_and_shows_what_foreign_text_says(base: RunConfig, tmp_path: Path) -> None:
    options = ["--task", "generate", "--data", str(base.data), "--model", base.model, "--epsilon", "8", "--lora", "2"]
    options += ["--epochs", "1", "--max-length", "24", "--accountant", "rdp", "--sample-prompt", "the film\x1b[31m"]
    result = CliRunner().invoke(app, ["train", *options, "--output", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    for part in (
        "train adapters alone (LoRA)",
        "DPSGD, automatic clipping",
        "published, not measured by us",
        "20 for dev; texts of the column 'completion' after prompts of 'prompt'; texts are cut at 24 tokens",
        "before training: perplexity",
        "epoch 1: perplexity",
        "(lower is better)",
        "it writes: the film",
        "perplexity on dev",
    ):
        assert part in result.output, part
    assert "\x1b[31m" not in result.output
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()


def test_a_paid_search_is_refused_and_a_free_one_takes_the_lowest_perplexity(base: RunConfig, tmp_path: Path) -> None:
    from lsg.tune.search import Search
    from lsg.tune.tune import tune

    config = replace(base, epsilon=8.0, noise_multiplier=None, epochs=1)
    with pytest.raises(ConfigurationError, match="--task generate: lsg tune pays for a choice by noise on a count"):
        Search(config, {"lr": [1e-2, 1e-3]})
    other = str(written(tmp_path / "public", train=40, dev=10))
    outcome = tune(Search(config, {"lr": [1e-2, 1e-9]}, runs=2, public_data=other), tmp_path / "search")
    assert outcome.measure == "perplexity" and outcome.scores[outcome.best - 1] == min(outcome.scores)
