"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
// distinguishable with any kind of colour vision, on light and dark backgrounds
const COLOURS = ["#D55E00", "#3A93D0", "#009E73"];

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function draw(id, traces, x, y) {
  const axis = (title) => ({ title: { text: title }, gridcolor: variable("--line"), zerolinecolor: variable("--line") });
  const layout = {
    height: 360, margin: { l: 70, r: 10, t: 10, b: 50 }, legend: { orientation: "h", y: 1.15 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: variable("--ink") },
    xaxis: axis(x), yaxis: axis(y),
  };
  Plotly.react(document.getElementById(id), traces, layout, { displayModeBar: false, responsive: true });
}

function drawAll() {
  const states = data.states.map((state, number) => ({
    name: state.name, mode: "lines+markers", line: { color: COLOURS[number % COLOURS.length] },
    x: state.points.map((point) => point.exponent + 0.01 * number), y: state.points.map((point) => point.mean),
    error_y: { type: "data", array: state.points.map((point) => point.error ?? 0) },
  }));
  draw("exponents", states, "exponent of S", "lead");
  const { measured, extrapolated, expected, rule, ref_batchsize } = data.curve;
  draw("curve", [
    { name: `always ${ref_batchsize}, measured`, mode: "markers", marker: { color: COLOURS[1] },
      x: measured.map((point) => point[0]), y: measured.map((point) => point[1]) },
    { name: `always ${ref_batchsize}, extrapolated`, mode: "lines", line: { color: COLOURS[1], dash: "dot" },
      x: extrapolated.map((point) => point[0]), y: extrapolated.map((point) => point[1]) },
    { name: `the trace with ${rule}, expected`, mode: "markers", marker: { color: COLOURS[0], size: 10 },
      x: [expected.samples], y: [expected.mean], error_y: { type: "data", array: [expected.error] } },
  ], "samples", "test loss");
}

drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
