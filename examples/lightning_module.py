"""Lightning: a module with a Stiefel weight, which only `__init__` and `configure_optimizers` mention."""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import ghor


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(49, 7, bias=False), torch.nn.Linear(7, 7))
        ghor.constrain(self.net[0], "weight", ghor.Stiefel())

    def training_step(self, batch, index):
        x, target = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), target)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return ghor.optim.AdamW(self, lr=1e-2)


x = torch.randn(512, 49, generator=torch.Generator().manual_seed(0))
data = DataLoader(TensorDataset(x, x[:, :7].argmax(dim=1)), batch_size=128)

if __name__ == "__main__":
    model = Classifier()
    quiet = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    trainer = pl.Trainer(max_epochs=40, accelerator="cpu", **quiet)
    trainer.fit(model, data)
    print(f"loss {trainer.callback_metrics['loss']:.3f}")
    ghor.check(model)
