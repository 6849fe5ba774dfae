"""Models of many kinds, each with its loss, that `measure_variants.py` runs; weights are random."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

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


class Audio(nn.Module):
    """Wav2Vec 2.0 on raw audio, each frame scored."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Wav2Vec2Config, Wav2Vec2Model

        config = Wav2Vec2Config(num_hidden_layers=6, apply_spec_augment=False, layerdrop=0.0)
        self.model = Wav2Vec2Model(config)
        self.out = nn.Linear(config.hidden_size, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        frames = self.out(self.model(x).last_hidden_state)
        return F.cross_entropy(frames.flatten(0, 1), y[:, : frames.shape[1]].flatten())


class Whisper(nn.Module):
    """Whisper of its base size: two 1-D convolutions, an encoder, a decoder."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        config = WhisperConfig(
            d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
            decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, use_cache=False,
        )  # fmt: skip
        self.model = WhisperForConditionalGeneration(config)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.model(input_features=x, labels=y).loss


class GatedSpeech(nn.Module):
    """Two 2-D convolutions over a spectrogram, three bidirectional GRUs, each frame scored."""

    def __init__(self, hidden: int = 768) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.gru = nn.GRU(32 * 41, hidden, 3, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, 29)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        frames = self.convolutions(x).flatten(1, 2).transpose(1, 2)
        scores = self.out(self.gru(frames)[0])
        return F.cross_entropy(scores.flatten(0, 1), y[:, : scores.shape[1]].flatten())


class Video(nn.Module):
    """A torchvision model of video with its loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import torchvision

        self.model = torchvision.models.get_model(name, weights=None, num_classes=400)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), y)


class Segmentation(nn.Module):
    """A torchvision model that scores every pixel."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import torchvision

        self.model = torchvision.models.get_model(
            name, weights=None, weights_backbone=None, num_classes=21
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x)["out"], y)


class Residual(nn.Module):
    """Two convolutions behind group norms, with the time added between them."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(32, inside), nn.GroupNorm(32, outside)])
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.time = nn.Linear(time, outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.first(F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.second(F.silu(self.norms[1](h)))


class Attend(nn.Module):
    """Self-attention over the pixels of a map."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(32, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, 3, self.heads, -1, h * w).transpose(3, 4).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(2, 3).reshape(n, c, h, w))


def noised(x: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noise, the image with it, and the sines of the step."""
    noise, share = torch.randn_like(x), (step / 1000).view(-1, 1, 1, 1)
    rates = torch.exp(-torch.arange(64, device=x.device) * 0.14)
    angles = step[:, None] * rates[None]
    return noise, (1 - share) * x + share * noise, torch.cat([angles.sin(), angles.cos()], 1)


class Diffusion(nn.Module):
    """A U-Net that finds the noise in images of 32 × 32."""

    def __init__(self, width: int = 128, times: tuple[int, ...] = (1, 2, 2, 2)) -> None:
        super().__init__()
        widths, time = [width * t for t in times], 4 * width
        self.time = nn.Sequential(nn.Linear(128, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.shrink, self.up, self.grow = (nn.ModuleList() for _ in range(4))
        now = width
        for k, w in enumerate(widths):
            self.down.append(nn.ModuleList([Residual(now, w, time), Residual(w, w, time)]))
            self.shrink.append(nn.Conv2d(w, w, 3, 2, 1) if k < len(widths) - 1 else nn.Identity())
            now = w
        self.middle = nn.ModuleList([Residual(now, now, time), Residual(now, now, time)])
        self.attend = nn.ModuleList([Attend(widths[1]), Attend(now)])
        for k, w in reversed(list(enumerate(widths))):
            self.up.append(nn.ModuleList([Residual(now + w, w, time), Residual(w, w, time)]))
            self.grow.append(nn.Conv2d(w, w, 3, padding=1) if k else nn.Identity())
            now = w
        self.last = nn.Sequential(nn.GroupNorm(32, now), nn.SiLU(), nn.Conv2d(now, 3, 3, padding=1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noise, x, sines = noised(x, y)
        time, kept = self.time(sines), []
        x = self.first(x)
        for k, (blocks, shrink) in enumerate(zip(self.down, self.shrink, strict=True)):
            for block in blocks:
                x = block(x, time)
            x = self.attend[0](x) if k == 1 else x
            kept.append(x)
            x = shrink(x)
        x = self.middle[1](self.attend[1](self.middle[0](x, time)), time)
        for k, (blocks, grow) in enumerate(zip(self.up, self.grow, strict=True)):
            x = torch.cat([x, kept.pop()], 1)
            for block in blocks:
                x = block(x, time)
            if k < len(self.up) - 1:
                x = grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.last(x), noise)


class DiffusionTransformer(nn.Module):
    """A transformer that finds the noise in latents; each layer scaled and shifted by the time."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.patch, self.place = nn.Conv2d(4, width, 2, 2), nn.Parameter(torch.zeros(256, width))
        self.time = nn.Sequential(nn.Linear(128, width), nn.SiLU(), nn.Linear(width, width))
        self.modulate = nn.ModuleList(nn.Linear(width, 6 * width) for _ in range(layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.mlp = nn.ModuleList(perceptron(width, 4 * width) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.out = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noise, x, sines = noised(x, y)
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        time = F.silu(self.time(sines))
        for modulate, qkv, mix, mlp in zip(
            self.modulate, self.qkv, self.mix, self.mlp, strict=True
        ):
            a, b, c, d, e, f = modulate(time)[:, None].chunk(6, -1)
            parts = qkv(self.norm(x) * (1 + a) + b).unflatten(2, (3, self.heads, -1))
            q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + c * mix(mixed)
            x = x + f * mlp(self.norm(x) * (1 + d) + e)
        found = self.out(self.norm(x)).unflatten(1, (16, 16)).unflatten(3, (4, 2, 2))
        return F.mse_loss(found.permute(0, 3, 1, 4, 2, 5).reshape(noise.shape), noise)


class GraphAttention(nn.Module):
    """Three layers of attention along the edges of a graph, ten edges a node."""

    def __init__(self, width: int = 256, heads: int = 4, edges: int = 10) -> None:
        super().__init__()
        self.heads, self.edges = heads, edges
        self.linears = nn.ModuleList(nn.Linear(k, width) for k in (128, width, width))
        self.scores = nn.ParameterList(torch.randn(2, heads, width // heads) for _ in range(3))
        self.out = nn.Linear(width, 40)
        self.register_buffer("ends", torch.zeros(0, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nodes = x.shape[0]
        start, end = self._edges(nodes, x.device)
        for linear, score in zip(self.linears, self.scores, strict=True):
            h = linear(x).unflatten(1, (self.heads, -1))
            weight = (h * score[0]).sum(-1)[start] + (h * score[1]).sum(-1)[end]
            weight = F.leaky_relu(weight, 0.2).exp()
            total = weight.new_zeros(nodes, self.heads).index_add(0, end, weight)
            share = weight / (total[end] + 1e-6)
            sent = h[start] * share[..., None].to(h.dtype)
            x = F.elu(torch.zeros_like(h).index_add(0, end, sent).flatten(1))
        return F.cross_entropy(self.out(x), y)

    def _edges(self, nodes: int, device: torch.device) -> torch.Tensor:
        if self.ends.shape[-1] != nodes * self.edges:
            torch.manual_seed(0)
            self.ends = torch.randint(0, nodes, (2, nodes * self.edges)).to(device)
        return self.ends


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=512, intermediate_size=1792, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=32000, num_local_experts=8, use_cache=False,
    )  # fmt: skip
    return Words(MixtralForCausalLM(config))


class Policy(nn.Module):
    """One minibatch of PPO: actor and critic of three layers, clipped surrogate, entropy."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(
                nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                nn.Linear(width, n),
            ) for n in (18, 1)
        )  # fmt: skip

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        odds = F.log_softmax(self.actor(x), -1)
        chosen = odds.gather(1, y[:, None]).squeeze(1)
        value = self.critic(x).squeeze(1)
        gain = x[:, 0] - value.detach()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        ratio = (chosen - x[:, 1]).clamp(-5, 5).exp()
        surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        entropy = -(odds.exp() * odds).sum(-1).mean()
        return 0.5 * F.mse_loss(value, x[:, 0]) - surrogate - 0.01 * entropy


class Autoencoder(nn.Module):
    """A variational autoencoder of images of 64 × 64, with transposed convolutions."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width, 8 * width]
        self.encode = nn.Sequential(*(
            layer
            for a, b in pairwise(sizes)
            for layer in (nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
        ))  # fmt: skip
        self.code, self.back = nn.Linear(8 * width * 16, 256), nn.Linear(128, 8 * width * 16)
        turned = sizes[::-1]
        self.decode = nn.Sequential(*(
            layer
            for a, b in zip(turned, [*turned[1:-1], width], strict=False)
            for layer in (nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
        ))  # fmt: skip
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean, log = self.code(self.encode(x).flatten(1)).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log).exp()
        found = self.last(self.decode(self.back(code).unflatten(1, (-1, 4, 4))))
        return F.mse_loss(found, x) - 0.5 * (1 + log - mean.pow(2) - log.exp()).mean()


class Points(nn.Module):
    """PointNet: 1-D convolutions of one point each, batch norms, the largest of all points."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 64, 64, 128, 1024]
        self.points = nn.Sequential(*(
            layer
            for a, b in pairwise(sizes)
            for layer in (nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())
        ))  # fmt: skip
        self.out = nn.Sequential(
            nn.Linear(1024, 512),
            nn.BatchNorm1d(512),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(512, 40),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(self.points(x).amax(2)), y)


Batch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def numbers(*shape: int, of: int = 1000, scores: tuple[int, ...] = ()) -> Batch:
    """Random numbers of a shape, and classes (one, or as many as `scores` says) a sample."""
    return lambda n: (torch.randn(n, *shape), torch.randint(0, of, (n, *scores)))


def words(count: int) -> Batch:
    """Random words that are their own labels."""

    def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, 30000, (n, count))
        return x, x.clone()

    return batch


@dataclass(frozen=True)
class Model:
    """A model: how it is made, its optimizer, samples a step, and what a batch is."""

    factory: Callable[[], nn.Module]
    optimizer: str
    samples: int
    batch: Batch
    is_image: bool = False  # maps with channels, which channels-last is for


def image(name: str, optimizer: str, samples: int) -> Model:
    return Model(lambda: Image(name), optimizer, samples, numbers(3, 224, 224), is_image=True)


MODELS: dict[str, Model] = {
    "resnet18": image("resnet18", "sgd", 128),
    "vit_b_16": image("vit_b_16", "adamw", 32),
    "llama_110m": Model(llama, "adamw", 8, words(512)),
    "efficientnet_b0": image("efficientnet_b0", "sgd", 64),
    "t5_small": Model(t5, "adamw", 16, words(256)),
    "densenet121": image("densenet121", "sgd", 64),
    "rnnlm": Model(Recurrent, "sgd", 64, words(35)),
    "convnext_tiny": image("convnext_tiny", "adamw", 32),
    "distilbert": Model(distilbert, "adamw", 32, words(128)),
    "mixer": Model(Mixer, "adamw", 64, numbers(3, 224, 224), is_image=True),
    "experts": Model(Experts, "adamw", 4096, numbers(1024)),
}
# Of other kinds: speech, video, diffusion, segmentation, a graph, experts, a policy, points.
KINDS: dict[str, Model] = {
    "wav2vec2": Model(Audio, "adamw", 8, numbers(80000, of=32, scores=(300,))),
    "whisper": Model(Whisper, "adamw", 8, numbers(80, 3000, of=30000, scores=(128,))),
    "speech_gru": Model(GatedSpeech, "sgd", 32, numbers(1, 161, 400, of=29, scores=(200,))),
    "r2plus1d_18": Model(lambda: Video("r2plus1d_18"), "sgd", 8, numbers(3, 8, 112, 112, of=400)),
    "diffusion_unet": Model(Diffusion, "adamw", 64, numbers(3, 32, 32), is_image=True),
    "dit": Model(DiffusionTransformer, "adamw", 32, numbers(4, 32, 32), is_image=True),
    "deeplabv3": Model(
        lambda: Segmentation("deeplabv3_resnet50"), "sgd", 8,
        numbers(3, 256, 256, of=21, scores=(256, 256)), is_image=True,
    ),
    "graph_attention": Model(GraphAttention, "adamw", 40000, numbers(128, of=40)),
    "mixtral": Model(mixtral, "adamw", 8, words(512)),
    "ppo": Model(Policy, "adamw", 4096, numbers(64, of=18)),
    "autoencoder": Model(Autoencoder, "adamw", 256, numbers(3, 64, 64), is_image=True),
    "pointnet": Model(Points, "adamw", 64, numbers(3, 2048, of=40)),
}  # fmt: skip
