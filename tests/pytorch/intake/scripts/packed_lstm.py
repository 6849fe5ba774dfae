"""Sequences of different lengths, packed."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.rnn = nn.LSTM(16, 32, batch_first=True, bidirectional=True)
        self.out = nn.Linear(64, 5)

    def forward(self, words):
        lengths = (words != 0).sum(1).cpu()
        packed = pack_padded_sequence(
            self.embed(words), lengths, batch_first=True, enforce_sorted=False
        )
        found, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(found)


model = Tagger()
adam = torch.optim.Adam(model.parameters())
for _ in range(50):
    words = torch.randint(1, 50, (6, 12))
    for k in range(6):
        words[k, 12 - k :] = 0
    tags = torch.randint(0, 5, (6, 12))
    adam.zero_grad()
    out = model(words)
    loss = nn.functional.cross_entropy(out.flatten(0, 1), tags.flatten())
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    adam.step()
