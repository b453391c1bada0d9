// The lighthouse's page. Everything that others wrote goes in by textContent, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const WINDOW_S = 120;
const COLOURS = ["#4c8dff", "#e0803a", "#2fa36b", "#c45bc9", "#c9a227", "#26a5b5", "#e2607a", "#8a78e0"];
const state = { job: "", stream: null, steps: new Map(), events: [], lastEvent: 0, alive: 0 };

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

function took(from, to) {
  if (!to) return "not yet";
  const seconds = to - from;
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`;
}

function spent(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return seconds < 3600 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

async function ask(path, options) {
  const answer = await fetch(path, { redirect: "manual", ...options });
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
    line.textContent = "";
    if (health.is_leader) line.append("this lighthouse leads");
    else if (health.leader) {
      line.append("another lighthouse leads: ");
      const link = element("a", health.leader);
      if (/^https?:\/\//.test(health.leader)) link.href = health.leader;
      line.append(link);
    } else line.append("no lighthouse leads; training goes on");
    line.append(health.store_reachable ? ", the store answers" : ", the store does not answer");
    line.className = health.ok ? "good" : "bad";
    return health;
  } catch {
    line.textContent = "this lighthouse does not answer; what you see is old";
    line.className = "bad";
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
  if (!names.length) { $("main").hidden = true; return; }
  if (!names.includes(state.job)) watch(new URLSearchParams(location.search).get("job") || names[0]);
  select.value = state.job;
  if (!state.stream || performance.now() - state.alive > 15000) watch(state.job);
}

function watch(job) {
  if (state.stream) state.stream.close();
  if (job !== state.job) Object.assign(state, { job, steps: new Map(), events: [], lastEvent: 0 });
  state.alive = performance.now();
  const stream = state.stream = new EventSource(`/v1/jobs/${encodeURIComponent(job)}/live`);
  const on = (kind, show) => stream.addEventListener(kind, (message) => {
    state.alive = performance.now();
    show(JSON.parse(message.data));
  });
  on("job", showJob);
  on("events", showEvents);
  on("recoveries", showRecoveries);
  on("still", () => {});
  stream.onerror = () => { if (stream.readyState === EventSource.CLOSED) state.stream = null; };
}

function showJob(job) {
  $("main").hidden = false;
  const waiting = job.waiting_for;
  $("waiting").textContent = waiting.startsWith("nothing: ") ? waiting.slice(9) : `Waiting for ${waiting}`;
  const facts = [["step", job.step], ["epoch", job.epoch], ["generation", job.generation],
    ["members", job.members.length], ["sessions", job.sessions], ["needs at least", job.policy.min_replicas]];
  if (job.ledger.goodput !== null) facts.push(["goodput", `${(100 * job.ledger.goodput).toFixed(1)} %`]);
  $("ledger").textContent = ["training", "degraded", "recovering", "stalled"]
    .filter((name) => job.ledger[name]).map((name) => `${name} ${spent(job.ledger[name])}`).join(" · ");
  $("facts").replaceChildren(...facts.map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    return pair;
  }));
  const verb = job.paused ? "resume" : "pause";
  $("paused").textContent = job.paused ? `Joins are paused ${job.paused}.` : "";
  $("joins").textContent = `${verb} joins`;
  $("joins").onclick = () => decide(verb);
  const penalised = new Map(job.penalties.map((p) => [p.about, p]));
  const rows = [...job.members.map((m) => [m, m.leaving ? "leaving" : m.fresh ? "new member" : "member"]),
    ...job.joiners.map((j) => [j, "outside"])];
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : "";
  $("members").replaceChildren(...rows.map(([entry, role]) => row(entry, role, penalised)));
  if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  noteSteps(rows.map(([entry]) => entry));
}

function row(entry, role, penalised) {
  const tr = element("tr");
  const trainer = entry.pulse ? entry.pulse.trainer : "";
  const phase = entry.busy ? `busy: ${entry.busy}` : entry.phase;
  const fine = entry.verdict === "alive" && entry.connected;
  const cells = [["replica", entry.replica], ["role", role], ["phase", phase + (entry.connected ? "" : " (away)")],
    ["step", entry.step ?? "", "number"], ["waits for", (entry.waiting_for || []).join(", ")],
    ["trainer", trainer, trainer === "gone" || trainer === "stopped" ? "bad" : ""],
    ["verdict", entry.verdict, fine ? "good" : "warn"]];
  for (const [label, text, className] of cells) {
    const td = element("td", text, className);
    td.dataset.label = label;
    tr.append(td);
  }
  const actions = element("td", undefined, "actions");
  for (const action of role !== "outside" ? ["drain", "evict"] : penalised.has(entry.replica) ? ["admit"] : []) {
    const button = element("button", action);
    button.type = "button";
    button.dataset.key = `${action} ${entry.replica}`;
    button.setAttribute("aria-label", `${action} ${entry.replica}`);
    button.addEventListener("click", () => decide(action, entry.replica));
    actions.append(button, " ");
  }
  tr.append(actions);
  return tr;
}

function noteSteps(entries) {
  const now = Date.now() / 1000;
  for (const entry of entries) {
    if (entry.step === null || entry.step === undefined) continue;
    const points = state.steps.get(entry.replica) || [];
    points.push([now, entry.step]);
    while (points.length && points[0][0] < now - WINDOW_S) points.shift();
    state.steps.set(entry.replica, points);
  }
  drawChart(now);
}

function svg(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawChart(now) {
  const lines = [...state.steps].filter(([, points]) => points.length);
  if (!lines.length) return;
  const steps = lines.flatMap(([, points]) => points.map((p) => p[1]));
  const low = Math.min(...steps), high = Math.max(...steps, low + 1);
  const x = (t) => 45 + (t - now + WINDOW_S) / WINDOW_S * 545;
  const y = (step) => 180 - (step - low) / (high - low) * 165;
  const parts = [svg("line", { class: "axis", x1: 45, y1: 180, x2: 590, y2: 180 }),
    svg("text", { x: 40, y: 184, "text-anchor": "end" }, low), svg("text", { x: 40, y: 20, "text-anchor": "end" }, high),
    svg("text", { x: 45, y: 197 }, "2 min ago"), svg("text", { x: 590, y: 197, "text-anchor": "end" }, "now")];
  lines.forEach(([, points], index) => {
    const path = points.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ");
    parts.push(svg("polyline", { class: "line", points: path, stroke: COLOURS[index % COLOURS.length] }));
  });
  $("chart").replaceChildren(...parts);
  const words = lines.map(([name, points]) => `${name}: ${points[points.length - 1][1]}`);
  $("chart-text").textContent = `Committed steps: ${words.slice(0, 16).join(", ")}${words.length > 16 ? " ..." : ""}`;
}

function diagnosis(found) {
  const box = element("details", undefined, "diagnosis");
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
    if (recovery.cause) item.append(element("span", `${recovery.cause} `, "small"));
    item.append(element("strong", `${recovery.kind}${lost.length ? ` of ${lost.join(", ")}` : ""}`));
    item.append(element("div", recovery.why));
    if (recovery.diagnosis) item.append(diagnosis(recovery.diagnosis));
    const phases = element("div", undefined, "phases");
    const say = (name, at) => phases.append(element("span", `${name} ${took(recovery.detected, at)}`));
    say(`epoch ${recovery.epoch || ""} committed after`, recovery.epoch_committed);
    say("links up after", recovery.links_up);
    say("next step after", recovery.step_committed);
    for (const [name, back] of Object.entries(recovery.lost)) say(`${name} back after`, back.joined);
    if (recovery.steps_lost) phases.append(element("span", `${recovery.steps_lost} steps lost`, "bad"));
    item.append(phases);
    return item;
  });
  $("recoveries").replaceChildren(...(items.length ? items : [element("li", "None so far.")]));
}

function showEvents(events) {
  const fresh = events.filter((event) => event.id > state.lastEvent);
  if (!fresh.length) return;
  state.lastEvent = fresh[fresh.length - 1].id;
  state.events = [...fresh.reverse(), ...state.events].slice(0, 200);
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
  const answer = await fetch("/login", { method: "POST", headers: { "Content-Type": "application/json" }, body });
  $("token").value = "";
  if (!answer.ok) { $("login-error").textContent = (await answer.json()).error; return; }
  $("login-error").textContent = "";
  $("login").close();
  lookForJobs();
});

function decide(action, replica = "") {
  const texts = { drain: "It leaves at the next step boundary. Nobody waits, nothing is lost.",
    evict: "It is left out at once, as if it had died. The others redo its part of the step.",
    admit: "It failed too often. That is forgotten, and it may join at once.",
    pause: "Nobody is admitted until joins are resumed. The members go on.", resume: "Newcomers are admitted again." };
  $("act-title").textContent = `${action} ${replica || "joins"}`;
  $("act-text").textContent = texts[action];
  $("act-do").textContent = `${action} ${replica || "joins"}`;
  $("act-error").textContent = "";
  $("act-form").dataset.action = action;
  $("act-form").dataset.replica = replica;
  $("act").showModal();
}

$("act-cancel").addEventListener("click", () => $("act").close());
$("act-form").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  const { action, replica } = $("act-form").dataset;
  const body = JSON.stringify({ replica, about: replica, who: $("who").value, why: $("why").value });
  try {
    await ask(`/v1/jobs/${encodeURIComponent(state.job)}/${action}`, { method: "POST", body });
    $("act").close();
  } catch (error) { $("act-error").textContent = error.message; }
});

$("jobs").addEventListener("change", () => watch($("jobs").value));
lookForJobs();
setInterval(lookForJobs, 3000);
