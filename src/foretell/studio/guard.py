"""Who may talk to the studio: those who know the token, from this machine's own address.

Every address begins with the token. A request must also name this machine as its host, so that no
page elsewhere can reach the studio through a name that resolves here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foretell.errors import ForetellError, InputError
from foretell.studio.desk import Desk, opened
from foretell.studio.uploads import MOST, keep, shown, too_large

HOSTS = ("127.0.0.1", "localhost")
MOST_CALL = 4 * 2**20  # bytes of a call of the page itself
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'"
    ),
}


def protect(server: Any, token: str) -> None:
    """Refuse whoever does not know the token or asks for another host."""
    from flask import abort, request

    def check() -> None:
        host = request.host.rpartition(":")[0] or request.host
        if host not in HOSTS or not (request.path + "/").startswith(f"/{token}/"):
            abort(404)
        is_upload = request.path == f"/{token}/upload"
        if not is_upload and (request.content_length or 0) > MOST_CALL:
            abort(413)

    def close(response: Any) -> Any:
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    server.before_request(check)
    server.after_request(close)


def take_uploads(server: Any, token: str, desk: Desk, most: int = MOST) -> None:
    """`POST upload?name=…` with a file as its body puts a step on the desk."""
    from flask import jsonify, request

    def upload() -> Any:
        name = request.args.get("name", "")
        try:
            if (request.content_length or 0) > most:
                raise too_large(name, most)
            path = keep(request.stream.read, name, desk.folder, most)
            try:
                key = opened(desk, path, shown(name))
            finally:
                path.unlink(missing_ok=True)
            return jsonify({"step": key, "name": shown(name)})
        except ForetellError as error:
            return jsonify({"error": _plain(error, desk.folder, name)}), 400

    server.add_url_rule(f"/{token}/upload", "upload", upload, methods=["POST"])


def _plain(error: ForetellError, folder: Path, name: str) -> str:
    """What went wrong, without the names the studio gives to files."""
    text = str(error)
    for path in (folder.resolve(), folder):
        start = text.find(f"{path}/upload-")
        while start >= 0:
            stop = text.find("`", start)
            text = text[:start] + shown(name) + (text[stop:] if stop >= 0 else "")
            start = text.find(f"{path}/upload-")
    return text


def send_files(server: Any, token: str, desk: Desk) -> None:
    """`GET out/NAME` sends what was exported, and nothing else."""
    from flask import send_from_directory

    def out(name: str) -> Any:
        is_page = name.endswith(".html")
        return send_from_directory(
            (desk.folder / "out").resolve(), name, as_attachment=not is_page, max_age=0
        )

    server.add_url_rule(f"/{token}/out/<name>", "out", out)


def known(name: str) -> str:
    """A name for an exported file made of letters, digits and dashes."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in name)
    found = kept.strip("-.")[:60]
    if not found:
        raise InputError(f"`{name[:40]}` makes no name for a file")
    return found
