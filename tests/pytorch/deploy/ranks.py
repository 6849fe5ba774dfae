"""Runs functions on several gloo ranks: processes forked from one that has imported torch.

`on_ranks(n, function)` gives back what the function returned on each rank. The server process is
started once a test run and imports torch once, so that a group of ranks costs a tenth of a second.
"""

import os
import socket
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

from tests.pytorch import forked

LIMIT = 240.0  # seconds for all that a group of ranks does, on a busy machine too


def on_ranks(size, function, *arguments, limit=LIMIT):
    """What `function(*arguments)` returns on each of `size` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        receive = forked.CONTEXT.SimpleQueue()
        processes = [
            forked.CONTEXT.Process(
                target=_rank, args=(rank, size, folder, receive, function, arguments), daemon=True
            )
            for rank in range(size)
        ]
        for process in processes:
            forked.start(process)
        try:
            return _collect(receive, processes, limit)
        finally:
            for process in processes:
                process.join(2)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(receive, processes, limit):
    found, ends = {}, time.monotonic() + limit
    while len(found) < len(processes):
        if receive.empty():
            assert time.monotonic() < ends, f"ranks {set(range(len(processes))) - set(found)} hang"
            dead = [r for r, p in enumerate(processes) if p.exitcode and r not in found]
            if dead:
                time.sleep(0.2)
                assert not receive.empty(), f"ranks {dead} ended with nothing said"
            time.sleep(0.005)
            continue
        rank, value, error = receive.get()
        assert error is None, f"rank {rank}:\n{error}"
        found[rank] = value
    return [found[rank] for rank in range(len(processes))]


def _rank(rank, size, folder, send, function, arguments):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT)
    )
    try:
        send.put((rank, function(*arguments), None))
    except BaseException:
        send.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def free_port():
    """A port nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
