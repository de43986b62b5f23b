"""Hugging Face Trainer: a small BERT, randomly initialised, whose attention ends in an orthogonal matrix."""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import ghor

torch.manual_seed(0)
small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=8, **small))
for layer in model.bert.encoder.layer:
    ghor.constrain(layer.attention.output.dense, "weight", ghor.Stiefel())

# the class is the larger half of the first token
tokens = torch.randint(20, (256, 8), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": int(row[0] >= 10)} for row in tokens]

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=4,
                per_device_train_batch_size=32,
                weight_decay=0.01,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=data,
            optimizer_cls_and_kwargs=(ghor.optim.AdamW, {"lr": 1e-2}),  # the Trainer makes the groups
        )
        trainer.train()
        print(f"loss {trainer.evaluate(data)['eval_loss']:.3f}")
    ghor.check(model)
