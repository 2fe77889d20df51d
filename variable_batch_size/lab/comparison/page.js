"use strict";

const data = JSON.parse(document.getElementById("data").textContent);

// Plotly takes some tags in a text for formatting
function literal(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

// what is drawn, from the top: a part of the curves, a quantity, a title, and how
const ROWS = [
  { part: "training", name: "batch_size", title: "batch size", shape: "vh", height: 0.6, isCommon: true },
  { part: "training", name: "lr", title: "learning rate", shape: "vh", height: 0.8 },
  { part: "training", name: "loss", title: "training loss, mean of the latest 2 % of the run", log: true, height: 1.2 },
  { part: "tests", name: "metric", title: "test " + literal(data.metric) + ", after the first quarter", marks: true, isLate: true, height: 1.4 },
  { part: "training", name: "gain", title: "gain", height: 0.8 },
  { part: "training", name: "noise_scale", title: "noise scale, in samples", log: true, height: 0.8 },
];
const AXES = { step: "steps", samples: "samples", progress: "progress" };
// distinguishable with any kind of colour vision, on light and dark backgrounds
const COLOURS = ["#D55E00", "#3A93D0", "#009E73", "#CC79A7", "#E69F00", "#8E7CC3", "#56B4E9"];
const GAP = 0.045;

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const rules = [...new Set(Object.values(data.traces).flat().map((arm) => arm.rule))];

function armsOf(trace) {
  const reference = data.reference ? [{ ...data.reference, colour: "#8a8f96", dash: "dot" }] : [];
  return data.traces[trace]
    .map((arm) => ({ ...arm, colour: COLOURS[rules.indexOf(arm.rule) % COLOURS.length] }))
    .concat(reference);
}

// of all rules, or of one and the baseline where it is the same for all rules
function armsIn(row, arms) {
  const found = arms.filter((arm) => arm[row.part][row.name]);
  return row.isCommon ? found.slice(0, 1).concat(found.slice(1).filter((arm) => arm.dash)) : found;
}

// the range of what is left when the first quarter of the run is left out, or null for all of it
function rangeOf(row, arms) {
  if (!row.isLate) return null;
  const late = arms.flatMap((arm) => {
    const { samples, [row.name]: quantity } = arm[row.part];
    return quantity.mean.filter((y, i) => y !== null && samples[i] >= samples[samples.length - 1] / 4);
  });
  const low = Math.min(...late), high = Math.max(...late);
  return low < high ? [low - (high - low) / 10, high + (high - low) / 10] : null;
}

// on a logarithmic axis ticks at 1, 2, 5, 10 … if it is short, and at powers of ten if it is long
function ticksOf(row, arms) {
  if (!row.log) return { nticks: 5 };
  const values = arms.flatMap((arm) => arm[row.part][row.name].mean.filter((y) => y > 0));
  return { type: "log", dtick: Math.max(...values) / Math.min(...values) > 30 ? 1 : "D2" };
}

// the mean of a quantity over seeds, and a band of one deviation around it
function linesOf(arm, row, axis, yaxis, isFirst) {
  const curves = arm[row.part];
  const quantity = curves[row.name];
  const common = { x: curves[axis], yaxis, xaxis: "x", legendgroup: arm.rule, line: { shape: row.shape || "linear" } };
  const mean = {
    ...common, y: quantity.mean, name: literal(arm.rule), showlegend: isFirst,
    mode: row.marks ? "lines+markers" : "lines", marker: { size: 5, color: arm.colour },
    line: { ...common.line, color: arm.colour, width: 2, dash: arm.dash || "solid" },
  };
  if (!quantity.low) return [mean];
  const edge = (y) => ({
    ...common, y, mode: "lines", line: { ...common.line, width: 0 }, showlegend: false, hoverinfo: "skip",
  });
  return [edge(quantity.low), { ...edge(quantity.high), fill: "tonexty", fillcolor: arm.colour + "30" }, mean];
}

function draw(chart, axis) {
  const arms = armsOf(chart.dataset.trace);
  const rows = ROWS.filter((row) => armsIn(row, arms).length);
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
    const members = armsIn(row, arms);
    const range = rangeOf(row, members);
    layout["yaxis" + id] = {
      domain: [bottom, top], gridcolor: line, zeroline: false, ...ticksOf(row, members), ...(range && { range }),
    };
    layout.annotations.push({
      text: row.title, x: 0, y: top, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom",
      showarrow: false, font: { color: ink, size: 12 },
    });
    members.forEach((arm) => {
      const colour = row.isCommon && !arm.dash ? ink : arm.colour;
      lines.push(...linesOf({ ...arm, colour }, row, axis, "y" + id, row === rows.find((other) => !other.isCommon)));
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
