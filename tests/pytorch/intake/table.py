"""Training scripts as people write them, none of which knows of foretell, and how to run one.

A server that has loaded torch starts a process for each script, so that each costs what it does
itself; what these processes run is what `foretell profile` and `foretell capture` start.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foretell.pytorch.intake.files import undo
from foretell.pytorch.intake.request import Request, Script, Wanted
from tests.pytorch import forked

SCRIPTS = Path(__file__).parent / "scripts"
FEW = Wanted(warmup=2, timed=3, traced=1)
PATIENCE = 240  # seconds for one script, on the slowest machine


@dataclass(frozen=True)
class Case:
    """A script, how it is called, and what its step is made of."""

    name: str
    args: tuple[str, ...] = ()
    needs: str = ""  # a package that may be missing
    is_module: bool = False
    is_real: bool = False  # captured with real tensors: its shapes depend on its weights
    optimizer: str = ""
    losses: int | None = None  # loss operators in a step
    ranks: int = 1  # that the script starts itself

    @property
    def is_here(self) -> bool:
        return not self.needs or find_spec(self.needs) is not None

    def __str__(self) -> str:
        return self.name.removesuffix(".py")


TABLE = (
    Case("plain_loop.py", optimizer="SGD", losses=1),
    Case("argparse_loader.py", ("--lr", "0.1"), optimizer="AdamW", losses=1),
    Case("accumulation_scaler.py", optimizer="Adam", losses=4),
    Case("gan.py", optimizer="Adam"),
    Case("lbfgs.py", optimizer="LBFGS"),
    Case("trainer_class.py", optimizer="RMSprop", losses=1),
    Case("swallows_everything.py", optimizer="Adagrad"),
    Case("packed_lstm.py", is_real=True, optimizer="Adam"),
    Case("rl_reinforce.py", optimizer="Adam"),
    Case("ema.py", optimizer="AdamW", losses=1),
    Case("custom_optimizer.py", optimizer="Sign"),
    Case("no_optimizer.py"),
    Case("optimizer_in_backward.py", optimizer="Adam"),
    Case("transformer_compiled.py", optimizer="AdamW", losses=1),
    Case("checkpointing.py", is_real=True, optimizer="NAdam"),
    Case("moe_routing.py", is_real=True, optimizer="Adam"),
    Case("ddp.py", optimizer="SGD", losses=1),
    Case("fsdp2.py", optimizer="Adam"),
    Case("package.train", ("8",), is_module=True, optimizer="Adadelta"),
    Case("nested/run.py", optimizer="SGD", losses=1),
    Case("short.py", optimizer="SGD"),
    Case("graph_network.py", optimizer="Adam"),
    Case("sharpness.py", optimizer="SGD", losses=2),
    Case("diffusion.py", optimizer="AdamW", losses=1),
    Case("functional.py", is_real=True, optimizer="Adam"),
)
SLOW = (
    Case("image_workers.py", optimizer="SGD"),
    Case("fsdp1.py", optimizer="AdamW", losses=1),
    Case("torchtitan_style.py", optimizer="AdamW", losses=1),
    Case("spawned.py", ("2", "29731"), ranks=2, optimizer="SGD"),
    Case("processes.py", ("2", "29733"), ranks=2, is_real=True, optimizer="SGD"),
    Case("hf_trainer.py", needs="transformers", optimizer="AdamW", losses=2),
    Case("hf_bert_trainer.py", needs="transformers", optimizer="AdamW", losses=1),
    Case("hf_accelerate.py", needs="accelerate", optimizer="AdamW", losses=2),
    Case("lightning_module.py", needs="lightning", optimizer="Adam", losses=1),
    Case("lightning_amp.py", needs="lightning", optimizer="AdamW", losses=2),
    Case("timm_vit.py", needs="timm", optimizer="AdamW"),
    Case("pytorch_lightning_gan.py", needs="pytorch_lightning", optimizer="Adam"),
)


def run(case: Case, goal: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank of a script answered; it ran in `folder/here`."""
    (folder / "here").mkdir()
    (folder / "notes").mkdir()
    name = case.name if case.is_module else str(SCRIPTS / case.name)
    request = Request(
        goal, Script(name, case.args, case.is_module), _output(case, goal, folder),
        str(folder / "notes"), "cpu", FEW, {"on": "h200"}, case.is_real,
    )  # fmt: skip
    where = SCRIPTS if case.is_module else folder / "here"
    words = (str(request.write()), str(where), str(folder))
    process = forked.CONTEXT.Process(target=_child, args=words)
    forked.start(process)
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
    undo(folder / "notes")
    answers = sorted((folder / "notes").glob("answer*.json"))
    printed = (folder / "printed").read_text(errors="replace")
    assert answers, printed
    found = [json.loads(place.read_text()) for place in answers]
    assert not any("error" in answer for answer in found), f"{found}\n{printed}"
    return found


def _output(case: Case, goal: str, folder: Path) -> str:
    if goal == "capture":
        return str(folder / "step.graph")
    return str(folder / ("step" if case.ranks > 1 else "step.json.gz"))


def _child(request: str, where: str, folder: str) -> None:
    from foretell.pytorch.intake.child import main

    os.setsid()
    os.chdir(where)
    printed = os.open(f"{folder}/printed", os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.path.insert(0, "")
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(request))
