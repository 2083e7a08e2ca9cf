"""Tiny models of transformers, one a family, and PEFT's methods: do they train in three lines, and right?

    python benchmarks/architectures.py --output results/architectures/table.json

Each is made from a config with random weights, made private by LSG, and trained for two steps; then the gradients of
three records are compared with those of three batches of one, by ordinary autograd. What is refused is stored with the
error's own words.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.model.test_architectures import loss, no_dropout
from tests.support.reference import attach, batch_of_one_gradients, project

from lsg import LSG, LsgError, __version__

B = 3
TOLERANCE = 1e-4
TEXT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40,
    "max_position_embeddings": 24, "pad_token_id": 0,
}  # fmt: skip
DECODER = TEXT | {"num_key_value_heads": 1, "head_dim": 8}
IMAGE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8,
    "patch_size": 4, "num_labels": 3,
}  # fmt: skip
SEQ2SEQ = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 40, "max_position_embeddings": 24, "pad_token_id": 0,
    "decoder_start_token_id": 2, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
AUDIO = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "conv_dim": (8, 8),
    "conv_kernel": (4, 2), "conv_stride": (4, 2), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer", "mask_time_prob": 0.0, "layerdrop": 0.0,
    "vocab_size": 20, "do_stable_layer_norm": True,
}  # fmt: skip
HEADS: dict[str, Any] = {
    "text": t.AutoModelForSequenceClassification,
    "decoder": t.AutoModelForCausalLM,
    "seq2seq": t.AutoModelForSeq2SeqLM,
    "image": t.AutoModelForImageClassification,
    "audio": t.AutoModelForAudioClassification,
}
BASE: dict[str, dict[str, Any]] = {
    "text": TEXT, "decoder": DECODER, "seq2seq": SEQ2SEQ, "image": IMAGE, "audio": AUDIO,
}  # fmt: skip
# Family -> the kind of its head, and what its config has beside the kind's; None leaves a setting out.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("text", {}),
    "roberta": ("text", {}),
    "xlm-roberta": ("text", {}),
    "camembert": ("text", {}),
    "distilbert": ("text", {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}),
    "albert": ("text", {"embedding_size": 8}),
    "electra": ("text", {"embedding_size": 8}),
    "mpnet": ("text", {}),
    "deberta": ("text", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta-v2": ("text", {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True,
                            "type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "modernbert": ("text", {"global_attn_every_n_layers": 2, "local_attention": 4, "bos_token_id": 1,
                            "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}),
    "xlnet": ("text", {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "max_position_embeddings": None}),
    "esm": ("text", {"mask_token_id": 3}),
    "roformer": ("text", {"embedding_size": 16}),
    "longformer": ("text", {"attention_window": 4}),
    "gpt2": ("decoder", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}),
    "gpt_neo": ("decoder", {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]],
                            "window_size": 4}),
    "gpt_neox": ("decoder", {}),
    "opt": ("decoder", {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "bloom": ("decoder", {"n_layer": 2, "n_head": 2}),
    "falcon": ("decoder", {"num_kv_heads": 2, "head_dim": None}),
    "llama": ("decoder", {}),
    "mistral": ("decoder", {}),
    "qwen2": ("decoder", {}),
    "qwen3": ("decoder", {}),
    "gemma": ("decoder", {}),
    "gemma2": ("decoder", {}),
    "gemma3_text": ("decoder", {}),
    "phi": ("decoder", {}),
    "phi3": ("decoder", {}),
    "olmo2": ("decoder", {}),
    "stablelm": ("decoder", {}),
    "granite": ("decoder", {}),
    "smollm3": ("decoder", {}),
    "starcoder2": ("decoder", {}),
    "mixtral": ("decoder", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "mamba": ("decoder", {"state_size": 4, "expand": 2, "conv_kernel": 2}),
    "t5": ("seq2seq", {"d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}),
    "bart": ("seq2seq", {}),
    "mbart": ("seq2seq", {}),
    "pegasus": ("seq2seq", {}),
    "marian": ("seq2seq", {}),
    "vit": ("image", {}),
    "deit": ("image", {}),
    "beit": ("image", {"use_relative_position_bias": True, "drop_path_rate": 0.0}),
    "dinov2": ("image", {}),
    "swin": ("image", {"patch_size": 1, "embed_dim": 8, "window_size": 4, "depths": [1, 2], "num_heads": [2, 2],
                      "num_attention_heads": None, "num_hidden_layers": None, "drop_path_rate": 0.0}),
    "convnext": ("image", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "image_size": 32}),
    "resnet": ("image", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}),
    "mobilenet_v2": ("image", {"image_size": 32}),
    "wav2vec2": ("audio", {}),
    "hubert": ("audio", {}),
}  # fmt: skip
# PEFT's name -> the name of its config, and that config's settings. On a tiny Llama.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 2, "target_modules": ["q_proj", "v_proj"]}),
    "rsLoRA": ("LoraConfig", {"r": 2, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True, "target_modules": ["q_proj", "v_proj"]}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 20, "target_modules": ["q_proj"]}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "VeRA": ("VeraConfig", {"r": 2, "target_modules": ["q_proj"]}),
    "LoHa": ("LoHaConfig", {"r": 2, "target_modules": ["q_proj"]}),
    "LoKr": ("LoKrConfig", {"r": 2, "target_modules": ["q_proj"]}),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "target_modules": ["q_proj"]}),
    "HRA": ("HRAConfig", {"r": 2, "target_modules": ["q_proj"]}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 10, "target_modules": ["q_proj"]}),
    "VB-LoRA": ("VBLoRAConfig", {"r": 2, "num_vectors": 8, "vector_length": 8, "target_modules": ["q_proj"]}),
    "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "P-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
}


def batch(kind: str, config: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "image":
        size = getattr(config, "image_size", 8)
        return {"pixel_values": torch.randn(B, 3, size, size, generator=generator)}
    if kind == "audio":
        return {"input_values": torch.randn(B, 64, generator=generator)}
    tokens = torch.randint(4, 40, (B, 8), generator=generator)
    mask = torch.ones(B, 8, dtype=torch.long)
    mask[0, 6:] = 0
    found = {"input_ids": tokens.where(mask.bool(), 0), "attention_mask": mask}
    return found | ({"decoder_input_ids": tokens.flip(1)} if kind == "seq2seq" else {})


def family(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    kind, own = FAMILIES[name]
    settings = BASE[kind] | own
    config = t.AutoConfig.for_model(name, **{key: value for key, value in settings.items() if value is not None})
    config._attn_implementation = "eager"
    config.architectures = config.architectures or []
    torch.manual_seed(0)
    return HEADS[kind].from_config(config), batch(kind, config)


def adapter(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import peft

    kind, own = ADAPTERS[name]
    torch.manual_seed(0)
    model = t.LlamaForCausalLM(t.LlamaConfig(**DECODER | {"num_key_value_heads": 2}))
    model.config.use_cache = False
    found = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **own))
    return found, batch("decoder", model.config)


def train(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Two private steps: what a user would do."""
    engine, optimizer, _ = attach(model, LSG(rank=2, sparsity=0.5), noise_multiplier=0.1, max_grad_norm=1.0, lr=0.01)
    try:
        for _ in range(2):
            loss(model, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        engine.detach()


def largest_error(model: nn.Module, inputs: dict[str, Tensor]) -> float:
    """Of all parameters' per-sample gradients, against batches of one; relative to the parameter's own gradient."""
    engine, optimizer, _ = attach(model, LSG(rank=2, sparsity=0.5))
    loss(model, inputs).backward()
    got, spaces = engine.per_sample_gradients(), engine.subspaces
    wanted = {name: g for name, g in batch_of_one_gradients(model, inputs, B, loss).items() if name in got}
    scale = max(float(g.norm()) for g in wanted.values())
    worst = 0.0
    for name, reference in wanted.items():
        expected = project(reference, spaces[name]) if name in spaces else (reference,)
        found = got[name] if name in spaces else (got[name],)
        for one, other in zip(found, expected, strict=True):
            error = (one.double() - other.double()).norm() / max(float(reference.norm()), 1e-3 * scale)
            worst = max(worst, float(error))
    optimizer.zero_grad()
    engine.detach()
    return worst


def judge(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> dict[str, Any]:
    """What becomes of one model. An error that is not lsg's own is a failure of this program or of lsg."""
    began = time.perf_counter()
    try:
        model, inputs = make()
        found: dict[str, Any] = {"class": type(model).__name__}
        no_dropout(model)
        train(model, inputs)
        error = largest_error(model, inputs)
        found |= {"trains": error <= TOLERANCE, "error": error}
    except LsgError as refusal:
        found |= {"trains": False, "refused": str(refusal).splitlines()[0]}
    except Exception as failure:
        found = {"class": "?", "trains": False, "failed": f"{type(failure).__name__}: {failure}"[:300]}
    return found | {"seconds": round(time.perf_counter() - began, 1)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for part, names, make in (("families", FAMILIES, family), ("adapters", ADAPTERS, adapter)):
        for name in names:
            if given.only is None or name in given.only:
                kind = FAMILIES[name][0] if part == "families" else "adapter"
                rows.append({"name": name, "kind": kind, **judge(lambda name=name, make=make: make(name))})
                print(json.dumps(rows[-1]), flush=True)
    if given.output:
        versions = {"lsg": __version__, "torch": torch.__version__, "transformers": t.__version__}
        if any(row["kind"] == "adapter" for row in rows):
            import peft

            versions["peft"] = peft.__version__
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    return 0 if not any("failed" in row for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
