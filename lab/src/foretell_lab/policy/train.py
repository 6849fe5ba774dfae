"""Fits the network to what searches did: cross entropy against how often each way on was taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.utils import scatter, softmax

from foretell.errors import InputError
from foretell.io import write_atomically
from foretell.pytorch.capture.values import first_line
from foretell_lab.policy.network import Network, batch

Tensor = Any
BATCH, RATE, DECAY = 32, 2e-3, 1e-4
WINDOW = 150_000  # examples that are kept, the newest: some 5 kB each


@dataclass
class Trainer:
    """A network, its optimizer and all examples so far: what a training goes on from."""

    widths: dict[str, int]
    seed: int = 0
    rounds: int = 0
    games: int = 0
    examples: list[Any] = field(default_factory=list)  # (seen, target, weight)
    kept: list[Any] = field(default_factory=list)  # the same, never trained on

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        self.network = Network(self.widths)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), RATE, weight_decay=DECAY)

    def believe(self, column: int, weight: float) -> None:
        """Begin with a score that one feature of a way on gives, before anything is learned."""
        with torch.no_grad():
            self.network.plain.weight.zero_()
            self.network.plain.weight[0, column] = weight

    def add(self, examples: list[Any], has_per_rank_costs: bool) -> None:
        """More examples to learn from, or never to."""
        into = self.kept if has_per_rank_costs else self.examples
        into += examples
        del into[:-WINDOW]

    def fit(self, steps: int) -> float:
        """So many steps over the examples at random; the loss on those that are kept apart."""
        draw = np.random.default_rng([self.seed, self.rounds])
        self.network.train()
        weight = np.array([example[2] for example in self.examples])
        for step in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = RATE * (1 - 0.9 * step / steps)  # down to a tenth in every round
            some = draw.choice(len(weight), BATCH, p=weight / weight.sum())
            loss = loss_of(self.network, [self.examples[i] for i in some])
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimizer.step()
        self.rounds += 1
        return self.validation_loss()

    def validation_loss(self) -> float:
        """The loss above the least there can be (the targets' own entropy), on those kept apart."""
        self.network.eval()
        some = self.kept[-512:] or self.examples[-512:]
        least = float(np.mean([-(t * np.log(np.maximum(t, 1e-9))).sum() for _, t, _ in some]))
        with torch.no_grad():
            return float(loss_of(self.network, some)) - least

    def save(self, path: Path) -> None:
        """Write all that is needed to go on."""
        state = {
            "widths": self.widths, "seed": self.seed, "rounds": self.rounds, "games": self.games,
            "network": self.network.state_dict(), "optimizer": self.optimizer.state_dict(),
            "examples": _tensors(self.examples), "kept": _tensors(self.kept),
        }  # fmt: skip
        write_atomically(path, lambda file: torch.save(state, file))

    def load(self, path: Path, seen: Any) -> None:
        """Go on from where `save` was called; `seen` makes questions of their fields."""
        try:
            state = torch.load(path, weights_only=True)  # tensors and numbers; nothing is run
        except Exception as error:  # pickle's, zip's and torch's own
            raise InputError(
                f"`{path}` is no state of a training: {first_line(error)}",
                hint="leave --resume out to begin anew",
            ) from None
        self.seed, self.rounds, self.games = state["seed"], state["rounds"], state["games"]
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.examples = _arrays(state["examples"], seen)
        self.kept = _arrays(state["kept"], seen)


def _tensors(examples: list[Any]) -> list[Any]:
    """Examples as tensors, which load without pickle."""
    return [([torch.tensor(a) for a in s], torch.tensor(t), float(w)) for s, t, w in examples]


def _arrays(examples: list[Any], seen: Any) -> list[Any]:
    return [(seen(*(a.numpy() for a in s)), t.numpy(), w) for s, t, w in examples]


def loss_of(network: Network, examples: Sequence[Any]) -> Tensor:
    """Mean cross entropy of a question."""
    given = batch([seen for seen, _, _ in examples])
    target = torch.tensor(np.concatenate([t for _, t, _ in examples]))
    chance = softmax(network(given), given.question, num_nodes=len(examples))
    each = scatter(-target * torch.log(chance + 1e-9), given.question, 0, len(examples), "sum")
    return each.mean()
