"""Models as people write them, nothing in them says how they split; and those of transformers."""

import torch
from torch import nn
from torch.nn import functional as F

WORDS, LONG, WIDE, HEADS, INNER, SAMPLES = 32, 8, 16, 4, 32, 8


def tokens(step=0):
    made = torch.Generator().manual_seed(100 + step)
    x = torch.randint(0, WORDS, (SAMPLES, LONG), generator=made)
    return x, x.roll(-1, 1)


def vectors(step=0):
    made = torch.Generator().manual_seed(100 + step)
    return torch.randn(SAMPLES, LONG, WIDE, generator=made), torch.randint(
        0, 4, (SAMPLES,), generator=made
    )


def images(step=0):
    made = torch.Generator().manual_seed(100 + step)
    x = torch.randn(SAMPLES, 3, 8, 8, generator=made)
    return x, torch.randint(0, 4, (SAMPLES,), generator=made)


def words_loss(output, target):
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


class Norm(nn.Module):
    """RMS norm, written out."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDE))

    def forward(self, x):
        return self.scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def turned(x):
    one, two = x.chunk(2, -1)
    return torch.cat((-two, one), -1)


class GroupedBlock(nn.Module):
    """Grouped heads, rotary angles, SwiGLU or experts."""

    def __init__(self, experts=0):
        super().__init__()
        depth = WIDE // HEADS
        self.first, self.second = Norm(), Norm()
        self.query = nn.Linear(WIDE, WIDE, bias=False)
        self.key, self.value = (nn.Linear(WIDE, 2 * depth, bias=True) for _ in range(2))
        self.merge = nn.Linear(WIDE, WIDE, bias=False)
        self.mlp = Routing(experts) if experts else Gated()

    def forward(self, x, angles=None, mask=None):
        b, t, _ = x.shape
        y = self.first(x)
        q, k, v = (f(y).view(b, t, -1, WIDE // HEADS) for f in (self.query, self.key, self.value))
        q, k = (z.transpose(1, 2) for z in (q, k))
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)  # under FSDP in short formats
        q, k = (z * cos + turned(z) * sin for z in (q, k))
        k, v = (z.repeat_interleave(2, 1) for z in (k, v.transpose(1, 2)))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.merge(y.transpose(1, 2).reshape(b, t, -1))
        return x + self.mlp(self.second(x))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDE, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDE, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ManyExperts(nn.Module):
    """A matrix for each expert, called with tokens, experts and weights."""

    def __init__(self, many):
        super().__init__()
        self.count = many
        self.up = nn.Parameter(torch.randn(many, INNER, WIDE) / 4)
        self.down = nn.Parameter(torch.randn(many, WIDE, INNER) / 4)

    def forward(self, x, index, weights):
        found = torch.zeros_like(x)
        for expert in range(self.count):
            token, place = torch.where(index == expert)
            y = F.linear(F.silu(F.linear(x[token], self.up[expert])), self.down[expert])
            y = y * weights[token, place, None]
            found.index_add_(0, token, y.to(x.dtype))  # under autocast
        return found


class Routing(nn.Module):
    def __init__(self, many):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDE, many, bias=False), ManyExperts(many)

    def forward(self, x):
        flat = x.reshape(-1, WIDE)
        weights, index = self.router(flat).softmax(-1).topk(2, -1)
        return self.experts(flat, index, weights / weights.sum(-1, keepdim=True)).view(x.shape)


class Grouped(nn.Module):
    def __init__(self, experts=0, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDE)
        self.blocks = nn.ModuleList(GroupedBlock(experts) for _ in range(4))
        self.norm, self.head = Norm(), nn.Linear(WIDE, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        x, depth = self.words(ids), WIDE // HEADS
        places = torch.arange(ids.shape[1], device=ids.device)[:, None].float()
        angles = places * 0.5 ** torch.arange(depth // 2).repeat(2)
        for block in self.blocks:
            x = block(x, angles=angles)
        return self.head(self.norm(x))


class Flat(nn.Module):
    """A linear layer with its weight the other way round, over rows."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias, self.outputs = nn.Parameter(torch.zeros(outputs)), outputs

    def forward(self, x):
        rows = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return rows.view(*x.shape[:-1], self.outputs)


class PackedBlock(nn.Module):
    """Queries, keys and values from one product; attention written out; heads counted."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDE), nn.LayerNorm(WIDE)
        self.packed, self.merge = Flat(WIDE, 3 * WIDE), Flat(WIDE, WIDE)
        self.up, self.down = Flat(WIDE, INNER), Flat(INNER, WIDE)
        self.register_buffer("past", torch.ones(LONG, LONG).tril().bool(), persistent=False)

    def forward(self, x):
        b, t, _ = x.shape
        each = self.packed(self.norm1(x)).split(WIDE, dim=2)
        q, k, v = (y.view(b, t, HEADS, WIDE // HEADS).transpose(1, 2) for y in each)
        scores = (q @ k.transpose(-2, -1) / 2.0).masked_fill(~self.past[:t, :t], -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, t, WIDE)
        x = x + self.merge(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDE), nn.Embedding(LONG, WIDE)
        self.blocks = nn.ModuleList(PackedBlock() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDE), nn.Linear(WIDE, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(WIDE, WIDE, 2, batch_first=True), nn.Linear(WIDE, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Convolving(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.head(F.relu(self.second(x)).mean((2, 3)))


def _of_transformers(config, model, **options):
    transformers = __import__("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "use_cache": False}
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes, **options))
    return made.train()


SIZES = {
    "hidden_size": WIDE, "intermediate_size": INNER, "num_hidden_layers": 4,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def llama():
    return _of_transformers("LlamaConfig", "LlamaForCausalLM", **SIZES)


def qwen2():
    return _of_transformers("Qwen2Config", "Qwen2ForCausalLM", tie_word_embeddings=True, **SIZES)


def mixtral():
    more = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _of_transformers("MixtralConfig", "MixtralForCausalLM", **SIZES, **more)


def gpt2():
    sizes = {"n_embd": WIDE, "n_layer": 4, "n_head": HEADS, "n_positions": LONG}
    return _of_transformers("GPT2Config", "GPT2LMHeadModel", **sizes)


def grouped():
    return Grouped()


def tied():
    return Grouped(tied=True)


def routed():
    return Grouped(experts=4)


MODELS = {
    "grouped": (grouped, tokens, words_loss),
    "tied": (tied, tokens, words_loss),
    "routed": (routed, tokens, words_loss),
    "packed": (Packed, tokens, words_loss),
    "lstm": (Recurrent, vectors, F.cross_entropy),
    "cnn": (Convolving, images, F.cross_entropy),
    "hf-llama": (llama, tokens, words_loss),
    "hf-qwen2": (qwen2, tokens, words_loss),
    "hf-mixtral": (mixtral, tokens, words_loss),
    "hf-gpt2": (gpt2, tokens, words_loss),
}
