"""Plans under other people's loops: the parameters that one process would have."""

import os

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from foretell.errors import InputError  # noqa: E402
from foretell.plan import Plan  # noqa: E402
from foretell.pytorch.adapters import hugging_face, lightning_strategy  # noqa: E402
from foretell.pytorch.deploy.apply import in_own_loop  # noqa: E402
from tests.pytorch.deploy.ranks import on_ranks  # noqa: E402
from tests.pytorch.deploy.same import CLOSE, STEPS, alone, mlp, off, part, samples, sgd  # noqa: E402

CLIP = 0.05  # under the norm of every gradient here, so that clipping changes each step
PLANS = ("dp=2", "dp=2,zero=3", "dp=2,bucket_mb=0.0001", "dp=2,zero=1", "dp=2,sync=0.weight+ps:0")
WORDS = 50


def clipped(model, num=STEPS):
    """Training on one process, gradients clipped."""
    update = sgd(model)
    for step in range(num):
        x, y = samples(step=step)
        update.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        update.step()
    return model


def plain_loops():
    """A loop that clips, and one that hands the optimizer a closure."""
    found = []
    for text in PLANS:
        model = mlp()
        update = sgd(model)
        in_own_loop(model, update, Plan.parse(text))
        for step in range(STEPS):
            x, y = samples(step=step)
            update.zero_grad()
            nn.functional.cross_entropy(model(part(x)), part(y)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            update.step()
        found.append(off(model, clipped(mlp())))
    model = mlp()
    update = sgd(model)
    in_own_loop(model, update, Plan.parse("dp=2"))
    for step in range(STEPS):
        x, y = samples(step=step)

        def closure(x=x, y=y):
            update.zero_grad()
            found = nn.functional.cross_entropy(model(part(x)), part(y))
            found.backward()
            return found

        update.step(closure)
    batches = [samples(step=step) for step in range(STEPS)]
    return [*found, off(model, alone(mlp, batches))]


def test_loops_that_clip_and_loops_with_a_closure():
    for each in on_ranks(2, plain_loops):
        assert max(each) <= CLOSE, each


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp=2,schedule=interleaved,chunks=2", "schedule=interleaved: the plan has a loop"),
        ("stages=0+a/1+b,actions=0F0/1F0", "stages: the plan has a loop of its own"),
        ("dp=2,update=by-message", "update=by-message: the plan has a loop of its own"),
    ],
)
def test_what_hooks_cannot_do(text, words):
    with pytest.raises(InputError, match=words):
        in_own_loop(mlp(), None, Plan.parse(text))


def elastic():
    """What torchrun would have set."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "1"}
    os.environ["ACCELERATE_USE_CPU"] = "true"


def tiny():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=8, n_embd=16, n_layer=2, n_head=2, **none)
    )


def rows():
    made = torch.randint(0, WORDS, (8, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in made]


def with_trainer(folder, text, accumulate):
    """A Trainer that clips; every step sees all rows, whoever has which."""
    from transformers import Trainer, TrainingArguments

    elastic()
    model = tiny()
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4 // accumulate, max_steps=STEPS,
        gradient_accumulation_steps=accumulate, optim="sgd", learning_rate=0.5,
        lr_scheduler_type="constant", max_grad_norm=CLIP, report_to=[], use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    callback = hugging_face(model, Plan.parse(text))
    Trainer(model, arguments, train_dataset=rows(), callbacks=[callback]).train()
    assert callback.deployed.plan.dp == 2
    wanted = tiny()
    update = torch.optim.SGD(wanted.parameters(), lr=0.5)
    batch = {k: torch.stack([row[k] for row in rows()]) for k in ("input_ids", "labels")}
    for _ in range(STEPS):
        update.zero_grad()
        wanted(**batch).loss.backward()
        nn.utils.clip_grad_norm_(wanted.parameters(), CLIP)
        update.step()
    return off(model, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "accumulate"), [("dp=2", 1), ("dp=2,zero=3", 1), ("dp=2", 2)])
def test_under_hugging_faces_trainer(tmp_path, text, accumulate):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    each = on_ranks(2, with_trainer, str(tmp_path), text, accumulate, limit=300)
    assert max(each) <= CLOSE, each


def with_lightning(folder, text, accumulate):
    import lightning
    from torch.utils.data import DataLoader

    elastic()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def training_step(self, batch, _):
            x, y = batch
            return nn.functional.cross_entropy(self.inner(x), y)

        def configure_optimizers(self):
            return sgd(self)

    model, strategy = Module(), lightning_strategy(Plan.parse(text))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=STEPS,
        gradient_clip_val=CLIP, accumulate_grad_batches=accumulate, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    rows = list(zip(*samples(), strict=True))
    trainer.fit(model, DataLoader(rows, batch_size=6 // accumulate))
    wanted = mlp()
    update = sgd(wanted)
    x, y = samples()
    for _ in range(STEPS):
        update.zero_grad()
        nn.functional.cross_entropy(wanted(x), y).backward()
        nn.utils.clip_grad_norm_(wanted.parameters(), CLIP)
        update.step()
    return off(model.inner, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "accumulate"), [("dp=2", 1), ("dp=2,zero=3", 1), ("dp=2", 2)])
@pytest.mark.filterwarnings("ignore")
def test_under_lightnings_trainer(tmp_path, text, accumulate):
    pytest.importorskip("lightning")
    each = on_ranks(2, with_lightning, str(tmp_path), text, accumulate, limit=300)
    assert max(each) <= CLOSE, each
