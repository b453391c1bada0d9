"""The checkpoint server answers HTTP requests with exact bytes, and refuses malformed requests with a
sentence.
"""

import http.client
import json
import random
import socket
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_support import (
    TOKEN,
    connect,
    fetch,
    manifest_of,
    publish,
    publish_gradient,
    snapshot_file,
)

from fabric.ckpt_server.attach import ServerHandle

# The size is several pieces of a transfer, and no multiple of a piece.
NBYTES = 9_500_001
FILE = snapshot_file(NBYTES)
STEP = 120


@pytest.fixture(scope="module")
def url(served: ServerHandle) -> str:
    publish(served, 0, snapshot_file(1000, 1), STEP - 10)
    publish(served, 1, FILE, STEP)
    # Requests without a generation never get the same step of an older generation.
    publish(served, 2, snapshot_file(1000, 2), STEP, generation=0)
    publish_gradient(served, 0, b"abcdefghij", STEP - 1)
    publish_gradient(served, 1, b"0123456789", STEP, weight=0.1 + 0.2)
    return served.url


PATH_PARTS = ["v1", "snapshots", "gradients", "data", "latest", "120", "..", "%2e%2e", "%00", "%ff", "?", "="]
PATH_PARTS += ["&", "generation", "wait_s", "%", "%2F", ";", "//", "etc", "metrics", "-1", "1e9", "a" * 300]
DATA = f"/v1/snapshots/{STEP}/data"


def test_a_request_without_a_range_gets_the_whole_file_with_its_headers(url):
    answer = fetch(url, DATA)
    assert answer.status == 200
    assert answer.body == FILE
    assert answer.headers["Content-Length"] == str(len(FILE))
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert answer.headers["X-Fabric-Step"] == str(STEP)
    assert answer.headers["X-Fabric-Generation"] == "1"
    assert answer.headers["ETag"] == f'"{answer.headers["X-Fabric-Digest"]}"'


@pytest.fixture(scope="module")
def kept(url):
    """One HTTP connection for many requests, as fetchers use it."""
    connection = connect(url)
    yield connection
    connection.close()


def ask(kept: http.client.HTTPConnection, path: str, header: str) -> http.client.HTTPResponse:
    kept.request("GET", path, headers={"Range": header})
    return kept.getresponse()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    first=st.integers(0, len(FILE) + 100),
    size=st.integers(1, 5_000_000),
    form=st.sampled_from(("closed", "open", "end")),
)
def test_every_range_is_exactly_those_bytes(kept, first, size, form):
    header, wanted = {
        "closed": (f"bytes={first}-{first + size - 1}", FILE[first : first + size]),
        "open": (f"bytes={first}-", FILE[first:]),
        "end": (f"bytes=-{size}", FILE[-size:]),
    }[form]
    response = ask(kept, DATA, header)
    body = response.read()
    if not wanted:
        assert response.status == 416
        assert response.headers["Content-Range"] == f"bytes */{len(FILE)}"
        assert "error" in json.loads(body)
        return
    assert response.status == 206
    assert body == wanted
    begin = len(FILE) - len(wanted) if form == "end" else first
    assert response.headers["Content-Range"] == f"bytes {begin}-{begin + len(wanted) - 1}/{len(FILE)}"


@pytest.mark.parametrize("first", [0, 1, 65535, 65536, 65537, 4 << 20, (4 << 20) + 65536])
@pytest.mark.parametrize("size", [1, 65536, 65537, 4 << 20, (4 << 20) + 65537])
def test_ranges_around_the_edges_of_pieces(kept, first, size):
    response = ask(kept, DATA, f"bytes={first}-{first + size - 1}")
    assert response.read() == FILE[first : first + size]


@pytest.mark.parametrize(
    "header",
    [
        "bytes=",
        "bytes=-",
        "bytes=a-b",
        "bytes=5-2",
        "bytes=1-2,5-6",
        "bytes",
        "bytes=--1",
        "bytes=1",
        "bytes=-0x1",
    ],
)
def test_malformed_ranges_are_400(url, header):
    assert "Range" in fetch(url, DATA, Range=header).error
    assert fetch(url, DATA, Range=header).status == 400


def test_ranges_without_a_byte_are_416(url):
    for header in (f"bytes={len(FILE)}-", "bytes=-0", "bytes=9999999999999999999-"):
        answer = fetch(url, DATA, Range=header)
        assert (answer.status, answer.headers["Content-Range"]) == (416, f"bytes */{len(FILE)}")
        assert "begin below" in answer.error


def test_an_unknown_unit_is_ignored(url):
    assert fetch(url, DATA, Range="lines=1-2").status == 200


def test_if_range_and_if_match_compare_the_digest(url):
    tag = fetch(url, DATA, "HEAD").headers["ETag"]
    assert fetch(url, DATA, Range="bytes=0-9", If_Range=tag).status == 206
    assert fetch(url, DATA, Range="bytes=0-9", If_Range='"other"').body == FILE
    assert fetch(url, DATA, Range="bytes=0-9", If_Range="Tue, 01 Jan 2030 00:00:00 GMT").status == 200
    assert fetch(url, DATA, Range="bytes=0-9", If_Match=f'"other", {tag}').body == FILE[:10]
    assert fetch(url, DATA, Range="bytes=0-9", If_Match="*").status == 206
    refused = fetch(url, DATA, If_Match='"other"')
    assert refused.status == 412
    assert tag in refused.error


def test_head_tells_the_size_and_sends_nothing(url):
    answer = fetch(url, DATA, "HEAD", Range="bytes=0-9")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["Content-Length"] == str(len(FILE))


def test_latest_step_and_generation(url):
    assert fetch(url, "/v1/snapshots/latest/data").body == FILE
    assert fetch(url, f"/v1/snapshots/{STEP - 10}/data").body == snapshot_file(1000, 1)
    assert fetch(url, f"{DATA}?generation=1").body == FILE
    assert fetch(url, f"{DATA}?generation=0").body == snapshot_file(1000, 2)
    assert fetch(url, "/v1/snapshots/latest/data?generation=0").body == snapshot_file(1000, 2)


def test_a_request_for_a_step_that_is_not_held_is_answered_with_the_held_steps(url):
    for path in (
        "/v1/snapshots/7/data",
        "/v1/snapshots/7/manifest",
        f"{DATA}?generation=9",
        "/v1/snapshots/latest/data?generation=9",
    ):
        answer = fetch(url, path)
        assert answer.status == 409
        assert answer.json["available"] == [STEP, STEP - 10, STEP]
        assert f"held are steps {STEP}, {STEP - 10}, {STEP}" in answer.error


def test_the_listing_names_every_snapshot_with_its_size_digest_and_age(url):
    listed = fetch(url, "/v1/snapshots").json
    assert [(s["generation"], s["step"]) for s in listed] == [(0, STEP), (1, STEP - 10), (1, STEP)]
    assert listed[2]["nbytes"] == len(FILE)
    assert listed[2]["digest"] == manifest_of(FILE, STEP)["digest"]
    assert listed[2]["created"] == 1.5e9
    # The age counts from the state's time in the manifest, not from its publication.
    assert abs(time.time() - 1.5e9 - listed[2]["age_s"]) < 3600


def test_the_manifest_is_the_published_one_with_the_url_of_the_bytes(url):
    manifest = fetch(url, f"/v1/snapshots/{STEP}/manifest").json
    wanted = manifest_of(FILE, STEP)
    assert {k: manifest[k] for k in wanted} == wanted
    assert manifest["url"] == f"{url}{DATA}?generation=1"
    first = NBYTES // 3
    assert manifest["tensors"] == {
        "a": {"dtype": "U8", "shape": [first], "data_offsets": [0, first]},
        "b": {"dtype": "U8", "shape": [NBYTES - first], "data_offsets": [first, NBYTES]},
    }


def test_gradients_carry_all_that_is_needed_to_apply_them(url):
    answer = fetch(url, f"/v1/gradients/{STEP}?generation=1&wait_s=0")
    assert (answer.status, answer.body) == (200, b"0123456789")
    headers = answer.headers
    assert headers["X-Fabric-Generation"] == "1"
    assert headers["X-Fabric-Epoch"] == "7"
    assert float(headers["X-Fabric-Weight"]) == 0.1 + 0.2
    assert headers["X-Fabric-Digest"] == f"{STEP:032x}"
    assert headers["X-Fabric-Layout"] == "feed"
    assert json.loads(headers["X-Fabric-Meta"]) == {"loss": 1.5}
    assert fetch(url, f"/v1/gradients/{STEP}", Range="bytes=3-4").body == b"34"
    assert [g["step"] for g in fetch(url, "/v1/gradients").json] == [STEP - 1, STEP]


def test_a_gradient_that_is_gone_and_one_that_is_not_yet_published_are_refused(url):
    gone = fetch(url, f"/v1/gradients/{STEP - 5}?wait_s=60")
    assert (gone.status, gone.json["gone"], gone.json["available"]) == (409, True, [STEP - 1, STEP])
    old = fetch(url, f"/v1/gradients/{STEP + 1}?generation=0&wait_s=60")
    assert (old.status, old.json["gone"]) == (409, True)
    later = fetch(url, f"/v1/gradients/{STEP + 1}?wait_s=0.05")
    assert (later.status, later.json["gone"], later.json["available"]) == (409, False, [STEP - 1, STEP])


@pytest.mark.parametrize(
    "path",
    [
        "/v1/snapshots/abc/data",
        "/v1/snapshots/-1/data",
        "/v1/snapshots/1.5/manifest",
        "/v1/snapshots/" + "9" * 40 + "/data",
        "/v1/snapshots/%d9%a1/data",
        f"{DATA}?generation=x",
        f"{DATA}?generation=-1",
        f"{DATA}?generation=" + "9" * 30,
        f"/v1/gradients/{STEP}?wait_s=nan",
        f"/v1/gradients/{STEP}?wait_s=-1",
        f"/v1/gradients/{STEP}?wait_s=61",
        f"/v1/gradients/{STEP}?wait_s=inf",
        "/v1/gradients/latest",
        "/v1/gradients/0x10",
    ],
)
def test_malformed_steps_and_queries_are_400(url, path):
    answer = fetch(url, path)
    assert answer.status == 400
    assert answer.error


def test_unknown_paths_and_methods(url):
    assert fetch(url, "/v1/nothing").status == 404
    assert "there is nothing at /v1/nothing" in fetch(url, "/v1/nothing").error
    refused = fetch(url, DATA, "POST")
    assert (refused.status, refused.headers["Allow"]) == (405, "GET,HEAD")
    assert "POST is not possible" in refused.error


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.sampled_from(PATH_PARTS),
        max_size=9,
    )
)
def test_no_path_makes_the_server_fail(url, parts):
    path = "/" + "/".join(parts)
    with connect_raw(url) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        status = int(raw.makefile("rb").readline().split()[1])
    assert status < 500


def test_bytes_that_are_not_http_do_not_make_the_server_fail(url):
    chance = random.Random(5)
    for size in (1, 10, 1000, 100_000):
        with connect_raw(url) as raw:
            try:
                raw.sendall(chance.randbytes(size) + b"\r\n\r\n")
                raw.shutdown(socket.SHUT_WR)
                answer = raw.makefile("rb").read()
            except ConnectionError:
                answer = b""
        assert b"Traceback" not in answer
        assert not answer or b" 400 " in answer.splitlines()[0]
    assert fetch(url, "/healthz").status == 200


def connect_raw(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_metrics_count_the_served_bytes_and_describe_the_slots(url):
    def value(name: str) -> float:
        lines = fetch(url, "/metrics").body.decode().splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(name)))

    before = value('fabric_ckpt_served_bytes_total{kind="snapshot"}')
    fetch(url, DATA, Range="bytes=0-999")
    fetch(url, DATA, "HEAD")
    assert value('fabric_ckpt_served_bytes_total{kind="snapshot"}') == before + 1000
    assert value('fabric_ckpt_active_transfers{kind="snapshot"}') == 0
    assert value('fabric_ckpt_snapshots{rank="0"}') == 3
    assert value('fabric_ckpt_snapshot_step{rank="0"}') == STEP
    assert value('fabric_ckpt_gradient_step{rank="0"}') == STEP
    assert value('fabric_ckpt_snapshot_age_seconds{rank="0"}') > 1e8
    assert value('fabric_ckpt_gradient_age_seconds{rank="0"}') < 1e5
    assert value('fabric_ckpt_trainer{rank="0",state="running"}') == 1
    assert value('fabric_ckpt_trainer{rank="0",state="gone"}') == 0
    assert value('fabric_ckpt_memory_bytes{kind="snapshot",rank="0"}') >= len(FILE)


def test_the_debug_view(url, served):
    state = fetch(url, "/debug/state").json
    assert (state["job"], state["replica"]) == ("job", "r0")
    assert state["trainer"]["attached"] is True
    by_slot = {(s["kind"], s["slot"]): s for s in state["slots"]}
    assert by_slot["snapshot", 1]["content"]["step"] == STEP
    assert by_slot["snapshot", 1]["readers"] == 0


def curl(*arguments: str) -> bytes:
    return subprocess.run(["curl", "-sS", *arguments], capture_output=True, check=True, timeout=30).stdout


def test_the_curl_lines_of_the_documentation(attach, tmp_path):
    """-o gives a file that every safetensors reader loads; ranges, the token and errors work by hand."""
    from safetensors import safe_open

    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    handle = attach(token_file=token)
    publish(handle, 0, FILE, 7)
    header = f"Authorization: Bearer {TOKEN}"
    assert curl(f"{handle.url}/healthz") == b'{"ok": true}'
    assert b'fabric_ckpt_snapshot_step{rank="0"} 7.0' in curl(f"{handle.url}/metrics")
    assert json.loads(curl(f"{handle.url}/v1/snapshots"))["error"].startswith("this needs the job's token")
    assert json.loads(curl("-H", header, f"{handle.url}/v1/snapshots"))[0]["step"] == 7
    assert json.loads(curl("-H", header, f"{handle.url}/v1/snapshots/latest/manifest"))["step"] == 7
    assert curl("-H", header, "-r", "5-9", f"{handle.url}/v1/snapshots/latest/data") == FILE[5:10]
    target = tmp_path / "x.safetensors"
    curl("-H", header, "-o", str(target), f"{handle.url}/v1/snapshots/latest/data")
    assert target.read_bytes() == FILE
    with safe_open(target, "numpy") as found:
        assert set(found.keys()) == {"a", "b"}
    # An interrupted download continues at the byte where it stopped.
    target.write_bytes(FILE[:1_000_000])
    curl("-H", header, "-C", "-", "-o", str(target), f"{handle.url}/v1/snapshots/latest/data")
    assert target.read_bytes() == FILE


def test_without_the_token_only_health_and_metrics_are_served(attach, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    handle = attach(token_file=token)
    publish(handle, 0, snapshot_file(1000), 7)
    paths = ["/v1/snapshots", "/v1/snapshots/latest/data", "/v1/snapshots/7/manifest", "/v1/gradients"]
    paths += [
        "/v1/gradients/7",
        "/debug/state",
        "/v1/nothing",
        "/",
        "/healthz/",
        "/metrics/x",
        "/healthz/../debug/state",
    ]
    for path in paths:
        for given_token in ("", "Bearer", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xff"):
            answer = fetch(handle.url, path, Authorization=given_token)
            assert answer.status == 401, (path, given_token)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert TOKEN not in answer.error
        assert fetch(handle.url, path, Authorization=f"bearer {TOKEN}").status != 401
    assert fetch(handle.url, "/healthz").status == fetch(handle.url, "/metrics").status == 200
    assert TOKEN not in Path(f"/proc/{handle.pid}/cmdline").read_text()
