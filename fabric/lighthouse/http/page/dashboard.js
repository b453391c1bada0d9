// The lighthouse's page. Everything that others wrote goes in by textContent, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const WINDOW_S = 120;
const COLOURS = ["#4c8dff", "#e0803a", "#2fa36b", "#c45bc9", "#c9a227", "#26a5b5", "#e2607a", "#8a78e0"];
// So many lines are told apart; of more replicas the furthest and the last are drawn.
const MOST_LINES = COLOURS.length;
const fresh = () => ({ steps: new Map(), epochs: [], events: [], lastEvent: 0, rows: new Map(), hosts: new Map(), view: null });
const state = { job: "", stream: null, alive: 0, note: "", ...fresh() };

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// What is the same is not written again: text that is selected stays so, and nothing is read out twice.
function say(made, text, className) {
  const words = String(text ?? "");
  if (made.textContent !== words) made.textContent = words;
  if (className !== undefined && made.className !== className) made.className = className;
  return made;
}

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

function took(from, to) {
  const seconds = to - from;
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`;
}

function spent(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return seconds < 3600 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// A cookie goes to every port of the host, so the page keeps its login itself. Only pages of this port read it.
function fetched(path, options = {}) {
  const login = sessionStorage.getItem("fabric-page");
  const headers = { ...options.headers, ...(login ? { Authorization: `Page ${login}` } : {}) };
  return fetch(path, { redirect: "manual", ...options, headers });
}

async function ask(path, options) {
  const answer = await fetched(path, options);
  if (answer.type === "opaqueredirect") throw new Error("another lighthouse leads: see the top of the page");
  const body = await answer.json();
  if (answer.status === 401) { showLogin(); throw new Error(body.error); }
  if (!answer.ok) throw new Error(body.error);
  return body;
}

async function lookAtHealth() {
  const line = $("health");
  try {
    const health = await (await fetch("/healthz")).json();
    const store = health.store_reachable ? ", the store answers" : ", the store does not answer";
    if (health.is_leader) say(line, `this lighthouse leads${store}`);
    else if (health.leader) {
      const old = state.job ? "; what you see below is old" : "";
      const link = element("a", health.leader);
      if (/^https?:\/\//.test(health.leader)) link.href = `${health.leader}/${location.search}`;
      if (!line.textContent.endsWith(`${health.leader}${store}${old}`)) {
        line.replaceChildren("another lighthouse leads: ", link, `${store}${old}`);
      }
    } else say(line, `no lighthouse leads; training goes on${store}`);
    line.className = health.ok ? "good" : "bad";
    return health;
  } catch {
    say(line, "this lighthouse does not answer; what you see is old", "bad");
    return null;
  }
}

async function lookForJobs() {
  const health = await lookAtHealth();
  if (!health || !health.is_leader) return;
  let jobs;
  try { jobs = await ask("/v1/jobs"); } catch { return; }
  const select = $("jobs");
  const names = jobs.map((job) => job.job);
  if (names.join() !== [...select.options].map((o) => o.value).join()) {
    select.replaceChildren(...names.map((name) => Object.assign(element("option", name), { value: name })));
  }
  const wanted = new URLSearchParams(location.search).get("job");
  const chosen = names.includes(state.job) ? state.job : names.includes(wanted) ? wanted : names[0];
  const broken = (jobs.find((job) => job.job === chosen) || {}).error;
  say($("notice"), !names.length ? "This lighthouse knows no job yet."
    : broken ? `Job ${chosen}: ${broken}`
    : wanted && !names.includes(wanted) ? `There is no job ${wanted} here; this is ${chosen}.` : state.note);
  if (!names.length || broken) { $("main").hidden = true; return; }
  if (chosen !== state.job || !state.stream || performance.now() - state.alive > 15000) watch(chosen);
  select.value = chosen;
}

function watch(job) {
  if (state.stream) state.stream.close();
  if (job !== state.job) {
    Object.assign(state, { job, note: "", ...fresh() });
    delete $("penalties").dataset.key;
    for (const list of ["members", "penalties", "hosts", "events", "recoveries", "chart"]) $(list).replaceChildren();
  }
  state.alive = performance.now();
  const control = new AbortController();
  const stream = state.stream = { close: () => control.abort() };
  const show = { job: showJob, events: showEvents, recoveries: showRecoveries, still: () => {} };
  follow(`/v1/jobs/${encodeURIComponent(job)}/live`, control.signal, (kind, body) => {
    state.alive = performance.now();
    show[kind](body);
  }).catch(() => {}).finally(() => { if (state.stream === stream) state.stream = null; });
}

// Read server-sent events, as an EventSource does, which sends no header.
async function follow(path, signal, take) {
  const answer = await fetched(path, { signal });
  if (!answer.ok) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done && !signal.aborted; part = await reader.read()) {
    const messages = (rest + part.value).split("\n\n");
    rest = messages.pop();
    for (const message of messages) {
      const [kind, body] = message.split("\n", 2).map((line) => line.slice(line.indexOf(": ") + 2));
      take(kind, JSON.parse(body));
    }
  }
}

function recoverable(job) {
  const held = job.recoverable;
  if (job.complete) return "";
  if (!held) return "If all trainers died now nothing would be left: no replica holds a whole snapshot.";
  const facts = [held.steps_behind === null ? "" : `${held.steps_behind} behind`,
    held.age_s === null ? "" : `${spent(held.age_s)} old`].filter(Boolean);
  return `If all trainers died now step ${held.step} would be left${facts.length ? ` (${facts.join(", ")})` : ""}.`;
}

function slow(health) {
  if (!health) return "";
  const advice = health.advice;
  const shares = advice ? Object.entries(advice.micro_batches).map(([r, n]) => `${r} ${n}`).join(", ") : "";
  return [...health.slow.map((x) => `Slow: ${x.evidence}.`),
    advice ? `Advice: ${advice.reason} (micro-batches: ${shares}; throughput +${Math.round(100 * advice.gain)} %).` : ""]
    .filter(Boolean).join(" ");
}

function showJob(job) {
  state.view = job;
  $("main").hidden = false;
  const waiting = job.waiting_for;
  const nothing = waiting.startsWith("nothing: ");
  const whole = /^(?:complete: .*|(\d+) of \1 replicas?)$/s.test(job.headline);
  say($("headline"), job.headline, whole ? "headline good" : "headline bad");
  say($("waiting"), !nothing ? `Waiting for ${waiting}` : job.absent.length ? "" : waiting.slice(9));
  const facts = [["step", job.step], ["epoch", job.epoch], ["generation", job.generation],
    ["members", job.members.length], ["sessions", job.sessions], ["needs at least", job.policy.min_replicas],
    ["may have", job.policy.max_replicas]];
  if (job.loss) facts.push(["loss", job.loss]);
  if (job.durable) facts.push(["durable step", job.durable.step]);
  const failing = Object.entries(job.durable_failing || {});
  if (failing.length) facts.push(["durable checkpoints fail", failing.map(([r, why]) => `${r}: ${why}`).join("; ")]);
  if (job.ledger.goodput !== null) facts.push(["goodput", `${(100 * job.ledger.goodput).toFixed(1)} %`]);
  facts.forEach(([name, value], index) => {
    let pair = $("facts").children[index];
    if (!pair) { pair = element("div"); pair.append(element("dt"), element("dd")); $("facts").append(pair); }
    say(pair.children[0], name);
    say(pair.children[1], value);
  });
  while ($("facts").children.length > facts.length) $("facts").lastChild.remove();
  say($("ledger"), ["training", "degraded", "recovering", "stalled"]
    .filter((name) => job.ledger[name]).map((name) => `${name} ${spent(job.ledger[name])}`).join(" \u00b7 "));
  say($("recoverable"), recoverable(job));
  say($("slow"), slow(job.health));
  showSpeeds(job);
  const overrides = job.record ? job.record.overrides : {};
  say($("paused"), [job.paused ? `Joins are paused ${job.paused}.` : "",
    overrides.scaled ? `Scaled ${overrides.scaled}.` : ""].filter(Boolean).join(" "));
  say($("joins"), `${job.paused ? "resume" : "pause"} joins`);
  showPenalties(job.penalties);
  showHosts(job.hosts, job.complete);
  const penalised = new Set(job.penalties.map((p) => p.about));
  const rows = [...job.members.map((m) => [m, m.leaving ? "leaving" : m.joining ? "new member" : "member"]),
    ...job.joiners.map((j) => [j, j.spare ? "spare" : "outside"])];
  const shown = new Set(rows.map(([entry]) => entry.replica));
  rows.push(...job.absent.filter((a) => !shown.has(a.replica)).map((a) => [{ replica: a.replica, host: a.host,
    phase: "", connected: true, verdict: [a.why, `since ${clock(a.since)}`].filter(Boolean).join(", ") }, a.state]));
  showRows(withHosts(rows, job.nodes), penalised, job.complete);
  noteSteps(rows.map(([entry]) => entry), job.epoch);
}

// The hosts of a replica of several hosts stand below it; of very many those that are no members.
function withHosts(rows, hosts) {
  const below = new Map();
  for (const host of hosts) {
    if (hosts.length > 20 && host.state === "member") continue;
    const replica = host.node < 0 ? "" : host.replica;
    const fine = host.state === "member" || host.state === "spare host";
    const verdict = fine && !host.why ? "alive" : [host.why, `since ${clock(host.since)}`].filter(Boolean).join(", ");
    const entry = { replica: replica && `${replica} node ${host.node}`, host: host.host + (host.rack && ` (rack ${host.rack})`),
      phase: "", connected: true, verdict, fine, ofHost: host.id };
    below.set(replica, [...(below.get(replica) || []), [entry, host.state]]);
  }
  const placed = rows.flatMap((row) => {
    const own = below.get(row[0].replica) || [];
    below.delete(row[0].replica);
    return [row, ...own];
  });
  return [...placed, ...[...below.values()].flat()];
}

// What failed too often and may not be here: hosts too.
function showPenalties(penalties) {
  const key = JSON.stringify(penalties);
  if ($("penalties").dataset.key === key) return;
  $("penalties").dataset.key = key;
  $("penalties").replaceChildren(...penalties.map((penalty) => {
    const item = element("li", `${penalty.kind} ${penalty.about} failed ${penalty.times} times, last: ` +
      `${penalty.why}; kept out until ${clock(penalty.until)} `);
    item.append(actionButton("admit", penalty.about));
    return item;
  }));
}

const HOST_COLUMNS = ["host", "suspicion", "failures", "score", "last failure", "reason", "replicas there"];

// The history of hosts, the most suspect first; nothing is shown while no host has failed.
function showHosts(hosts, over) {
  $("failed-hosts").hidden = !hosts.length;
  placeRows($("hosts"), state.hosts, hosts.map((host) => [host.host, host]), HOST_COLUMNS, (tr, host) => {
    const day = new Date(host.at * 1000).toLocaleDateString([], { month: "short", day: "numeric" });
    const values = [[host.host], host.suspect ? ["suspect", "warn"] : ["none", "good"], [host.times, "number"],
      [host.score.toFixed(2), "number"], [`${day}, ${clock(host.at)}`], [host.why], [host.replicas.join(", ")]];
    values.forEach(([text, className], index) => say(tr.cells[index], text, className));
    placeActions(tr, host.suspect && !over ? ["admit"] : [], host.host);
  });
}

// Rows are made once and then changed in place: what is under the pointer, or has the focus, stays there.
function placeRows(body, rows, entries, columns, fill) {
  const seen = new Set(entries.map(([key]) => key));
  for (const [key, tr] of rows) if (!seen.has(key)) { tr.remove(); rows.delete(key); }
  entries.forEach(([key, entry], index) => {
    if (!rows.has(key)) rows.set(key, emptyRow(columns));
    const tr = rows.get(key);
    fill(tr, entry);
    if (body.children[index] !== tr) body.insertBefore(tr, body.children[index] || null);
  });
}

function showRows(rows, penalised, over) {
  const entries = rows.map((row) => {
    const isOutside = row[1] === "outside" || row[1] === "spare";
    return [`${isOutside ? "outside" : "member"} ${row[0].replica} ${row[0].ofHost || ""}`, row];
  });
  placeRows($("members"), state.rows, entries, COLUMNS, (tr, [entry, role]) => fillRow(tr, entry, role, penalised, over));
  const troubled = rows.filter(([entry, role]) => role !== "spare" && !isFine(entry)).map(([entry]) => entry.replica);
  const named = troubled.slice(0, 20).join(", ") + (troubled.length > 20 ? ` and ${troubled.length - 20} more` : "");
  say($("trouble"), rows.length > 20 && troubled.length && !over ? `Not as they should be: ${named}` : "");
}

const COLUMNS = ["replica", "role", "host", "phase", "step", "waits for", "trainer", "verdict"];

function emptyRow(columns) {
  const tr = element("tr");
  for (const label of columns) tr.append(Object.assign(element("td"), { className: label === "step" ? "number" : "" }));
  columns.forEach((label, index) => { tr.cells[index].dataset.label = label; });
  tr.append(element("td", undefined, "actions"));
  return tr;
}

const isFine = (entry) => entry.connected && (entry.fine || entry.verdict === "alive" || entry.verdict === "finished");

function fillRow(tr, entry, role, penalised, over) {
  const trainer = entry.trainer_status ? entry.trainer_status.trainer : "";
  const phase = (entry.busy ? `busy: ${entry.busy}` : entry.phase) + (entry.connected || over ? "" : " (away)");
  const values = [[entry.replica], [role], [entry.host], [phase], [entry.step], [(entry.waiting_for || []).join(", ")],
    [trainer, trainer === "gone" || trainer === "stopped" ? "bad" : ""],
    [entry.verdict, isFine(entry) || over ? "good" : "warn"]];
  values.forEach(([text, className], index) => say(tr.cells[index], text, className));
  const outside = role === "outside" || role === "spare";
  const actions = over || "fine" in entry || role === "down" || role === "left" ? [] : !outside ? ["drain", "evict"] : penalised.has(entry.replica) ? ["admit", "drain"] : ["drain"];
  placeActions(tr, actions, entry.replica);
}

function placeActions(tr, actions, about) {
  if (tr.dataset.actions === actions.join()) return;
  tr.dataset.actions = actions.join();
  tr.lastChild.replaceChildren(...actions.flatMap((action) => [actionButton(action, about), " "]));
}

function actionButton(action, about) {
  const button = element("button", action);
  button.type = "button";
  button.dataset.key = `${action} ${about}`;
  button.setAttribute("aria-label", `${action} ${about}`);
  // A line that appears above moves the button, but a press that began on it stays its own.
  button.addEventListener("pointerdown", (event) => button.setPointerCapture(event.pointerId));
  button.addEventListener("click", () => decide(action, about));
  return button;
}

function noteSteps(entries, epoch) {
  const now = Date.now() / 1000;
  const known = entries.filter((entry) => Number.isFinite(entry.step));
  if (known.length > MOST_LINES) {
    const order = known.map((entry) => entry.step).sort((a, b) => a - b);
    notePoint("the furthest", now, order[order.length - 1]);
    notePoint("the last", now, order[0]);
  } else known.forEach((entry) => notePoint(entry.replica, now, entry.step));
  for (const [name, points] of state.steps) {
    while (points.length && points[0][0] < now - WINDOW_S) points.shift();
    if (!points.length) state.steps.delete(name);
  }
  const last = state.epochs[state.epochs.length - 1];
  if (!last || last[1] !== epoch) state.epochs.push([now, epoch]);
  while (state.epochs.length > 1 && state.epochs[1][0] < now - WINDOW_S) state.epochs.shift();
  drawChart(now);
}

// A line that goes on level needs its two ends only.
function notePoint(name, now, step) {
  if (!state.steps.has(name)) state.steps.set(name, []);
  const points = state.steps.get(name), count = points.length;
  if (count > 1 && points[count - 1][1] === step && points[count - 2][1] === step) points[count - 1][0] = now;
  else points.push([now, step]);
}

function svg(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawChart(now) {
  const lines = [...state.steps];
  if (!lines.length) return;
  const steps = lines.flatMap(([, points]) => points.map((p) => p[1]));
  const low = steps.reduce((a, b) => Math.min(a, b)), high = steps.reduce((a, b) => Math.max(a, b), low + 1);
  const x = (t) => 45 + (t - now + WINDOW_S) / WINDOW_S * 545;
  const y = (step) => 180 - (step - low) / (high - low) * 165;
  const parts = [svg("line", { class: "axis", x1: 45, y1: 180, x2: 590, y2: 180 }),
    svg("text", { x: 40, y: 184, "text-anchor": "end" }, low), svg("text", { x: 40, y: 20, "text-anchor": "end" }, high),
    svg("text", { x: 45, y: 197 }, "2 min ago"), svg("text", { x: 590, y: 197, "text-anchor": "end" }, "now")];
  // The first one was there before anybody looked; the others began while somebody did.
  let taken = 620;
  for (const [t, epoch] of state.epochs.slice(1).reverse()) {
    if (t < now - WINDOW_S) continue;
    parts.push(svg("line", { class: "epoch", x1: x(t), y1: 15, x2: x(t), y2: 180 }));
    if (x(t) + 60 > taken) continue;  // of those that lie close together the newest is named
    taken = x(t);
    parts.push(svg("text", { x: x(t), y: 12, "text-anchor": x(t) > 540 ? "end" : "start" }, `epoch ${epoch}`));
  }
  lines.forEach(([, points], index) => {
    const path = points.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ");
    parts.push(svg("polyline", { class: "line", points: path, stroke: COLOURS[index % COLOURS.length] }));
  });
  $("chart").replaceChildren(...parts);
  const words = lines.map(([name, points]) => `${name}: ${points[points.length - 1][1]}`);
  say($("chart-text"), `Committed steps: ${words.join(", ")}`);
}

function diagnosis(found, id) {
  const box = element("details", undefined, "diagnosis");
  box.dataset.id = id;
  box.open = Boolean(document.querySelector(`details[open][data-id="${id}"]`));
  const line = element("summary");
  line.append(element("strong", found.verdict), ` ${found.why}`);
  box.append(line);
  for (const seen of found.seen) {
    const who = seen.rank ? `${seen.replica} rank ${seen.rank}` : seen.replica;
    const facts = [`process ${seen.pid} ${seen.process}`, seen.phase, seen.step === null ? "" : `step ${seen.step}`,
      seen.collective, seen.kernel, seen.problem].filter(Boolean).join(" · ");
    box.append(element("div", `${who}: ${facts}`));
    if (seen.main.length) box.append(element("pre", seen.main.join("\n")));
  }
  return box;
}

function showRecoveries(recoveries) {
  const items = recoveries.slice().reverse().map((recovery) => {
    const item = element("li");
    const lost = Object.keys(recovery.lost);
    item.append(element("time", clock(recovery.detected)));
    if (recovery.incident_id) item.append(element("span", `${recovery.incident_id} `, "small"));
    item.append(element("strong", `${recovery.kind}${lost.length ? ` of ${lost.join(", ")}` : ""}`));
    item.append(element("div", recovery.why));
    if (recovery.diagnosis) item.append(diagnosis(recovery.diagnosis, Number(recovery.id)));
    const phases = element("div", undefined, "phases");
    const say = (name, at, before) => phases.append(
      element("span", at ? `${name} after ${took(recovery.detected, at)}` : before));
    say(`epoch ${recovery.epoch} committed`, recovery.epoch_committed, "no new epoch yet");
    say("links up", recovery.links_up, "links not up yet");
    say("next step", recovery.step_committed, "no step yet");
    for (const [name, back] of Object.entries(recovery.lost)) say(`${name} back`, back.joined, `${name} not back yet`);
    if (recovery.steps_lost) phases.append(element("span", `${recovery.steps_lost} steps lost`, "bad"));
    item.append(phases);
    return item;
  });
  $("recoveries").replaceChildren(...(items.length ? items : [element("li", "None so far.")]));
}

function showEvents(events) {
  const news = events.filter((event) => event.id > state.lastEvent);
  if (!news.length) return;
  state.lastEvent = news[news.length - 1].id;
  state.events = [...news.reverse(), ...state.events].slice(0, 200);
  $("events").replaceChildren(...state.events.map((event) => {
    const item = element("li");
    item.append(element("time", clock(event.t)));
    item.append([`epoch ${event.epoch}`, event.kind === "epoch" ? "" : event.kind, event.about, event.why].filter(Boolean).join(" · "));
    return item;
  }));
}

function showLogin() {
  if (!$("login").open) $("login").showModal();
}

$("login-form").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  const body = JSON.stringify({ token: $("token").value });
  try {
    const answer = await fetch("/login", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const login = await answer.json();
    $("token").value = "";
    say($("login-error"), answer.ok ? "" : login.error);
    if (!answer.ok) return;
    if (login.page) sessionStorage.setItem("fabric-page", login.page);
  } catch {
    say($("login-error"), "this lighthouse does not answer: try again in a moment");
    return;
  }
  $("login").close();
  lookForJobs();
});

const TEXTS = {
  drain: "It leaves at the next step boundary. Nobody waits, nothing is lost.",
  evict: "It is left out at once, as if it had died. The others redo its part of the step.",
  admit: "It failed too often. That is forgotten, and it may join at once.",
  pause: "Nobody is admitted until joins are resumed. The members go on.",
  resume: "Newcomers are admitted again.",
  scale: "Below the minimum the members stop and wait; above the maximum the newest leave. 0: as the replicas ask.",
};

function decide(action, about = "") {
  const title = about ? `${action} ${about}` : action === "scale" ? "scale the job" : `${action} joins`;
  $("act-title").textContent = title;
  $("act-text").textContent = TEXTS[action];
  $("act-do").textContent = title;
  $("act-error").textContent = "";
  const form = $("act-form");
  Object.assign(form.dataset, { action, about, job: state.job });
  $("sizes").hidden = action !== "scale";
  const overrides = state.view && state.view.record ? state.view.record.overrides : {};
  $("least").value = overrides.min_replicas || 0;
  $("most").value = overrides.max_replicas || 0;
  $("act").showModal();
}

$("joins").addEventListener("click", () => decide(state.view && state.view.paused ? "resume" : "pause"));
$("scale").addEventListener("click", () => decide("scale"));
$("act-cancel").addEventListener("click", () => $("act").close());
$("act-form").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  const { action, about, job } = $("act-form").dataset;
  const body = { replica: about, about, who: $("who").value, why: $("why").value };
  if (action === "scale") Object.assign(body, { min: Number($("least").value), max: Number($("most").value) });
  try {
    const path = `/v1/jobs/${encodeURIComponent(job)}/${action}`;
    const answer = await ask(path, { method: "POST", body: JSON.stringify(body) });
    $("act").close();
    $("why").value = "";
    say($("notice"), state.note = answer.note || "");
  } catch (error) { $("act-error").textContent = error.message; }
});

$("jobs").addEventListener("change", () => {
  history.replaceState(null, "", `?job=${encodeURIComponent($("jobs").value)}`);
  watch($("jobs").value);
});
lookForJobs();
setInterval(lookForJobs, 3000);
