"""Models of many kinds, each with its loss, that `measure_variants.py` runs; weights are random."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Image(nn.Module):
    """A torchvision model with its loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import torchvision

        self.model = torchvision.models.get_model(name, weights=None)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), y)


class Words(nn.Module):
    """A transformers model with its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=x, labels=y).loss


class Recurrent(nn.Module):
    """A two-layer LSTM language model."""

    def __init__(self, words: int = 33278, hidden: int = 1500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.lstm = nn.LSTM(hidden, hidden, 2, batch_first=True, dropout=0.2)
        self.out = nn.Linear(hidden, words)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(x))
        return F.cross_entropy(self.out(hidden).flatten(0, 1), y.flatten())


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return Words(T5ForConditionalGeneration(T5Config(use_cache=False, decoder_start_token_id=0)))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, vocab_size=32000, use_cache=False,
    )  # fmt: skip
    return Words(LlamaForCausalLM(config))


class Mixer(nn.Module):
    """Two perceptrons a block: one along the patches of an image, one along their channels."""

    def __init__(self, width: int = 512, blocks: int = 8, patches: int = 196) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.along = nn.ModuleList(perceptron(patches, 256) for _ in range(blocks))
        self.across = nn.ModuleList(perceptron(width, 2048) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks + 1))
        self.out = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for k, (along, across) in enumerate(zip(self.along, self.across, strict=True)):
            x = x + along(self.norms[2 * k](x).transpose(1, 2)).transpose(1, 2)
            x = x + across(self.norms[2 * k + 1](x))
        return F.cross_entropy(self.out(self.norms[-1](x).mean(1)), y)


class Experts(nn.Module):
    """Two layers of eight wide perceptrons, every one for every sample, weighed by a gate."""

    def __init__(self, width: int = 1024, inside: int = 4096, experts: int = 8) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(2))
        self.experts = nn.ModuleList(
            nn.ModuleList(perceptron(width, inside, nn.SiLU()) for _ in range(experts))
            for _ in range(2)
        )
        self.out = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for norm, gate, experts in zip(self.norms, self.gates, self.experts, strict=True):
            h = norm(x)
            weights = gate(h).softmax(-1)
            x = x + sum(weights[:, k : k + 1] * expert(h) for k, expert in enumerate(experts))
        return F.cross_entropy(self.out(x), y)


def perceptron(width: int, inside: int, between: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inside), between or nn.GELU(), nn.Linear(inside, width))


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    return Words(DistilBertForMaskedLM(DistilBertConfig()))


# Factory, optimizer, samples a step, and words a sample (0: images of 224 × 224; less: numbers).
MODELS: dict[str, tuple[Callable[[], nn.Module], str, int, int]] = {
    "resnet18": (lambda: Image("resnet18"), "sgd", 128, 0),
    "vit_b_16": (lambda: Image("vit_b_16"), "adamw", 32, 0),
    "llama_110m": (llama, "adamw", 8, 512),
    "efficientnet_b0": (lambda: Image("efficientnet_b0"), "sgd", 64, 0),
    "t5_small": (t5, "adamw", 16, 256),
    "densenet121": (lambda: Image("densenet121"), "sgd", 64, 0),
    "rnnlm": (Recurrent, "sgd", 64, 35),
    "convnext_tiny": (lambda: Image("convnext_tiny"), "adamw", 32, 0),
    "distilbert": (distilbert, "adamw", 32, 128),
    "mixer": (Mixer, "adamw", 64, 0),
    "experts": (Experts, "adamw", 4096, -1024),
}
