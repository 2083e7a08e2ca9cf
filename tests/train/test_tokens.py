"""`lsg train --task tokens`, end to end on tiny models: gradients, scores, files, resuming, persons, refusals."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForTokenClassification, AutoTokenizer
from typer.testing import CliRunner

from lsg import DPSGD, ConfigurationError, PrivacyEngine
from lsg.cli import app
from lsg.tasks.encoded import as_loader
from lsg.tasks.encoded_tags import EncodedTags
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.prepare_data import prepare_data
from lsg.train.prepare_model import prepare_model
from lsg.train.run import run
from lsg.train.tagging import Tagger
from tests.support.language import tiny_gpt2
from tests.support.tagged import tagged, write_rows, written_tags
from tests.support.tiny import WORDS, tiny_bert, tiny_tokenizer
from tests.support.train_runs import CPU, CrashAt, CrashError, same, strict

MODELS = {"bert": tiny_bert, "gpt2": tiny_gpt2}


class Shown(Listener):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunConfig]:
    folder = tmp_path_factory.mktemp("tokens")
    for name, make in MODELS.items():
        make(folder / name)
    yield RunConfig(
        task="tokens",
        data=str(written_tags(folder / "data")),
        model=str(folder / "bert"),
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


def prepared(config: RunConfig) -> tuple[Any, EncodedTags, EncodedTags]:
    """The model, and the records to train and to score on."""
    data = prepare_data(config, CPU, Listener())
    (dev,) = data.evaluation.values()
    assert isinstance(data.train, EncodedTags) and isinstance(dev, EncodedTags)
    return prepare_model(config, data, CPU, Listener()).eval(), data.train, dev


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("trainable", ["paper", "bias", "all", "head"])
def test_gradients_of_a_batch_are_those_of_batches_of_one(name: str, trainable: str, base: RunConfig) -> None:
    model, train, _ = prepared(of(base, name, method="dpsgd", trainable=trainable))
    scorer = Tagger("fp32", CPU)
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    wanted = []
    for record in range(5):  # of 5 to 8 words
        scorer.loss(model, train.__getitems__([record])).backward()
        wanted.append({key: torch.zeros_like(p) if p.grad is None else p.grad.clone() for key, p in trained.items()})
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


def test_the_score_is_that_of_a_plain_loop(base: RunConfig, tmp_path: Path) -> None:
    """Over words, record by record; words that are cut off are not right."""
    config = replace(base, data=str(written_tags(tmp_path / "data")), max_length=7)
    model, _, dev = prepared(config)
    rows, names = tagged(20), ("BAD", "GOOD", "O")
    assert model.config.id2label == dict(enumerate(names))
    tokenizer = AutoTokenizer.from_pretrained(base.model)
    right = words = majority = 0
    with torch.no_grad():
        for row in rows:
            kept = row["tokens"][:5]  # beside [CLS] and [SEP]: here a word is a token
            logits = model(**tokenizer(kept, is_split_into_words=True, return_tensors="pt")).logits[0, 1:-1]
            answers = [names[answer] for answer in logits.argmax(1).tolist()]
            right += sum(answer == tag for answer, tag in zip(answers, row["ner_tags"], strict=False))
            majority += row["ner_tags"][:5].count("O")
            words += len(row["tokens"])
        found = Tagger("fp32", CPU).scores(model, {"dev": dev})
    assert found == {"dev": right / words} and dev.unseen == words - sum(min(5, len(row["tokens"])) for row in rows) > 0
    one = Tagger("fp32", CPU).one_answer({"dev": dev})["dev"]
    assert one.score == majority / words and one.records == 20 and one.told_from > one.score


def test_the_error_of_one_answer_is_that_of_drawn_records(base: RunConfig) -> None:
    """Compared with scores on records drawn again and again."""
    _, train, _ = prepared(base)
    one = Tagger("fp32", CPU).one_answer({"dev": train})["dev"]
    hits = (train.labels == 2).sum(1).double()
    drawn = torch.randint(60, (4000, 60), generator=torch.Generator().manual_seed(0))
    scores = hits[drawn].sum(1) / train.words[drawn].sum(1)
    assert one.error == pytest.approx(scores.std().item(), rel=0.1)


def test_a_record_without_a_seen_word_counts_with_a_gradient_of_zero(base: RunConfig, tmp_path: Path) -> None:
    rows = [
        {"tokens": ["", " "], "ner_tags": ["O", "BAD"]} if number % 2 else row for number, row in enumerate(tagged(40))
    ]
    for name in ("train", "dev"):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    shown, config = Shown(), replace(base, data=str(tmp_path), method="dpsgd")
    result = run(config, tmp_path / "run", listener=shown)
    assert "40 words are cut off or have no token, and teach nothing (not private)" in shown.notes
    assert result.privacy["records"] == 40
    model, train, _ = prepared(config)
    loss = Tagger("fp32", CPU).loss(model, train.__getitems__([1]))
    loss.backward()
    assert loss == 0 and all(not p.grad.any() for p in model.parameters() if p.requires_grad)


def _persons(base: RunConfig) -> RunConfig:
    return replace(base, unit_column="who", max_records_per_unit=2, averaging=0.5)


@pytest.fixture(scope="module")
def done(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With persons, dropout and averaged weights."""
    folder = tmp_path_factory.mktemp("runs") / "persons"
    run(_persons(base), folder)
    return folder


def test_a_resumed_run_is_the_same(base: RunConfig, done: Path, tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        run(_persons(base), tmp_path / "run", listener=CrashAt(step=4), checkpoint_every=3)
    run(_persons(base), tmp_path / "run", resume=True)
    same(tmp_path / "run", done)


def test_the_statement_is_about_persons_and_says_that_tags_are_public(done: Path) -> None:
    statement = strict(done / "privacy.json")
    assert statement["units"] == 30 and statement["records"] == 60 and statement["task"] == "tokens"
    public = " ".join(statement["public_by_assumption"])
    assert "The number of classes, 3, and their names" in public and "a tag for each word in each" in public
    text = json.dumps(statement)
    assert "secret name" not in text and "words" not in "".join(statement)
    records = strict(done / "result.json")
    assert records["measure"] == "accuracy" and records["untrained"] is None


def test_the_saved_model_is_read_by_transformers_and_scores_the_same(base: RunConfig, done: Path) -> None:
    model = AutoModelForTokenClassification.from_pretrained(done / "model").eval()
    assert model.config.id2label == {0: "BAD", 1: "GOOD", 2: "O"} and model.config.label2id["O"] == 2
    _, _, dev = prepared(_persons(base))
    with torch.no_grad():
        score = Tagger("fp32", CPU).scores(model, {"dev": dev})["dev"]
    assert score == strict(done / "result.json")["score"]
    assert AutoTokenizer.from_pretrained(done / "model")(["good"], is_split_into_words=True).word_ids() == [
        None,
        0,
        None,
    ]


def test_without_noise_and_privacy_a_model_learns(base: RunConfig, tmp_path: Path) -> None:
    config = replace(base, method="non-private", noise_multiplier=None, trainable="all", epochs=20)
    result = run(config, tmp_path / "run")
    assert result.score == 1 and result.warnings == []


def test_a_run_that_learns_nothing_is_warned_of(base: RunConfig, tmp_path: Path) -> None:
    result = run(replace(base, lr=1e-9), tmp_path / "run")
    assert any("always giving the most frequent answer, 84.6 %, on 20 records" in text for text in result.warnings)


def test_a_model_that_looks_at_padding_is_refused(base: RunConfig, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 4 + len(WORDS)}
    torch.manual_seed(0)
    config = transformers.FNetConfig(max_position_embeddings=40, pad_token_id=0, **sizes)
    transformers.FNetForTokenClassification(config).save_pretrained(tmp_path / "fnet")
    tiny_tokenizer(tmp_path / "fnet")
    with pytest.raises(ConfigurationError, match="what it says of a text changes with the padding behind it"):
        run(replace(base, model=str(tmp_path / "fnet")), tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": None}, "--task tokens needs --data"),
        ({"model": "scatter-linear"}, "--model scatter-linear is for images"),
        ({"pooling": "mean"}, "--pooling mean: --task tokens has an answer for each word, and nothing to pool"),
        ({"lora": 2}, "--lora is for --task generate, and not for tokens"),
        ({"views": 2}, "only images have views"),
        ({"max_length": 2}, "--max-length 2: --model .* needs at least 3"),
        ({"max_length": 41}, "--max-length 41 is more than the 40 tokens"),
        ({"batch_size": 61}, "--batch-size 61 is more than the 60 training records"),
        ({"label_column": "nothing"}, "no column 'nothing'; it has 'tokens', 'ner_tags', 'who'"),
        ({"text_column": "who"}, "line 1: 'who' is 'secret name 0', not a list"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    settings: dict[str, Any], message: str, base: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(replace(base, **settings), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_words_of_which_none_has_a_token_are_refused(base: RunConfig, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", tagged(20))
    write_rows(tmp_path / "dev.jsonl", [{"tokens": [" ", ""], "ner_tags": ["O", "BAD"]}])
    with pytest.raises(
        ConfigurationError, match=r"of its part 'dev' the tokenizer of --model .* makes no token within"
    ):
        run(replace(base, data=str(tmp_path)), tmp_path / "run")


def test_a_model_without_such_a_head_is_refused(base: RunConfig, tmp_path: Path) -> None:
    transformers.MarianConfig(d_model=16).save_pretrained(tmp_path / "marian")
    tiny_tokenizer(tmp_path / "marian")
    with pytest.raises(
        ConfigurationError, match="a marian model cannot classify words: transformers has no token class"
    ):
        run(replace(base, model=str(tmp_path / "marian")), tmp_path / "run")


def test_the_command_chooses_a_recipe_and_says_whose_rule_it_is(base: RunConfig, tmp_path: Path) -> None:
    options = ["--task", "tokens", "--data", str(base.data), "--model", base.model, "--epsilon", "8"]
    options += ["--epochs", "1", "--max-length", "24", "--accountant", "rdp", "--output", str(tmp_path / "run")]
    result = CliRunner().invoke(app, ["train", *options])
    assert result.exit_code == 0, result.output
    for part in (
        "train the head alone\n",
        "the rule for texts, by records times ε, not measured for tags",
        "20 for dev; words of the column 'tokens' with tags of 'ner_tags'; labels BAD, GOOD, O; texts are cut at 24",
        "new, seeded weights for classifier.bias, classifier.weight",
        "accuracy on dev",
    ):
        assert part in result.output, part


def test_a_paid_search_is_refused_and_a_free_one_runs(base: RunConfig, tmp_path: Path) -> None:
    from lsg.tune.search import Search
    from lsg.tune.tune import tune

    config = replace(base, epsilon=8.0, noise_multiplier=None, epochs=1)
    with pytest.raises(
        ConfigurationError, match=r"--task tokens: lsg tune pays .* one text can have any number of words"
    ):
        Search(config, {"lr": [1e-2, 1e-3]})
    other = str(written_tags(tmp_path / "public", train=40, dev=10))
    outcome = tune(Search(config, {"lr": [1e-2, 1e-9]}, runs=2, public_data=other), tmp_path / "search")
    assert outcome.measure == "accuracy" and outcome.scores[outcome.best - 1] == max(outcome.scores)
