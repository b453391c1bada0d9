"""Refusals of every route, generated from an OpenAPI document of its routes. So the tests try each new route,
parameter and announced refusal.
"""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from openapi_document import DOCUMENT
from server_support import ROOT, TOKEN, end, fetch, publish, publish_gradient, snapshot_file, start_server

from fabric.ckpt_server.format.manifest import check_manifest, make_manifest
from fabric.ckpt_server.format.safetensors_file import build_preamble, read_preamble
from fabric.ckpt_server.server.routes import check_if_match, is_unchanged
from fabric.errors import StateError, Unauthorized
from fabric.model import SnapshotRef
from fabric.runtime.http.http_service import check_bearer

STEP = 33
PATHS = DOCUMENT["paths"]
BEARER = f"Bearer {TOKEN}"
# Correct parameters of every operation.
GOOD = {
    "last": "5",
    "step": str(STEP),
    "tensor": "a",
    "blocks": "0-0",
    "generation": "1",
    "wait_s": "0",
    "slice": "0:1",
}
GOOD |= {"of": "part", "Range": "bytes=0-0", "If-Match": "*", "If-None-Match": '"x"'}
GOOD |= {"Accept-Encoding": "zstd", "tensors": "0"}
# The cause of each refusal, by the parameter that it is about.
PROVOKED = {
    "304": {"If-None-Match": "*"},
    "404": {"tensor": "no-such-tensor", "blocks": "7-9"},
    "409": {"step": "999999"},
    "412": {"If-Match": '"0123456789abcdef0123456789abcdef"'},
    "416": {"Range": "bytes=999999999999-"},
}
# These routes need a trainer's recording; tests/ckpt_server/test_debug_probe.py has real recordings.
RECORDINGS = ("/debug/flight", "/debug/exchange")
ELSEWHERE = {("/debug/stacks", "409"), *((path, status) for path in RECORDINGS for status in ("404", "409"))}
MALFORMED = {
    "integer": ["x", "-1", "1.5", "1e3", "9" * 40, "\u0663", ""],
    "number": ["x", "-1", "nan", "inf", "1e9"],
    "enum": ["other", ""],
    "Range": ["bytes=5-2", "bytes=-", "bytes=0-1,3-4", "bytes=a-b", "0-5"],
    "slice": ["x", "5:1", "::", "0:1,0:1,0:1"],
    "blocks": ["x", "3-1", "0", "-1-0"],
    "step": ["x", "-1", "1.5", "9" * 40, "LATEST"],
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("refusals")
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    handle = start_server(folder / "run", token_file=token)
    publish(handle, 0, snapshot_file(1000), STEP)
    publish_gradient(handle, 0, b"0123456789", STEP)
    yield handle.url
    handle.close()
    end(handle.pid)


def parameters(path: str) -> dict[str, dict]:
    return {p["name"]: p for p in PATHS[path]["get"]["parameters"]}


def ask(url: str, path: str, method: str = "GET", headers: dict[str, str] | None = None, **values: str):
    """Call the operation at ``path`` with these parameters; other parameters of the path have correct
    values.
    """
    known, query, sent = parameters(path), [], dict(headers or {"Authorization": BEARER})
    for name, value in values.items():
        if known[name]["in"] == "query":
            query.append(f"{name}={quote(value)}")
        elif known[name]["in"] == "header":
            sent[name] = value
    filled = re.sub(r"{(\w+)}", lambda m: quote(values.get(m[1], GOOD[m[1]])), path)
    return fetch(url, filled + ("?" + "&".join(query) if query else ""), method, **sent)


def declared(path: str) -> set[str]:
    return set(PATHS[path]["get"]["responses"])


def must_be_a_refusal(answer, status: str, path: str) -> None:
    assert str(answer.status) == status and status in declared(path)
    if status != "304":
        assert answer.error and "Traceback" not in answer.error
        assert answer.headers["Content-Type"].startswith("application/json")


@pytest.mark.parametrize("path", PATHS)
def test_a_correct_request_is_answered_as_the_document_says(url, path):
    for names in ([], *([n] for n, p in parameters(path).items() if p["in"] != "path")):
        answer = ask(url, path, **{name: GOOD[name] for name in names})
        assert str(answer.status) in declared(path), names
        if path not in RECORDINGS:
            assert answer.status in (200, 206), (names, answer.body)


@pytest.mark.parametrize("path", PATHS)
def test_a_request_without_the_right_token_is_refused_as_the_document_says(url, path):
    is_open = path in ("/healthz", "/metrics")
    assert is_open == (PATHS[path]["get"].get("security") == []) == ("401" not in declared(path))
    wrong = ["", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"]
    wrong += [f"Bearer {TOKEN} {TOKEN}", f"Bearer {TOKEN.upper()}", "Bearer \xff\xfe"]
    for header in wrong:
        answer = ask(url, path, headers={"Authorization": header} if header else {"X": "y"})
        if is_open:
            assert answer.status == 200
            continue
        must_be_a_refusal(answer, "401", path)
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert TOKEN not in answer.body.decode()


@pytest.mark.parametrize("path", PATHS)
def test_other_http_methods_are_refused(url, path):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert ask(url, path, method).status == 405, method
    assert ask(url, path, "POST", headers={"X": "y"}).status in (401, 405), "refused without a token as well"


CASES = [
    (path, status, name)
    for path in PATHS
    for status, name in itertools.chain.from_iterable(
        [(status, name) for name in values if name in parameters(path)] for status, values in PROVOKED.items()
    )
]


@pytest.mark.parametrize(("path", "status", "name"), CASES)
def test_a_refusal_has_the_status_that_the_document_announces(url, path, status, name):
    must_be_a_refusal(ask(url, path, **{name: PROVOKED[status][name]}), status, path)
    good = {k: GOOD[k] for k in parameters(path) if k in ("If-None-Match", "generation")}
    must_be_a_refusal(ask(url, path, **{**good, name: PROVOKED[status][name]}), status, path)


def test_every_announced_refusal_is_provoked():
    announced = {(path, status) for path in PATHS for status in declared(path) - {"200", "206", "400", "401"}}
    here = {(path, status) for path, status, _ in CASES} | {(path, "504") for path in RECORDINGS}
    assert announced == here | ELSEWHERE
    own = (Path(__file__).parent / "test_debug_probe.py").read_text()
    assert all(f'"{path}"' in own for path, _ in ELSEWHERE)


def test_a_trainer_without_a_debug_endpoint_is_reported(url):
    for path in RECORDINGS:
        must_be_a_refusal(ask(url, path), "504", path)


def malformed(parameter: dict) -> list[str]:
    name, schema = parameter["name"], parameter["schema"]
    return MALFORMED.get(name) or MALFORMED["enum" if "enum" in schema else schema["type"]]


# for these parameters any text is well formed
NEVER_MALFORMED = {"If-Match", "If-None-Match", "Accept-Encoding", "tensor"}


@pytest.mark.parametrize("path", [path for path in PATHS if parameters(path)])
def test_malformed_parameters_are_refused(url, path):
    for name, parameter in parameters(path).items():
        if name in NEVER_MALFORMED:
            continue
        for value in malformed(parameter):
            answer = ask(url, path, **{name: value})
            if name in ("step", "blocks") and not value:
                continue
            must_be_a_refusal(answer, "400", path)


@pytest.mark.parametrize("path", PATHS)
def test_a_line_that_is_too_long_is_refused_and_the_next_one_served(url, path):
    place = urlsplit(url)
    filled = re.sub(r"{(\w+)}", lambda m: GOOD[m[1]], path)
    head = f"Host: 127.0.0.1\r\nAuthorization: {BEARER}\r\n"
    for request in (
        f"GET {filled}?x={'a' * 100_000} HTTP/1.1\r\n{head}\r\n",
        f"GET {filled} HTTP/1.1\r\n{head}X: {'a' * 100_000}\r\n\r\n",
        f"GET {filled} HTTP/1.1\r\n{head}" + "".join(f"X-{n}: y\r\n" for n in range(100_000)) + "\r\n",
        f"GET {filled} HTTP/1.1\r\n{head}Content-Length: 99999999999999999999\r\n\r\n",
        f"GET {filled} HTTP/9.9\r\n{head}\r\n",
        "\x00" * 1000 + "\r\n\r\n",
    ):
        with socket.create_connection((place.hostname, place.port), timeout=30) as line:
            answered = b""
            try:
                line.sendall(request.encode("latin-1"))
                line.shutdown(socket.SHUT_WR)
                answered = line.recv(65536)
            except OSError:
                continue  # the server closed the connection in the middle of the request: a refusal too
            assert re.match(rb"HTTP/1\.[01] 4(00|13|31) |$", answered), answered[:80]
    assert ask(url, path).status in (200, 504)


# --- parsers of what comes from outside ------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
MANIFEST = make_manifest(SnapshotRef(1, 5, "0" * 32), 5000, ["0" * 16] * 1, job="j", replica="r", created=1.0)
KEYS = [*MANIFEST, "rank", "ranks"]


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), st.lists(st.sampled_from(KEYS), max_size=2))
def test_any_manifest_is_well_formed_or_refused(changed, dropped):
    body = {k: v for k, v in {**MANIFEST, **changed}.items() if k not in dropped}
    try:
        found = check_manifest(body)
    except StateError:
        return
    assert 0 < found["nbytes"] <= len(found["blocks"]) * found["block_bytes"]
    assert found["nbytes"] > (len(found["blocks"]) - 1) * found["block_bytes"]


@settings(deadline=None, max_examples=100)
@given(JSON)
def test_arbitrary_json_is_refused_as_a_manifest(body):
    with pytest.raises(StateError):
        check_manifest(body)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_bytes_are_a_header_that_covers_the_file_or_refused(data):
    file = bytearray(snapshot_file(200))
    for _ in range(data.draw(st.integers(0, 4))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    file = file[: data.draw(st.integers(0, len(file)))]
    try:
        header = read_preamble(memoryview(file), len(file))
    except StateError:
        return
    at = header.nbytes
    for span in header.tensors:
        assert span.begin == at
        at = span.end
    assert at == len(file)


@pytest.mark.parametrize(
    ("spelling", "damaged"),
    [(':[0,0],"dtype":"U8"', ',[0,0],"dtype":"U8"'), ('[0,0],"dtype"', '[0,0]:"dtype"')],
)
def test_a_header_of_one_tensor_with_a_wrong_sign_is_refused(spelling, damaged):
    file = build_preamble([("a", "U8", (0,), 0)], "{}")
    assert file.count(spelling.encode()) == 1
    with pytest.raises(StateError, match="damaged"):
        read_preamble(memoryview(file.replace(spelling.encode(), damaged.encode())), len(file))


def test_a_name_that_occurs_twice_is_refused():
    file = build_preamble([("a", "U8", (2,), 2), ("b", "U8", (0,), 0)], "{}")
    with pytest.raises(StateError, match="a key occurs twice"):
        read_preamble(memoryview(file.replace(b'"b"', b'"a"')), len(file) + 2)


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=3))
def test_any_json_is_read_as_a_file_header_or_refused(entries):
    text = json.dumps({"__metadata__": {"fabric": "{}"}, **entries}).encode()
    file = len(text).to_bytes(8, "little") + text
    try:
        header = read_preamble(memoryview(file), len(file))
    except StateError:
        return
    assert (header.tensors[-1].end if header.tensors else header.nbytes) == len(file)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=100), st.booleans())
def test_any_if_match_header_is_met_or_not_met(text, around):
    tag = '"0123456789abcdef"'
    listed = f"{text}, {tag} " if around else text
    held = is_unchanged(listed, tag)
    try:
        check_if_match(listed, tag)
        matched = True
    except web.HTTPPreconditionFailed:
        matched = False
    if around:
        assert held and matched
    else:
        assert (held, matched) == (False, False) or text.strip() == "*" or tag in text


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=100))
def test_no_authorization_but_the_right_one_is_let_in(text):
    for header in (text, f"Bearer {text}", f"bearer  {text}"):
        if header.partition(" ")[2].strip() != TOKEN:
            with pytest.raises(Unauthorized):
                check_bearer(header, TOKEN)


def test_a_header_of_bytes_that_are_no_text_is_refused():
    with pytest.raises(Unauthorized):
        check_bearer("Bearer " + "\udcff" * 10, TOKEN)


def test_a_server_that_does_not_listen_on_loopback_alone_needs_a_token(tmp_path):
    command = [sys.executable, "-m", "fabric.ckpt_server", "--job=j", "--replica=r"]
    command += [f"--run-dir={tmp_path}", "--bind=0.0.0.0"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ, check=False)
    assert ended.returncode == 1 and "without a token would serve anybody" in ended.stderr
