"""PrivateTrainer: equal to a loop by hand, continued bit by bit, right in its losses, honest in what it writes."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from lsg import DPSGD, ConfigurationError, LsgError, PrivacyEngine, PrivacyError
from lsg.integrations.transformers import PrivacyArguments, PrivateSeq2SeqTrainer, PrivateTrainer, refusals
from lsg.integrations.transformers.first_step import FirstStep
from lsg.integrations.transformers.losses import PerSequenceSmoother
from lsg.losses import per_sequence
from tests.support import trainer_runs as runs
from tests.support.trainer_runs import trainer, weights


@pytest.mark.parametrize("kind", ["class", "causal"])
def test_it_equals_a_loop_by_hand_bit_for_bit(kind: str, tmp_path: Path) -> None:
    own = trainer(tmp_path, kind)
    own.train()
    model, epsilon, steps = runs.by_hand(kind)
    assert torch.equal(weights(own.model), weights(model))
    assert own.get_epsilon() == epsilon <= 8.0
    assert own.state.global_step == steps == len(own.engine.accountant) == 12  # 23 / 4 an epoch: 6, then 12


def test_the_loop_by_hand_is_an_ordinary_one(tmp_path: Path) -> None:
    """`by_hand` goes by logical batches, for its scheduler; iterating the loader is the same."""
    found = []
    for ordinary in (False, True):
        model, engine = runs.classifier(), PrivacyEngine(accountant="rdp")
        torch.manual_seed(0)
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(runs.class_records(), batch_size=3, collate_fn=t.default_data_collator),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            max_physical_batch_size=2,
            noise_generator=torch.Generator().manual_seed(5),
        )

        def step(batch: Any, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            model(**batch).loss.backward()
            optimizer.step()

        if ordinary:
            for batch in loader:
                step(batch)
        else:
            for micro_batches in loader.logical_batches():
                rows = [step(batch) for batch in micro_batches]
                if not rows:
                    optimizer.step()
        found.append((weights(model), engine.accountant.history))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_a_logical_batch_is_handed_out_whole() -> None:
    model, engine = runs.classifier(), PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(runs.class_records(), batch_size=20, collate_fn=t.default_data_collator),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=2,
    )
    with pytest.raises(PrivacyError, match="before all micro-batches"):
        for micro_batches in loader.logical_batches():
            model(**next(micro_batches)).loss.backward()
            optimizer.step()


@pytest.mark.parametrize("step", [4, 6], ids=["inside an epoch", "after an epoch"])
def test_it_is_continued_bit_by_bit_with_what_was_spent(step: int, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": step}
    whole = trainer(tmp_path, args=saving)
    whole.train()
    resumed = trainer(tmp_path, args=saving, own={"noise_generator": torch.Generator().manual_seed(77)})
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert torch.equal(weights(whole.model), weights(resumed.model))
    assert resumed.get_epsilon() == whole.get_epsilon()
    assert [row["learning_rate"] for row in resumed.state.log_history if "loss" in row] == [
        row["learning_rate"] for row in whole.state.log_history if "loss" in row
    ]


def test_a_checkpoint_that_is_not_whole_is_passed_over_or_refused(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4}
    trainer(tmp_path, args=saving).train()
    (tmp_path / "checkpoint-12" / "trainer_state.json").unlink()
    resumed = trainer(tmp_path, args=saving)
    with pytest.raises(ConfigurationError, match=r"has no whole trainer_state\.json"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    (tmp_path / "checkpoint-8" / "private_run.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"has no whole private_run\.safetensors.*made by a plain Trainer"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 12
    shutil.rmtree(tmp_path)
    with pytest.raises(ConfigurationError, match="no checkpoint of a private run"):
        resumed.train(resume_from_checkpoint=True)


def test_files_of_two_checkpoints_are_refused(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4}
    trainer(tmp_path, args=saving).train()
    name = "private_run.safetensors"
    shutil.copy(tmp_path / "checkpoint-4" / name, tmp_path / "checkpoint-8" / name)
    with pytest.raises(ConfigurationError, match="the files do not belong together"):
        trainer(tmp_path, args=saving).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))


def test_another_plan_is_not_continued(tmp_path: Path) -> None:
    trainer(tmp_path, args={"save_strategy": "steps", "save_steps": 4}).train()
    with pytest.raises(ConfigurationError, match="the saved run has noise_multiplier="):
        trainer(tmp_path, args={"num_train_epochs": 3}).train(resume_from_checkpoint=True)
    for args, own in (({"max_steps": 5}, {}), ({"gradient_accumulation_steps": 1}, {}), ({}, {"target_epsilon": 4.0})):
        with pytest.raises(ConfigurationError, match=r"num_train_epochs or max_steps.*per_device.*target_eps") as told:
            trainer(tmp_path, args=args, own=own).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert "make_private" not in str(told.value)


def test_what_cannot_be_made_private_is_told_by_lsg_itself(tmp_path: Path) -> None:
    frozen, mixing = runs.classifier(), runs.classifier()
    frozen.requires_grad_(False)
    mixing.classifier = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 2))
    second_order = runs.classifier()
    lbfgs = torch.optim.LBFGS(second_order.parameters())
    with pytest.raises(LsgError, match="BatchNorm1d"):
        trainer(tmp_path, model=mixing).train()
    with pytest.raises(LsgError, match="requires a gradient"):
        trainer(tmp_path, model=frozen).train()
    with pytest.raises(LsgError, match="LBFGS"):
        trainer(tmp_path, model=second_order, optimizers=(lbfgs, None)).train()
    with pytest.raises(LsgError, match=r"target_epsilon=0\.001 cannot be reached"):
        trainer(tmp_path, own={"target_epsilon": 1e-3, "target_delta": 1e-6}).train()


def own_loader(tmp_path: Path, loader: DataLoader[Any], **options: Any) -> PrivateTrainer:
    class Own(PrivateTrainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            return loader

    common: dict[str, Any] = {"args": runs.arguments(tmp_path), "privacy": runs.privacy()}
    torch.manual_seed(0)
    return Own(**{"model": runs.classifier(), "train_dataset": runs.class_records()} | common | options)


def test_a_loader_of_ones_own_counts_as_trainers_own(tmp_path: Path) -> None:
    """Two records a device, accumulated twice: the same run as Trainer's own loader of such batches gives."""
    plain = trainer(tmp_path)
    plain.train()
    loader = DataLoader(runs.class_records(), batch_size=2, shuffle=True, collate_fn=t.default_data_collator)
    own = own_loader(tmp_path, loader, args=runs.arguments(tmp_path, per_device_train_batch_size=1))
    own.train()
    assert own.state.global_step == plain.state.global_step == 12
    assert own.engine.accountant.history == plain.engine.accountant.history  # noise, rate, steps
    assert torch.equal(weights(own.model), weights(plain.model))
    assert [row["learning_rate"] for row in own.state.log_history if "loss" in row] == [
        row["learning_rate"] for row in plain.state.log_history if "loss" in row
    ]


def test_the_records_are_those_of_a_loader_of_ones_own(tmp_path: Path) -> None:
    loader = DataLoader(runs.class_records()[:11], batch_size=2, collate_fn=t.default_data_collator)
    own = own_loader(tmp_path, loader, train_dataset=None)
    own.train()
    own.save_model(str(tmp_path / "model"))
    said = json.loads((tmp_path / "model" / "privacy.json").read_text())
    assert (said["records"], said["units"], said["sample_rate"], said["steps"]) == (11, 11, 4 / 11, 6)
    assert own.get_epsilon() <= 8.0 and len(own.engine.accountant) == 6


def test_a_loader_of_ones_own_that_samples_is_refused(tmp_path: Path) -> None:
    sampler = WeightedRandomSampler([1.0] * runs.N, runs.N)
    with pytest.raises(ConfigurationError, match="WeightedRandomSampler, which is not Poisson sampling"):
        own_loader(tmp_path, DataLoader(runs.class_records(), batch_size=2, sampler=sampler)).train()


def test_a_delta_that_allows_publishing_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"target_delta=0\.1 must be below 1/N = 0\.0435 \(N = 23 training rec"
    ):
        trainer(tmp_path, own={"target_delta": 0.1})
    assert trainer(tmp_path, own={"target_delta": None}).delta == 1e-3
    loader = DataLoader(runs.class_records(), batch_size=2)
    with pytest.raises(ConfigurationError, match="must be below 1/N"):
        own_loader(tmp_path, loader, train_dataset=None, privacy=runs.privacy(target_delta=0.1)).train()


def test_a_trainer_trains_once(tmp_path: Path) -> None:
    own = trainer(tmp_path, args={"max_steps": 2})
    own.train()
    with pytest.raises(ConfigurationError, match="has spent 2 steps already"):
        own.train()
    with pytest.raises(ConfigurationError, match="each trial spends privacy"):
        own.hyperparameter_search()


@pytest.mark.parametrize(("steps", "epochs"), [(3, -1), (-1, 0.5), (14, -1)])
def test_noise_is_for_all_steps_and_no_more(steps: int, epochs: float, tmp_path: Path) -> None:
    """13 steps of two epochs and a bit, and 3 of half an epoch: each run ends within its ε, and close to it."""
    own = trainer(tmp_path, args={"max_steps": steps, "num_train_epochs": epochs if epochs > 0 else 3})
    own.train()
    assert own.state.global_step == len(own.engine.accountant) == (steps if steps > 0 else 3)
    assert 7.5 < own.get_epsilon() <= 8.0


def test_epsilon_is_in_the_logs_and_the_statement(tmp_path: Path) -> None:
    own = trainer(tmp_path, args={"eval_strategy": "epoch"}, eval_dataset=runs.class_records())
    assert own.get_epsilon() == 0.0
    own.train()
    logged = [row["epsilon"] for row in own.state.log_history]
    assert logged == sorted(logged) and 0 < logged[0] < logged[-1] == own.get_epsilon()
    assert any("eval_loss" in row for row in own.state.log_history)
    own.save_model(str(tmp_path / "model"))
    said = json.loads((tmp_path / "model" / "privacy.json").read_text())
    assert said["epsilon"] == own.get_epsilon() and said["steps"] == 12 and said["delta"] == 1e-3
    assert "(8.00, 0.001)-differential privacy" in said["statement"]
    loaded = t.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert torch.equal(weights(loaded), weights(own.model))


def test_the_model_card_states_privacy_and_no_training_loss(tmp_path: Path) -> None:
    own = trainer(tmp_path, args={"eval_strategy": "epoch"}, eval_dataset=runs.class_records())
    own.train()
    own.create_model_card(model_name="tiny")
    own.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert card.count("## Privacy") == 1 and "-differential privacy" in card and "not private" in card
    losses = {f"{row['loss']:.4f}" for row in own.state.log_history if "loss" in row}
    assert losses and not any(loss in card for loss in losses)
    assert all("loss" in row for row in own.state.log_history[:1])  # the log itself is whole


def test_training_without_noise_says_so(tmp_path: Path) -> None:
    own = trainer(tmp_path, args={"max_steps": 2}, own={"noise_multiplier": 0.0})
    own.train()
    own.save_model(str(tmp_path / "model"))
    said = json.loads((tmp_path / "model" / "privacy.json").read_text())
    assert said["epsilon"] is None and "no privacy guarantee" in said["statement"]


@pytest.mark.parametrize("kind", ["class", "causal"])
def test_accumulation_changes_nothing_but_memory(kind: str, tmp_path: Path) -> None:
    """Micro-batches of one, two and four records: the same steps up to rounding; nothing is divided by their number."""
    found = []
    for size in (1, 2, 4):
        own = trainer(
            tmp_path,
            kind,
            args={"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size, "optim": "sgd"},
            model={"class": runs.classifier, "causal": runs.causal}[kind](
                **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if kind == "class" else {}
            ),
        )
        own.train()
        found.append(weights(own.model))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"label_smoothing_factor": 0.1},
        {"lr_scheduler_type": "cosine"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["class", "causal"])
def test_it_trains_with(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    own = trainer(tmp_path, kind, args={"max_steps": 3, **options})
    before = weights(own.model)
    own.train()
    assert torch.isfinite(weights(own.model)).all() and not torch.equal(before, weights(own.model))
    assert "forward" not in own.model.__dict__  # given back as it was


def test_bfloat16_computes_in_it(tmp_path: Path) -> None:
    seen = []
    own = trainer(tmp_path, args={"max_steps": 1, "bf16": True})
    own.model.classifier.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    own.train()
    assert torch.bfloat16 in seen and all(p.dtype == torch.float32 for p in own.model.parameters())


def test_gradient_checkpointing_changes_no_bit(tmp_path: Path) -> None:
    found = []
    for on in (False, True):
        own = trainer(tmp_path, "causal", args={"max_steps": 3, "gradient_checkpointing": on})
        own.train()
        found.append(weights(own.model))
    assert torch.equal(*found)


def test_label_smoothing_is_each_sequences_own() -> None:
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    labels[0, 2:] = -100
    for shift in (False, True):
        ours = PerSequenceSmoother(0.1)({"logits": logits}, labels, shift_labels=shift, num_items_in_batch=4)
        theirs = t.trainer_pt_utils.LabelSmoother(0.1)
        each = [theirs({"logits": logits[i : i + 1]}, labels[i : i + 1], shift_labels=shift) for i in range(3)]
        torch.testing.assert_close(ours, torch.stack(each).mean())


def token_classifier() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = t.BertForTokenClassification(t.BertConfig(**runs.SMALL, num_labels=3))
    records = [
        row | {"labels": (row["input_ids"] % 3).where(row["attention_mask"].bool(), -100)} for row in with_masks()
    ]
    return model, records


def translator() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    config = t.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=40, decoder_start_token_id=0)
    records = [row | {"labels": row["input_ids"].where(row["attention_mask"].bool(), -100)} for row in with_masks()]
    return t.T5ForConditionalGeneration(config), records


def with_masks() -> list[dict[str, Tensor]]:
    return [{name: row[name] for name in ("input_ids", "attention_mask")} for row in runs.causal_records()]


@pytest.mark.parametrize(
    ("kind", "make"),
    [(PrivateTrainer, token_classifier), (PrivateSeq2SeqTrainer, translator)],
    ids=["tokens", "seq2seq"],
)
def test_heads_with_a_loss_over_all_tokens_get_one_for_each_record(kind: Any, make: Any, tmp_path: Path) -> None:
    model, records = make()
    args = runs.arguments(tmp_path, max_steps=3)
    if kind is PrivateSeq2SeqTrainer:
        args = t.Seq2SeqTrainingArguments(**{f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init})
    own = kind(model=model, args=args, train_dataset=records, privacy=runs.privacy())
    batch = t.default_data_collator(records[:3])
    batch = own._prepare_inputs(batch)
    model.eval()
    loss, outputs = own.compute_loss(model, dict(batch), return_outputs=True)
    torch.testing.assert_close(loss, per_sequence(outputs["logits"], batch["labels"]))
    own.train()
    assert own.state.global_step == 3


def test_units_may_be_a_column(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {name: [row[name].tolist() for row in runs.class_records()] for name in ("input_ids", "labels")}
    data = datasets.Dataset.from_dict(columns | {"who": [f"user {n % 9}" for n in range(runs.N)]})
    own = trainer(
        tmp_path,
        args={"max_steps": 2, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 1},
        own={"unit_of": "who", "max_records_per_unit": 2},
        train_dataset=data,
    )
    own.train()
    own.save_model(str(tmp_path / "model"))
    said = json.loads((tmp_path / "model" / "privacy.json").read_text())
    assert (said["units"], said["records"], said["sample_rate"]) == (9, runs.N, 3 / 9)
    with pytest.raises(ConfigurationError, match="no such column"):
        trainer(tmp_path, own={"unit_of": "whom"}, train_dataset=data)


def test_a_loss_function_of_ones_own_that_divides_by_tokens_of_others_is_told_so(tmp_path: Path) -> None:
    def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels)

    def broken(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        raise TypeError("of its own")

    with pytest.raises(ConfigurationError, match=r"compute_loss_func.*num_items_in_batch is None.*mean over"):
        trainer(tmp_path, compute_loss_func=summed).train()
    with pytest.raises(TypeError, match="of its own"):
        trainer(tmp_path, compute_loss_func=broken).train()
    found = []
    for function in (None, mean):
        own = trainer(tmp_path, compute_loss_func=function)
        own.train()
        found.append(weights(own.model))
    assert torch.equal(*found)


def test_weights_that_do_not_move_are_noticed(tmp_path: Path) -> None:
    """Steps too small for the precision of half of the parameters: those that are not zero."""
    own = trainer(tmp_path, model=runs.classifier().bfloat16(), args={"learning_rate": 1e-9, "optim": "sgd"})
    with pytest.warns(UserWarning, match=r"has not moved \d+ of \d+ trained parameters \('bert"):
        own.train()
    layer = nn.Linear(2, 2)
    first = FirstStep(dict(layer.named_parameters()))
    with pytest.raises(PrivacyError, match="moved none of the trained weights"):
        first.check()
    trainer(tmp_path, args={"warmup_steps": 2, "max_steps": 3}).train()  # the first step has a rate of zero


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "group_by_length": ({"train_sampling_strategy": "group_by_length"}, "Poisson"),
    "sequential": ({"train_sampling_strategy": "sequential"}, "Poisson"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "without being accounted for"),
    "fp16": ({"fp16": True}, "bf16=True"),
    "torch_compile": ({"torch_compile": True}, "PerfConfig"),
    "drop_last": ({"dataloader_drop_last": True}, "Poisson"),
    "data_seed": ({"data_seed": 3}, "noise_generator"),
    "neftune": ({"neftune_noise_alpha": 5.0}, "longest record"),
    "ignore_data_skip": ({"ignore_data_skip": True}, "where it stopped"),
    "jit": ({"enable_jit_checkpoint": True}, "middle of a step"),
    "debug": ({"debug": "underflow_overflow"}, "what a record did"),
    "lomo": ({"optim": "lomo"}, "adamw_torch"),
    "layerwise": ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["x"]}, "adamw_torch"),
    "schedule_free": ({"optim": "schedule_free_adamw"}, "adamw_torch"),
    "no threshold": ({"max_grad_norm": 0.0}, "no threshold"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_break_privacy_are_refused_by_name(case: str, tmp_path: Path) -> None:
    options, words = REFUSED[case]
    with pytest.raises(ConfigurationError, match=words) as refusal:
        trainer(tmp_path, args=options)
    assert next(iter(options)) in str(refusal.value)


def test_checkpoints_are_not_uploaded(tmp_path: Path) -> None:
    args = runs.arguments(tmp_path, hub_strategy="all_checkpoints")
    args.push_to_hub = True
    with pytest.raises(ConfigurationError, match="can undo the noise"):
        refusals.check_training_arguments(args)


def test_two_thresholds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"max_grad_norm=0\.5.*max_grad_norm=2"):
        trainer(tmp_path, args={"max_grad_norm": 0.5}, own={"max_grad_norm": 2.0})
    assert trainer(tmp_path, args={"max_grad_norm": 0.0}, own={"max_grad_norm": 2.0}).privacy.max_grad_norm == 2.0


def test_own_samplers_collators_and_data_without_length_are_refused(tmp_path: Path) -> None:
    class Sampling(PrivateTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return None

    common = {"args": runs.arguments(tmp_path), "privacy": runs.privacy()}
    with pytest.raises(ConfigurationError, match="Sampling has a sampler of its own"):
        Sampling(model=runs.classifier(), train_dataset=runs.class_records(), **common)
    with pytest.raises(ConfigurationError, match="packs several records"):
        PrivateTrainer(
            model=runs.causal(),
            train_dataset=runs.causal_records(),
            data_collator=t.DataCollatorWithFlattening(),
            **common,
        )
    with pytest.raises(ConfigurationError, match="without a length"):
        args = runs.arguments(tmp_path, max_steps=2)
        PrivateTrainer(model=runs.classifier(), train_dataset=iter([]), args=args, privacy=runs.privacy())


def test_every_training_argument_was_thought_of() -> None:
    fields = {item.name for item in dataclasses.fields(t.TrainingArguments)}
    fields |= {item.name for item in dataclasses.fields(t.Seq2SeqTrainingArguments)}
    assert fields <= refusals.SUPPORTED | refusals.REFUSED.keys()
    assert not refusals.SUPPORTED & refusals.REFUSED.keys()
    page = (Path(__file__).parents[2] / "docs" / "hugging-face.md").read_text()
    refused = page.partition("**Refused by name:**")[2].partition("\n- ")[0]
    assert "`num_items_in_batch` is\n  None" in page
    named = {name for name in re.findall(r"`(\w+)(?:=[^`]*)?`", refused.partition(", packing")[0])}
    assert named <= fields, "the page names arguments that TrainingArguments has"


def test_a_setting_that_lsg_does_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "SUPPORTED", refusals.SUPPORTED - {"adam_beta1"})
    trainer(tmp_path)
    with pytest.raises(ConfigurationError, match=r"adam_beta1=0\.5.*does not know"):
        trainer(tmp_path, args={"adam_beta1": 0.5})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "neither is given"),
        ({"target_epsilon": 1.0, "noise_multiplier": 1.0}, "both are given"),
        ({"target_epsilon": 0.0}, "target_epsilon=0.0 must be"),
        ({"target_epsilon": "3"}, "target_epsilon='3' must be"),
        ({"target_epsilon": 3.0, "target_delta": 2.0}, "below 1"),
        ({"target_epsilon": 3.0, "method": "lsg"}, "method='lsg'"),
        ({"target_epsilon": 3.0, "secure_mode": True, "noise_generator": torch.Generator()}, "secure_mode"),
    ],
)
def test_privacy_arguments_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        PrivacyArguments(**options)


def test_a_plain_trainer_is_told_that_its_batches_are_its_own(tmp_path: Path) -> None:
    model, engine = runs.classifier(), PrivacyEngine(accountant="rdp")
    _, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(runs.class_records(), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=DPSGD(),
    )
    plain = t.Trainer(
        model=model,
        args=runs.arguments(tmp_path, gradient_accumulation_steps=1),
        train_dataset=runs.class_records(),
        optimizers=(optimizer, None),
    )
    with pytest.raises(
        PrivacyError, match=r"transformers' Trainer trains on batches that its own sampler drew.*PrivateTrainer"
    ):
        plain.train()
    assert len(engine.accountant) == 0


def test_a_run_that_is_killed_ends_as_if_nobody_had(tmp_path: Path) -> None:
    """Three kills; `benchmarks/kill_trainer.py` makes any number."""
    program = Path(__file__).parents[2] / "benchmarks" / "kill_trainer.py"
    command = [
        sys.executable,
        str(program),
        "--kills",
        "3",
        "--kinds",
        "class",
        "--output",
        str(tmp_path / "found.json"),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["class"]
    assert found["equal"] and len(found["killed"]["killed_after_steps"]) == 3
    assert max(found["killed"]["killed_after_steps"]) > 0  # while it trained, not only before
