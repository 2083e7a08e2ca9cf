"""LoRA on a Llama-shaped causal language model with TRL's SFTTrainer, private. Needs `pip install peft trl`.

In practice model and tokenizer come from `from_pretrained`, and the records from your data.
"""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from lsg import DPSGD
from lsg.integrations.transformers import PrivacyArguments, PrivateSFTTrainer

FLOORS = [f"floor{number}" for number in range(20)]


def conversations(count: int) -> Dataset:
    """Only completions are learnt. Each row is a record: what ε says is about one of them."""
    floors = [FLOORS[number % len(FLOORS)] for number in range(count)]
    prompts = [f"where is the meeting on {floor} ?" for floor in floors]
    return Dataset.from_dict({"prompt": prompts, "completion": [f" take the stairs to {floor}" for floor in floors]})


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", "where", "is", "the", "meeting", "on", "?", "take", "stairs", "to", *FLOORS]
    vocabulary = {word: number for number, word in enumerate(words)}
    by_words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    by_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=by_words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=32
    )


def main(count: int = 400, epochs: int = 2) -> float:
    torch.manual_seed(0)
    words = tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateSFTTrainer(
            model=LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(words), max_position_embeddings=32)),
            args=SFTConfig(
                output_dir=folder, num_train_epochs=epochs, learning_rate=5e-3, per_device_train_batch_size=20,
                gradient_accumulation_steps=2, max_length=32, save_strategy="no", report_to="none", use_cpu=True,
                bf16=False, gradient_checkpointing=False, disable_tqdm=True,
            ),
            processing_class=words,
            train_dataset=conversations(count),
            peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]),
            # LoRA's matrices are thin already: there is nothing left to project.
            privacy=PrivacyArguments(target_epsilon=8.0, target_delta=1e-4, method=DPSGD()),
        )  # fmt: skip
        trainer.train()
        trainer.save_model(folder)  # the adapter alone, and privacy.json
        print(f"epsilon {trainer.get_epsilon():.2f}")
        return float(trainer.get_epsilon())


if __name__ == "__main__":
    main()
