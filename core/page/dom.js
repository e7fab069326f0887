"use strict";
// What all parts of the page share. Text of the data reaches the document as text nodes only.

const report = JSON.parse(document.getElementById("report-data").textContent);
const byId = (id) => document.getElementById(id);

// el("p", {class: "note", onclick: f}, "text", node): names of tags and attributes come from this code, never from data
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

const stageNames = report.stages.map((s) => s.name);
// SFT has the same colour in the table, the curves and the browser, whatever stands beside it
const palette = ["base", "sft", "grpo"];
for (const name of stageNames) if (!palette.includes(name)) palette.push(name);
const stageColour = (name) =>
  String(palette.indexOf(name) < 6 ? palette.indexOf(name) : 3 + (palette.indexOf(name) % 3));
const stageTag = (name) =>
  el("span", { class: "stage who", "data-stage": stageColour(name) }, el("span", { class: "swatch" }), name);

// Ties go to the even digit, as in the tables that Python prints of the same figures
function fixed(x, digits) {
  const scaled = Math.abs(x) * 10 ** digits,
    below = Math.floor(scaled);
  return scaled - below === 0.5
    ? ((Math.sign(x) * (below + (below % 2))) / 10 ** digits).toFixed(digits)
    : x.toFixed(digits);
}
const percent = (x, digits = 1) => (x === null || x === undefined ? "–" : `${fixed(100 * x, digits)}%`);
const points = (x) => `${x < 0 ? "−" : "+"}${fixed(Math.abs(100 * x), 1)}`;
const whole = (n) => n.toLocaleString("en-US");
const pValue = (p) => (p < 0.001 ? "p < 0.001" : `p = ${p.toFixed(p < 0.1 ? 3 : 2)}`);

function number(x) {
  if (x === null || x === undefined) return "–";
  if (x !== 0 && (Math.abs(x) < 0.001 || Math.abs(x) >= 1e6)) return x.toExponential(1).replace("e+", "e");
  return Math.abs(x) >= 1000 ? whole(Math.round(x)) : String(+x.toPrecision(3));
}

function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// An estimate with its interval on a scale from 0 to 1
function intervalBar(at, interval, stage) {
  const label = `${percent(at)}, 95 % interval ${percent(interval[0])} to ${percent(interval[1])}`;
  const place = { "--lo": `${100 * interval[0]}%`, "--hi": `${100 * interval[1]}%`, "--at": `${100 * at}%` };
  return el(
    "div",
    { class: "bar stage", "data-stage": stageColour(stage), role: "img", "aria-label": label, title: label, ...place },
    el("i", { class: "band" }),
    el("i", { class: "dot" }),
  );
}

// A note with the command that makes what is missing
function note(text, command) {
  return el("p", { class: "note" }, text, command ? [" ", el("code", {}, command)] : null);
}

function setUpTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const order = ["auto", "light", "dark"];
  let choice = "auto";
  try {
    choice = localStorage.getItem("sixstep-theme") || "auto";
  } catch {
    /* a page from a file may have no storage */
  }
  const show = () => {
    document.documentElement.toggleAttribute("data-dark", choice === "dark" || (choice === "auto" && system.matches));
    byId("theme").replaceChildren(el("span", {}, "Theme: "), choice);
  };
  system.addEventListener("change", show);
  byId("theme").addEventListener("click", () => {
    choice = order[(order.indexOf(choice) + 1) % 3];
    try {
      localStorage.setItem("sixstep-theme", choice);
    } catch {
      /* as above */
    }
    show();
  });
  show();
}
