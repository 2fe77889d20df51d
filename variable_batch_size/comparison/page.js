"use strict";

const data = JSON.parse(document.getElementById("data").textContent);

// what is drawn, from the top: a part of the curves, a quantity, a title, and how
const ROWS = [
  { part: "training", name: "batch_size", title: "batch size", shape: "hv", height: 0.6 },
  { part: "training", name: "lr", title: "learning rate", shape: "hv", height: 0.8 },
  { part: "training", name: "loss", title: "training loss", log: true, height: 1.2 },
  { part: "tests", name: "metric", title: "test " + data.metric, marks: true, height: 1.4 },
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

function groupsOf(trace) {
  const reference = data.reference ? [{ ...data.reference, colour: "#8a8f96", dash: "dot" }] : [];
  return data.traces[trace].map((group, i) => ({ ...group, colour: COLOURS[i % COLOURS.length] })).concat(reference);
}

function rowsOf(groups) {
  return ROWS.filter((row) => groups.some((group) => group[row.part][row.name]));
}

// the mean of a quantity over seeds, and a band of one deviation around it
function linesOf(group, row, axis, yaxis, isFirst) {
  const curves = group[row.part];
  const quantity = curves[row.name];
  if (!quantity) return [];
  const common = { x: curves[axis], yaxis, xaxis: "x", legendgroup: group.rule, line: { shape: row.shape || "linear" } };
  const mean = {
    ...common, y: quantity.mean, name: group.rule, showlegend: isFirst,
    mode: row.marks ? "lines+markers" : "lines", marker: { size: 5, color: group.colour },
    line: { ...common.line, color: group.colour, width: 2, dash: group.dash || "solid" },
  };
  if (!quantity.deviation) return [mean];
  const edge = (sign) => ({
    ...common, y: quantity.mean.map((y, i) => (y === null ? null : y + sign * quantity.deviation[i])),
    mode: "lines", line: { ...common.line, width: 0 }, showlegend: false, hoverinfo: "skip",
  });
  return [edge(-1), { ...edge(1), fill: "tonexty", fillcolor: group.colour + "30" }, mean];
}

function draw(chart, axis) {
  const groups = groupsOf(chart.dataset.trace);
  const rows = rowsOf(groups);
  const ink = variable("--ink"), line = variable("--line");
  const total = rows.reduce((sum, row) => sum + row.height, 0);
  const free = 1 - GAP * (rows.length - 1);
  const layout = {
    height: 130 * total + 140, margin: { l: 52, r: 12, t: 40, b: 44 },
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: ink, size: 12 },
    legend: { orientation: "h", x: 0, y: 1.0, yanchor: "bottom", yref: "container", groupclick: "togglegroup" },
    hovermode: "x", annotations: [],
    xaxis: { title: { text: AXES[axis] }, gridcolor: line, zeroline: false, anchor: "y" + (rows.length > 1 ? rows.length : "") },
  };
  const lines = [];
  let top = 1;
  rows.forEach((row, i) => {
    const bottom = Math.max(0, top - (free * row.height) / total);
    const id = i ? String(i + 1) : "";
    layout["yaxis" + id] = {
      domain: [bottom, top], type: row.log ? "log" : "linear", gridcolor: line, zeroline: false, nticks: 5,
    };
    layout.annotations.push({
      text: row.title, x: 0, y: top, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom",
      showarrow: false, font: { color: ink, size: 12 },
    });
    groups.forEach((group) => lines.push(...linesOf(group, row, axis, "y" + id, row.name === "loss")));
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
