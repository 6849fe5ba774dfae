"""Lightning's Trainer with validation, logs and checkpoints."""

import lightning
import torch
from torch import nn


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch, number):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, number):
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self):
        adam = torch.optim.Adam(self.parameters())
        return {"optimizer": adam, "lr_scheduler": torch.optim.lr_scheduler.StepLR(adam, 10)}


if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer = lightning.Trainer(max_epochs=2, num_sanity_val_steps=2, accelerator="auto")
    trainer.fit(Module(), loader, loader)
