"""The studio over HTTP: who gets in, what an upload answers, and that paths stay closed."""

import gzip
import importlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("flask", reason="the studio needs the extra `web`")

from foretell.errors import InputError
from foretell.studio import serve

KIND = "application/json"
STEP = Path(__file__).resolve().parents[2] / "docs" / "guides" / "step.txt"


@pytest.fixture(scope="module")
def studio():
    running = serve([STEP], most=4 << 20)
    yield running
    running.close()
    assert not running.desk.folder.exists()


def query(url, data=None, **headers):
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
    for path in ("/", "/call/desk", "/upload?name=x.json", "/wrong/", "/out/x.html", almost):
        assert query(f"http://{parts.netloc}{path}")[0] == 404, path


def test_with_the_token_there_is_a_page(studio):
    status, body, headers = query(studio.url)
    assert status == 200
    assert b"foretell studio" in body
    assert headers["X-Frame-Options"] == "DENY"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert nonce not in query(studio.url)[2]["Content-Security-Policy"]
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
    assert query(studio.url, Host="evil.example")[0] == 404
    assert query(studio.url, Host=f"localhost:{urlsplit(studio.url).port}")[0] == 200


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
    assert answer.status in (404, 400, 308)
    assert b"root:" not in body
    assert b"def serve" not in body


def upload(studio, name, raw):
    status, body, _ = query(f"{studio.url}upload?name={urllib.request.quote(name)}", raw)
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
    _, body, headers = query(studio.url + "call/desk", b"{}", **{"Content-Type": KIND})
    assert "<img" in json.dumps(json.loads(body))  # as a value, which a browser may not guess
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
    status, _, _ = query(studio.url + "call/whatif", bytes(5 << 20))
    assert status == 413


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"changes": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b"",
        b"[]",
        b'{"changes": {}}',
        b'{"step": {"key": "1"}}',
        b"\xff",
    ],
)
def test_what_is_no_call_is_a_bad_request(studio, body):
    assert query(studio.url + "call/whatif", body, **{"Content-Type": KIND})[0] == 400


def test_an_unknown_call_says_so(studio):
    status, body, _ = query(studio.url + "call/nonsense", b"{}", **{"Content-Type": KIND})
    assert (status, json.loads(body)["error"]) == (200, "the studio has no call `nonsense`")


@pytest.mark.parametrize("name", ["main.js", "page.html", "../serve.py", "studio.html"])
def test_only_its_own_assets_are_sent(studio, name):
    assert query(studio.url + "assets/" + name)[0] == 404


def test_pages_elsewhere_are_refused(studio):
    address = studio.url + "call/whatif"
    here = f"http://{urlsplit(studio.url).netloc}"
    for origin in ("http://evil.example", "null", "https://127.0.0.1", here + "0"):
        assert query(address, b"{}", Origin=origin)[0] == 403, origin
        assert query(f"{studio.url}upload?name=x.json", b"{}", Origin=origin)[0] == 403, origin
    assert query(address, b"{}", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert query(address, b"{", Origin=here)[0] == 400
    assert query(address, b"{}", Origin=here)[0] == 200


def test_a_body_without_a_length_is_refused(studio):
    parts = urlsplit(studio.url)
    for path in ("upload?name=x.json", "call/whatif"):
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
    from foretell.studio.views import allowed

    with pytest.raises(InputError, match="the studio opens none"):
        allowed(planner)
    assert allowed("oracle").name == "oracle"


def call(studio, name, **given):
    """What the page sends when something is chosen."""
    raw = json.dumps(given).encode()
    status, answer, _ = query(studio.url + "call/" + name, raw, **{"Content-Type": KIND})
    return status, json.loads(answer) if answer[:1] in b"{[" else answer


def test_ticking_a_change_answers(studio):
    status, found = call(studio, "whatif", step="1", changes=["faster-host:times=2"])
    assert status == 200
    assert found["changes"] == ["faster-host"]
    assert found["predicted_s"] < found["baseline_s"]


def test_the_order_of_ticks_does_not_matter(studio):
    one = call(
        studio, "whatif", step="1", changes=["faster-host:times=2", "faster:op=gemm,times=2"]
    )
    two = call(
        studio, "whatif", step="1", changes=["faster:op=gemm,times=2", "faster-host:times=2"]
    )
    assert one == two


def test_a_change_that_does_not_apply_says_why(studio):
    status, found = call(studio, "whatif", step="1", changes=["channels-last"])
    assert status == 200
    assert found["error"]


@pytest.mark.parametrize("own", ["nonsense", "faster:op=gemm,times=x", "<script>", "amp " * 50])
def test_nonsense_is_answered_in_words(studio, own):
    status, found = call(studio, "whatif", step="1", changes=own.split() or [own])
    assert status == 200
    assert found["error"]


def test_a_view_is_a_report(studio):
    from tests.report.test_page import unpacked

    _, answer = call(studio, "view", step="1", changes=["faster-host:times=2"])
    found = unpacked(answer.decode())
    quick = call(studio, "whatif", step="1", changes=["faster-host:times=2"])[1]
    assert [line["name"] for line in found["lines"]] == ["current step", "with faster-host"]
    assert found["figures"][0]["seconds"] == quick["baseline_s"]
    assert found["lines"][1]["step_s"] == quick["predicted_s"]
    assert found["diagnosis"]["verdict"]["sentence"]


def test_choices_can_all_be_made(studio):
    """Every model that is offered loads with the sizes that are shown; every GPU makes machines."""
    from foretell.cluster import load as load_cluster
    from foretell.plan import Plan
    from foretell.workload import load

    _, found = call(studio, "choices")
    for name, sizes in found["sizes"].items():
        text = ",".join(f"{s['name']}={s['default']}" for s in sizes)
        assert load(f"{name}:{text}" if text else name, files=False).parameters > 0
    for name in found["models"]["published"]:
        load(f"{name}:batch=2", files=False)
    for gpu in found["gpus"]:
        assert load_cluster(f"{gpu}:gpus=2").size == 2
    for field in found["plan"]:
        assert hasattr(Plan(), field["name"])


def test_a_plan_is_drawn_with_its_pipeline(studio):
    from tests.report.test_page import unpacked

    plan = "dp=1,tp=2,pp=2,micro_batch=1,global_batch=4"
    _, answer = call(
        studio, "plan", workload="gpt:layers=4,hidden=256,heads=4", cluster="h100:gpus=4", plan=plan
    )
    found = unpacked(answer.decode())
    (drawn,) = found["plans"]
    assert sum(len(node["ranks"]) for node in drawn["machines"]["nodes"]) == 4
    kinds = [(b["kind"], b["micro_batch"]) for b in drawn["schedule"]["blocks"]]
    assert sorted(kinds) == sorted(2 * [(k, m) for k in "FB" for m in range(4)])
    predicted = found["figures"][0]["seconds"]
    assert found["lines"][0]["step_s"] == found["diagnosis"]["step_s"] == predicted


def test_a_planner_answers_what_predict_says():
    from foretell.cluster import load as load_cluster
    from foretell.plan import Plan
    from foretell.search.kit import priced
    from foretell.studio.views import planned
    from foretell.workload import load

    model, cluster, result = "gpt:layers=4,hidden=256,heads=4", load_cluster("h100:gpus=2"), []
    best, *rivals = planned(model, cluster, "oracle", lambda *what: result.append(what))
    again = priced(Plan.parse(best["plan"]), load(model), cluster)
    assert best["step_s"] == pytest.approx(again.step)
    assert best["peak_bytes"] == again.peak
    assert rivals
    assert result


def test_strategies_are_sent_as_they_are_found():
    from foretell.studio.views import strategies

    parts = []
    rows = strategies(
        "gpt:layers=4,hidden=256,heads=4", "h100:gpus=2", "1,2",
        lambda words, best=None, found=None: parts.append(len(found)) if found else None,
    )  # fmt: skip
    assert parts == sorted(parts)
    assert {r["gpus"] for r in rows} == {1, 2}
    front = [r for r in rows if r["front"]]
    fastest = max((r for r in rows if r["fits"]), key=lambda r: r["samples_per_s"])
    assert fastest in front


def test_a_built_step_lies_on_the_desk(studio):
    _, found = call(
        studio,
        "build",
        workload="gpt:layers=2,hidden=128,heads=2",
        cluster="h100:gpus=2",
        plan="dp=2",
    )
    _, desk = call(studio, "desk")
    assert found["step"] in [s["key"] for s in desk["steps"]]


def test_machines_from_a_text(studio):
    _, preset = call(studio, "cluster", cluster="dgx-a100:nodes=2")
    assert (preset["ranks"], preset["nodes"]) == (16, 2)
    _, again = call(studio, "cluster", text=preset["text"])
    assert again["ranks"] == 16
    assert again["cluster"].startswith("text ")
    assert "is no preset" in call(studio, "cluster", cluster="/etc/passwd")[1]["error"]


def test_scenarios_are_kept_and_forgotten(studio):
    _, kept = call(studio, "save", step="1", changes=["faster-host:times=2"])
    mine = kept["scenarios"][-1]
    assert mine["title"] == "faster-host"
    _, left = call(studio, "forget", numbers=[mine["number"]])
    assert mine["number"] not in [s["number"] for s in left["scenarios"]]


def test_twenty_ask_at_once(studio):
    specs = [f"faster:op=gemm,times={1 + k / 10:g}" for k in range(1, 21)]
    found = {}

    def ask(spec):
        found[spec] = call(studio, "whatif", step="1", changes=[spec])

    threads = [threading.Thread(target=ask, args=(spec,)) for spec in specs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    assert {status for status, _ in found.values()} == {200}
    steps = [found[spec][1]["predicted_s"] for spec in specs]
    assert steps == sorted(steps, reverse=True)
    assert len(found) == 20


def test_a_step_is_ranked_once_however_often_its_page_is_opened(studio):
    jobs = {call(studio, "rank", step="1")[1]["job"] for _ in range(4)}
    assert len(jobs) == 1
    end = time.monotonic() + 120
    while call(studio, "job", job=min(jobs))[1]["state"] == "running":
        assert time.monotonic() < end
        time.sleep(0.1)
    assert call(studio, "rank", step="1")[1]["job"] in jobs
