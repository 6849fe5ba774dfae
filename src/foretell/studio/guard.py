"""Access control: only requests with the token, from this machine's own address.

Every address begins with the token. A request must also name this machine as its host, so that no
page elsewhere can reach the studio through a name that resolves here.
"""

from __future__ import annotations

import secrets
from importlib import resources
from pathlib import Path
from typing import Any

from foretell.errors import ForetellError, InputError
from foretell.io import decode
from foretell.report.page import SCRIPTS
from foretell.studio.calls import Studio, answer
from foretell.studio.desk import Desk, open_file
from foretell.studio.uploads import MOST, display_name, receive, too_large

HOSTS = ("127.0.0.1", "localhost")
ASSETS = (*(f"{name}.js" for name in SCRIPTS if name != "main"), "style.css", "studio.css",
          "studio.js")  # fmt: skip
MOST_CALL = 4 * 2**20  # bytes of a call of the page itself
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# Scripts and styles of this server, and those of a page that carry the number of that one answer.
_POLICY = (
    "default-src 'self'; script-src 'self' 'nonce-{0}'; style-src 'self' 'nonce-{0}'; "
    "img-src 'self' data: blob:; connect-src 'self'; object-src 'none'; base-uri 'none'; "
    "frame-ancestors 'none'; form-action 'self'"
)
# An exported report is a page of its own: it can reach nothing of this server.
_EXPORTED = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; img-src data: blob:; "
    "object-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)


def protect(server: Any, token: str) -> None:
    """Refuse requests without the token, for another host or from another page."""
    from flask import abort, request

    def check() -> None:
        host = request.host.rpartition(":")[0] or request.host
        if host not in HOSTS or not (request.path + "/").startswith(f"/{token}/"):
            abort(404)
        if not _is_from_here(request):
            abort(403)
        if request.method == "POST" and request.content_length is None:
            abort(411)  # what comes in pieces of unknown number has no limit
        if request.path == f"/{token}/upload":
            return
        if (request.content_length or 0) > MOST_CALL:
            abort(413)
        if request.method == "POST" and not _is_call(request.get_data(cache=True)):
            abort(400)

    def close(response: Any) -> Any:
        nonce = secrets.token_urlsafe(16)
        if response.mimetype == "text/html" and response.status_code == 200:
            response.direct_passthrough = False
            response.set_data(_with_nonce(response.get_data(), nonce))
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        policy = _EXPORTED if request.endpoint == "out" else _POLICY
        response.headers["Content-Security-Policy"] = policy.format(nonce)
        return response

    server.before_request(check)
    server.after_request(close)


def _is_from_here(request: Any) -> bool:
    """Whether a request was made by a page of this server, or by no page."""
    origin = request.headers.get("Origin")
    is_own = origin in (None, f"http://{request.host}")
    return is_own and request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")


def _is_call(raw: bytes) -> bool:
    """Whether bytes are what the page sends: one object, no deeper than it needs."""
    try:
        found = decode(raw, dict[str, Any], "the call")
    except InputError:
        return False
    return all(isinstance(value, (str, int, float, list, type(None))) for value in found.values())


def _with_nonce(page: bytes, nonce: str) -> bytes:
    """A page of ours whose scripts and styles carry a number; texts in it have no brackets."""
    mark = f' nonce="{nonce}"'.encode()
    return page.replace(b"<script", b"<script" + mark).replace(b"<style", b"<style" + mark)


def take_uploads(server: Any, token: str, desk: Desk, most: int = MOST) -> None:
    """`POST upload?name=…` with a file as its body puts a step on the desk."""
    from flask import jsonify, request

    def upload() -> Any:
        name = request.args.get("name", "")
        try:
            if (request.content_length or 0) > most:
                raise too_large(name, most)
            path = receive(request.stream.read, name, desk.folder, most)
            try:
                key = open_file(desk, path, display_name(name))
            finally:
                path.unlink(missing_ok=True)
            return jsonify({"step": key, "name": display_name(name)})
        except ForetellError as error:
            return jsonify({"error": _without_paths(error, desk.folder, name)}), 400

    server.add_url_rule(f"/{token}/upload", "upload", upload, methods=["POST"])


def _without_paths(error: ForetellError, folder: Path, name: str) -> str:
    """An error message without the studio's temporary file names."""
    text = str(error)
    for path in (folder.resolve(), folder):
        start = text.find(f"{path}/upload-")
        while start >= 0:
            stop = text.find("`", start)
            text = text[:start] + display_name(name) + (text[stop:] if stop >= 0 else "")
            start = text.find(f"{path}/upload-")
    return text


def take_calls(server: Any, token: str, studio: Studio) -> None:
    """`POST call/NAME` with an object as its body answers what the page asks for."""
    from flask import Response, jsonify, request

    def call_endpoint(name: str) -> Any:
        arguments = decode(request.get_data(cache=True), dict[str, Any], "the call")
        try:
            found = answer(studio, name, arguments)
        except ForetellError as error:
            return jsonify({"error": error.message, "hint": error.hint or ""})
        return Response(found, mimetype="text/plain") if isinstance(found, str) else jsonify(found)

    server.add_url_rule(f"/{token}/call/<name>", "called", call_endpoint, methods=["POST"])


def send_page(server: Any, token: str) -> None:
    """`GET` of the studio's own page, and of the scripts and styles it is made of."""
    from flask import Response, abort

    def page() -> Any:
        return Response(_asset("studio.html"), mimetype="text/html")

    def asset(name: str) -> Any:
        if name not in ASSETS:
            abort(404)
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(_asset(name), mimetype=kind)

    server.add_url_rule(f"/{token}/", "page", page)
    server.add_url_rule(f"/{token}/assets/<name>", "asset", asset)


def _asset(name: str) -> str:
    """A file of the studio's, or of the report's whose drawings it shares."""
    room, folder = ("studio", "assets") if name.startswith("studio") else ("report", "web")
    return resources.files(f"foretell.{room}").joinpath(folder, name).read_text()


def send_files(server: Any, token: str, desk: Desk) -> None:
    """`GET out/NAME` sends what was exported, and nothing else."""
    from flask import send_from_directory

    def out(name: str) -> Any:
        is_page = name.endswith(".html")
        return send_from_directory(
            (desk.folder / "out").resolve(), name, as_attachment=not is_page, max_age=0
        )

    server.add_url_rule(f"/{token}/out/<name>", "out", out)
