"""A text classifier with PrivateTrainer: train, stop, go on, save with a privacy statement.

In practice model and tokenizer come from `from_pretrained`, and the records from your data.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from lsg.integrations.transformers import PrivacyArguments, PrivateTrainer


def records(count: int) -> list[dict[str, torch.Tensor]]:
    """Twelve tokens, and whether the first is even."""
    tokens = torch.randint(5, 100, (count, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2} for row in tokens]


def trainer(folder: Path, count: int, epochs: int) -> PrivateTrainer:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=100, num_labels=2))
    args = TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, learning_rate=2e-3,
        per_device_train_batch_size=16, gradient_accumulation_steps=4,  # 64 records a step, 16 in memory
        save_strategy="epoch", logging_steps=5, report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    privacy = PrivacyArguments(target_epsilon=8.0, target_delta=1e-4)
    return PrivateTrainer(model=model, args=args, train_dataset=records(count), privacy=privacy)


def main(count: int = 640, epochs: int = 3) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer(folder, count, epochs).train()
        again = trainer(folder, count, epochs)  # as after a crash: nothing is forgotten, nothing is spent twice
        again.train(resume_from_checkpoint=True)
        again.save_model(str(folder / "model"))  # the model, and privacy.json beside it
        print((folder / "model" / "privacy.json").read_text())
        return again.get_epsilon()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    main(epochs=parser.parse_args().epochs)
