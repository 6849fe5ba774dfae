"""Plans run on one GPU: how long a step takes, and whether it trains as one process does.

    python benchmarks/gpu_plans.py OUT [--parts alone,cells,shared,scripts,four,nccl,fp8]

Parts, each a list in OUT/PART.part.json: steps of single ranks under plans that one GPU can run;
two and four ranks that share the GPU over gloo; buckets and FSDP over NCCL with one rank; matmuls
in fp8 beside bf16; cells of the correctness matrix (tests/pytorch/deploy/
matrix.py) and unedited scripts (tests/pytorch/intake/scripts) on CUDA tensors.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from unittest.mock import MagicMock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "src")]
if importlib.util.find_spec("msgspec") is None:  # traces are read with it, plans are not
    sys.modules["msgspec"] = MagicMock()
    sys.modules["msgspec"].Struct = type(
        "Struct", (), {"__struct_fields__": (), "__init_subclass__": lambda *_, **__: None}
    )
MODELS = ("gpt", "conv")
ALONE = [
    "dp=1", "precision=tf32", "precision=bf16-mixed", "recompute=full", "recompute=selective",
    "precision=bf16-mixed,recompute=full", "optimizer_kernels=fused", "optimizer_kernels=foreach",
    "precision=bf16-mixed,compile=yes", "precision=bf16-mixed,whatifs=cuda-graph",
    "whatifs=cuda-graph", "micro_batch=2", "dtype=fp8",
]  # fmt: skip
SHARED = ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "cp=2", "pp=2,micro_batch=2"]
FOUR = ["dp=4", "dp=4,zero=3", "dp=2,pp=2,micro_batch=2", "dp=2,tp=2"]
GEMMS = [(4096, 4096, 4096), (8192, 4096, 14336), (16384, 8192, 8192)]  # m, n, k
CELLS = [
    "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,shares=5+3", "dp=2,recompute=full",
    "tp=2", "tp=2,sp=yes", "cp=2", "pp=2,micro_batch=2", "pp=2,micro_batch=2,schedule=zb-h1",
    "pp=2,micro_batch=2,schedule=interleaved,chunks=2", "filter=2", "spatial=2",
]  # fmt: skip
SCRIPTS = ["plain_loop.py", "ema.py", "moe_routing.py", "trainer_class.py", "gan.py"]
SCRIPTS += ["transformer_compiled.py", "accumulation_scaler.py"]
STEPS, WARM = 12, 4


def script(name):
    """A described model of gpu_models."""
    spec = importlib.util.spec_from_file_location(name, HERE / "gpu_models" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def deployed(name, text, world, rank):
    import torch

    from foretell.plan import Plan
    from foretell.pytorch.deploy.apply import deploy
    from foretell.pytorch.deploy.collective import place

    made, plan = script(name), Plan.parse(text)
    torch.manual_seed(0)
    model = made.model().cuda()
    at = place(plan, rank)["dp"]
    x, y = (t.cuda() for t in made.batch(at, plan.dp))
    found = deploy(
        model, made.optimizer(model.parameters()), plan, loss=getattr(made, "loss", None),
        device="cuda", samples=len(x), example=((x,), y),
    )  # fmt: skip
    return found, x, y


def measured(name, text, world=1, rank=0):
    """Seconds of each step, losses, and peak memory."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    found, x, y = deployed(name, text, world, rank)
    times, losses = [], []
    for _ in range(WARM + STEPS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        loss = found.step((x,), y)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
        losses.append(None if loss is None else float(loss))
    return {
        "model": name, "plan": text, "step_s": statistics.median(times[WARM:]),
        "steps_s": times[WARM:], "losses": losses, "peak_bytes": torch.cuda.max_memory_allocated(),
    }  # fmt: skip


def tried(call, *args):
    try:
        return call(*args)
    except Exception as error:
        traceback.print_exc()
        return {
            "model": args[0],
            "plan": args[1],
            "error": f"{type(error).__name__}: {error}"[:300],
        }


def join(rank, world, folder, backend="gloo"):
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    torch.backends.cudnn.allow_tf32 = False
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def keep(out, part, rows):
    path = Path(out) / f"{part}.part.json"
    path.write_text(json.dumps(rows))


def alone(_, out, folder):
    join(0, 1, folder)
    rows = []
    for name in MODELS:
        for text in ALONE:
            rows.append(tried(measured, name, text))
            keep(out, "alone", rows)


def shared(rank, out, folder):
    join(rank, 2, folder)
    rows = []
    for name in MODELS:
        for text in SHARED:
            rows.append(tried(measured, name, text, 2, rank))
            if rank == 0:
                keep(out, "shared", rows)


def four(rank, out, folder):
    join(rank, 4, folder)
    rows = []
    for text in FOUR:
        rows.append(tried(measured, "gpt", text, 4, rank))
        if rank == 0:
            keep(out, "four", rows)


def nccl(_, out, folder):
    """Gradient buckets and FSDP over NCCL, a group of one rank, beside the model as it is."""
    join(0, 1, folder, "nccl")
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from foretell.pytorch.deploy.shard import shard
    from foretell.pytorch.deploy.sync import synchronize

    made, rows = script("gpt"), []
    x, y = (t.cuda() for t in made.batch(0, 1))
    loss = getattr(made, "loss", None) or torch.nn.functional.cross_entropy
    for way in ("plain", "buckets", "fsdp"):
        torch.manual_seed(0)
        model, sync = made.model().cuda(), None
        optimizer = made.optimizer(model.parameters())
        if way == "buckets":
            sync = synchronize(model, group=dist.group.WORLD)
            sync.attach(optimizer)
        if way == "fsdp":
            shard(model, init_device_mesh("cuda", (1,)))
            optimizer = made.optimizer(model.parameters())
        times, losses = [], []
        for _ in range(WARM + STEPS):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            optimizer.zero_grad()
            found = loss(model(x), y)
            found.backward()
            if sync is not None:
                sync.finish()
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
            losses.append(float(found))
        row = {"model": "gpt", "plan": way, "step_s": statistics.median(times[WARM:])}
        rows.append(row | {"losses": losses, "backend": dist.get_backend()})
        keep(out, "nccl", rows)


def fp8(_, out, folder):
    """Seconds of matmuls in fp8 (scaled, e4m3) and in bf16."""
    import torch

    rows, one = [], torch.ones((), device="cuda")
    for m, n, k in GEMMS:
        a, b = (torch.randn(s, k, device="cuda").to(torch.bfloat16) for s in (m, n))
        a8, b8 = (t.to(torch.float8_e4m3fn) for t in (a, b))
        ways = {
            "bf16": lambda a=a, b=b: a @ b.T,
            "fp8": lambda a=a8, b=b8: torch._scaled_mm(
                a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
            ),
        }
        for way, run in ways.items():
            times = []
            for _ in range(20):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                for _ in range(10):
                    run()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begun) / 10)
            rows.append({"model": f"{m}x{n}x{k}", "plan": way, "step_s": statistics.median(times)})
            keep(out, "fp8", rows)


def cells(rank, out, folder):
    """The matrix on CUDA tensors."""
    join(rank, 2, folder)
    from dataclasses import replace
    from functools import partial

    from tests.pytorch.deploy import matrix, zoo

    from foretell.errors import ForetellError
    from foretell.plan import Plan
    from foretell.pytorch.deploy.verify import Case, verify

    rows = []
    for text in CELLS:
        for name in zoo.EVERY:
            plan = Plan.parse(text)
            shares = list(plan.shares) or [zoo.BATCH // plan.dp] * plan.dp
            case = Case(
                partial(zoo.make, name), matrix.optimizer, partial(_parts, name, shares),
                zoo.EVERY[name][2], "cuda",
            )  # fmt: skip
            row = {"model": name, "plan": text}
            try:
                found = replace(verify(case, plan, 3, in_fp32=False), differences=())
                row |= {"loss_off": found.loss_off, "gradient_off": found.gradient_off}
            except ForetellError as error:
                row["refused"] = error.message[:200]
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
                rows.append(row)
                keep(out, f"cells{rank}", rows)
                return
            rows.append(row)
            if rank == 0:
                keep(out, "cells", rows)


def _parts(name, shares, step):
    from tests.pytorch.deploy import zoo

    return [
        (tuple(x.cuda() for x in inputs), None if target is None else target.cuda())
        for inputs, target in zoo.parts(name, shares, step)
    ]


class Enough(BaseException):
    """As many steps as are wanted."""


def scripted(path, plan):
    """Losses and times of the first steps of an unedited script, all of it on the GPU."""
    import torch

    from foretell.pytorch.deploy.unedited import Training, Wanted
    from foretell.pytorch.intake.child import run
    from foretell.pytorch.intake.request import Script

    def enough():
        raise Enough

    def fail(error):
        raise error

    torch.set_default_device("cuda")
    job = Training(plan, Wanted(8, device="cuda", is_still=True), enough, fail)
    try:
        with job.open():
            run(Script(str(path)), job)
    except Enough:
        pass
    finally:
        torch.set_default_device(None)
    times = statistics.median(job.times[2:])
    return [float(x) for x in job.losses], times, [m.places.device for m in job.made.values()]


def scripts(rank, out, folder):
    join(rank, 2, folder)
    import torch.distributed as dist

    from foretell.plan import Plan

    rows, home = [], HERE.parent / "tests/pytorch/intake/scripts"
    os.chdir(folder)
    for name in SCRIPTS:
        alone = scripted(home / name, None)
        for text in ("dp=2", "dp=2,zero=3", "tp=2"):
            dist.barrier()
            row = {"model": name, "plan": text}
            try:
                losses, seconds, devices = scripted(home / name, Plan.parse(text))
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
                traceback.print_exc()
            else:
                off = max(
                    abs(a - b) / max(abs(a), 0.5) for a, b in zip(alone[0], losses, strict=True)
                )
                row |= {"loss_off": off, "step_s": seconds, "alone_s": alone[1]}
                row |= {"devices": devices, "losses": losses}
            rows.append(row)
            if rank == 0:
                keep(out, "scripts", rows)
            if "error" in row:
                return


PARTS = {
    "alone": (alone, 1), "shared": (shared, 2), "cells": (cells, 2), "scripts": (scripts, 2),
    "four": (four, 4), "nccl": (nccl, 1), "fp8": (fp8, 1),
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default="alone,cells,shared,scripts")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    import torch.multiprocessing as mp

    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
    for part in options.parts.split(","):
        begun = time.time()
        job, ranks = PARTS[part]
        try:
            mp.spawn(job, (str(options.out), tempfile.mkdtemp()), ranks)
        except Exception as error:
            print(part, "ended:", str(error)[-600:], flush=True)
        print(part, f"{time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
