"""Hugging Face's Trainer on a model from a config, with accumulation and logs."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, k):
        ids = torch.randint(0, 128, (16,))
        return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    args = TrainingArguments(
        "trainer_output",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=60,
        logging_steps=5,
        save_steps=10,
        report_to="none",
    )
    Trainer(LlamaForCausalLM(config), args, train_dataset=Words()).train()
