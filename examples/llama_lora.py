"""LoRA on a Llama-shaped causal language model with PrivateTrainer. Needs `pip install peft`."""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from lsg import DPSGD
from lsg.integrations.transformers import PrivacyArguments, PrivateTrainer


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    """Padded to 16 tokens; padding has the label -100, and is masked."""
    found = []
    for number in range(count):
        length = 6 + number % 10
        tokens = torch.arange(number, number + 16) % 90 + 5
        mask = (torch.arange(16) < length).long()
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask.bool(), -100)})
    return found


def main(count: int = 400, epochs: int = 2) -> float:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = get_peft_model(
        LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=100, max_position_embeddings=32)),
        LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder, num_train_epochs=epochs, learning_rate=5e-3, per_device_train_batch_size=20,
                gradient_accumulation_steps=2, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
            ),
            train_dataset=texts(count),
            # LoRA's matrices are thin already: there is nothing left to project.
            privacy=PrivacyArguments(target_epsilon=8.0, target_delta=1e-4, method=DPSGD()),
        )  # fmt: skip
        trainer.train()
        trainer.save_model(folder)  # the adapter alone, and privacy.json
        print(f"epsilon {trainer.get_epsilon():.2f}")
        return trainer.get_epsilon()


if __name__ == "__main__":
    main()
