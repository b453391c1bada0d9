"""The lighthouse's page in a real Chromium, over a real job: a login, a kill, a return, a decision.

``python tests/integration/test_dashboard.py docs/screenshots`` makes the pictures of docs/ again.
"""

import sys
import tempfile
import urllib.error
import urllib.request
from importlib.resources import files
from pathlib import Path

import pytest
from browser import Browser, require_browser
from job import Job, Zygote

TAB, ENTER, ESCAPE = "\ue004", "\ue007", "\ue00c"
ENVIRONMENT = {"TINY_STEPS": "20000", "TINY_STEP_S": "0.05"}
QUIET = ENVIRONMENT | {"TINY_STEP_S": "0.2"}  # it runs for a long time, and a few steps are enough


@pytest.fixture
def job(zygote, tmp_path):
    """A job that the test changes."""
    require_browser()
    with Job(zygote, tmp_path / "job", environment=ENVIRONMENT) as job:
        job.start_all()
        yield job


@pytest.fixture(scope="module")
def quiet_job(zygote, tmp_path_factory):
    """A job that no test changes."""
    require_browser()
    with Job(zygote, tmp_path_factory.mktemp("quiet") / "job", environment=QUIET) as job:
        job.start_all()
        yield job


@pytest.fixture(scope="module")
def one_browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(one_browser):
    one_browser.forget()
    return one_browser


def log_in(browser: Browser, job: Job) -> None:
    browser.open(job.url)
    browser.wait_for(lambda: "this lighthouse leads" in browser.text("#health"), "the lighthouse's health")
    browser.wait_for(lambda: browser.run("return document.querySelector('#login').open"), "the question")
    browser.type("#token", job.token.read_text().strip())
    browser.press(ENTER)
    browser.wait_for(lambda: "every member runs" in browser.text("#waiting"), "the job")
    browser.console()  # the console shows the refusal after which the page asked for the token


def row(browser: Browser, replica: str) -> str:
    """Return the table's row of one replica."""
    script = """return [...document.querySelectorAll('#members tr')]
        .filter((tr) => tr.cells[0].textContent === arguments[0]).map((tr) => tr.innerText).join()"""
    return browser.run(script, replica)


def step(browser: Browser) -> int:
    return int(browser.run("return document.querySelector('#facts dd').textContent"))


def test_the_page_shows_a_kill_and_a_return(job, browser):
    log_in(browser, job)
    for replica in ("r0", "r1", "r2"):
        assert {"member", "127.0.0.1", "alive"} <= set(row(browser, replica).split("\t"))
    assert "None so far" in browser.text("#recoveries")
    before = step(browser)
    browser.wait_for(lambda: step(browser) > before, "the steps to go on")
    browser.wait_for(
        lambda: browser.run("return document.querySelectorAll('#chart polyline').length") == 3, "three lines"
    )
    job.kill("r1")
    browser.wait_for(lambda: "death of r1" in browser.text("#recoveries"), "the failure")
    browser.wait_for(lambda: "next step after" in browser.text("#recoveries"), "its phases")
    browser.wait_for(lambda: "the process of r1 has ended" in browser.text("#recoveries"), "its diagnosis")
    browser.wait_for(lambda: "recovering" in browser.text("#ledger"), "what it cost the job")
    assert "r1 not back yet" in browser.text("#recoveries")
    browser.wait_for(lambda: "evicting · r1" in browser.text("#events"), "the event")
    at_death = step(browser)
    job.wait_for(lambda: job.ended("r1") is not None, "the killed one's end")
    job.start("r1")
    browser.wait_for(lambda: "yet" not in browser.text("#recoveries"), "the return")
    browser.wait_for(lambda: "alive" in row(browser, "r1") and "member" in row(browser, "r1"), "its row")
    assert step(browser) > at_death
    assert not browser.console(), "no error in the console, none by the content security policy"


def test_a_person_decides_by_keyboard(job, browser):
    log_in(browser, job)
    browser.run("document.querySelector('[data-key=\"drain r2\"]').focus()")
    # The focus must stay on its element, although every heartbeat updates the table.
    before = step(browser)
    browser.wait_for(lambda: step(browser) > before + 2, "the page to be drawn anew")
    assert browser.run("return document.activeElement.dataset.key") == "drain r2"
    browser.press(ENTER)
    browser.wait_for(lambda: browser.text("#act-title") == "drain r2", "the dialogue")
    browser.press(ESCAPE)
    assert not browser.run("return document.querySelector('#act').open"), "escape changes one's mind"
    assert "drain asked" not in browser.text("#events")
    browser.run("document.querySelector('[data-key=\"drain r2\"]').focus()")
    browser.press(ENTER)
    browser.type("#who", "ann")
    browser.type("#why", "<b>its host</b> is hot")
    browser.press(ENTER)
    browser.wait_for(
        lambda: "drain asked · r2 · by ann: <b>its host</b> is hot" in browser.text("#events"), "it"
    )
    job.wait_for(lambda: job.ended("r2") == 0, "the drained one's end")
    browser.wait_for(lambda: "2 of 3 replicas; r2 left" in browser.text("body"), "the headline to say so")
    browser.wait_for(lambda: "left" in row(browser, "r2"), "its row")  # its session may end a moment later
    assert "<b>its host</b> is hot" in browser.text("body"), "a person's words are text, not markup"


def test_a_button_stays_under_the_pointer_while_the_page_is_redrawn(quiet_job, browser):
    """A person's click takes longer than a redraw of the page."""
    log_in(browser, quiet_job)
    browser.press_down('[data-key="evict r1"]')
    before = step(browser)
    browser.wait_for(lambda: step(browser) > before + 2, "the page to be drawn anew")
    browser.run("document.body.style.paddingTop = '200px'")  # as a new line above the table does
    browser.let_go()
    assert browser.text("#act-title") == "evict r1"
    browser.press(ESCAPE)
    assert browser.run("return document.activeElement.dataset.key") == "evict r1", "where one was"


# The page gets the status of the real job, with its replicas copied many times.
MANY = """
const count = arguments[0], rounds = arguments[1];
watch = () => {};  // nothing of the real job comes in between
state.stream.close();
state.steps.clear();
const view = structuredClone(state.view), [member] = view.members;
for (let round = 0; round < rounds; round++) {
  view.members = Array.from({ length: count }, (_, i) =>
    ({ ...structuredClone(member), replica: `r${i}`, step: 1000 + round + (i === 7 ? 0 : 1) }));
  view.members[5].verdict = "both <i>silent</i> for 2 s";
  noteSteps(view.members, 1);
}
showJob(view);
view.members = view.members.slice(0, 3);
const rows = () => [$("members").children.length, $("trouble").textContent];
const all = [...rows(), document.querySelectorAll("#chart polyline").length, $("chart-text").textContent];
showJob(view);
return [...all, ...rows()];
"""


# The page gets the status of the real job with failed hosts; the script returns the table's text.
HOSTS = """
const shown = (hosts, complete) => {
  showJob({ ...structuredClone(state.view), hosts, complete });
  const texts = (tr) => [...tr.cells].map((td) => td.textContent.trim());
  return [$("failed-hosts").hidden, [...$("hosts").rows].map(texts)];
};
watch = () => {};  // nothing of the real job comes in between
state.stream.close();
const host = (name, score, suspect) =>
  ({ host: name, times: 2, score, suspect, at: 1763717000, why: "<b>its</b> process is gone",
    replicas: ["r1"] });
const first = shown([host("10.0.0.7", 1.904, true), host("10.0.0.8", 0.5, false)], false);
const button = document.querySelector('[data-key="admit 10.0.0.7"]');
button.focus();
const second = shown([host("10.0.0.8", 1.7, true), host("10.0.0.7", 1.6, true)], false);
const stays = document.activeElement === button && button.isConnected;
const third = shown([host("10.0.0.8", 1.7, true)], true);
return { first, second, stays, third, none: shown([], false) };
"""


def test_hosts_that_failed_are_listed_with_the_most_suspect_first(quiet_job, browser):
    log_in(browser, quiet_job)
    assert browser.run("return document.querySelector('#failed-hosts').hidden"), "none has failed"
    shown = browser.run(HOSTS)
    hidden, (suspect, other) = shown["first"]
    assert not hidden and suspect[:4] == ["10.0.0.7", "suspect", "2", "1.90"]
    assert suspect[5:] == ["<b>its</b> process is gone", "r1", "admit"]
    assert other[:4] == ["10.0.0.8", "none", "2", "0.50"] and other[7] == "", "an order needs a suspicion"
    assert [row[0] for row in shown["second"][1]] == ["10.0.0.8", "10.0.0.7"]
    assert [row[7] for row in shown["third"][1]] == [""], "a complete job takes no orders"
    assert shown["none"] == [True, []]
    assert not browser.console()
    assert quiet_job.ask("/v1/jobs/test/hosts") == b"[]"


# The page gets the status of the real job, with the hosts of a replica of two; the script returns the table.
NODES = """
watch = () => {};  // nothing of the real job comes in between
state.stream.close();
const view = structuredClone(state.view);
const node = (number, host, rack, kind, why) =>
  ({ id: host, replica: "r1", node: number, host, rack, state: kind, since: 1763717000, why });
view.nodes = [node(0, "h0", "x", "member", ""), node(1, "h1", "", "missing", "<b>node 1</b> is silent"),
  node(-1, "h9", "", "spare host", "this host stands by")];
showJob(view);
const rows = () => [...$("members").rows].map((tr) => [...tr.cells].map((td) => td.textContent.trim()));
const first = rows();
view.nodes = [];
showJob(view);
return [first, rows().length];
"""


def test_the_hosts_of_a_replica_stand_below_it_and_spare_hosts_at_the_end(quiet_job, browser):
    log_in(browser, quiet_job)
    rows, later = browser.run(NODES)
    assert [row[0] for row in rows] == ["r0", "r1", "r1 node 0", "r1 node 1", "r2", ""]
    healthy, missing, spare = rows[2], rows[3], rows[5]
    assert (healthy[1:3], healthy[7]) == (["member", "h0 (rack x)"], "alive")
    assert missing[1:3] == ["missing", "h1"] and missing[7].startswith("<b>node 1</b> is silent, since ")
    assert spare[1:3] == ["spare host", "h9"] and spare[7].startswith("this host stands by, since ")
    assert [row[8] for row in (healthy, missing, spare)] == ["", "", ""], "orders are for replicas"
    assert later == 3
    assert not browser.console()


# The page gets the status of the real job, with speeds of a job of two replicas of two ranks.
SPEEDS = """
watch = () => {};  // nothing of the real job comes in between
state.stream.close();
const view = structuredClone(state.view);
const row = (replica, rank, speeds, seconds) =>
  ({ replica, rank, stage: rank, speeds, seconds, predicted_s: 0.25 });
view.health = { mode: "act", slow: [], replicas: {}, vetoed: ["r0"],
  advice: { reason: "", micro_batches: {}, gain: 0.1, held: "too soon" },
  shares: { reason: "r1 computes at 0.5", micro_batches: { r0: 8, r1: 4 } },
  by_step: { steps: [7, 8, 9], left_out: 3, rows: [
    row("r0", 0, [1.02, 1, null], 0.25), row("r0", 1, [1, 1, 1], 0.25),
    row("r1", 0, [1, 0.98, 0.99], 0.25), row("r1", 1, [1, 0.6, 0.49], 0.51)] } };
showJob(view);
const lines = () => [...$("speeds").children].slice(2);
const kinds = (g) => [...g.querySelectorAll("rect")].map((x) => x.getAttribute("class").slice(5));
const line = (g) => [g.firstChild.textContent, kinds(g), g.lastChild.textContent];
const first = lines().map(line), kept = lines()[3], title = kept.querySelectorAll("title")[2].textContent;
view.health.by_step.rows[3].speeds = [0.6, 0.49, 1];
showJob(view);
const second = line(kept), same = kept.isConnected;
const table = [...document.querySelectorAll("#speed-rows tr")]
  .map((tr) => [...tr.cells].map((c) => c.textContent));
const words = [$("plan").textContent, $("speeds-text").textContent], hidden = $("speeds-section").hidden;
view.health.by_step.rows = [];
showJob(view);
return { first, second, same, title, table, words, hidden, none: $("speeds-section").hidden };
"""


def test_speeds_are_a_heat_map_with_a_text_that_says_the_same(quiet_job, browser):
    log_in(browser, quiet_job)
    shown = browser.run(SPEEDS)
    assert shown["first"] == [
        ["r0 rank 0", ["usual", "usual", "none"], "1.00"],
        ["r0 rank 1", ["usual", "usual", "usual"], "1.00"],
        ["r1 rank 0", ["usual", "usual", "usual"], "0.99"],
        ["r1 rank 1", ["usual", "slow", "slow"], "0.49 slow"],
    ]
    assert shown["title"] == "r1 rank 1, step 9: speed 0.49"
    assert shown["second"] == ["r1 rank 1", ["slow", "slow", "usual"], "1.00"] and shown["same"]
    assert shown["table"][3][:5] == ["r1 rank 1", "1", "0.510 s", "0.250 s", "1.00"]
    plan, text = shown["words"]
    assert "(mode act)" in plan and "In force: r1 computes at 0.5 (micro-batches: r0 8, r1 4)." in plan
    assert "not followed: too soon" in plan and "veto keeps the shares of r0" in plan
    assert text.startswith("Speed relative to equals, 1 is usual, steps 7 to 9. No rank is slower than 0.9.")
    assert text.endswith("3 faster ranks are not shown.")
    assert not shown["hidden"] and shown["none"]
    assert not browser.console(), "no error in the console, none by the content security policy"


def test_a_page_of_many_replicas_names_who_is_in_trouble_and_draws_the_first_and_the_last(quiet_job, browser):
    log_in(browser, quiet_job)
    shown = browser.run(MANY, 300, 500)
    words = "Committed steps: the furthest: 1500, the last: 1499"
    assert shown == [300, "Not as they should be: r5", 2, words, 3, ""]
    assert not browser.console(), "no error in the console"
    # The page no longer shows a replica that left long ago.
    browser.open(f"{quiet_job.url}/?job=<b>none</b>")
    browser.wait_for(lambda: "every member runs" in browser.text("#waiting"), "the job")
    assert browser.text("#notice") == "There is no job <b>none</b> here; this is test."
    old = "state.steps.set('gone', [[Date.now() / 1000 - 200, 0], [Date.now() / 1000 - 130, 0]])"
    browser.run(old)
    browser.wait_for(lambda: not browser.run("return state.steps.has('gone')"), "its line to go")
    browser.wait_for(lambda: "gone" not in browser.text("#chart-text"), "its word to go")


def test_a_person_sets_how_many_there_may_be_and_pauses_joins(job, browser):
    log_in(browser, job)
    browser.click("#scale")
    browser.wait_for(lambda: browser.text("#act-title") == "scale the job", "the dialogue")
    values = {"#least": "2", "#most": "1", "#who": "bea", "#why": "budget"}
    script = "document.querySelector(arguments[0]).value = arguments[1]"
    for field, value in values.items():
        browser.run(script, field, value)
    browser.click("#act-do")
    browser.wait_for(lambda: "at most 1 replicas cannot be" in browser.text("#act-error"), "the refusal")
    browser.console()  # the console shows the refusal
    browser.run(script, "#most", "2")
    browser.click("#act-do")
    browser.wait_for(lambda: "Scaled by bea: budget." in browser.text("#paused"), "what the page says")
    browser.wait_for(lambda: browser.run("return state.view.members.length") == 2, "one to leave")
    assert not browser.run("return document.querySelector('#act').open")

    for verb, shown in (
        ("pause", "Joins are paused by bea: a look at rack 4. Scaled by bea: budget."),
        ("resume", "Scaled by bea: budget."),
    ):
        browser.wait_for(lambda verb=verb: browser.text("#joins") == f"{verb} joins", "the button")
        browser.run("document.querySelector('#joins').click()")
        browser.wait_for(lambda verb=verb: browser.text("#act-title") == f"{verb} joins", "the dialogue")
        browser.run("document.querySelector('#who').value = 'bea'")
        browser.run("document.querySelector('#why').value = 'a look at rack 4'")
        browser.run("document.querySelector('#act-do').click()")
        browser.wait_for(lambda shown=shown: browser.text("#paused") == shown, "what the page says")
    assert not browser.console()


def test_a_wrong_token_is_reported_and_the_right_one_is_not_kept(quiet_job, browser):
    browser.open(quiet_job.url)
    browser.wait_for(lambda: browser.run("return document.querySelector('#login').open"), "the question")
    browser.type("#token", "wrong")
    browser.press(ENTER)
    browser.wait_for(lambda: "does not match" in browser.text("#login-error"), "the refusal")
    browser.type("#token", quiet_job.token.read_text().strip())
    browser.press(ENTER)
    browser.wait_for(lambda: "r2" in browser.text("#members"), "the job")
    assert browser.run("return document.cookie") == "", "a cookie goes to every port of the host"
    kept = browser.run("return [JSON.stringify(localStorage), Object.keys(sessionStorage).join()].join()")
    assert kept == "{},fabric-page"
    assert quiet_job.token.read_text().strip() not in browser.run("return JSON.stringify(sessionStorage)")


MADE_UP = ("", "1.x", "99999999999.00", "\u00e4", "99999999999..", ".")


BROKEN_WORDS = """
const broken = [];
for (const cell of document.querySelectorAll("td"))
  for (const word of cell.firstChild.data.matchAll(/\\S+/g)) {
    const range = document.createRange();
    range.setStart(cell.firstChild, word.index);
    range.setEnd(cell.firstChild, word.index + word[0].length);
    if (range.getClientRects().length > 1) broken.push(word[0]);
  }
return [broken, document.documentElement.scrollWidth];
"""


@pytest.mark.parametrize("width", [1280, 800])
def test_a_long_reason_breaks_no_word_of_the_other_cells(browser, tmp_path, width):
    """Beside a reason of three lines the page had "memb er" and "runnin g"."""
    path = "/a-folder" * 40
    cells = {
        "replica": "r0",
        "role": "new member",
        "phase": "run, waiting",
        "step": "690",
        "waits for": "r1, r3",
    }
    cells |= {"trainer": "running", "verdict": f"{'refused for its other settings ' * 12} {path}"}
    row = "".join(f'<td data-label="{label}">{text}</td>' for label, text in cells.items())
    style = (files("fabric.lighthouse.http") / "page" / "dashboard.css").read_text()
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><style>{style}</style><section><table><tr>{row}</tr></table></section>")
    browser.resize(width, 800)
    browser.open(page.as_uri())
    assert browser.run(BROKEN_WORDS) == [[path], width]


def test_a_made_up_login_opens_nothing(quiet_job):
    for path in ("/v1/jobs", "/v1/jobs/test", "/v1/jobs/test/live"):
        for login in MADE_UP:
            headers = {"Authorization": f"Page {login}".encode().decode("latin-1")}
            with pytest.raises(urllib.error.HTTPError) as refused:
                asked = urllib.request.Request(quiet_job.url + path, headers=headers)
                urllib.request.urlopen(asked, timeout=10)
            with refused.value as answer:
                assert answer.status == 401


# Speeds of a job of three replicas of four ranks, of which one gets slow and one misses a report.
SPEEDS_PICTURE = """
watch = () => {};
state.stream.close();
const view = structuredClone(state.view), steps = Array.from({ length: 30 }, (_, i) => 780 + i), rows = [];
for (const replica of ["r0", "r1", "r2"]) for (let rank = 0; rank < 4; rank++) {
  const slow = replica === "r1" && rank === 2;
  const speeds = steps.map((step, i) => i === 11 && replica === "r2" ? null
    : (slow && i > 17 ? 0.48 : 1) + ((step * 7 + rank * 3) % 11 - 5) / 200);
  rows.push({ replica, rank, stage: 0, speeds, seconds: slow ? 0.52 : 0.25, predicted_s: 0.25 });
}
const micro_batches = { r0: 10, r1: 4, r2: 10 };
const shares = { micro_batches, reason: "r1 computes at 0.49 of the speed of the others" };
view.health =
  { mode: "act", slow: [], replicas: {}, advice: null, shares, by_step: { steps, left_out: 0, rows } };
showJob(view);
"""


def make_screenshots(folder: Path) -> None:
    """A job that has lost a replica and got it back, in dark, light and on a phone; then speeds of ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    zygote = Zygote()
    with (
        tempfile.TemporaryDirectory() as scratch,
        Job(zygote, Path(scratch) / "job", environment=ENVIRONMENT) as job,
    ):
        job.start_all()
        with Browser(Path(scratch) / "browser") as browser:
            browser.resize(1280, 1000)
            log_in(browser, job)
            first = step(browser)
            browser.wait_for(lambda: step(browser) > first + 100, "a line to be seen")
            job.kill("r1")
            job.wait_for(lambda: job.ended("r1") is not None, "its end")
            job.start("r1")
            browser.wait_for(lambda: "r1 back after" in browser.text("#recoveries"), "the return")
            second = step(browser)
            browser.wait_for(lambda: step(browser) > second + 60, "a while after it")
            for name, scheme, size in (
                ("light", "light", (1280, 1000)),
                ("dark", "dark", (1280, 1000)),
                ("phone", "light", (390, 1400)),
            ):
                browser.prefer(scheme)
                browser.resize(*size)
                drawn = step(browser)
                browser.wait_for(lambda drawn=drawn: step(browser) > drawn, "the page to be drawn anew")
                browser.screenshot(folder / f"dashboard-{name}.png")
            browser.resize(1280, 760)
            browser.run(SPEEDS_PICTURE)
            for scheme in ("light", "dark"):
                browser.prefer(scheme)
                browser.run("document.querySelector('#speeds-section').scrollIntoView()")
                browser.screenshot(folder / f"speeds-{scheme}.png")
    zygote.close()


if __name__ == "__main__":
    make_screenshots(Path(sys.argv[1]))
