"""Small copies of what well-known models do, and some of those models themselves, tiny and random."""

from typing import Any

import torch
from torch import Tensor, nn

from lsg import DPSGD
from tests.adversarial.cases.collection import W, case, indices, masks, sequences
from tests.adversarial.records import Batch, batch

LOOSE = {"tolerance": 1e-3, "methods": (DPSGD(),), "reduction": "mean"}  # float32 models


def texts(*sizes: int, padded: bool = False, labels: bool = False) -> list[Batch]:
    """input_ids, and as the kinds ask for: attention_mask, labels with -100 where it is padding."""
    found = []
    for i, records in enumerate(indices(*sizes, positions=5, vocabulary=16)):
        (ids,) = records.args
        mask = torch.arange(5) <= (torch.arange(len(ids)).unsqueeze(1) + i) % 4 + 1
        inputs: dict[str, Any] = {"input_ids": ids}
        if padded:
            inputs["attention_mask"] = mask.long()
        if labels:
            inputs["labels"] = ids.masked_fill(~mask, -100) if padded else ids.clone()
        found.append(batch(**inputs))
    return found


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=1, eos_token_id=1))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=16, num_key_value_heads=2, pad_token_id=0))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **off, vocab_size=16, max_position_embeddings=8))


def own_loss(output: Any, batch: Batch, reduction: str) -> Tensor:
    return output.loss


def logits(model: nn.Module, batch: Batch) -> Tensor:
    """The model's answer without what it caches."""
    return model(**batch.kwargs).logits


@case("right", texts(4, 3, padded=True, labels=True), loss=own_loss, own_loss=True, **LOOSE)
def llama_with_labels_of_different_lengths() -> nn.Module:
    """Its loss is a mean over all tokens of the batch."""
    return _llama()


@case("right", texts(4, 3, padded=True, labels=True), loss=own_loss, own_loss=True, **LOOSE)
def gpt2_with_labels_of_different_lengths() -> nn.Module:
    return _gpt2()


@case("right", texts(4, 3, labels=True), loss=own_loss, **LOOSE)
def gpt2_with_labels_of_one_length() -> nn.Module:
    return _gpt2()


@case("right", texts(4, 3), call=logits, **LOOSE)
def gpt2_logits() -> nn.Module:
    return _gpt2()


@case("right", texts(4, 3), call=logits, **LOOSE)
def llama_logits() -> nn.Module:
    return _llama()


@case("right", texts(4, 5), call=logits, **LOOSE)
def bert_as_many_records_as_positions() -> nn.Module:
    return _bert()


@case("right", [*texts(4), *texts(3, padded=True), *texts(2)], call=logits, **LOOSE)
def bert_whose_mask_comes_and_goes() -> nn.Module:
    return _bert()


def _sequence_batches() -> list[Batch]:
    plain, masked, last = sequences(4, 3, 2)
    return [batch(*plain.args), batch(*masked.args, src_key_padding_mask=~masks(3)), batch(*last.args)]


@case("right", _sequence_batches())
def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(W, 2, 8, dropout=0.0, batch_first=True)


class PromptTuned(nn.Module):
    """A frozen body; a bare parameter of the model, the same for all records, before the record's own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(2, W))
        self.body = nn.TransformerEncoderLayer(W, 2, 8, dropout=0.0, batch_first=True).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.cat([self.prompt.expand(len(x), -1, -1), x], 1)).mean(1)


case("right", sequences(4, 3, 1))(PromptTuned)


class DoRA(nn.Module):
    """Bare parameters: a direction of low rank and a magnitude, on a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(W, W).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, W)), nn.Parameter(torch.zeros(W, 2))
        self.magnitude = nn.Parameter(self.base.weight.norm(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.up @ self.down
        return x @ (self.magnitude.unsqueeze(1) * weight / weight.norm(dim=1, keepdim=True)).T


@case("right", sequences(4, 3, 1))
def dora_in_a_model() -> nn.Module:
    return nn.Sequential(nn.Linear(W, W), DoRA(), nn.LayerNorm(W))


class Latents(nn.Module):
    """Perceiver's: learned queries (1, N, F), shared by all records, attend to each record."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.attention = nn.Embedding(3, W), nn.MultiheadAttention(W, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.latents(torch.arange(3)).expand(len(x), -1, -1)
        return self.attention(queries, x, x)[0]


case("right", sequences(4, 2, 1))(Latents)


@case("right or refused", sequences(3, 4, 3))
class LatentsAsManyAsRecords(Latents):
    """Not expanded by hand: (3, F) or (B', 3, F)? The table's output looks batch first."""

    def forward(self, x: Tensor) -> Tensor:
        queries = self.latents(torch.arange(3))
        return self.attention(x + queries, x, x)[0]


class XLNetLike(nn.Module):
    """(T, B, F) inside, with a position table of (T, 1, F)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(8, W), nn.Embedding(8, W)
        self.inner, self.head = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, ids: Tensor) -> Tensor:
        turned = ids.t().contiguous()
        h = self.table(turned) + self.places(torch.arange(len(turned))).unsqueeze(1)
        return self.head(self.inner(h).tanh()).transpose(0, 1)


case("right or refused", indices(4, 3, 2, positions=3))(XLNetLike)


class DebertaLike(nn.Module):
    """Relative positions as a whole table through the layers that records go through."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.relative = nn.Embedding(8, W), nn.Embedding(6, W)
        self.norm, self.query, self.key = nn.LayerNorm(W), nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        relative = self.norm(self.relative.weight)  # (6, F), for all records
        query, places = self.query(h), self.key(relative).unsqueeze(0)
        return h + (query @ places.mT).softmax(-1) @ self.query(relative)


case("right or refused", indices(4, 6, 3, positions=3))(DebertaLike)


class SwinLike(nn.Module):
    """Windows of an image in the batch dimension, (B * windows, N, F), with attention inside each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(W, W), nn.LayerNorm(W)
        self.attention, self.head = nn.MultiheadAttention(W, 2, batch_first=True), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        windows = self.norm(self.embed(x)).reshape(len(x) * 2, x.shape[1] // 2, W)
        return self.head(self.attention(windows, windows, windows)[0].reshape(x.shape).mean(1))


case("right or refused", sequences(4, 3, 1, positions=4))(SwinLike)


@case("right", sequences(4, 3, 1, positions=4))
class SwinLikeByLinearLayers(SwinLike):
    def forward(self, x: Tensor) -> Tensor:
        windows = self.norm(self.embed(x)).reshape(len(x) * 2, x.shape[1] // 2, W)
        return self.head(windows).tanh().reshape(x.shape).mean(1)


class Padded(nn.Module):
    """Pools over padding, too, and pads to the longest of the batch by itself: a record's mean depends on others."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, W), nn.Linear(W, W)

    def forward(self, ids: Tensor) -> Tensor:
        longest = int((ids != 0).sum(1).max().clamp_min(1))
        return self.head(self.table(ids[:, :longest]).mean(1))


def _ragged() -> list[Batch]:
    cut = [records.args[0].masked_fill(torch.arange(4) > torch.arange(records.size).unsqueeze(1), 0)
           for records in indices(4, 3, positions=4)]  # fmt: skip
    return [batch(ids) for ids in cut]


case("refused", _ragged())(Padded)
