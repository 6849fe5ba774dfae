"""Profiles taken while training goes on: in a loop, by a Trainer's and Lightning's callback."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from foretell.pytorch.adapters import profile_lightning, profile_trainer, profiler  # noqa: E402
from foretell.trace import read  # noqa: E402

FEW = {"warmup": 1, "timed": 2, "traced": 1}


def check(path: Path) -> None:
    trace = read(path)
    assert trace.real is not None
    assert trace.real > 0
    for phase in ("forward", "backward", "update"):
        assert len(trace.graph.select(phase=phase)), phase


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(8), torch.randn(2)) for _ in range(64)]


def test_two_lines_of_a_loop(tmp_path: Path) -> None:
    net = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    profiled = profiler(tmp_path / "step.json.gz", **FEW)
    steps = 0
    for x, y in data():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x[None]), y[None]).backward()
        optimizer.step()
        profiled.step()
        steps += 1
    assert steps == 64  # training went on
    assert profiled.is_done
    check(tmp_path / "step.json.gz")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries themselves
def test_a_callback_of_hugging_faces_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.mse_loss(self.net(x), labels)}

    rows = [{"x": x, "labels": y} for x, y in data()]
    args = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=12, report_to="none", save_strategy="no", use_cpu=True,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, disable_tqdm=True,
    )  # fmt: skip
    callback = profile_trainer(tmp_path / "step.json.gz", **FEW)
    trainer = transformers.Trainer(Net(), args, train_dataset=rows, callbacks=[callback])
    trainer.train()
    assert trainer.state.global_step == 12
    check(tmp_path / "step.json.gz")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries themselves
def test_a_callback_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 2)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        max_steps=10, accumulate_grad_batches=2, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, default_root_dir=tmp_path,
        callbacks=[profile_lightning(tmp_path / "step.json.gz", **FEW)],
    )  # fmt: skip
    trainer.fit(Net(), torch.utils.data.DataLoader(data(), batch_size=2))
    assert trainer.global_step == 10
    check(tmp_path / "step.json.gz")
