"""The older name of Lightning, and manual optimization of two optimizers."""

import pytorch_lightning as pl
import torch
from torch import nn


class Gan(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.critic = nn.Linear(8, 16), nn.Linear(16, 1)

    def training_step(self, batch, number):
        of_maker, of_critic = self.optimizers()
        (x,) = batch
        fake = self.maker(torch.randn(len(x), 8, device=self.device))
        of_critic.zero_grad()
        self.manual_backward(self.critic(fake.detach()).mean() - self.critic(x).mean())
        of_critic.step()
        of_maker.zero_grad()
        self.manual_backward(-self.critic(fake).mean())
        of_maker.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(m.parameters()) for m in (self.maker, self.critic)], []


if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.randn(256, 16))
    pl.Trainer(max_epochs=1, enable_progress_bar=False, logger=False).fit(
        Gan(), torch.utils.data.DataLoader(data, batch_size=4)
    )
