"""Runs every curl line of docs/http.md against a job held still in a step, and compares the answers' shape
with the page.
"""

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import SimpleNamespace

import numpy
import pytest
import xxhash
from job import Job
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file

from fabric.ckpt_server.server import routes as ckpt_routes
from fabric.lighthouse.http import dashboard
from fabric.lighthouse.http import routes as lighthouse_routes

PAGE = Path(__file__).parent.parent.parent / "docs" / "http.md"
HELD_STEP = 8
SERVED_STEP = HELD_STEP - 1  # r0 serves a copy when it has computed the step after it


# An application of these parts names its routes, and answers nothing.
NO_PARTS = SimpleNamespace(jobs=SimpleNamespace(token_refused=None))


@dataclass(frozen=True)
class Example:
    """A command of the page and the answer shown below it, if there is one."""

    command: str
    kind: str
    answer: str


def examples() -> list[Example]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = []
    for (kind, text), (next_kind, next_text) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind == "sh":
            shown = next_kind in ("json", "text", "prometheus")
            found.append(Example(text, next_kind if shown else "", next_text if shown else ""))
    return found


EXAMPLES = examples()


@pytest.fixture(scope="module")
def job(zygote, tmp_path_factory):
    """Three replicas, held still in the forward pass of a step, with snapshots of the steps before."""
    environment = {"FABRIC_SNAPSHOT_EVERY": "100000%", "TINY_STEPS": "2000"}
    with Job(zygote, tmp_path_factory.mktemp("curl"), environment=environment) as job:
        job.start_all({"r0": f"forward@{HELD_STEP}=wait:{job.folder / 'go-on'}"})
        job.wait_for(lambda: len(job.events("r0", "commit")) == HELD_STEP, "the steps before")
        # Run the page's own commands for the token file, so that the test covers them too.
        prepare = next(b for b in re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL) if "umask" in b)
        line = next(line for line in prepare.splitlines() if "umask" in line)
        subprocess.run(["bash", "-euc", line], cwd=job.folder, check=True)
        assert (job.folder / "auth").stat().st_mode & 0o077 == 0
        job.wait_for(lambda: SERVED_STEP in held(job), "the snapshot of the last step")
        yield job


def held(job: Job) -> list[int]:
    return [entry["step"] for entry in json.loads(curl(job, "$CKPT/v1/snapshots"))]


def variables(job: Job) -> dict[str, str]:
    """Return the page's variables. The replica r0, whose server they name, stays the same process."""
    if job.url not in _VARIABLES:
        _VARIABLES[job.url] = _variables(job)
    return _VARIABLES[job.url]


_VARIABLES: dict[str, dict[str, str]] = {}  # lighthouse's address -> the variables


def _variables(job: Job) -> dict[str, str]:
    address = f"{job.url}/v1/jobs/test"
    shown = subprocess.run(["curl", "-sf", "-H", "@auth", address], cwd=job.folder, capture_output=True)
    servers = {m["replica"]: m["ckpt"] for m in json.loads(shown.stdout)["members"]}
    return {"LIGHTHOUSE": job.url, "JOB": "test", "CKPT": servers["r0"]}


def shell(job: Job, command: str) -> subprocess.CompletedProcess:
    """Run ``command`` in the job's folder, where ``auth`` is, with the page's variables."""
    environment = {**os.environ, **variables(job)}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=job.folder, env=environment, capture_output=True, timeout=20
    )
    assert done.returncode == 0, f"{command}\n{done.stdout!r}\n{done.stderr!r}"
    return done


def curl(job: Job, address: str, *options: str) -> bytes:
    return shell(job, f'curl -sS -H @auth {" ".join(options)} "{address}"').stdout


def like(shown: object, answered: object, where: str = "answer") -> None:
    """Check that the answer has every shown key, with a value of the same type; compare lists by their first
    element.
    """
    if isinstance(shown, bool) or not isinstance(shown, int | float):
        assert type(answered) is type(shown), f"{where} is {answered!r}, shown is {shown!r}"
    else:
        assert isinstance(answered, int | float), f"{where} is {answered!r}, shown is {shown!r}"
    if isinstance(shown, dict):
        for key, value in shown.items():
            assert key in answered, f"{where} has no {key}: {sorted(answered)}"
            like(value, answered[key], f"{where}.{key}")
    elif isinstance(shown, list) and shown:
        assert answered, f"{where} is empty"
        like(shown[0], answered[0], f"{where}[0]")


def samples(text: str) -> set[tuple[str, tuple[str, ...]]]:
    """Return the names of metrics in Prometheus' text format, each with the names of its labels."""
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels))) for family in families for s in family.samples}


def first_line(job: Job, command: str) -> str:
    """Return the first line of a command that goes on for ever."""
    environment = {**os.environ, **variables(job)}
    with subprocess.Popen(
        ["bash", "-euc", f"exec {command}"],
        cwd=job.folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        line = process.stdout.readline()
        process.kill()
    return line


# The examples of the page's last section change the job, so they run last.
AFTERWARDS = [e for e in EXAMPLES if "/recoveries" in e.command]
ASKING = [e for e in EXAMPLES if " -d '" not in e.command and e not in AFTERWARDS]
TELLING = [e for e in EXAMPLES if " -d '" in e.command]


def test_the_status_has_the_mean_loss_of_the_newest_step(job):
    sums = job.events("r0", "commit")[-1]["metrics"]

    def shown() -> bool:
        (line,) = json.loads(curl(job, "$LIGHTHOUSE/v1/jobs"))
        return line["loss"] == f"{sums['loss'] / sums['samples']:.4g}"

    job.wait_for(shown, "the loss of the newest step")


@pytest.mark.parametrize("example", ASKING, ids=lambda e: e.command.strip().splitlines()[-1][-50:])
def test_every_curl_line_of_the_page_works(job, example):
    if "follow=1" in example.command:
        like(json.loads(example.answer), json.loads(first_line(job, example.command)))
        return
    answered = shell(job, example.command).stdout.decode()
    if "/slowdowns" in example.command:
        assert answered == ""  # no replica was slow; tests/lighthouse/test_slowdown_records.py has the fields
    elif example.kind == "json":
        like(json.loads(example.answer), json.loads(answered))
    elif example.kind == "prometheus":
        assert samples(example.answer) <= samples(answered)
    elif example.kind == "text":
        shown = {line.partition(":")[0] for line in example.answer.splitlines()}
        assert shown <= {line.partition(":")[0].strip() for line in answered.splitlines()}


def test_every_route_is_on_the_page():
    text = (
        PAGE.read_text()
        .replace("$JOB", "{job}")
        .replace("latest", "{step}")
        .replace("$STEP", "{step}")
        .replace("$TENSOR", "{tensor}")
        .replace("blocks/0-0", "blocks/{blocks}")
    )
    for app in (lighthouse_routes.make_app(NO_PARTS, None), ckpt_routes.make_app(None, None, None)):
        paths = {x.canonical.removeprefix("/ranks/{rank}") for x in app.router.resources()} - {"/"}
        assert len(paths) > 5
        for path in paths:
            assert re.search(re.escape(path) + r'["`?]', text), f"{path} is not on the page"


def code(job: Job, address: str, *options: str) -> str:
    return shell(
        job, f'curl -s -o answer -w "%{{http_code}}" {" ".join(options)} "{address}"'
    ).stdout.decode()


def closed_paths() -> list[str]:
    """Return every path that needs the token."""
    found = []
    apps = {"$LIGHTHOUSE": lighthouse_routes.make_app(NO_PARTS, None)}
    apps["$CKPT"] = ckpt_routes.make_app(None, None, None)
    for variable, app in apps.items():
        for resource in app.router.resources():
            if resource.canonical not in ("/healthz", "/metrics", "/livez", "/readyz", *dashboard.OPEN_PATHS):
                path = (
                    resource.canonical.replace("{job}", "test")
                    .replace("{step}", "7")
                    .replace("{tensor}", "w")
                    .replace("{blocks}", "0-0")
                    .replace("{rank}", "0")
                )
                found.append(variable + path)
    return found


@pytest.mark.parametrize("variable", ["$LIGHTHOUSE", "$CKPT"])
def test_open_paths_need_no_token(job, variable):
    for path in ("/healthz", "/metrics"):
        assert code(job, variable + path) == "200"
    text = shell(job, f'curl -sf "{variable}/metrics"').stdout.decode()
    found = samples(text)
    assert found and all(name.startswith("fabric_") for name, _ in found)


def manifest(job: Job) -> dict:
    return json.loads(curl(job, "$CKPT/v1/snapshots/latest/manifest"))


def state_digest(file: bytes) -> str:
    """Compute a state's digest as the page defines it."""
    size = 4 << 20
    hasher = xxhash.xxh3_128(len(file).to_bytes(8, "big") + size.to_bytes(8, "big"))
    for begin in range(0, len(file), size):
        hasher.update(xxhash.xxh3_64_digest(file[begin : begin + size]))
    return hasher.hexdigest()


def test_the_file_is_safetensors_and_has_its_digest(job):
    """The ``safetensors`` package reads it, and its bytes are what manifest and journal say."""
    curl(job, "$CKPT/v1/snapshots/latest/data", "-o", "state.safetensors")
    path = job.folder / "state.safetensors"
    data, described = path.read_bytes(), manifest(job)
    assert state_digest(data) == described["digest"]
    size = described["block_bytes"]
    blocks = [xxhash.xxh3_64_hexdigest(data[i : i + size]) for i in range(0, len(data), size)]
    assert blocks == described["blocks"]
    assert len(data) == described["nbytes"]

    def journalled() -> list[str]:
        return [e["digest"] for e in job.events("r1", "state") if e["step"] == described["step"]]

    # A failpoint holds r0 in the middle of this step; r0 journals the digest when the step ends.
    job.wait_for(journalled, "the digest of that step in the journal")
    assert journalled() == [described["digest"]]
    tensors = load_file(path)
    assert set(tensors) == set(described["tensors"])
    assert tensors["model/0.weight"].shape == (64, 16)
    assert all(numpy.isfinite(t).all() for t in tensors.values())


def test_every_replica_serves_the_same_bytes(job):
    found = json.loads(curl(job, "$LIGHTHOUSE/v1/jobs/test"))
    bodies = {curl(job, m["ckpt"] + f"/v1/snapshots/{SERVED_STEP}/data") for m in found["members"]}
    assert len(found["members"]) == 3 and len(bodies) == 1


@pytest.mark.parametrize(
    ("wanted", "begin", "end"),
    [("0-7", 0, 8), ("8-1023", 8, 1024), ("100-100", 100, 101), ("-16", -16, None)],
)
def test_a_range_is_exactly_those_bytes(job, wanted, begin, end):
    whole = curl(job, "$CKPT/v1/snapshots/latest/data")
    assert curl(job, "$CKPT/v1/snapshots/latest/data", "-r", wanted) == whole[begin:end]
    options = ("-H", "@auth", "-r", wanted)
    assert code(job, "$CKPT/v1/snapshots/latest/data", *options) == "206"


def test_an_impossible_range_is_refused(job):
    nbytes = manifest(job)["nbytes"]
    options = ("-H", "@auth", "-r", f"{nbytes}-{nbytes + 5}")
    assert code(job, "$CKPT/v1/snapshots/latest/data", *options) == "416"


def test_a_request_for_another_state_is_refused(job):
    address = "$CKPT/v1/snapshots/latest/data"
    digest = manifest(job)["digest"]
    assert code(job, address, "-H", "@auth", "-H", f"'If-Match: \"{digest}\"'") == "200"
    assert code(job, address, "-H", "@auth", "-H", f"'If-Match: \"{'0' * 32}\"'") == "412"


REFUSED = [
    ("$LIGHTHOUSE/v1/jobs/no-such-job", "404", "there is no job no-such-job"),
    ("$LIGHTHOUSE/v2", "404", "there is nothing at /v2"),
    ("$LIGHTHOUSE/v1/jobs/test/events?after=soon", "400", "after must be an integer"),
    ("$LIGHTHOUSE/v1/jobs/test/session", "400", "this is a WebSocket"),
    ("$CKPT/v1/snapshots/first/manifest", "400", "is no step: give a number or latest"),
    ("$CKPT/v1/snapshots/latest/data?generation=99", "409", "in generation 99"),
    ("$CKPT/v1/gradients/latest", "400", "gradients are named by their step"),
    ("$CKPT/v1/gradients/999999", "409", "the gradient of step 999999 is not held yet"),
    ("$CKPT/v1/gradients/7?wait_s=1e9", "400", "wait_s must be a number of seconds from 0 to 60"),
]


@pytest.mark.parametrize(("address", "status", "expected"), REFUSED, ids=[a for a, _, _ in REFUSED])
def test_a_refused_request_is_answered_as_the_page_says(job, address, status, expected):
    assert code(job, address, "-H", "@auth") == status
    assert expected in json.loads((job.folder / "answer").read_text())["error"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("no JSON", "400"),
        ('{"replica": "r1"}', "400"),
        ('{"replica": "r9", "who": "me", "why": "test"}', "404"),
        ('{"replica": "../r1", "who": "me", "why": "test"}', "400"),
    ],
)
def test_an_impossible_command_is_refused(job, body, status):
    before = evictions(job)
    assert code(job, "$LIGHTHOUSE/v1/jobs/test/evict", "-H", "@auth", "-d", f"'{body}'") == status
    assert evictions(job) == before


def evictions(job: Job) -> list[dict]:
    return [e for e in json.loads(curl(job, "$LIGHTHOUSE/v1/jobs/test/events")) if e["kind"] == "evicting"]


def tell(job: Job, example: Example) -> None:
    """Run a line of the last section; check that the events name the operator and the reason."""
    answered = json.loads(shell(job, example.command).stdout)
    assert answered == {**json.loads(example.answer), "job": "test"}
    told = json.loads(re.search(r"-d '(.*?)'", example.command)[1])
    events = json.loads(curl(job, "$LIGHTHOUSE/v1/jobs/test/events"))
    about, why = told.get("replica", told.get("about", "")), f"by {told['who']}: {told['why']}"
    assert any(e["about"] == about and e["why"].startswith(why) for e in events)


def test_the_operator_commands_of_the_page_work(job):
    """The last section of the page in order: r2 is drained without a stop, r1 is evicted and returns, then
    the overrides.
    """
    drain, evict, *orders = TELLING
    assert len(orders) == 2  # tests/lighthouse/test_override_commands.py has the others
    tell(job, drain)
    (job.folder / "go-on").touch()
    job.wait_for(lambda: job.ended("r2") is not None, "the end of the drained one")
    said = (job.folder / "r2.log").read_text()
    # On a busy machine the replica may have logged a wait before this line.
    assert said.endswith("fabric: r2: drained: the others go on without this replica\n")
    assert job.ended("r2") == 0
    epochs = job.events("r0", "epoch")
    assert epochs[-1]["roster"] == ["r0", "r1"] and not any(e["forced"] for e in epochs[1:])
    assert not job.events("r0", "abort"), "a drain stops nobody"

    tell(job, evict)
    job.wait_for(lambda: ["r0"] in rosters(job), "the eviction")
    job.wait_for(lambda: "r1" in rosters(job)[-1], "the return of the evicted one")
    assert job.ended("r1") is None, "it came back without a restart"

    (cost,) = AFTERWARDS

    def whole() -> bool:
        (line,) = shell(job, cost.command).stdout.splitlines()
        like(json.loads(cost.answer), json.loads(line))
        return bool(json.loads(line)["lost"]["r1"]["joined"])

    job.wait_for(whole, "the record of the eviction to be whole")
    for order in orders:
        tell(job, order)


def rosters(job: Job) -> list[list[str]]:
    return [e["roster"] for e in job.events("r0", "epoch")]


# The last test: after so many tries without a token the lighthouse lets each further request wait a second.
def test_each_request_without_the_token_is_refused(job):
    """All at once, because some paths let a stranger wait for seconds."""
    servers = variables(job)
    refusals = [
        (Template(path).substitute(servers), headers)
        for path in closed_paths()
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic YTpi"})
    ]

    def is_refused(url: str, headers: dict[str, str]) -> bool:
        try:
            urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
        except urllib.error.HTTPError as error:
            with error:
                body = json.loads(error.read())
            return error.code == 401 and list(body) == ["error"] and "token" in body["error"]
        return False

    with ThreadPoolExecutor(8) as pool:
        refused = list(pool.map(lambda x: is_refused(*x), refusals))
    assert len(refused) > 100
    assert [x for x, is_so in zip(refusals, refused, strict=True) if not is_so] == []
