// Training curves as small multiples: one cursor for all charts of a stage, values in the legends.

const CHARTS = [
  // title, the keys it takes (in order of preference for a line's place), how values read
  ["Reward", /^reward$/, "plain"],
  ["Reward by dimension", /^rewards\/(.+)\/mean$/, "plain"],
  [
    "Held-out accuracy",
    /^(?:eval_(?!mean_token)|held_?out[_/]).*(?:accuracy|correct|reward|exec_match).*$|^accuracy$/,
    "share",
  ],
  ["Loss", /^(?:loss|eval_loss)$/, "plain"],
  ["Token accuracy", /^(?:mean_token_accuracy|eval_mean_token_accuracy)$/, "share"],
  ["Groups without spread", /^frac_reward_zero_std$/, "share"],
  ["Turns and tool calls", /^(?:turns(?:\/mean)?|tools\/call_frequency)$/, "plain"],
  [
    "Tool failures, cut episodes, parse failures",
    /^(?:tools\/failure_frequency|completions\/clipped_ratio|parse_fail\w*)$/,
    "share",
  ],
  ["Completion length, tokens", /^completions\/(mean_length|min_length|max_length)$/, "plain"],
  ["KL", /^(?:kl|objective\/kl)$/, "plain"],
  ["Entropy", /^(?:entropy|eval_entropy)$/, "plain"],
  ["Gradient norm", /^grad_norm$/, "plain"],
  ["Learning rate", /^learning_rate$/, "plain"],
  ["Step time, seconds", /^step_time$/, "plain"],
];

function drawTraining() {
  const section = byId("training");
  const runs = Object.entries(report.curves);
  if (!runs.length) return section.append(note("No training has logged anything yet.", report.hints.train));
  const longest = Math.max(...runs.map(([, run]) => run.steps.length));
  const slider = el("input", {
    type: "range",
    min: 0,
    max: 0.95,
    step: 0.05,
    value: longest > 40 ? 0.8 : 0,
    id: "smoothing",
  });
  const shown = el("output", { for: "smoothing" }, slider.value);
  const redraws = [];
  slider.addEventListener("input", () => {
    shown.textContent = slider.value;
    redraws.forEach((redraw) => redraw(+slider.value));
  });
  section.append(
    el(
      "div",
      { class: "tools" },
      el("label", {}, "Smoothing", slider, shown),
      el(
        "span",
        { class: "soft keys" },
        "Point at a chart, or focus one and press ← →: all charts of the stage show that step.",
      ),
    ),
  );
  for (const [stage, run] of runs) {
    const state = run.finished
      ? `${whole(run.steps.length)} logged steps, ${duration(run.seconds)}`
      : `${whole(run.steps.length)} logged steps so far; not finished`;
    section.append(
      el("div", { class: "runhead" }, el("h3", {}, stageTag(stage)), el("span", { class: "soft" }, state)),
    );
    const cursor = new Cursor();
    const taken = new Set();
    const charts = [];
    for (const [title, pattern, kind] of CHARTS) {
      const keys = Object.keys(run.series).filter((key) => pattern.test(key) && !taken.has(key));
      keys.forEach((key) => taken.add(key));
      if (keys.length)
        charts.push(
          chart(
            title,
            keys.map((key) => [key.match(pattern)[1] || key, run.series[key]]),
            kind,
          ),
        );
    }
    const rest = Object.keys(run.series)
      .filter((key) => !taken.has(key))
      .map((key) => chart(key, [[key, run.series[key]]], "plain"));
    const draw = (c) => {
      const [node, redraw] = c(stage, run.steps, cursor);
      redraws.push(redraw);
      redraw(+slider.value);
      return node;
    };
    section.append(el("div", { class: "charts" }, charts.map(draw)));
    if (rest.length)
      section.append(
        el(
          "details",
          { class: "rest" },
          el("summary", {}, `${rest.length} more`),
          el("div", { class: "charts" }, rest.map(draw)),
        ),
      );
  }
  for (const hint of report.hints.curves) section.append(el("div", { class: "runhead" }, note(hint)));
}

class Cursor {
  // the step all charts of one stage point at
  listeners = [];
  index = null;
  move(index) {
    this.index = index;
    this.listeners.forEach((f) => f(index));
  }
}

// Exponential mean without the pull towards the first values; gaps stay gaps
function smooth(values, weight) {
  let sum = 0,
    norm = 0;
  return values.map((v) => {
    if (v === null) return null;
    sum = weight * sum + (1 - weight) * v;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function ticks(low, high) {
  if (low === high) {
    const pad = Math.abs(low) * 0.1 || 0.5;
    low -= pad;
    high += pad;
    if (low < 0 && high - pad >= 0) low = 0;
  }
  const rough = (high - low) / 3,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9),
    last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => +((first + i) * step).toPrecision(10));
}

const chart = (title, lines, kind) => (stage, steps, cursor) => {
  const seen = lines.flatMap(([, values]) => values).filter((v) => v !== null);
  const low = seen.reduce((a, b) => Math.min(a, b), Infinity),
    high = seen.reduce((a, b) => Math.max(a, b), -Infinity);
  const marks =
    kind === "share" ? ticks(0, Math.min(1, Math.max(high, 0.1))) : ticks(low > 0 && low < 0.4 * high ? 0 : low, high);
  const [bottom, top] = [marks[0], marks[marks.length - 1]];
  const x = (i) => (steps.length < 2 ? 50 : (100 * (steps[i] - steps[0])) / (steps[steps.length - 1] - steps[0]));
  const y = (v) => 100 - (100 * (v - bottom)) / (top - bottom);
  const text = (v) =>
    v === null || v === undefined ? "–" : kind === "share" ? percent(v, v > 0 && v < 0.1 ? 1 : 0) : number(v);
  const colour = (i) => (lines.length === 1 ? stageColour(stage) : String((i + (stage === "grpo" ? 2 : 1)) % 6));
  const drawing = svg(
    "svg",
    { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" },
    marks.map((m) => svg("path", { class: "grid", d: `M0 ${y(m)}H100` })),
  );
  const paths = lines.map((_, i) =>
    ["raw", "line", "points"].map((name) =>
      drawing.appendChild(svg("path", { class: `${name} stage`, "data-stage": colour(i) })),
    ),
  );
  const rule = el("div", { class: "cursor", hidden: true });
  const spots = lines.map((_, i) => el("div", { class: "spot stage", "data-stage": colour(i), hidden: true }));
  const values = lines.map(() => el("span", { class: "num" }));
  const plot = el(
    "div",
    { class: "plot", tabindex: 0, role: "img" },
    drawing,
    marks.map((m) => fill(el("span", { class: "tick" }, text(m)), {}, [])),
    rule,
    spots,
  );
  plot.querySelectorAll(".tick").forEach((tick, i) => {
    tick.style.top = `${y(marks[i])}%`;
  });
  const step = el("span", {});
  const latest = lines.map(([, v]) => v.reduce((found, value, i) => (value === null ? found : i), 0));

  function path(line, keep) {
    let d = "",
      pen = false; // down: the next point is joined
    line.forEach((v, i) => {
      if (v === null) pen &&= keep;
      else {
        d += `${pen ? "L" : "M"}${x(i).toFixed(2)} ${y(v).toFixed(2)}`;
        pen = true;
      }
    });
    return d;
  }
  function redraw(weight) {
    lines.forEach(([, line], i) => {
      const count = line.filter((v) => v !== null).length;
      const sparse = count < line.length * 0.8; // logged now and then: joined across the gaps, with its points
      const smoothed = weight > 0 && count > 20; // a mean of a few points would hide them
      paths[i][0].setAttribute("d", smoothed ? path(line, sparse) : "");
      paths[i][1].setAttribute("d", path(smoothed ? smooth(line, weight) : line, sparse));
      const dots =
        count <= 3 || (sparse && count <= 60)
          ? line.map((v, at) => (v === null ? "" : `M${x(at).toFixed(2)} ${y(v).toFixed(2)}h.001`)).join("")
          : "";
      paths[i][2].setAttribute("d", dots);
    });
  }
  function show(index) {
    rule.hidden = index === null;
    if (index !== null) rule.style.left = `${x(index)}%`;
    lines.forEach(([, line], i) => {
      const v = index === null ? line[latest[i]] : line[index];
      values[i].textContent = text(v);
      spots[i].hidden = index === null || v === null;
      if (!spots[i].hidden) {
        spots[i].style.left = `${x(index)}%`;
        spots[i].style.top = `${y(v)}%`;
      }
    });
    step.textContent = index === null ? `step ${whole(steps[steps.length - 1])}` : `at step ${whole(steps[index])}`;
    plot.setAttribute(
      "aria-label",
      `${title}: ${lines.map(([name], i) => `${name} ${values[i].textContent}`).join(", ")}, ${step.textContent}`,
    );
  }
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(),
      share = (100 * (event.clientX - box.left)) / box.width;
    let best = 0;
    steps.forEach((_, i) => {
      if (Math.abs(x(i) - share) < Math.abs(x(best) - share)) best = i;
    });
    cursor.move(best);
  });
  plot.addEventListener("pointerleave", () => cursor.move(null));
  plot.addEventListener("blur", () => cursor.move(null));
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    cursor.move(Math.max(0, Math.min(steps.length - 1, (cursor.index ?? steps.length - 1) + by)));
  });
  cursor.listeners.push(show);
  show(null);
  const legend = el(
    "ul",
    { class: "legend" },
    lines.map(([name], i) =>
      el(
        "li",
        { class: "stage", "data-stage": colour(i) },
        el("span", { class: "key" }, el("span", { class: "swatch" }), name),
        values[i],
      ),
    ),
  );
  return [
    el(
      "div",
      { class: "panel chart" },
      el("h4", {}, title),
      plot,
      el("div", { class: "axis" }, el("span", {}, `step ${whole(steps[0])}`), step),
      legend,
    ),
    redraw,
  ];
};
