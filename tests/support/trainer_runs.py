"""Small runs of PrivateTrainer, and the loops by hand that they have to equal."""

from pathlib import Path
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lsg import PrivacyEngine
from lsg.integrations.transformers import PrivacyArguments, PrivateTrainer

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 16,
}
N = 23  # no multiple of the batch size: epochs differ by a step


def tokens(rows: int = N) -> Tensor:
    return torch.randint(5, 40, (rows, 7), generator=torch.Generator().manual_seed(1))


def classifier(**config: Any) -> nn.Module:
    torch.manual_seed(0)
    return t.BertForSequenceClassification(t.BertConfig(**SMALL | config, num_labels=2))


def class_records() -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2} for row in tokens()]


def causal(**config: Any) -> nn.Module:
    torch.manual_seed(0)
    return t.LlamaForCausalLM(t.LlamaConfig(**SMALL | config, num_key_value_heads=1))


def causal_records() -> list[dict[str, Tensor]]:
    """Texts of different lengths, so that a mean over all tokens is not a mean over texts."""
    found = []
    for number, row in enumerate(tokens()):
        mask = (torch.arange(len(row)) < 3 + number % 5).long()
        found.append({"input_ids": row, "attention_mask": mask, "labels": row.where(mask.bool(), -100)})
    return found


def arguments(folder: Path, **options: Any) -> t.TrainingArguments:
    """Two records a micro-batch, four a logical batch, two epochs."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "lr_scheduler_type": "linear",
        "report_to": "none",
        "use_cpu": True,
        "logging_steps": 4,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return t.TrainingArguments(**settings | options)


def privacy(**options: Any) -> PrivacyArguments:
    settings: dict[str, Any] = {"target_delta": 1e-3, "accountant": "rdp"}
    if "noise_multiplier" not in options:
        settings["target_epsilon"] = 8.0
    if not options.get("secure_mode"):
        settings["noise_generator"] = torch.Generator().manual_seed(5)
    return PrivacyArguments(**settings | options)


def trainer(folder: Path, kind: str = "class", *, args: Any = None, own: Any = None, **options: Any) -> PrivateTrainer:
    """kind: "class" or "causal". args: TrainingArguments' settings. own: PrivacyArguments'."""
    make, records = {"class": (classifier, class_records), "causal": (causal, causal_records)}[kind]
    torch.manual_seed(0)
    return PrivateTrainer(
        **{"model": make(), "train_dataset": records()} | options,
        args=arguments(folder, **args or {}),
        privacy=privacy(**own or {}),
    )


def by_hand(kind: str = "class", epochs: int = 2) -> tuple[nn.Module, float, int]:
    """The same as a loop with a PrivacyEngine: model, ε and steps."""
    make, records = {"class": (classifier, class_records), "causal": (causal, causal_records)}[kind]
    model, engine = make(), PrivacyEngine(accountant="rdp")
    t.set_seed(42)  # as Trainer does, for dropout
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0),
        data_loader=DataLoader(records(), batch_size=4, collate_fn=t.default_data_collator),
        target_epsilon=8.0,
        target_delta=1e-3,
        epochs=epochs,
        max_grad_norm=1.0,
        max_physical_batch_size=2,
        noise_generator=torch.Generator().manual_seed(5),
    )
    scheduler = t.get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=loader.steps(epochs))
    model.train()
    for _ in range(epochs):
        for micro_batches in loader.logical_batches():
            empty = True
            for batch in micro_batches:
                empty = False
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if empty:
                optimizer.step()
            scheduler.step()
    engine.detach()
    return model, engine.get_epsilon(1e-3), len(engine.accountant)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
