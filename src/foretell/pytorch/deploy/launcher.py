"""Starts a plan on several ranks through torchrun, watches them, and ends them: no torch needed.

A run ends in one of four ways: every rank is done; a rank failed or died, and is named; no rank has
moved for the time limit, and the one that the others wait for is named; or the user stopped it.
In all four no process is left: ranks are ended by their own ids, and end by themselves when
the launcher is gone. A run whose rank failed, died or hung starts again from its last checkpoint,
as often as was asked for.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foretell.errors import ForetellError, InputError
from foretell.plan import Plan
from foretell.plan.unsupported import require_in_script, require_runnable
from foretell.pytorch.deploy import run_files
from foretell.pytorch.deploy.run_files import BEFORE, RunRequest, State
from foretell.pytorch.intake.files import undo
from foretell.pytorch.intake.launch import capture_script
from foretell.pytorch.intake.request import Script
from foretell.pytorch.ranks.pin import allowed

Progress = Callable[[str, float | None], None]
_POLL = 0.1  # seconds between looks at the ranks
_SETTLE = 1.0  # seconds for others to say why they failed too, so that the first cause is known
_GRACE = 3.0  # seconds for ranks to end when asked, before they are made to
_BEGIN = 60.0  # seconds for imports before the first step, which a busy machine may take
_LONGEST = 1e9  # seconds that a time limit may have: what torch's timer can count
_STALE = 5.0  # seconds without a sign of life: the rank is stopped or stuck outside Python
_ROOM = 1 << 20  # bytes that a run's own files need at least
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_CAUSES = {  # of what torchrun writes, in small letters
    "address already in use": "the port of --rendezvous is in use",
    "eaddrinuse": "the port of --rendezvous is in use",
    "no space left on device": "the disk is full",
    "rendezvousconnectionerror": "no node answers at --rendezvous",
    "rendezvoustimeouterror": "not all nodes came to --rendezvous in time",
}
# what torchrun says in its log of ranks that it ends because another has died
_CLOSED = re.compile(r"Sending process (\d+) closing signal")
# glibc gives large blocks back to the system and maps them again for the next op: on a CPU that
# doubles what an optimizer's step takes, or does not, by where the blocks lie
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
# libgomp's threads spin for 300 000 pauses when a parallel region has ended, ten ms and more, on
# cores that the ranks' messages want; a thousand are longer than from one op to the next
_SPIN_SHORTLY = {"GOMP_SPINCOUNT": "1000"}


class RankFailure(InputError):
    """A rank failed, died or hung in the middle: the same run, started again, may end well."""


def launch(
    request: RunRequest,
    *,
    restarts: int = 0,
    say: Callable[[str], None] = lambda words: None,
    **options: Any,
) -> dict[str, Any]:
    """Run a plan, again after a failure of a rank while there are restarts left.

    The options are those of `launch_once`; from the second time on the run goes on from its last
    checkpoint, where it writes any.
    """
    until = _steps_kept(request) + request.warmup + request.steps
    for again in range(restarts + 1):
        try:
            found = launch_once(request, **options)
            return found | {"restarts": again}
        except RankFailure as error:
            if again == restarts:
                raise
            say(f"restart {again + 1} of {restarts}: {error.message.splitlines()[0]}")
            if request.checkpoint:
                request = replace(request, resume=True, until=until)
    raise AssertionError  # the last turn returns or raises


def _steps_kept(request: RunRequest) -> int:
    """Steps of the checkpoint that a run goes on from; 0 where it begins."""
    names = (
        [path.name for path in Path(request.checkpoint).glob("step-*")] if request.resume else []
    )
    return max((int(n) for name in names if (n := name.removeprefix("step-")).isdigit()), default=0)


def launch_once(
    request: RunRequest,
    *,
    ranks: int = 0,  # on this machine; as many as the plan needs
    folder: Path | None = None,
    nodes: int = 1,
    rendezvous: str = "",  # host:port that all nodes know
    progress: Progress = lambda words, share: None,
    show: bool = False,  # what the first rank prints
) -> dict[str, Any]:
    """Run a plan and give back what was measured; an error names the rank that ended it.

    `progress` receives what the last rank does and, once steps are over, the share that is.
    """
    plan = Plan.parse(request.plan)
    require_runnable(plan)
    ranks = ranks or plan.ranks // nodes
    _check(plan, request, ranks, nodes, rendezvous)
    with _place(folder) as place:
        run_files.write_request(place, RunRequest(**vars(request) | {"launcher": os.getpid()}))
        process = _start(place, ranks, nodes, rendezvous)
        shown = _Shown(place / "rank-0.log" if show else None)
        try:
            supervise(process, place, ranks, request.timeout, shown.around(progress), nodes)
        finally:
            shown.read()
        return {"folder": str(place), "ranks": run_files.results(place)}


def supervise(
    process: subprocess.Popen[bytes],
    place: Path,
    ranks: int,
    timeout: float,
    progress: Progress,
    nodes: int = 1,
) -> None:
    """Wait until all ranks are done; leave none behind, however they end."""
    try:
        with _heard():
            _watch(process, place, ranks, timeout, progress, nodes)
    finally:
        _end(process, place)


def train(request: RunRequest, **options: Any) -> dict[str, Any]:
    """Run a script with a loop of its own; the options are those of `launch`.

    The first time, its first steps are compared with one process; files that it writes meanwhile
    are taken back.
    """
    require_in_script(Plan.parse(request.plan))
    verdict = _first_steps(request, options)
    with tempfile.TemporaryDirectory(prefix="foretell-step-") as name:
        graph, why = _captured(request, Path(name), options) if request.predict else ("", None)
        found = launch(replace(request, goal="train", captured=graph), **options)
    more = {"verified": verdict} | ({"predicted": why} if why else {})
    found["ranks"] = {rank: row | more for rank, row in found["ranks"].items()}
    return found


def _captured(
    request: RunRequest, folder: Path, options: dict[str, Any]
) -> tuple[str, dict[str, Any] | None]:
    """The graph of a step of the script, or why it is not predicted."""
    if options.get("nodes", 1) > 1:
        return "", {"why": "a script is predicted on one node only"}
    reported = options.get("progress", lambda words, share: None)
    path = folder / "step.graph"
    try:
        capture_script(
            Script(request.script, request.args, request.is_module), path, on="cpu",
            progress=lambda words, share: reported(f"predict: {words}", None),
        )  # fmt: skip
    except ForetellError as error:
        return "", {"why": error.message}
    return str(path), None


def _first_steps(request: RunRequest, options: dict[str, Any]) -> dict[str, Any] | None:
    """Result of comparing a script's first steps, or why they were not compared."""
    path = run_files.kept("verified") / f"{_script_key(request)}.json"
    if request.verify == "no":
        return None
    before: dict[str, Any] | None = run_files.read(path) if request.verify == "first" else None
    if before:
        return before | {"before": True}
    if options.get("nodes", 1) > 1:
        return {"skipped": "several nodes; run it once on one with --verify"}
    reported = options.get("progress", lambda words, share: None)

    def verifying(words: str, share: float | None) -> None:
        reported(f"verify: {words}", share)

    with tempfile.TemporaryDirectory(prefix="foretell-verify-") as name:
        folder = Path(name)
        try:
            alone = replace(request, goal="reference", plan="dp=1")
            _undone(alone, ranks=1, folder=folder, progress=verifying)
        except ForetellError as error:
            return {"skipped": f"one process did not run it: {error.message}"}
        plan = replace(request, goal="compare")
        found = _undone(plan, ranks=options.get("ranks", 0), folder=folder, progress=verifying)
    verdict: dict[str, Any] = found["ranks"][0]["verified"]
    run_files.keep(path, {"plan": request.plan} | verdict)
    return verdict


def _undone(request: RunRequest, **options: Any) -> dict[str, Any]:
    """Launch, and take back what the script wrote."""
    try:
        return launch(request, **options)
    finally:
        undo(options["folder"])


def _script_key(request: RunRequest) -> str:
    """The same where script, arguments, plan, device and torch are the same."""
    text = "" if request.is_module else Path(request.script).read_text(errors="replace")
    words = [text, request.script, *request.args, request.plan, request.batch_norm, request.device]
    words.append(version("torch"))
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:24]


@contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    """Where a run writes; a place of our own goes again after an error that does not name it."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InputError(f"`{folder}` is a file", hint="-o names a folder")
    try:
        place = folder or Path(tempfile.mkdtemp(prefix="foretell-run-"))
        place.mkdir(parents=True, exist_ok=True)
        for old in place.glob("rank-*"):
            old.unlink()
    except OSError as error:
        raise _unwritable(folder or Path(tempfile.gettempdir()), error) from None
    try:
        yield place
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise _unwritable(place, error) from None
    except ForetellError as error:
        if folder is None and str(place) not in str(error):
            shutil.rmtree(place, ignore_errors=True)
        raise


def _unwritable(place: Path, error: OSError) -> InputError:
    return InputError(
        f"`{place}` cannot be written: {error.strerror or error}",
        hint="-o names a folder with room that is yours",
    )


def _check(plan: Plan, request: RunRequest, ranks: int, nodes: int, rendezvous: str) -> None:
    is_file = Path(request.script).is_file() and Path(request.script).suffix == ".py"
    if not is_file and not request.is_module:
        raise InputError(
            f"there is no script `{request.script}`", hint="name a .py file that trains a model"
        )
    if not 0 < request.timeout < _LONGEST:
        raise InputError(f"a time limit of {request.timeout:g} s", hint="give seconds above zero")
    if plan.ranks != ranks * nodes:
        raise InputError(
            f"the plan `{plan}` needs {plan.ranks} ranks, not {ranks * nodes}",
            hint=f"run it with -n {max(plan.ranks // nodes, 1)}",
        )
    if nodes > 1 and not rendezvous:
        raise InputError(
            f"{nodes} nodes have to meet somewhere", hint="give --rendezvous HOST:PORT on each"
        )


class _Shown:
    """Forwards what a rank prints, as it comes, up to a traceback, which the log keeps."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.at = path, 0

    def around(self, progress: Progress) -> Progress:
        def reported(words: str, share: float | None) -> None:
            self.read()
            progress(words, share)

        return reported

    def read(self) -> None:
        if self.path is None or not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.at)
            new = file.read()
        self.at += len(new)
        text, mark, _ = new.decode(errors="replace").partition(f"{run_files.ENDED}\n")
        self.path = None if mark else self.path
        sys.stderr.write(text)
        sys.stderr.flush()


def _start(folder: Path, ranks: int, nodes: int, rendezvous: str) -> subprocess.Popen[bytes]:
    more = [f"--nnodes={nodes}", f"--rdzv-endpoint={rendezvous or 'localhost:0'}"]
    return torchrun("foretell.pytorch.deploy.worker", folder, ranks, more)


def torchrun(
    module: str,
    folder: Path,
    ranks: int,
    more: Sequence[str] = ("--nnodes=1", "--rdzv-endpoint=localhost:0"),
    prefix: Sequence[str] = (),  # of the command, where ranks are in a namespace of their own
) -> subprocess.Popen[bytes]:
    """Start ranks of a module that is given the folder they write to."""
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", *more]
    command += [f"--nproc-per-node={ranks}", "--max-restarts=0", "--monitor-interval=1"]
    command += ["--local-addr=127.0.0.1"] if prefix else []
    command += ["-m", module, str(folder)]
    own = {"GLOO_SOCKET_IFNAME": "lo"} if prefix else {}  # there is nothing else there
    threads = str(max(1, allowed() // ranks))
    with (folder / "launch.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": threads, **_KEEP_MEMORY, **_SPIN_SHORTLY, **os.environ, **own},
            start_new_session=True,  # Ctrl-C reaches us alone, and we end the ranks in order
        )


def _watch(
    process: subprocess.Popen[bytes],
    folder: Path,
    ranks: int,
    timeout: float,
    progress: Progress,
    nodes: int = 1,
) -> None:
    """Return when all ranks are done; raise as soon as one is known to have failed."""
    begun = last = time.time()
    while True:
        if _stops:  # Ctrl-C that met code which cannot be interrupted
            raise KeyboardInterrupt
        ended = process.poll()
        states = run_files.states(folder)
        if ended == 0 and len(run_files.results(folder)) == ranks:
            return
        has_failed = ended is not None or bool(run_files.errors(folder))
        if has_failed or _dead(states):
            time.sleep(_SETTLE)
            # A rank may be done between the reading of its state and the look at its process.
            if has_failed or _dead(run_files.states(folder)):
                raise _failure(folder, ranks, process, nodes)
        last = max([last, begun, *(s.moved for s in states.values())])
        limit = timeout if _have_begun(states, ranks) else max(timeout, _BEGIN)
        if time.time() - last > limit:
            raise _hang(states, ranks, limit, folder)
        progress(*_progress(states))
        time.sleep(_POLL)


_stops: list[int] = []  # Ctrl-C, as often as it came


@contextmanager
def _heard() -> Iterator[None]:
    """Note Ctrl-C besides raising it: one that meets a finalizer is lost otherwise."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: Any) -> None:
        _stops.append(number)
        raise KeyboardInterrupt

    _stops.clear()
    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _have_begun(states: dict[int, State], ranks: int) -> bool:
    """Whether every rank has come to its first step."""
    return len(states) == ranks and not any(s.phase in BEFORE for s in states.values())


def _progress(states: dict[int, State]) -> tuple[str, float | None]:
    """What the rank that is furthest behind does, and which share of its steps is over."""
    if not states:
        return "starting", None
    last = min(states.values(), key=lambda s: (s.done, s.moved))
    return last.phase, last.done or None


def _dead(states: dict[int, State]) -> list[int]:
    """Ranks whose process is gone though they were not done."""
    return [r for r, s in states.items() if s.phase != "done" and not _is_alive(s.pid)]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def _failure(
    folder: Path, ranks: int, process: subprocess.Popen[bytes], nodes: int = 1
) -> ForetellError:
    """The rank that ended the run: one that died silently, else the first that failed itself."""
    errors, states = run_files.errors(folder), run_files.states(folder)
    closed = _closed(folder)
    silent = [r for r in _dead(states) if r not in errors and states[r].pid not in closed]
    own = {r: e for r, e in errors.items() if not e["is_consequence"]}
    if own:
        rank = min(own, key=lambda r: own[r]["time"])
        return _said(rank, own[rank], folder)
    if not errors and _is_full(folder):
        what = f"rank {silent[0]} ended in {states[silent[0]].phase}" if silent else "the run ended"
        return InputError(
            f"{what}: the disk of `{folder}` is full",
            hint="make room, or name another folder with -o",
        )
    if silent:
        step = states[silent[0]].phase
        return RankFailure(
            f"rank {', '.join(map(str, silent))} died in {step}, without a word",
            hint=f"killed, or out of memory? its last words are in {folder}/rank-{silent[0]}.log",
        )
    if errors:
        rank = min(errors, key=lambda r: errors[r]["time"])
        return _lost(rank, errors[rank]) if nodes > 1 else _said(rank, errors[rank], folder)
    unseen = _unseen(states, ranks)
    code = process.poll()
    cause = _cause(folder)
    return InputError(
        f"the launch ended with {code} before rank {', '.join(map(str, unseen))} began{cause}",
        hint=f"see {folder}/launch.log",
    )


def _cause(folder: Path) -> str:
    """What torchrun's log says of a launch that never began, where that is known."""
    log = folder / "launch.log"
    text = log.read_text(errors="replace").lower() if log.exists() else ""
    found = [words for mark, words in _CAUSES.items() if mark in text]
    return f": {found[0]}" if found else ""


def _is_full(folder: Path) -> bool:
    return shutil.disk_usage(folder).free < _ROOM


def _closed(folder: Path) -> set[int]:
    """Processes that torchrun has ended itself: they went after the one that died, not before."""
    log = folder / "launch.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    return {int(pid) for pid in _CLOSED.findall(text)}


def _unseen(states: dict[int, State], ranks: int) -> list[int]:
    """Ranks that were not heard of; on a node that is not the first, how they are numbered is not
    known before they say so."""
    return sorted(set(range(ranks)) - set(states)) if all(r < ranks for r in states) else []


def _said(rank: int, error: dict[str, Any], folder: Path) -> ForetellError:
    if error["is_ours"]:
        return InputError(error["message"], hint=error["hint"])
    return RankFailure(
        f"rank {rank} failed in {error['phase']}: {error['message']}\n  at {error['where']}",
        hint=f"the whole traceback is in {folder}/rank-{rank}.log",
    )


def _lost(rank: int, error: dict[str, Any]) -> ForetellError:
    """On several nodes: what went first is known where it ran."""
    return RankFailure(
        f"rank {rank} lost its peers of another node in {error['phase']}: {error['message'][:160]}",
        hint="the rank that ended the run is named on its own node",
    )


def _hang(states: dict[int, State], ranks: int, timeout: float, folder: Path) -> ForetellError:
    """Name the rank that others wait for: unheard of, else behind, else not itself waiting."""
    unseen = _unseen(states, ranks)
    if unseen:
        return InputError(
            f"rank {', '.join(map(str, unseen))} did not begin within {timeout:g} s",
            hint=f"see {folder}/launch.log; on several nodes, start `foretell run` on each, with a "
            "port of --rendezvous that nothing else listens on",
        )
    now = time.time()
    stale = [r for r, s in states.items() if now - s.seen > _STALE and s.phase != "done"]
    least = min(s.moved for s in states.values())
    busy = [r for r, s in states.items() if not s.waits and s.phase != "done"]
    behind = [r for r, s in states.items() if s.moved == least]
    rank = (stale or busy or behind)[0]
    how = "gives no sign of life" if rank in stale else f"is at {states[rank].where}"
    return RankFailure(
        f"rank {rank} hangs: no rank has moved for {timeout:g} s, "
        f"and in {states[rank].phase} it {how}",
        hint="raise --timeout-s if a step may take that long",
    )


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Leave no process behind: ask torchrun to end its ranks, then end what is left by id."""
    pids = [s.pid for s in run_files.states(folder).values()]
    if process.poll() is None:
        process.terminate()
        for pid in pids:
            _signal(pid, signal.SIGCONT)  # one that was stopped cannot end
    ends = time.time() + _GRACE
    while time.time() < ends and (process.poll() is None or any(map(_is_alive, pids))):
        time.sleep(0.05)
    for pid in pids:
        _signal(pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
    process.wait()


def _signal(pid: int, number: int) -> None:
    if _is_alive(pid):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
