"""Start the studio: a folder of its own, a token, a server on this machine's own address."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.studio.calls import Studio
from foretell.studio.desk import Desk, open_file
from foretell.studio.guard import protect, send_files, send_page, take_calls, take_uploads
from foretell.studio.jobs import Jobs
from foretell.studio.machines import Machines
from foretell.studio.uploads import MOST

HOST = "127.0.0.1"
STALLED = 30.0  # seconds without a byte after which a connection is closed
MOST_CONNECTIONS = 64


@dataclass(frozen=True, eq=False)
class Running:
    """A studio that answers at `url` until it is closed."""

    url: str
    desk: Desk
    server: Any
    thread: threading.Thread

    def close(self) -> None:
        """Stop answering and take the studio's folder away."""
        self.server.shutdown()
        self.thread.join(5)
        self.server.server_close()
        shutil.rmtree(self.desk.folder, ignore_errors=True)


def serve(
    files: Sequence[Path] = (), port: int = 0, most: int = MOST, real: float | None = None
) -> Running:
    """Start a studio with files on its desk; port 0 takes a free one.

    `real` is the measured time of a step without the profiler, in seconds.
    """
    if find_spec("flask") is None:
        raise InputError("the studio needs Flask", hint="pip install 'foretell[web]'")
    folder = Path(tempfile.mkdtemp(prefix="foretell-studio-"))
    desk = Desk(folder)
    try:
        for path in files:
            open_file(desk, path, path.name, None, real)
        token = secrets.token_urlsafe(24)
        server = _server(_app(desk, token, most), port)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    thread = threading.Thread(target=server.serve_forever, daemon=True, name="studio")
    thread.start()
    return Running(f"http://{HOST}:{server.server_port}/{token}/", desk, server, thread)


def _app(desk: Desk, token: str, most: int) -> Any:
    from flask import Flask

    app = Flask("foretell.studio", static_folder=None)
    studio = Studio(desk, Jobs(), Machines(desk.folder))
    protect(app, token)
    send_page(app, token)
    take_calls(app, token, studio)
    take_uploads(app, token, desk, most)
    send_files(app, token, desk)
    return app


def _server(app: Any, port: int) -> Any:
    """A server that answers several requests at once, waits for none for long, and is quiet."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        timeout = STALLED  # of every read and write of a connection

        def log_request(self, *_: Any) -> None:
            return

    try:
        made = make_server(HOST, port, app, threaded=True, request_handler=Quiet)
    except (OSError, SystemExit):
        raise InputError(f"port {port} is taken", hint="choose another with --port") from None
    made.daemon_threads = True  # type: ignore[attr-defined]
    _limit(made)
    return made


def _limit(server: Any) -> None:
    """No more connections at once than threads are affordable; others are closed."""
    free = threading.BoundedSemaphore(MOST_CONNECTIONS)
    start, work = server.process_request, server.process_request_thread

    def process_request(request: Any, address: Any) -> None:
        if free.acquire(blocking=False):
            start(request, address)
        else:
            server.shutdown_request(request)

    def process_request_thread(request: Any, address: Any) -> None:
        try:
            work(request, address)
        finally:
            free.release()

    server.process_request = process_request
    server.process_request_thread = process_request_thread
