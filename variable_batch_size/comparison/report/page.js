"use strict";

const data = JSON.parse(document.getElementById("data").textContent);

// what is drawn, from the top: a part of the curves, a quantity, a title, and how
const ROWS = [
  { part: "training", name: "batch_size", title: "batch size", shape: "vh", height: 0.6, isCommon: true },
  { part: "training", name: "lr", title: "learning rate", shape: "vh", height: 0.8 },
  { part: "training", name: "loss", title: "training loss, mean of the latest 2 % of the run", log: true, height: 1.2 },
  { part: "tests", name: "metric", title: "test " + data.metric + ", after the first quarter", marks: true, isLate: true, height: 1.4 },
  { part: "training", name: "gain", title: "gain", height: 0.8 },
  { part: "training", name: "noise_scale", title: "noise scale, in samples", log: true, height: 0.8 },
];
const AXES = { step: "steps", samples: "samples", progress: "progress" };
// told apart by people of any colour vision, on light and on dark paper
const COLOURS = ["#D55E00", "#3A93D0", "#009E73", "#CC79A7", "#E69F00", "#8E7CC3", "#56B4E9"];
const GAP = 0.045;

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const rules = [...new Set(Object.values(data.traces).flat().map((group) => group.rule))];

function groupsOf(trace) {
  const reference = data.reference ? [{ ...data.reference, colour: "#8a8f96", dash: "dot" }] : [];
  return data.traces[trace]
    .map((group) => ({ ...group, colour: COLOURS[rules.indexOf(group.rule) % COLOURS.length] }))
    .concat(reference);
}

// of all rules, or of one and the yardstick where it is the same for all rules
function groupsIn(row, groups) {
  const found = groups.filter((group) => group[row.part][row.name]);
  return row.isCommon ? found.slice(0, 1).concat(found.slice(1).filter((group) => group.dash)) : found;
}

// the range of what is left when the first quarter of the run is left out, or null for all of it
function rangeOf(row, groups) {
  if (!row.isLate) return null;
  const late = groups.flatMap((group) => {
    const { samples, [row.name]: quantity } = group[row.part];
    return quantity.mean.filter((y, i) => y !== null && samples[i] >= samples[samples.length - 1] / 4);
  });
  const low = Math.min(...late), high = Math.max(...late);
  return low < high ? [low - (high - low) / 10, high + (high - low) / 10] : null;
}

// on a logarithmic axis ticks at 1, 2, 5, 10 … if it is short, and at powers of ten if it is long
function ticksOf(row, groups) {
  if (!row.log) return { nticks: 5 };
  const values = groups.flatMap((group) => group[row.part][row.name].mean.filter((y) => y > 0));
  return { type: "log", dtick: Math.max(...values) / Math.min(...values) > 30 ? 1 : "D2" };
}

// the mean of a quantity over seeds, and a band of one deviation around it
function linesOf(group, row, axis, yaxis, isFirst) {
  const curves = group[row.part];
  const quantity = curves[row.name];
  const common = { x: curves[axis], yaxis, xaxis: "x", legendgroup: group.rule, line: { shape: row.shape || "linear" } };
  const mean = {
    ...common, y: quantity.mean, name: group.rule, showlegend: isFirst,
    mode: row.marks ? "lines+markers" : "lines", marker: { size: 5, color: group.colour },
    line: { ...common.line, color: group.colour, width: 2, dash: group.dash || "solid" },
  };
  if (!quantity.low) return [mean];
  const edge = (y) => ({
    ...common, y, mode: "lines", line: { ...common.line, width: 0 }, showlegend: false, hoverinfo: "skip",
  });
  return [edge(quantity.low), { ...edge(quantity.high), fill: "tonexty", fillcolor: group.colour + "30" }, mean];
}

function draw(chart, axis) {
  const groups = groupsOf(chart.dataset.trace);
  const rows = ROWS.filter((row) => groupsIn(row, groups).length);
  const ink = variable("--ink"), line = variable("--line");
  const total = rows.reduce((sum, row) => sum + row.height, 0);
  const free = 1 - GAP * (rows.length - 1);
  const height = 130 * total + 140, margin = { l: 52, r: 12, t: 56, b: 44 };
  const layout = {
    height, margin,
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: ink, size: 12 },
    legend: { orientation: "h", x: 0, y: 1 + 22 / (height - margin.t - margin.b), yanchor: "bottom", traceorder: "normal" },
    hovermode: "x", annotations: [],
    xaxis: { title: { text: AXES[axis] }, gridcolor: line, zeroline: false, anchor: "y" + (rows.length > 1 ? rows.length : "") },
  };
  const lines = [];
  let top = 1;
  rows.forEach((row, i) => {
    const bottom = Math.max(0, top - (free * row.height) / total);
    const id = i ? String(i + 1) : "";
    const members = groupsIn(row, groups);
    const range = rangeOf(row, members);
    layout["yaxis" + id] = {
      domain: [bottom, top], gridcolor: line, zeroline: false, ...ticksOf(row, members), ...(range && { range }),
    };
    layout.annotations.push({
      text: row.title, x: 0, y: top, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom",
      showarrow: false, font: { color: ink, size: 12 },
    });
    members.forEach((group) => {
      const colour = row.isCommon && !group.dash ? ink : group.colour;
      lines.push(...linesOf({ ...group, colour }, row, axis, "y" + id, row === rows.find((other) => !other.isCommon)));
    });
    top = bottom - GAP;
  });
  Plotly.react(chart, lines, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  chart.previousElementSibling.querySelectorAll("button").forEach((button) => {
    button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
  });
}

function drawAll(axis) {
  document.querySelectorAll(".chart").forEach((chart) => draw(chart, axis));
}

let axis = "samples";
document.querySelectorAll(".axes button").forEach((button) => {
  button.addEventListener("click", () => { axis = button.dataset.axis; drawAll(axis); });
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(axis));
drawAll(axis);
