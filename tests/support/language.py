"""Tiny language models, their tokenizer and documents, made on the spot: nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny import WORDS

VOCABULARY = ["[PAD]", "[UNK]", "</s>", *WORDS, *"0123456789"]
END, PADDING = 2, 0
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def word_tokenizer(folder: Path, **special: str) -> None:
    """A word a token, and nothing added to a text: as GPT-2's. special: in place of a padding token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(WordLevel({word: number for number, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    plain.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=plain,
        unk_token="[UNK]",
        eos_token="</s>",
        model_max_length=64,
        model_input_names=["input_ids", "attention_mask"],
        **special,
    ).save_pretrained(folder)


def tiny_llama(folder: Path, **sizes: int) -> Path:
    """Its tokenizer has no padding token; its output layer is its table of tokens. sizes: in place of SIZES."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=END,
        **(SIZES | sizes),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer(folder)
    return folder


def tiny_gpt2(folder: Path) -> Path:
    """With dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=len(VOCABULARY), n_embd=16, n_layer=2, n_head=2, n_positions=48, eos_token_id=END, bos_token_id=END
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    word_tokenizer(folder, pad_token="[PAD]")
    return folder


def tiny_t5(folder: Path) -> Path:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(1)
    config = T5Config(
        vocab_size=len(VOCABULARY),
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=PADDING,
        pad_token_id=PADDING,
        eos_token_id=END,
    )
    T5ForConditionalGeneration(config).save_pretrained(folder)
    word_tokenizer(folder, pad_token="[PAD]")
    return folder


def documents(count: int) -> list[dict[str, Any]]:
    """Texts of varying length with prompts, of persons of one to three records."""
    return [
        {
            "prompt": f"the {('film', 'story')[number % 2]} was",
            "completion": f"{'very ' * (number % 5)}{WORDS[6 + number % 6]} .",
            "who": f"secret name {number % (count // 2)}",
        }
        for number in range(count)
    ]


def written(folder: Path, train: int = 60, dev: int = 20) -> Path:
    """A folder of train.jsonl and dev.jsonl."""
    folder.mkdir(parents=True)
    for name, count in (("train", train), ("dev", dev)):
        lines = [json.dumps(row) for row in documents(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
