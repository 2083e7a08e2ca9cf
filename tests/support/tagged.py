"""Lists of words with tags, made on the spot: adjectives and other words."""

import json
from pathlib import Path
from typing import Any

from tests.support.tiny import BAD, GOOD


def tagged(count: int) -> list[dict[str, Any]]:
    """Lists of varying length, of persons of one to three records."""
    rows = []
    for number in range(count):
        words = ["the", "film", "was", *["very"] * (number % 4), (BAD, GOOD)[number % 2][number % 3], "."]
        tags = ["GOOD" if word in GOOD else "BAD" if word in BAD else "O" for word in words]
        rows.append({"tokens": words, "ner_tags": tags, "who": f"secret name {number % (count // 2)}"})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def written_tags(folder: Path, train: int = 60, dev: int = 20) -> Path:
    """A folder of train.jsonl and dev.jsonl."""
    folder.mkdir(parents=True)
    for name, count in (("train", train), ("dev", dev)):
        write_rows(folder / f"{name}.jsonl", tagged(count))
    return folder


def byte_tokenizer(folder: Path, kind: str = "PreTrainedTokenizerFast") -> Path:
    """As RoBERTa's: bytes, and a blank belongs to the word behind it. kind: a class of transformers."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet)
    plain.train_from_iterator(["a good film"] * 5, trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="</s>")
    made.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": kind}))
    transformers.GPT2Config().save_pretrained(folder)
    return folder
