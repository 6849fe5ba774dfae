"""The studio over HTTP: who gets in, what an upload answers, and that paths stay closed."""

import gzip
import importlib
import json
import socket
import threading
import urllib.error
import urllib.request
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("dash", reason="the studio needs the extra `web`")

from foretell.errors import InputError
from foretell.studio import serve

STEP = Path(__file__).resolve().parents[2] / "docs" / "guides" / "step.txt"


@pytest.fixture(scope="module")
def studio():
    running = serve([STEP], most=4 << 20)
    yield running
    running.close()
    assert not running.desk.folder.exists()


def asked(url, data=None, **headers):
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=250) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def test_it_listens_on_this_machine_alone(studio):
    assert studio.server.server_address[0] == "127.0.0.1"


def test_without_the_token_there_is_nothing(studio):
    parts = urlsplit(studio.url)
    almost = parts.path[:-2] + "/"
    for path in ("/", "/_dash-layout", "/upload?name=x.json", "/wrong/", "/out/x.html", almost):
        assert asked(f"http://{parts.netloc}{path}")[0] == 404, path


def test_with_the_token_there_is_a_page(studio):
    status, body, headers = asked(studio.url)
    assert status == 200
    assert b"foretell studio" in body
    assert headers["X-Frame-Options"] == "DENY"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert nonce not in asked(studio.url)[2]["Content-Security-Policy"]
    scripts = body.count(b"<script")
    assert scripts == body.count(f'<script nonce="{nonce}"'.encode()) > 3
    assert b"http://" not in body.replace(studio.url.encode(), b"")
    assert b"https://" not in body


def test_two_studios_have_two_tokens(studio):
    other = serve()
    assert urlsplit(other.url).path != urlsplit(studio.url).path
    assert len(urlsplit(other.url).path) >= 32
    other.close()


def test_another_host_is_refused(studio):
    assert asked(studio.url, Host="evil.example")[0] == 404
    assert asked(studio.url, Host=f"localhost:{urlsplit(studio.url).port}")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "out/../../../etc/passwd",
        "out/%2e%2e%2fcluster.toml",
        "out//etc/passwd",
        "assets/../serve.py",
        "assets/%2e%2e/serve.py",
        "out/missing.html",
    ],
)
def test_no_path_leads_out(studio, path):
    parts = urlsplit(studio.url)
    link = HTTPConnection(parts.hostname, parts.port, timeout=10)
    link.request("GET", parts.path + path)  # as it stands: urllib would tidy it
    answer = link.getresponse()
    body = answer.read()
    assert answer.status in (404, 400) or b"react-entry-point" in body
    assert b"root:" not in body
    assert b"def serve" not in body


def upload(studio, name, raw):
    status, body, _ = asked(f"{studio.url}upload?name={urllib.request.quote(name)}", raw)
    return status, json.loads(body)


def test_an_upload_puts_a_step_on_the_desk(studio):
    status, found = upload(studio, "mine.txt", STEP.read_bytes())
    assert status == 200
    assert studio.desk.step(found["step"]).name == "mine.txt"
    assert list(studio.desk.folder.glob("upload-*")) == []


def test_markup_in_a_name_stays_text(studio):
    status, found = upload(studio, "<img src=x onerror=alert(1)>.txt", STEP.read_bytes())
    assert status == 200
    assert found["name"] == "<img src=x onerror=alert(1)>.txt"
    _, body, headers = asked(studio.url + "_dash-layout")
    assert b"<img" not in body
    assert "<img" in json.dumps(json.loads(body))  # written in code, and a browser may not guess
    assert headers["Content-Type"] == "application/json"
    assert headers["X-Content-Type-Options"] == "nosniff"


# A step that ends before it begins, around a kernel: no time passes.
STILL = json.dumps({"schemaVersion": 1, "traceEvents": [
    {"ph": "X", "name": "ProfilerStep#1", "cat": "user_annotation", "pid": 1, "tid": 1, "ts": 5,
     "dur": -100},
    {"ph": "X", "name": "k", "cat": "kernel", "pid": 0, "tid": 7, "ts": 3, "dur": 1},
]}).encode()  # fmt: skip


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("x.json", b"not json", "x.json"),
        ("x.json", b"{}", "x.json"),
        ("x.graph", b"\x00" * 100, "x.graph"),
        ("x.exe", b"MZ", "none of the files"),
        ("x.json", b"", "is empty"),
        ("bomb.json.gz", gzip.compress(bytes(1 << 20)), "bomb.json.gz"),
        ("big.json", bytes(5 << 20), "more than 4 MiB"),
        ("../../etc/x.plan", b'{"dp": 2}', "x.plan"),
        ("deep.json", b"[" * 1_000_000, "deep.json"),
        ("x.json", b'{"traceEvents": ["<script>", 1, null]}', "x.json"),
        ("still.json", STILL, "0 s"),
    ],
)
def test_bad_uploads_say_what_is_wrong(studio, name, raw, says):
    status, found = upload(studio, name, raw)
    assert status == 400
    assert says in found["error"]
    assert str(studio.desk.folder) not in found["error"]
    assert "Traceback" not in found["error"]
    assert list(studio.desk.folder.glob("upload-*")) == []


def test_a_gibibyte_is_refused_before_it_is_sent(studio):
    parts = urlsplit(studio.url)
    with socket.create_connection((parts.hostname, parts.port), 10) as link:
        lines = [f"POST {parts.path}upload?name=x.json HTTP/1.1", f"Host: {parts.netloc}"]
        head = "\r\n".join([*lines, f"Content-Length: {1 << 30}", "", ""])
        link.sendall(head.encode() + b"x" * 1000)
        answer = link.recv(65536)
    assert b" 400 " in answer.splitlines()[0]
    assert list(studio.desk.folder.glob("upload-*")) == []


def test_a_long_call_is_refused(studio):
    status, _, _ = asked(studio.url + "_dash-update-component", bytes(5 << 20))
    assert status == 413


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"output": "x", "inputs": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b"",
        b"[]",
        b"{}",
        b'{"output": 5, "inputs": []}',
        b'{"output": "x", "inputs": {}}',
        b"\xff",
    ],
)
def test_what_is_no_call_is_a_bad_request(studio, body):
    kind = {"Content-Type": "application/json"}
    assert asked(studio.url + "_dash-update-component", body, **kind)[0] == 400


def test_pages_elsewhere_are_refused(studio):
    address = studio.url + "_dash-update-component"
    here = f"http://{urlsplit(studio.url).netloc}"
    for origin in ("http://evil.example", "null", "https://127.0.0.1", here + "0"):
        assert asked(address, b"{}", Origin=origin)[0] == 403, origin
        assert asked(f"{studio.url}upload?name=x.json", b"{}", Origin=origin)[0] == 403, origin
    assert asked(address, b"{}", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert asked(address, b"{}", Origin=here)[0] == 400


def test_a_body_without_a_length_is_refused(studio):
    parts = urlsplit(studio.url)
    for path in ("upload?name=x.json", "_dash-update-component"):
        with socket.create_connection((parts.hostname, parts.port), 250) as link:
            lines = [f"POST {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc}"]
            head = "\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""])
            link.sendall(head.encode())
            assert b" 411 " in link.recv(65536).splitlines()[0]


def test_a_connection_that_stalls_is_closed(monkeypatch):
    monkeypatch.setattr(importlib.import_module("foretell.studio.serve"), "STALLED", 0.3)
    running = serve()
    try:
        parts = urlsplit(running.url)
        with socket.create_connection((parts.hostname, parts.port), 250) as link:
            link.sendall(b"POST / HTT")
            assert link.recv(1) == b""
    finally:
        running.close()


def test_there_are_only_so_many_connections(monkeypatch):
    module = importlib.import_module("foretell.studio.serve")
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 2)
    running = serve()
    parts = urlsplit(running.url)
    try:
        held = [socket.create_connection((parts.hostname, parts.port), 250) for _ in range(2)]
        for link in held:
            link.sendall(b"GET ")
        with socket.create_connection((parts.hostname, parts.port), 250) as more:
            assert more.recv(1) == b""
        for link in held:
            link.close()
    finally:
        running.close()


@pytest.mark.parametrize("planner", ["fusion:resume=/tmp/x", "fusion:start=/etc/passwd"])
def test_a_planner_opens_no_file(planner):
    from foretell.studio.answers import allowed

    with pytest.raises(InputError, match="the studio opens none"):
        allowed(planner)
    assert allowed("oracle").name == "oracle"


def call(studio, changes, own=""):
    """What Dash's own script would send when changes are ticked."""
    outputs = [("headline", "children"), ("problem", "children"), ("assumed", "children"),
               ("now", "data")]  # fmt: skip
    inputs = [("steps", "1"), ("changes", changes), ("own", own), ("cluster", ""), ("machine", "")]
    kinds = ["data" if name == "machine" else "value" for name, _ in inputs]
    body = {
        "output": "..{}..".format("...".join(f"{i}.{p}" for i, p in outputs)),
        "outputs": [{"id": i, "property": p} for i, p in outputs],
        "inputs": [
            {"id": i, "property": kind, "value": v}
            for (i, v), kind in zip(inputs, kinds, strict=True)
        ],
        "changedPropIds": ["changes.value"],
        "state": [],
    }
    raw, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    status, answer, _ = asked(studio.url + "_dash-update-component", raw, **kind)
    return status, json.loads(answer)["response"] if status == 200 else answer


def test_ticking_a_change_answers(studio):
    status, found = call(studio, ["faster-host:times=2"])
    assert status == 200
    assert found["now"]["data"]["changes"] == ["faster-host"]
    assert found["now"]["data"]["predicted_s"] < found["now"]["data"]["baseline_s"]


def test_a_change_that_does_not_apply_says_why(studio):
    status, found = call(studio, ["channels-last"])
    assert status == 200
    assert found["problem"]["children"]
    assert found["now"]["data"] is None
    assert "headline" not in found


@pytest.mark.parametrize("own", ["nonsense", "faster:op=gemm,times=x", "amp " * 50, "<script>"])
def test_nonsense_is_answered_in_words(studio, own):
    status, found = call(studio, [], own)
    assert status == 200
    assert found["problem"]["children"]


def test_twenty_ask_at_once(studio):
    specs = [f"faster:op=gemm,times={1 + k / 10:g}" for k in range(1, 21)]
    found = {}

    def ask(spec):
        found[spec] = call(studio, [], spec)

    threads = [threading.Thread(target=ask, args=(spec,)) for spec in specs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    assert {status for status, _ in found.values()} == {200}
    steps = [found[spec][1]["now"]["data"]["predicted_s"] for spec in specs]
    assert steps == sorted(steps, reverse=True)
    assert len(found) == 20


def test_a_figure_of_nothing_has_no_axes():
    from foretell.studio.figures import compared, nothing

    assert compared([]) == nothing()
    assert not any(nothing()["layout"][axis]["visible"] for axis in ("xaxis", "yaxis"))
