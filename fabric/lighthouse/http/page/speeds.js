// The speeds of ranks: a heat map of rank by step, a table of observed and predicted seconds, and the plan.
// It uses element, say and svg of dashboard.js, which calls showSpeeds.
"use strict";

const CELL = { width: 20, height: 18, left: 120, right: 60, top: 18 };
// A rank at this speed or below has the strongest colour.
const SLOWEST = 0.5;
const MODES = {
  off: "Slow replicas are not looked for (mode off).",
  advise: "The lighthouse says what would help, and changes no shares (mode advise).",
  act: "The lighthouse changes shares by speed (mode act).",
};

const nameOf = (row) => (row.ranks > 1 ? `${row.replica} rank ${row.rank}` : row.replica);
// The end of a long name fits beside the cells; the cell's title has the whole name.
const shortName = (row) => (nameOf(row).length > 18 ? `\u2026${nameOf(row).slice(-17)}` : nameOf(row));
const newest = (row) => row.speeds.findLast((speed) => speed !== null) ?? null;
const shownSpeed = (speed) => (speed === null ? "" : speed.toFixed(2));

// Rows with the number of ranks of their replica, and the seconds of a replica of one rank.
function speedRows(health) {
  const ranks = new Map();
  for (const row of health.by_step.rows) ranks.set(row.replica, (ranks.get(row.replica) || 0) + 1);
  return health.by_step.rows.map((row) => {
    const whole = health.replicas[row.replica] || {};
    return { ...row, ranks: ranks.get(row.replica), seconds: row.seconds ?? whole.seconds ?? null,
      predicted_s: row.predicted_s ?? whole.predicted_s ?? null };
  });
}

function planText(health) {
  const list = (shares) => Object.entries(shares).map(([replica, count]) => `${replica} ${count}`).join(", ");
  const parts = [MODES[health.mode] || ""];
  if (health.shares) parts.push(`In force: ${health.shares.reason} (micro-batches: ${list(health.shares.micro_batches)}).`);
  else parts.push("In force: each member has the share that it asked for.");
  if (health.advice && health.advice.held) parts.push(`The advice is not followed: ${health.advice.held}.`);
  for (const x of health.layouts || []) parts.push(`${x.replica} has the order to run in the layout ${x.layout}, usually ${x.usual}: ${x.reason}.`);
  if (health.vetoed && health.vetoed.length) parts.push(`An operator's veto keeps the shares of ${health.vetoed.join(", ")}.`);
  return parts.filter(Boolean).join(" ");
}

function speedText(rows, steps, leftOut) {
  const known = rows.filter((row) => newest(row) !== null).sort((a, b) => newest(a) - newest(b));
  if (!known.length) return "No speed is known yet: the lighthouse predicts times after 50 reported steps.";
  const slow = known.filter((row) => newest(row) < 0.9);
  const named = slow.slice(0, 5).map((row) => `${nameOf(row)} at ${shownSpeed(newest(row))}`).join(", ");
  const more = slow.length > 5 ? ` and ${slow.length - 5} more` : "";
  const others = known.length - slow.length;
  return [`Speed relative to equals, 1 is usual, steps ${steps[0]} to ${steps[steps.length - 1]}.`,
    slow.length ? `Slower than 0.9: ${named}${more}.` : "No rank is slower than 0.9.",
    slow.length && others ? `${others} at 0.9 or more.` : "",
    leftOut ? `${leftOut} faster ranks are not shown.` : ""].filter(Boolean).join(" ");
}

// Cells are made once for a number of rows and columns, and then changed in place.
function drawSpeeds(rows, steps) {
  const chart = $("speeds"), key = `${rows.length} ${steps.length}`;
  const width = CELL.left + steps.length * CELL.width + CELL.right;
  if (chart.dataset.key !== key) {
    chart.dataset.key = key;
    const height = CELL.top + rows.length * CELL.height + 4;
    chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
    chart.style.maxWidth = `${1.4 * width}px`;
    const lines = rows.map((_, y) => {
      const line = svg("g", { transform: `translate(0 ${CELL.top + y * CELL.height})` });
      line.append(svg("text", { x: CELL.left - 8, y: 13, "text-anchor": "end" }), ...steps.map((_, x) => {
        const cell = svg("rect", { x: CELL.left + x * CELL.width, y: 1, width: CELL.width - 2, height: CELL.height - 2, rx: 2 });
        cell.append(svg("title", {}));
        return cell;
      }), svg("text", { x: width - CELL.right + 8, y: 13, class: "speed" }));
      return line;
    });
    chart.replaceChildren(svg("text", { x: CELL.left, y: 12 }),
      svg("text", { x: width - CELL.right - 2, y: 12, "text-anchor": "end" }), ...lines);
  }
  const [first, last, ...lines] = chart.children;
  say(first, `step ${steps[0]}`);
  say(last, steps.length > 5 ? `step ${steps[steps.length - 1]}` : "");
  rows.forEach((row, y) => {
    const parts = lines[y].children, now = newest(row);
    say(parts[0], shortName(row));
    row.speeds.forEach((speed, x) => paint(parts[1 + x], row, steps[x], speed));
    say(parts[parts.length - 1], now === null ? "" : `${shownSpeed(now)}${now < 0.9 ? " slow" : ""}`);
  });
}

function paint(cell, row, step, speed) {
  const strength = speed === null ? 0 : Math.min(1, Math.max(0, (1 - speed) / (1 - SLOWEST)));
  cell.setAttribute("class", speed === null ? "cell none" : strength > 0.1 ? "cell slow" : "cell usual");
  cell.setAttribute("fill-opacity", (speed === null ? 0 : strength > 0.1 ? 0.2 + 0.8 * strength : 0.35).toFixed(2));
  const text = speed === null ? "no report" : `speed ${shownSpeed(speed)}`;
  say(cell.firstChild, `${nameOf(row)}, step ${step}: ${text}`);
}

function showSpeedTable(rows) {
  const seconds = (value) => (value === null ? "" : `${value.toFixed(3)} s`);
  const body = $("speed-rows");
  while (body.children.length > rows.length) body.lastChild.remove();
  rows.forEach((row, index) => {
    if (!body.children[index]) body.append(emptyRow(["rank", "stage", "observed", "predicted", "speed"]));
    const values = [nameOf(row), row.stage, seconds(row.seconds), seconds(row.predicted_s), shownSpeed(newest(row))];
    values.forEach((value, cell) => say(body.children[index].cells[cell], value, cell ? "number" : ""));
  });
}

function showSpeeds(job) {
  const health = job.health;
  $("speeds-section").hidden = !health || !health.by_step || !health.by_step.rows.length;
  if ($("speeds-section").hidden) return;
  const rows = speedRows(health), steps = health.by_step.steps;
  say($("plan"), planText(health));
  say($("speeds-text"), speedText(rows, steps, health.by_step.left_out));
  drawSpeeds(rows, steps);
  showSpeedTable(rows);
}
