"""In the manner of torchtitan: meta device, mesh, fully_shard, checkpointed, compiled blocks."""

import os
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@dataclass
class JobConfig:
    steps: int = 40
    batch: int = 4
    length: int = 32
    width: int = 64
    layers: int = 3
    heads: int = 4
    vocab: int = 128
    lr: float = 8e-4
    warmup: int = 5
    compiled: bool = True
    log_every: int = 10
    seen: list = field(default_factory=list)


class Attention(nn.Module):
    def __init__(self, job):
        super().__init__()
        self.heads = job.heads
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(job.width, job.width, bias=False) for _ in range(4)
        )

    def forward(self, x, angles):
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, self.heads, -1) for w in (self.wq, self.wk, self.wv))
        q, k = (self.turn(t, angles) for t in (q, k))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))

    def turn(self, x, angles):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles[:, None]).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self, job):
        super().__init__()
        self.attention, self.norm1, self.norm2 = (
            Attention(job),
            nn.RMSNorm(job.width),
            nn.RMSNorm(job.width),
        )
        self.w1, self.w3 = (nn.Linear(job.width, 4 * job.width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(4 * job.width, job.width, bias=False)

    def forward(self, x, angles):
        x = x + self.attention(self.norm1(x), angles)
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self, job):
        super().__init__()
        self.job = job
        self.tok = nn.Embedding(job.vocab, job.width)
        self.layers = nn.ModuleDict({str(k): Block(job) for k in range(job.layers)})
        self.norm, self.output = nn.RMSNorm(job.width), nn.Linear(job.width, job.vocab, bias=False)
        self.register_buffer("angles", self.rotations(), persistent=False)

    def rotations(self):
        depth = self.job.width // self.job.heads
        rates = 1.0 / 10000 ** (torch.arange(0, depth, 2).float() / depth)
        turns = torch.outer(torch.arange(self.job.length).float(), rates)
        return torch.polar(torch.ones_like(turns), turns)

    def init_weights(self, device):
        with torch.device(device):
            self.angles = self.rotations()
        for p in self.parameters():
            nn.init.trunc_normal_(p, std=0.02) if p.dim() > 1 else nn.init.ones_(p)

    def forward(self, ids):
        x = self.tok(ids)
        for layer in self.layers.values():
            x = layer(x, self.angles)
        return self.output(self.norm(x))


class Trainer:
    def __init__(self, job):
        self.job = job
        self.device = torch.device(
            f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
        )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        mesh = init_device_mesh(
            self.device.type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp_shard",)
        )
        with torch.device("meta"):
            self.model = Transformer(job)
        for name, layer in self.model.layers.named_children():
            layer = checkpoint_wrapper(layer, preserve_rng_state=False)
            if job.compiled:
                layer = torch.compile(layer, backend="aot_eager", fullgraph=False)
            self.model.layers.register_module(name, layer)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh["dp_shard"], mp_policy=policy, reshard_after_forward=True)
        fully_shard(self.model, mesh=mesh["dp_shard"], mp_policy=policy)
        self.model.to_empty(device=self.device)
        with torch.no_grad():
            self.model.init_weights(self.device)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=job.lr, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda k: min(1.0, (k + 1) / job.warmup)
        )

    def batches(self):
        while True:
            yield torch.randint(0, self.job.vocab, (self.job.batch, self.job.length + 1))

    def train_step(self, data):
        self.optimizer.zero_grad()
        ids, labels = data[:, :-1].to(self.device), data[:, 1:].to(self.device)
        logits = self.model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        del logits
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach(), norm

    def train(self):
        data, began = self.batches(), time.perf_counter()
        for step in range(1, self.job.steps + 1):
            loss, norm = self.train_step(next(data))
            if step % self.job.log_every == 0:
                took, began = time.perf_counter() - began, time.perf_counter()
                tokens = self.job.batch * self.job.length * self.job.log_every / took
                print(f"step {step} loss {loss.item():.4f} {norm.item():.2f} {tokens:.0f} tok/s")


if __name__ == "__main__":
    Trainer(JobConfig()).train()
    dist.destroy_process_group()
