"use strict";

const MILLISECONDS_BETWEEN_LOOKS = 100; // the server answers when there is news
// what is drawn, from the top: a quantity of the records, its title, and how; low and high are the ends of a band
const ROWS = [
  { name: "batch_size", title: "batch size", shape: "vh", height: 1 },
  { name: "cores", title: "cores", shape: "vh", height: 0.6, zero: true },
  { name: "lr", title: "learning rate", shape: "vh", height: 0.8 },
  { name: "factor", title: "learning-rate factor", shape: "vh", height: 0.7 },
  { name: "loss", title: "training loss, smoothed over 2 % of the run", height: 1.5, raw: true },
  { name: "noise_scale", title: "noise scale, in samples, with its 95 % interval", height: 1, log: true, band: true },
  { name: "gain", title: "gain, with its 95 % interval", height: 0.8, band: true },
  { name: "efficiency", title: "efficiency: gain per sample of the batch", height: 0.7 },
  { name: "seconds_per_step", title: "seconds per step", height: 0.7, zero: true },
  { name: "idle_share", title: "idle share of cores", height: 0.6, zero: true },
  { name: "samples_per_second", title: "samples per second", height: 0.8, zero: true },
];
const AXES = { step: "steps", samples: "samples", tokens: "tokens", seconds: "hours", progress: "progress" };
// distinguishable with any kind of colour vision, on light and dark backgrounds
const COLOURS = ["#D55E00", "#3A93D0", "#009E73", "#CC79A7", "#E69F00", "#8E7CC3", "#56B4E9"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const GAP = 24, UNIT = 105, MARGIN = { l: 56, r: 12, t: 30, b: 42 }; // in pixels

let data = { version: -1, runs: [] };
let axis = "samples";
const find = (selector) => document.querySelector(selector);

// Plotly interprets some tags in a text as formatting
function literal(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function fillTable(table, head, rows) {
  const line = (tag, cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map((cell) => element(tag, cell)));
    return row;
  };
  table.querySelector("thead").replaceChildren(line("th", head));
  table.querySelector("tbody").replaceChildren(...rows.map((cells) => line("td", cells)));
}

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function number(value, digits = 4) {
  if (typeof value !== "number") return "–"; // a record may contain anything
  return Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

function duration(seconds) {
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = parts.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "0 s";
  const [unit, size] = parts[first], below = parts[first + 1];
  const rest = below ? Math.floor((seconds % size) / below[1]) : 0;
  return `${Math.floor(seconds / size)} ${unit}` + (rest ? ` ${rest} ${below[0]}` : "");
}

const colourOf = (i) => COLOURS[i % COLOURS.length];
const dashOf = (i) => DASHES[Math.floor(i / COLOURS.length) % DASHES.length];

function showRuns() {
  find("#runs").replaceChildren(...data.runs.map((run, i) => {
    const card = element("article", "", "run");
    card.style.setProperty("--colour", colourOf(i));
    card.append(element("h3", run.name));
    const state = element("p", "");
    state.append(element("span", run.state, "state " + run.state), run.why ? ": " + run.why : "");
    card.append(state);
    const latest = run.latest, list = document.createElement("dl");
    const facts = {
      step: number(latest.step), samples: number(latest.samples), epoch: number(latest.epoch),
      "batch size": number(latest.batch_size), loss: latest.loss === null ? "not finite" : number(latest.loss),
      "samples/s": number(latest.samples_per_second),
    };
    if (run.seconds_left !== null) {
      const end = new Date(Date.now() + 1000 * run.seconds_left);
      facts["expected end"] = `in ${duration(run.seconds_left)}, ${end.toLocaleString()}`;
    }
    if (run.read < 1) facts["read so far"] = `${Math.floor(100 * run.read)} %; until then, a sample is shown`;
    for (const [name, text] of Object.entries(facts)) {
      if (text === "–") continue;
      const item = document.createElement("div");
      item.append(element("dt", name), element("dd", text));
      list.append(item);
    }
    card.append(list);
    return card;
  }));
}

function showDecisions() {
  const rows = data.runs.flatMap((run) => run.decisions.slice(-40).reverse().map((found) => [
    run.name, number(found.from_step), number(found.batch_size), number(found.cores), number(found.noise_scale),
    String(found.why || ""),
  ]));
  find("#decisions").hidden = !rows.length;
  fillTable(find("#decisions table"), ["run", "from step", "batch size", "cores", "noise scale", "why"], rows);
}

// the columns of a run that have a quantity, or null
function columnsOf(run, row) {
  if (row.name === "batch_size" && run.steps.batch_size && run.steps[axis]) return run.steps;
  return run.log[row.name] && run.log[axis] ? run.log : null;
}

function positions(columns) {
  return axis === "seconds" ? columns.seconds.map((value) => value === null ? null : value / 3600) : columns[axis];
}

function linesOf(run, i, row, yaxis, isFirst) {
  const columns = columnsOf(run, row), colour = colourOf(i);
  const common = { x: positions(columns), yaxis, xaxis: "x", legendgroup: String(i), name: literal(run.name), mode: "lines" };
  const line = { shape: row.shape || "linear", color: colour, dash: dashOf(i), width: 2 };
  const edge = (y) => ({ ...common, y, line: { ...line, width: 0 }, showlegend: false, hoverinfo: "skip" });
  const band = (low, high) => [edge(low), { ...edge(high), fill: "tonexty", fillcolor: colour + "28" }];
  const found = [];
  if (row.raw && columns.loss_low) found.push(...band(columns.loss_low, columns.loss_high));
  if (row.raw) found.push({ ...common, y: columns.loss, line: { ...line, width: 1 }, opacity: 0.35, showlegend: false, hoverinfo: "skip" });
  if (row.band && columns[row.name + "_low"]) found.push(...band(columns[row.name + "_low"], columns[row.name + "_high"]));
  const y = row.raw ? columns.loss_smooth : columns[row.name];
  found.push({ ...common, y, line, showlegend: isFirst && data.runs.length > 1 });
  if (row.name === "batch_size" && run.decisions.length && run.log[axis]) found.push(marksOf(run, i, common));
  return found;
}

// the decisions that changed something, where they took effect, with their reasons
function marksOf(run, i, common) {
  const steps = run.log.step, x = positions(run.log), shown = run.decisions.filter((found) => found.from_step <= steps[steps.length - 1] && typeof found.batch_size === "number");
  const at = (step) => x[Math.max(0, steps.findIndex((value) => value >= step))];
  return {
    ...common, mode: "markers", showlegend: false, x: shown.map((found) => at(found.from_step)),
    y: shown.map((found) => found.batch_size), marker: { symbol: "diamond", size: 7, color: colourOf(i) },
    text: shown.map((found) => literal(String(found.why || ""))), hoverinfo: "text",
  };
}

// ticks of a logarithmic axis: at 1, 2, 5, 10 … if it is short, and at powers of ten if it is long
function rangeOf(row, y) {
  if (row.zero) return { rangemode: "tozero" };
  const known = y.filter((value) => value > 0);
  if (!row.log || !known.length) return {};
  const [low, high] = known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, 0]);
  return { type: "log", dtick: high / low > 10 ? 1 : "D2" };
}

function draw() {
  const runs = data.runs.map((run, i) => [run, i]);
  const rows = ROWS.filter((row) => runs.some(([run]) => columnsOf(run, row)));
  const ink = variable("--ink"), line = variable("--line");
  const inner = rows.reduce((sum, row) => sum + row.height * UNIT, 0) + GAP * Math.max(0, rows.length - 1);
  const layout = {
    height: inner + MARGIN.t + MARGIN.b + (data.runs.length > 1 ? 40 : 0), margin: { ...MARGIN, t: MARGIN.t + (data.runs.length > 1 ? 40 : 0) },
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: ink, size: 12 },
    legend: { orientation: "h", x: 0, y: 1 + 24 / Math.max(inner, 1), yanchor: "bottom", traceorder: "normal" },
    hovermode: "x", annotations: [], uirevision: axis,
    xaxis: { title: { text: AXES[axis] }, gridcolor: line, zeroline: false, anchor: "y" + (rows.length > 1 ? rows.length : ""), nticks: 6, rangemode: "tozero" },
  };
  const lines = [];
  let top = inner;
  rows.forEach((row, i) => {
    const bottom = top - row.height * UNIT, id = i ? String(i + 1) : "";
    const members = runs.filter(([run]) => columnsOf(run, row));
    layout["yaxis" + id] = {
      domain: [Math.max(0, bottom / inner), top / inner], gridcolor: line, zeroline: false, nticks: 4,
      ...rangeOf(row, members.flatMap(([run]) => columnsOf(run, row)[row.name])),
    };
    layout.annotations.push({
      text: row.title, x: 0, y: top / inner, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom",
      showarrow: false, font: { color: ink, size: 12 },
    });
    members.forEach(([run, j]) => lines.push(...linesOf(run, j, row, "y" + id, i === 0)));
    top = bottom - GAP;
  });
  Plotly.react(find("#chart"), lines, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  document.querySelectorAll(".axes button").forEach((button) => {
    const name = button.dataset.axis;
    button.setAttribute("aria-pressed", String(name === axis));
    button.hidden = !data.runs.some((run) => run.log[name] || run.steps[name]);
  });
}

function fillRuns() {
  const select = find("#what-if select"), chosen = select.value;
  if (select.options.length !== data.runs.length) {
    select.replaceChildren(...data.runs.map((run, i) => Object.assign(element("option", run.name), { value: String(i) })));
    select.value = chosen || "0";
  }
}

function show() {
  const names = data.runs.map((run) => run.name);
  document.title = names.length === 1 ? `${data.runs[0].state}: ${names[0]}` : `${names.length} runs`;
  showRuns();
  draw();
  showDecisions();
  fillRuns();
  document.body.dataset.version = data.version;
}

function complain(text) {
  find("#problem").hidden = !text;
  find("#problem").textContent = text;
}

async function look() {
  try {
    const answer = await fetch("data?seen=" + data.version);
    if (!answer.ok) throw new Error(await answer.text());
    if (answer.status === 200) {
      data = await answer.json();
      show();
    }
    complain("");
  } catch (error) {
    complain("vbs watch does not answer: the page shows the latest data that it received. " + error.message);
  }
  setTimeout(look, MILLISECONDS_BETWEEN_LOOKS);
}

find("#what-if form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const answer = find("#answer");
  answer.textContent = "…";
  answer.className = "";
  const query = new URLSearchParams(new FormData(event.target));
  try {
    const found = await (await fetch("forecast?" + query)).json();
    answer.textContent = found.error || found.lead;
    answer.className = found.error ? "bad" : "";
    const [head, ...rows] = found.table || [[]];
    fillTable(find("#forecast"), head, rows);
  } catch (error) {
    answer.textContent = error.message;
    answer.className = "bad";
  }
});

document.querySelectorAll(".axes button").forEach((button) => {
  button.addEventListener("click", () => { axis = button.dataset.axis; draw(); });
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
look();
