"""A classifier by the Trainer: evaluation, early stopping, warmup, a collator of its own."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
)


class Texts(torch.utils.data.Dataset):
    def __init__(self, many):
        self.rows = [torch.randint(4, 128, (5 + k % 11,)) for k in range(many)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        return {"input_ids": self.rows[k], "label": k % 3}


def padded(rows):
    ids = torch.nn.utils.rnn.pad_sequence([r["input_ids"] for r in rows], batch_first=True)
    labels = torch.tensor([r["label"] for r in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def right(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


if __name__ == "__main__":
    config = BertConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, num_labels=3, max_position_embeddings=32,
    )  # fmt: skip
    args = TrainingArguments(
        "bert_output", per_device_train_batch_size=8, num_train_epochs=6, eval_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="accuracy",
        warmup_steps=5, max_grad_norm=1.0, weight_decay=0.01, report_to="none",
        dataloader_num_workers=1, remove_unused_columns=False,
    )  # fmt: skip
    Trainer(
        BertForSequenceClassification(config), args, data_collator=padded,
        train_dataset=Texts(64), eval_dataset=Texts(16), compute_metrics=right,
        callbacks=[EarlyStoppingCallback(3)],
    ).train()  # fmt: skip
