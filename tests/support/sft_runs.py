"""Small runs of PrivateSFTTrainer, TRL's trainer made private."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t

from tests.support import trainer_runs as runs


def sft(folder: Path, **options: Any) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from lsg.integrations.transformers import PrivateSFTTrainer

    records = runs.causal_records()
    data = datasets.Dataset.from_dict(
        {
            "input_ids": [row["input_ids"][row["attention_mask"].bool()].tolist() for row in records],
            "labels": [row["labels"][row["attention_mask"].bool()].tolist() for row in records],
        }
    )
    plain = runs.arguments(folder)
    settings = {item.name: getattr(plain, item.name) for item in dataclasses.fields(plain) if item.init}
    settings |= {"bf16": False, "gradient_checkpointing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    torch.manual_seed(0)
    return PrivateSFTTrainer(
        model=runs.causal(),
        args=trl.SFTConfig(**settings | options),
        train_dataset=data,
        data_collator=collate,
        processing_class=tokenizer(),
        privacy=runs.privacy(),
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<eos>": 2} | {f"w{n}": n for n in range(3, 40)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return t.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded to seven tokens, as the records of the plain trainer are."""

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([list(row[name]) + [value] * (7 - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (7 - len(row["input_ids"])) for row in rows])
    return {"input_ids": padded("input_ids", 0), "attention_mask": mask, "labels": padded("labels", -100)}
