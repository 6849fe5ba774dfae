"""What one rank of `foretell run` does: load a script, deploy, take steps, write what it measured.

What a script defines is in `foretell.pytorch.script`: `model()` and `batch(rank, size, step)`, and
`loss(output, target)`, `optimizer(parameters)` and `scheduler(optimizer)` if it likes, and the
numbers `max_norm` (to which gradients are clipped) and `ema` (decay of averaged parameters).
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import resource
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from foretell.errors import ForetellError, InputError
from foretell.plan import Plan
from foretell.pytorch.deploy import measured, run_files
from foretell.pytorch.deploy.measured import Piece
from foretell.pytorch.deploy.run_files import RunRequest, State, StepLog

_BEAT = 0.5  # seconds between signs of life
_NOTED = 5  # more steps at most, to see what one is spent on
_TALK = os.path.join("torch", "distributed")
_OURS = str(Path(__file__).parent)
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", str(Path(__file__).parents[1]), "<frozen")


class Heartbeat:
    """Writes how far this rank is, from a thread of its own, and ends it with its launcher."""

    def __init__(self, folder: Path, rank: int, launcher: int) -> None:
        self.file, self.launcher = run_files.Board(folder / f"rank-{rank}.state.json"), launcher
        self.main = threading.main_thread().ident
        self.phase, self.moved, self.done = "starting", time.time(), 0.0
        self.lock = threading.Lock()
        threading.Thread(target=self._beat, daemon=True).start()

    def enter(self, phase: str, done: float | None = None) -> None:
        """Say what this rank does now, and which share of its steps is over."""
        self.phase, self.moved = phase, time.time()
        self.done = self.done if done is None else done
        self._write()

    def _beat(self) -> None:
        while True:
            self._write()
            time.sleep(_BEAT)
            if not _exists(self.launcher):
                os._exit(1)

    def _write(self) -> None:
        with self.lock:
            where, waits = _place(self.main)
            now = time.time()
            state = State(os.getpid(), self.phase, self.moved, now, where, waits, self.done)
            self.file.write(vars(state))


def main(folder: Path) -> None:
    """Run one rank; a failure is written where the launcher finds it."""
    rank = int(os.environ["RANK"])
    redirect(folder / f"rank-{rank}.log")
    request = run_files.read_request(folder)
    heartbeat = Heartbeat(folder, rank, request.launcher)
    try:
        if request.goal:
            from foretell.pytorch.deploy.script_rank import run

            result = run(request, folder, rank, heartbeat)
        else:
            result = _run(request, folder, rank, heartbeat)
    except BaseException as error:
        failed(folder, rank, error, heartbeat.phase)
    done(folder, rank, result, heartbeat)


def failed(folder: Path, rank: int, error: BaseException, phase: str) -> NoReturn:
    """Say why this rank ends, and end it: peers may be inside a collective."""
    try:
        print(run_files.ENDED, file=sys.stderr)
        traceback.print_exception(error)
        sys.stderr.flush()
        run_files.write(folder / f"rank-{rank}.error.json", _failure(error, phase))
    finally:  # whatever the disk takes
        os._exit(1)


def done(folder: Path, rank: int, result: dict[str, Any], heartbeat: Heartbeat) -> None:
    """Say what this rank measured, and end it."""
    run_files.write(folder / f"rank-{rank}.result.json", result)
    heartbeat.enter("done")
    leave()


def leave() -> None:
    """End a process that has done its work, with what the script wants done at its end.

    Threads of torch that are still there when the interpreter is taken down abort it at times.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(request: RunRequest, folder: Path, rank: int, heartbeat: Heartbeat) -> dict[str, Any]:
    import torch.distributed as dist

    from foretell.pytorch.deploy.collective import place

    plan = Plan.parse(request.plan)
    device = joined(request)
    script = load(Path(request.script))
    run = _Steps(script, plan, device, request.batch_norm)
    verified = run.verify(request, heartbeat) if request.verify != "no" else None
    heartbeat.enter("model")
    model = run.make()
    heartbeat.enter("predict")
    predictor = run.predictor() if request.predict else None
    heartbeat.enter("deploy")
    run.deploy(model)
    first = run.resume(Path(request.checkpoint)) if request.resume else 0
    last = request.until or first + request.warmup + request.steps
    warm = min(request.warmup, max(last - first - 1, 0))
    if first >= last:
        raise InputError(f"the checkpoint has all {last} steps already")
    heartbeat.enter("predict")
    predicted = predictor.predict(lambda: run.between(heartbeat)) if predictor is not None else None
    times = _trained(run, request, folder, heartbeat, range(first, last))
    result = run.measured() | {"steps_s": times[warm:], "rank": rank}
    result["core_s"] = statistics.median(run.cpu[warm:])
    result["load"] = 1 + sum(run.waits[warm:]) / max(sum(run.cpu[warm:]), 1e-9)
    result |= {"verified": verified, "stage": place(plan, rank)["pp"]} | run.noted(
        min(request.steps, _NOTED)
    )
    if predictor is not None and predicted is not None and predictor.dry is not None:
        heartbeat.enter("learn")
        predicted["first_apart"] = run.learn(
            predictor, min(run.cpu[warm:]), statistics.median(times[warm:]), result["load"]
        )
    result["predicted"] = predicted
    if request.profile:
        heartbeat.enter("profile")
        run.profile(folder / f"rank-{rank}.trace.json.gz")
    dist.barrier()
    dist.destroy_process_group()
    return result


def _trained(
    run: _Steps, request: RunRequest, folder: Path, heartbeat: Heartbeat, steps: range
) -> list[float]:
    """Seconds of each step; losses are logged, and checkpoints written."""
    times = []
    log = StepLog(folder, is_on=run.rank == 0, plan=request.plan)
    for step in steps:
        times.append(run.take(step, steps.stop, heartbeat))
        log.write(step, run.losses[-1], times[-1])
        done = step + 1
        is_due = done == steps.stop or (request.every and done % request.every == 0)
        if request.checkpoint and is_due:
            heartbeat.enter(f"checkpoint {done}")
            run.save(Path(request.checkpoint), done)
    log.close()
    return times


def joined(request: RunRequest) -> str:
    """Join the job; the kind of device that this rank computes on.

    NCCL takes one rank a GPU: several that share one go through the host.
    """
    import torch
    import torch.distributed as dist

    from foretell.pytorch.deploy.precision import precision_of, require_fp8

    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_fp8(precision_of(Plan.parse(request.plan)), device)
    backend = "gloo"
    if device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
        if int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus:
            backend = "cpu:gloo,cuda:nccl"  # a script may have a model on the host
    # the launcher gives up first, and knows whom to name
    dist.init_process_group(backend, timeout=timedelta(seconds=request.timeout + 60))
    return device


class _Steps:
    """A deployed model and the batches of a script."""

    def __init__(self, script: ModuleType, plan: Plan, device: str, batch_norm: str) -> None:
        import torch.distributed as dist

        from foretell.pytorch.deploy.collective import place, replica

        self.script, self.plan, self.device = script, plan, device
        self.batch_norm, self.loss = batch_norm, getattr(script, "loss", None)
        self.losses: list[float | None] = []
        self.cpu: list[float] = []  # core seconds of each step, of the thread that takes it
        self.waits: list[float] = []  # and seconds that it waited for a core
        self.rank = dist.get_rank()
        where = place(plan, self.rank)
        self.at, self.stage = where["dp"], where["pp"] or self.rank * bool(plan.groups)
        self.replica = replica(plan, self.rank)

    def make(self, is_whole: bool = False) -> Any:
        """The script's model, the same on every rank; without values where ranks get parts."""
        import torch

        from foretell.pytorch.deploy.shard import fills_parts

        torch.manual_seed(0)
        if fills_parts(self.plan) and not is_whole:
            self.model = _without_values(self.script.model, self.rank)
        else:
            self.model = self.script.model()
        if not any(p.is_meta for p in self.model.parameters()):
            self.model = self.model.to(self.device)
        self.part(0, self.at)  # which makes it take its inputs by name, where it wants that
        return self.model

    def verify(self, request: RunRequest, heartbeat: Heartbeat) -> dict[str, Any] | None:
        """Compare the plan's first steps with one process; nothing where that was done before."""
        from foretell.pytorch.deploy.verify import Case, verified

        def parts(step: int) -> list[Any]:
            return [self.part(step, at) for at in range(self.plan.dp)]

        case = Case(
            self.make,
            lambda model: _optimizer(self.script, self.plan, model),
            parts,
            self.loss,
            self.device,
            self.batch_norm,
            float(getattr(self.script, "max_norm", 0.0)),
            partial(self.make, is_whole=True),
        )
        source = Path(request.script).read_text(errors="replace")
        found = verified(
            case, self.plan, source, always=request.verify == "yes", enter=heartbeat.enter
        )
        self.model = None
        return found

    def predictor(self) -> Any:
        """What predicts a step on this machine, its ops timed."""
        from foretell.pytorch.deploy.prediction import Predictor, Step, captured

        inputs, target = self.batch(0)
        step = Step(
            self.model,
            len(inputs[0]),
            captured(self.model, (*inputs, target), self.loss),
            partial(_optimizer, self.script, self.plan),
            self.device,
            self._copy,
        )
        found = Predictor(step, self.plan)
        found.prepare()
        return found

    def learn(self, predictor: Any, *measured: float) -> dict[str, Any] | None:
        """Keep how ops did in a step, for the next prediction; the first that took another time."""
        from foretell.pytorch.deploy.op_times import profiled

        if self.deployed.pipeline is not None or not self.deployed.trains or self.device != "cpu":
            return None
        seen = profiled(lambda: self._step(*self.batch(0)))
        found: dict[str, Any] | None = predictor.learn(seen, *measured) if self.rank == 0 else None
        return found

    def deploy(self, model: Any) -> None:
        """Make the model run as the plan says."""
        self.samples = len(self.batch(0)[0][0])
        self.deployed = self._deployed(model)
        schedule = getattr(self.script, "scheduler", None)
        self.scheduler = schedule(self.deployed.optimizer) if schedule is not None else None

    def _deployed(self, model: Any) -> Any:
        from foretell.pytorch.deploy.apply import deploy

        inputs, target = self.batch(0)
        return deploy(
            model,
            _optimizer(self.script, self.plan, model),
            self.plan,
            loss=self.loss,
            device=self.device,
            samples=len(inputs[0]),
            example=(inputs, target),
            batch_norm=self.batch_norm,
            max_norm=float(getattr(self.script, "max_norm", 0.0)),
            ema=float(getattr(self.script, "ema", 0.0)),
        )

    def _copy(self) -> Callable[[], object]:
        """A step of a copy of the model, deployed; its values stay as they are."""
        from foretell.pytorch.deploy.dry_run import copied, freeze
        from foretell.pytorch.deploy.pipelined import padded

        made, (inputs, target) = self._deployed(copied(self.model)[0]), self.batch(0)
        if made.pipeline is not None:  # ranks ask each other what stages put out
            made.pipeline.prepare(tuple(padded(self.plan, x) for x in inputs))
        if not made.trains:
            made.model.eval()
            return partial(made.infer, inputs)
        freeze(made.optimizer)
        return partial(made.step, inputs, target)

    def save(self, folder: Path, step: int) -> None:
        """Write a checkpoint of so many steps."""
        from foretell.pytorch.deploy.checkpoint import save

        notes = {"scheduler": self.scheduler.state_dict()} if self.scheduler is not None else {}
        if self.deployed.scaler is not None:
            notes["scaler"] = self.deployed.scaler.state_dict()
        save(self.deployed, folder, step, **notes)

    def resume(self, folder: Path) -> int:
        """Take up the last checkpoint of a folder; how many steps it has, 0 where there is none."""
        from foretell.pytorch.deploy.checkpoint import latest, load

        path = latest(folder)
        if path is None:
            return 0
        notes = load(self.deployed, path)
        if self.scheduler is not None and "scheduler" in notes:
            self.scheduler.load_state_dict(notes["scheduler"])
        if self.deployed.scaler is not None and "scaler" in notes:
            self.deployed.scaler.load_state_dict(notes["scaler"])
        return int(notes["step"])

    def batch(self, step: int) -> tuple[tuple[Any, ...], Any]:
        """This rank's share of a step's batch, as the model takes it."""
        import torch

        found = self.part(step, self.at)
        # ranks with the same layers draw the same numbers for a sample, stages draw their own
        torch.manual_seed(hash((step, self.replica, self.stage)) % 2**31)
        return found

    def part(self, step: int, at: int) -> tuple[tuple[Any, ...], Any]:
        """The share of one data-parallel rank: whichever rank asks, it draws the same."""
        import torch

        from foretell.pytorch.script import prepared, share

        plan = self.plan
        torch.manual_seed(1000 + at + step * plan.dp)
        found = share(self.script.batch, at, plan.dp, step, device=self.device, shares=plan.shares)
        return prepared(self.model, found, self.loss)[:2]

    def between(
        self, heartbeat: Heartbeat, step: int = 0, phase: str = "predict", done: float | None = None
    ) -> tuple[tuple[Any, ...], Any]:
        """What is done between two steps: say so, and make a batch."""
        heartbeat.enter(phase, done)
        found = self.batch(step)
        self._wait()
        return found

    def take(self, step: int, steps: int, heartbeat: Heartbeat) -> float:
        """Seconds of one step of so many, the batch not counted."""
        inputs, target = self.between(heartbeat, step, f"step {step}", step / steps)
        queued, start, core = run_files.queued(), time.perf_counter(), time.thread_time()
        loss = self._step(inputs, target)
        if self.scheduler is not None:
            self.scheduler.step()
        self._wait()
        seconds = time.perf_counter() - start
        self.cpu.append(time.thread_time() - core)
        self.waits.append(run_files.queued() - queued)
        self.losses.append(None if loss is None else float(loss))
        return seconds

    def _step(self, inputs: tuple[Any, ...], target: Any) -> Any:
        """Train; where the plan has no backward, only infer."""
        if self.deployed.trains:
            return self.deployed.step(inputs, target)
        self.model.eval()
        self.made = self.deployed.infer(inputs)
        return None

    def noted(self, times: int) -> dict[str, Any]:
        """When the parts of a step began and ended: of a pipeline's last, else of some more.

        Of those the middle one, the same on every rank; and what each was spent on.
        """
        if self.deployed.pipeline is not None or not self.deployed.trains:
            return {"pieces": measured.of_actions(self._ran())}
        rows = [self._pieces() for _ in range(times)]
        middle = self._middle([measured.length(row) for row in rows])
        return {"pieces": rows[middle], "spent": [measured.spent_on(row) for row in rows]}

    def _pieces(self) -> list[Piece]:
        inputs, target = self.batch(0)
        with measured.Notes(self.deployed) as notes:
            self._step(inputs, target)
            self._wait()
        sent = [(row["op"], row["start"], row["end"] or notes.ended) for row in notes.sent]
        return measured.of_marks(notes.begun, notes.marks) + sent

    def _middle(self, lengths: list[float]) -> int:
        """Which step's slowest rank took neither long nor short."""
        import torch
        import torch.distributed as dist

        slowest = torch.tensor(lengths, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return int(slowest.argsort()[len(lengths) // 2])

    def _ran(self) -> list[Any]:
        pipeline = self.deployed.pipeline
        return [list(r) for r in pipeline.ran] if pipeline else []

    def profile(self, path: Path) -> None:
        """One more step under the profiler, for a trace."""
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU]
        if self.device == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        inputs, target = self.batch(0)
        with profile(activities=kinds, record_shapes=True) as profiler:
            self._step(inputs, target)
            self._wait()
        profiler.export_chrome_trace(str(path))

    def measured(self) -> dict[str, Any]:
        """Memory, losses, samples, notes, and the actions of a pipeline's last step."""
        from foretell.pytorch.deploy.precision import fp8_notes

        row = {"weight": self.deployed.share, "actions": self._ran()}
        row |= {"at": self.at, "samples": self.samples, "notes": fp8_notes(self.model)}
        return {"peak_bytes": peak_bytes(self.device), "losses": self.losses} | row

    def _wait(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


def peak_bytes(device: str) -> int:
    """The most memory that this rank had: of its GPU, or of the process."""
    import torch

    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # given in KiB


def _without_values(make: Any, rank: int) -> Any:
    """A model on the meta device whose values are made part by part.

    Where that cannot be, the first rank has values for all; the others too, where a model looks at
    them while it is made.
    """
    import torch

    from foretell.pytorch.deploy.deferred import NotDeferred, deferred

    try:
        return deferred(make)
    except NotDeferred:
        torch.manual_seed(0)
    if rank == 0:
        return make()
    try:
        with torch.device("meta"):
            return make()
    except Exception:  # whatever a script does with values that are not there
        torch.manual_seed(0)
        return make()


def load(path: Path) -> ModuleType:
    """The user's script as a module; it need not be importable from anywhere else."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    for name in ("model", "batch"):
        if not callable(getattr(module, name, None)):
            raise InputError(
                f"`{path}` defines no `{name}`",
                hint="define model() and batch(rank, size); loss and optimizer if you like",
            )
    return module


def _optimizer(script: ModuleType, plan: Plan, model: Any) -> Any:
    import torch

    own = getattr(script, "optimizer", None)
    if own is not None:
        return own(model.parameters())
    if plan.optimizer not in ("sgd", "momentum"):
        return torch.optim.Adam(model.parameters())
    momentum = 0.9 if plan.optimizer == "momentum" else 0.0
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)


def _failure(error: BaseException, phase: str) -> dict[str, Any]:
    """A failure in the form that the launcher reads."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(place in f.filename for place in _LIBRARIES)]
    own = own or list(frames)
    text = str(error).strip()
    words = ("gloo", "nccl", "connection", "process group", "timed out", "socket")
    kinds = {kind.__name__ for kind in type(error).__mro__}  # DistError: torch.distributed's own
    is_torch = "DistError" in kinds
    is_torch |= isinstance(error, RuntimeError) and any(w in text.lower() for w in words)
    row = {
        "message": f"{type(error).__name__}: {_first(text)}",
        "hint": "",
        "is_ours": False,
        "is_consequence": is_torch,  # the peer at the other end went away, most likely
        "phase": phase,
        "where": f"{own[-1].filename}:{own[-1].lineno}" if own else "",
        "time": time.time(),
    }
    if isinstance(error, ForetellError):
        row |= {"message": error.message, "hint": error.hint, "is_ours": True}
    return row


def _first(text: str) -> str:
    return text.splitlines()[0][:300] if text else ""


def _place(thread: int | None) -> tuple[str, bool]:
    """The line of user code that a thread is at, and whether it waits for other ranks.

    It waits where the innermost code is torch's or our own communication: waiting itself is C++.
    """
    frame = sys._current_frames().get(thread or 0)
    names = []
    while frame is not None:
        names.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    inner = names[0][0] if names else ""
    waits = _TALK in inner or (_OURS in inner and inner != __file__)
    own = [
        n for n in names if "site-packages" not in n[0] and _OURS not in n[0] and n[0][:1] != "<"
    ]
    file, line = (own or names or [("", 0)])[0]
    return f"{file}:{line}", waits


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def redirect(path: Path) -> None:
    """What this rank prints goes to its own file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
