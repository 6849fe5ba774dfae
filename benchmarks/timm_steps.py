"""Capture the training steps of timm's models as timm's own benchmark ran them in July 2022.

    pip install --no-deps timm==0.6.7 torchvision pillow      # what was measured then
    python benchmarks/timm_steps.py capture TABLE.csv out/timm     # minutes; goes on where it was
    python benchmarks/timm_steps.py pack out/timm lab/src/foretell_lab/validate/tables/timm_steps.xz

TABLE is timm's `benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv` as columns `model`,
`batch_per_gpu`, `seq_or_img`, `metric`. The step is that of timm's `benchmark.py`: autocast to fp16
without a scaler, channels last, cross entropy with random targets, SGD with Nesterov momentum one
parameter at a time, and gradients set to zero (not dropped) before, as PyTorch 1.12 did.
`foretell validate --oracle` prices what `pack` wrote, without timm and without torch.
"""

import argparse
import csv
import gc
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["PYTORCH_JIT"] = "0"  # scripted functions as the operators they are made of

SPREAD = 12  # models far apart in the table come first, so that a part of it is a fair sample
SIZES = ("params", "batch_per_gpu", "seq_or_img")
# Words for where weights come from; the model is the same where its parameters are as many.
_WEIGHTS = re.compile(r"^(swsl|ssl|tv|ig|adv)_|_(ap|ns|in22ft1k|in21ft1k|miil|sam|dino)$")
# Made with other words in the versions around the one installed; of the same layers (timm 0.6.5).
SAME = {"convnext_tiny_hnfd": "convnext_tiny_hnf"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("capture", "pack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    {"capture": capture_all, "pack": pack_all}[given.what](given.source, given.target)


def capture_all(table: Path, folder: Path) -> None:
    """One graph a model into a folder, or a text that says why there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    with table.open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "step_time"]
    first: dict[tuple[str, ...], str] = {}
    for row in _ordered(rows):
        one = first.setdefault(_what(row), row["model"])
        if one != row["model"]:
            (folder / f"{row['model']}.same").write_text(one)
    for row in _ordered(rows):
        done = folder / f"{row['model']}.graph"
        if row["model"] in first.values() and not _is_done(done):
            _captured(row, done)


def _is_done(graph: Path) -> bool:
    return graph.exists() or graph.with_suffix(".txt").exists()


def _what(row: dict[str, str]) -> tuple[str, ...]:
    """What a step depends on: the model without whose weights, and its sizes."""
    return (_WEIGHTS.sub("", row["model"]), *(row[key] for key in SIZES))


def _ordered(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows far apart before their neighbours; those of equal sizes, mostly one model, last."""
    spread = [row for i in range(SPREAD) for row in rows[i::SPREAD]]
    first = {tuple(row[key] for key in SIZES): row["model"] for row in reversed(spread)}
    return sorted(spread, key=lambda row: row["model"] not in first.values())


def _captured(row: dict[str, str], target: Path) -> None:
    from foretell.graph.file import save

    began, why = time.perf_counter(), target.with_suffix(".txt")
    why.write_text("torch ended the process")  # true until this has come to an end
    try:
        name = SAME.get(row["model"], row["model"])
        graph = step(name, int(row["batch_per_gpu"]), int(row["seq_or_img"]))
        save(graph, target)
        why.unlink()
        said = f"{graph.size} tasks"
    except Exception as error:
        said = re.sub(r"\S*/timm/", "timm/", str(error).strip().splitlines()[0])
        why.write_text(said)
    print(f"{row['model']:40} {time.perf_counter() - began:6.1f} s  {said}", flush=True)
    gc.collect()


def step(name: str, batch: int, image: int) -> Any:
    """One step of timm's benchmark."""
    import torch

    from foretell.pytorch.capture import capture

    def images() -> Any:
        return torch.empty(batch, 3, image, image).to(memory_format=torch.channels_last)

    def optimizer(parameters: Any) -> Any:
        options = {"lr": 1e-4, "momentum": 0.9, "nesterov": True, "foreach": False}
        return torch.optim.SGD(parameters, **options)

    return capture(
        _model(name), images, loss=_loss, optimizer=optimizer, autocast="fp16", on="3090"
    )


def _model(name: str) -> Callable[[], Any]:
    _stand_in_for_nms()
    import timm
    import torch

    def made() -> Any:
        drawn = dict.fromkeys(("uniform_", "normal_", "erfinv_", "fill_"), _as_it_is)
        with patch.multiple(torch.Tensor, **drawn):  # nothing depends on the weights' values
            model = timm.create_model(name, drop_rate=0.0).train()
        return model.to(memory_format=torch.channels_last)

    return made


def _as_it_is(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor


def _loss(model: Any, images: Any) -> Any:
    import torch

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    output = model(images)
    output = output[0] if isinstance(output, tuple) else output
    target = torch.empty(len(output), device=output.device, dtype=torch.long)
    return torch.nn.functional.cross_entropy(output, target.random_(output.shape[-1]))


def _stand_in_for_nms() -> None:
    """torchvision looks for operators of its own that its wheel has for GPUs only."""
    import torch

    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        for word in ("nms", "qnms"):
            library.define(f"{word}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


_KEPT: list[Any] = []  # operators go with the library that defined them


def pack_all(folder: Path, target: Path) -> None:
    """All graphs of a folder as one small file, and why others are not there."""
    from foretell.graph.file import load
    from foretell_lab.validate.steps import Steps, save, taken

    lines: dict[str, int] = {}
    models = {}
    for path in sorted(folder.glob("*.graph")):
        graph = load(path)
        models[path.stem] = taken(graph, int(graph.facts["batch"]), lines)
    for path in sorted(folder.glob("*.same")):
        if path.read_text() in models:
            models[path.stem] = models[path.read_text()]
    missing = {path.stem: path.read_text() for path in sorted(folder.glob("*.txt"))}
    save(Steps(tuple(lines), models, missing), target)
    print(f"{len(models)} steps, {len(missing)} missing, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
