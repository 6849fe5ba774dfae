"""Every format that is read: a few sound samples, how to change them, and the commands for them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzz import mutate

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "step.txt"
MODEL = "gpt:layers=2,hidden=64,heads=2,seq=32,vocab=100"
ON = ["--on", "dgx-a100:nodes=1"]
PREDICT = ["predict", MODEL, *ON]
ROW = {"workload": MODEL, "on": "dgx-a100:nodes=1", "plan": "dp=8,global_batch=8"}
CASE = "CASE"  # stands for the file in a command


@dataclass(frozen=True)
class Format:
    """How one kind of file is made and read."""

    ending: str
    make: Callable[[random.Random], bytes]
    commands: tuple[tuple[str, ...], ...]
    cost: int = 1  # sound cases take a command so many times as long as those of others
    reading: int = 1  # and a reader

    def case(self, number: int, name: str) -> tuple[bytes, list[str]]:
        """The bytes and the command of a number."""
        draw = random.Random(f"{name} {number}")
        return self.make(draw), list(draw.choice(self.commands))


def _json(*samples: Any) -> Callable[[random.Random], bytes]:
    def make(draw: random.Random) -> bytes:
        raw = mutate.as_json(mutate.tree(draw.choice(samples), draw), draw)
        return mutate.data(raw, draw) if draw.random() < 0.15 else raw

    return make


def _lines(rows: list[Any]) -> Callable[[random.Random], bytes]:
    def make(draw: random.Random) -> bytes:
        raw = b"\n".join(mutate.as_json(mutate.tree(row, draw), draw) for row in rows)
        return mutate.data(raw, draw) if draw.random() < 0.15 else raw

    return make


def _text(*samples: str) -> Callable[[random.Random], bytes]:
    def make(draw: random.Random) -> bytes:
        raw = mutate.text(draw.choice(samples), draw)
        return mutate.data(raw, draw) if draw.random() < 0.15 else raw

    return make


def _bytes(*samples: bytes) -> Callable[[random.Random], bytes]:
    return lambda draw: mutate.data(draw.choice(samples), draw)


def _packed(make: Callable[[random.Random], bytes]) -> Callable[[random.Random], bytes]:
    def packed(draw: random.Random) -> bytes:
        raw = gzip.compress(make(draw), 1)
        return mutate.data(raw, draw) if draw.random() < 0.3 else raw

    return packed


@cache
def _graphs() -> tuple[str, bytes]:
    """A graph as text and as a file, with its digest."""
    import tempfile

    from foretell.graph import load, save

    with tempfile.TemporaryDirectory() as folder:
        save(load(GUIDE), Path(folder) / "x.graph")
        return GUIDE.read_text(), (Path(folder) / "x.graph").read_bytes()


def _graph_file(draw: random.Random) -> bytes:
    """A graph whose header, numbers or frames are changed; lengths and digest are right again."""
    import hashlib

    import zstandard

    raw = _graphs()[1]
    magic, body = raw[:17], raw[33:]
    end = 8 + int.from_bytes(body[:8], "little")
    header, frames = json.loads(zstandard.decompress(body[8:end])), body[end:]
    kind = draw.random()
    if kind < 0.6:
        frames = _other_numbers(header, frames, draw)
    elif kind < 0.8:  # what the header tells of the graph, or that of its arrays as well
        parts = ("facts", "history", "names") if draw.random() < 0.7 else tuple(header)
        part = draw.choice(parts)
        changed = mutate.tree({part: header.pop(part)}, draw)
        header = {**header, **changed} if isinstance(changed, dict) else changed
    else:
        frames = mutate.data(frames, draw)
    packed = zstandard.compress(mutate.as_json(header, draw))
    body = len(packed).to_bytes(8, "little") + packed + frames
    return magic + hashlib.blake2b(body, digest_size=16).digest() + body


def _other_numbers(header: dict[str, Any], frames: bytes, draw: random.Random) -> bytes:
    """The frames of a graph with some numbers of its arrays changed, put in or left out."""
    import zstandard

    rows, at, spans = header["arrays"], 0, []
    for row in rows:
        spans.append(frames[at : at + row[3]])
        at += row[3]
    filled = [k for k, row in enumerate(rows) if row[2]]
    for _ in range(draw.choice((1, 1, 2, 4))):
        k = draw.randrange(len(rows)) if draw.random() < 0.1 else draw.choice(filled)
        numbers = mutate.numbers(_numbers(spans[k], *rows[k][1:3]), draw)
        by_significance = numbers.view("u1").reshape(-1, numbers.itemsize).T.tobytes()
        spans[k] = zstandard.compress(by_significance)
        rows[k][2:] = [len(numbers), len(spans[k])]
    return b"".join(spans)


def _numbers(frame: bytes, kind: str, length: int) -> Any:
    import numpy as np
    import zstandard

    size = np.dtype(kind).itemsize
    planes = np.frombuffer(zstandard.decompress(frame), "u1").reshape(size, length)
    return np.ascontiguousarray(planes.T).reshape(-1).view(kind).copy()


@cache
def _trace() -> Any:
    from tests.trace.kineto import Kineto, training_step

    k = Kineto()
    for step in range(2):
        training_step(k, 1000.0 * step, step + 1)
    return {"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceEvents": k.events}


EXECUTION = {
    "schema": "1.1.0-chakra.0.0.4", "pid": 1,
    "nodes": [
        {"id": 2, "name": "aten::mm", "ctrl_deps": 1,
         "inputs": {"values": [[1, 2, 0, 16, 4, "cuda:0"]], "shapes": [[4, 4]],
                    "types": ["Tensor(float)"]},
         "outputs": {"values": [[3, 4, 0, 16, 4, "cuda:0"]], "shapes": [[4, 4]],
                     "types": ["Tensor(float)"]},
         "attrs": [{"name": "tid", "type": "uint64", "value": 1}]},
        {"id": 3, "name": "aten::relu", "ctrl_deps": 1,
         "inputs": {"values": [[3, 4, 0, 16, 4, "cuda:0"]], "shapes": [[4, 4]],
                    "types": ["Tensor(float)"]},
         "outputs": {"values": [[5, 6, 0, 16, 4, "cuda:0"]], "shapes": [[4, 4]],
                     "types": ["Tensor(float)"]},
         "attrs": [{"name": "tid", "type": "uint64", "value": 1}]},
    ],
}  # fmt: skip
CHAKRA = {
    "workload_graph": [
        {"Id": 1, "Name": "mm", "NodeType": 4, "ctrlDeps": [], "data_deps": [], "runtime": 5},
        {"Id": 2, "Name": "ar", "NodeType": 7, "data_deps": [1], "runtime": 9, "comm_size": 64,
         "comm_type": 0},
    ]
}  # fmt: skip
BLOCKS = [
    {"block": b, "micro_batch": m, "start": 2.0 * m + b, "end": 2.0 * m + b + 1, "devices": [b],
     "kind": "F"}
    for m in range(3) for b in range(2)
]  # fmt: skip
SCHEDULE = {"blocks": BLOCKS, "makespan": 7.0, "period": 2.0, "unroll": 1, "micro_batches": 3,
            "peak_memory": [1.0, 2.0], "proven": True, "per_micro_batch": 2.0}  # fmt: skip
LAYOUTS = {
    "workload": MODEL,
    "rows": [
        {"gpus": n, "strategy": "dp", "plan": f"dp={n}", "global_batch": 8 * n, "step_s": 0.1 / n,
         "peak_bytes": 1e9, "fits": True, "findings": [{"name": "x", "evidence": "y"}]}
        for n in (1, 2)
    ],
}  # fmt: skip
PLANNED = {"plan": "dp=8,global_batch=8", "predicted_s": 0.1, "baseline_s": 0.2,
           "baselines": {"ddp": 0.2}, "bound_s": 0.05}  # fmt: skip
PLAN = {"dp": 2, "tp": 2, "pp": 2, "micro_batch": 1, "global_batch": 8, "recompute": "full"}
PLACED = {"groups": [["embedding", "head", "all-reduce", "0:4", "1:4"]], "global_batch": 8}
PLACEMENT = {
    "name": "two", "ndevs": 2, "mode": "train",
    "blocks": [{"id": 0, "kind": "F", "devices": [0], "time": 1, "mem": 1},
               {"id": 1, "kind": "F", "devices": [1], "time": 1, "mem": 1},
               {"id": 2, "kind": "B", "devices": [1], "time": 2, "mem": -1},
               {"id": 3, "kind": "B", "devices": [0], "time": 2, "mem": -1}],
    "deps": [[0, 1], [1, 2, 0.5], [2, 3]], "memory": 4,
}  # fmt: skip
CALIBRATION = {"calibration": {"compute": 1.1, "host": 0.9, "alpha": 2.0, "tree_bytes": 1e6}}
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64,
    "torch_dtype": "bfloat16", "rope_scaling": None, "tie_word_embeddings": False,
}  # fmt: skip
CSV = (
    "workload,on,plan,step_s\n"
    f'"{MODEL}",dgx-a100:nodes=1,"dp=8,global_batch=8",0.01\n'
    f'"{MODEL}",dgx-a100:nodes=1,"dp=4,tp=2,global_batch=8",0.02\n'
)


@cache
def _cluster() -> str:
    from foretell.cluster import load

    return load("dgx-a100:nodes=1").text()


_STEP = (
    ("show", CASE, "--json"), ("show", CASE), ("simulate", CASE, "--json"), ("simulate", CASE),
    ("compare", CASE, CASE, "--json"), ("whatif", CASE, "faster:op=gemm,times=2", "--json"),
    ("check", CASE, "--step-under", "1s", "--json"), ("report", CASE, "--no-advice", "--json"),
)  # fmt: skip
_TRACE = (*_STEP, ("replay", CASE, "--json"), ("replay", CASE))
_REPORT = (
    ("report", CASE, "--json"), ("report", CASE, "-o", "OUT.html"),
    ("report", CASE, *ON, "--of", MODEL, "--json"),
)  # fmt: skip
_PLAN = (("predict", MODEL, *ON, "--plan", CASE, "--json"), *_REPORT)
_FIT = (("fit", CASE, "--json", "-o", "OUT.json"),)
_SCHEDULE = (
    ("schedule", CASE, "-n", "3", "--method", "1f1b", "--no-cache", "--json"),
    ("schedule", CASE, "-n", "2", "--time", "0.2", "--no-cache", "--json"),
    ("show", CASE, "--json"),
)  # fmt: skip


@cache
def formats() -> dict[str, Format]:
    """Every format by name."""
    words, packed = _graphs()
    trace = _json(_trace())
    return {
        "trace": Format(".json", trace, _TRACE, reading=4),
        "trace-gz": Format(".json.gz", _packed(trace), _TRACE, reading=4),
        "execution": Format(".json", _json(EXECUTION), _STEP),
        "chakra": Format(".json", _json(CHAKRA), _STEP),
        "graph-text": Format(".txt", _text(words), _STEP),
        "graph": Format(".graph", _graph_file, _STEP),
        "graph-bytes": Format(".graph", _bytes(packed), _STEP),
        "plan": Format(".plan", _json(PLAN, PLACED), _PLAN),
        "plan-toml": Format(".toml", _text("dp = 8\nglobal_batch = 8\nzero = 1\n"), _PLAN[:1]),
        "answer": Format(".json", _json(SCHEDULE, LAYOUTS, PLANNED), _REPORT),
        "batch": Format(".jsonl", _lines([ROW, ROW]), (("predict", "--batch", CASE, "--json"),)),
        "runs": Format(".jsonl", _lines([{**ROW, "step_s": 0.01}]), _FIT),
        "runs-csv": Format(".csv", _text(CSV), _FIT, cost=20),
        "cluster": Format(
            ".toml", _text(_cluster()),
            (("predict", MODEL, "--on", CASE, "--plan", "dp=8,global_batch=8", "--json"),
             ("show", CASE), ("show", CASE, "--json")),
        ),
        "calibration": Format(
            ".json", _json(CALIBRATION),
            ((*PREDICT, "--plan", "dp=8,global_batch=8", "--calibration", CASE, "--json"),),
        ),
        "prices": Format(
            ".toml", _text("a100-80 = 1.9\nh100 = 3.5\n"),
            (("oracle", MODEL, "--on", "dgx-a100", "--gpus", "2", "--prices", CASE, "--json"),),
        ),
        "placement": Format(".json", _json(PLACEMENT), _SCHEDULE),
        "config": Format(
            ".config.json", _json(CONFIG),
            (("predict", CASE, *ON, "--plan", "dp=8,global_batch=8", "--json"),),
        ),
    }  # fmt: skip


def spec_case(number: int) -> list[str]:
    """A command whose words are changed, not a file."""
    draw = random.Random(f"spec {number}")
    sound = draw.choice((
        [*PREDICT, "--plan", "dp=4,tp=2,pp=1,micro_batch=1,global_batch=8,zero=1", "--json"],
        ["predict", "llama:layers=2,hidden=64,heads=2,seq=32,vocab=100", *ON, "--plan", "dp=1"],
        ["show", "dgx-a100:nodes=2,oversubscription=2", "--json"],
        ["schedule", "v:devices=2", "-n", "2", "--method", "1f1b", "--no-cache", "--json"],
        ["whatif", str(GUIDE), "data-parallel:ranks=4", *ON, "--json"],
        ["whatif", str(GUIDE), "faster:op=gemm,times=2", "amp:dtype=bf16", "--json"],
        ["explain", "amp"],
        ["oracle", MODEL, "--on", "dgx-a100", "--gpus", "1..4", "--json"],
        ["check", str(GUIDE), "--step-under", "1s", "--json"],
        ["show", "dgx-a100:gpus=8,rack=2", "--json"],
    ))  # fmt: skip
    k = draw.randrange(1, len(sound))
    if sound[k].startswith("--"):
        return sound
    changed = mutate.text(sound[k], draw).decode("utf-8", "replace")
    return [*sound[:k], changed.replace("\0", ""), *sound[k + 1 :]]  # no system passes a NUL
