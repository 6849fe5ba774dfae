"""Processes forked from one that has imported torch: each then costs a tenth of a second.

The server is of its own: the one that Python keeps for all may belong to others by now, with
nothing imported, and every process would spend seconds on torch.
"""

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
_ROOT = Path(__file__).resolve().parents[2]
_server = forkserver.ForkServer()
_server.set_forkserver_preload(["tests.pytorch.preload"])


def start(process):
    """Start a process of the context."""
    was, here = forkserver.connect_to_new_process, os.getcwd()
    forkserver.connect_to_new_process = _server.connect_to_new_process
    try:
        os.chdir(_ROOT)  # what it imports lies here
        _server.ensure_running()
        os.chdir(here)
        process.start()
    finally:
        os.chdir(here)
        forkserver.connect_to_new_process = was
