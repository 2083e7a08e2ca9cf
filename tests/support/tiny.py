"""Tiny text models and GLUE files, made on the spot: nothing is downloaded."""

from pathlib import Path

import torch

WORDS = ["the", "film", "story", "was", "very", ".", "good", "fine", "great", "bad", "dull", "poor"]
GOOD, BAD = WORDS[6:9], WORDS[9:]


def tiny_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    plain = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = Whitespace()
    plain.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=40,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)


def tiny_bert(folder: Path) -> Path:
    """A base encoder without a classification head, dropout included."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(1)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=4 + len(WORDS), max_position_embeddings=40, **shape)
    BertModel(config).save_pretrained(folder)
    tiny_tokenizer(folder)
    return folder


def glue_sst2(folder: Path, train: int = 96, dev: int = 40) -> Path:
    """Sentences of varying length whose adjective tells the label."""
    folder.mkdir(parents=True)
    for name, count in (("train", train), ("dev", dev)):
        rows = []
        for number in range(count):
            label = number % 2
            adjective = (BAD, GOOD)[label][number % 3]
            rows.append(f"the film was {'very ' * (number % 7)}{adjective}\t{label}")
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    return folder
