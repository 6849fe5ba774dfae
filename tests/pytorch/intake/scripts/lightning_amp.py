"""Lightning: bf16 autocast, accumulation, clipping, a scheduler, a data module, validation."""

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Data(lightning.LightningDataModule):
    def setup(self, stage):
        self.rows = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))

    def train_dataloader(self):
        return DataLoader(self.rows, 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.rows, 32)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("right", (self.net(x).argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    trainer = lightning.Trainer(
        max_epochs=6, precision="bf16-mixed", accumulate_grad_batches=2, gradient_clip_val=1.0,
        log_every_n_steps=5, default_root_dir="lightning_output", enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Classifier(), Data())
