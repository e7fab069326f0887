// Header, comparison table and breakdown.

function drawHead() {
  const head = report.head;
  const facts = [
    ["model", head.model],
    ["server", head.server],
    ["prompts", head.prompts],
    ["hardware", head.device],
    ["commit", head.commit && head.commit.slice(0, 10) + (head.dirty ? " with local changes" : "")],
    ["seed", head.seed],
    ["tasks", head.tasks],
    ["time", head.stages.map(([name, s]) => `${name} ${duration(s)}`).join(", ")],
  ];
  const versions = Object.entries(head.versions)
    .map(([name, version]) => `${name} ${version}`)
    .join("\n");
  fill(byId("head"), {}, [
    el("h1", {}, report.run),
    el(
      "dl",
      { class: "facts" },
      facts
        .filter(([, value]) => value !== null && value !== undefined && value !== "")
        .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))),
    ),
    el(
      "div",
      { class: "more" },
      head.recipe &&
        el("details", {}, el("summary", {}, "Recipe"), el("pre", { class: "panel", tabindex: 0 }, head.recipe)),
      versions &&
        el("details", {}, el("summary", {}, "Versions"), el("pre", { class: "panel", tabindex: 0 }, versions)),
    ),
  ]);
}

function drawResults(browse) {
  const section = byId("results");
  if (!report.stages.length) return section.append(note(report.hints.eval_text, report.hints.eval));
  section.append(
    el(
      "div",
      { class: "figures" },
      report.stages.map((s) => figure(s, browse)),
    ),
    el("div", { class: "panel scroll", tabindex: 0, role: "region", "aria-label": "Comparison table" }, table()),
  );
  section.append(
    el(
      "p",
      { class: "note foot" },
      "Accuracy with Wilson's 95 % interval. Stages are compared on the same questions: difference with Newcombe's paired 95 % interval, p by McNemar's exact test. ",
      report.stages.some((s) => s.undecided) ? "Undecided episodes (the judge could not tell) count neither way." : "",
    ),
    el("div", { class: "more-tables" }, moreTables()),
  );
}

// Tables as the summary words them: turn limits, self-correction, samples
function moreTables() {
  return report.more.map((t) =>
    el(
      "div",
      { class: "more-table" },
      el("h3", {}, t.title),
      el(
        "div",
        { class: "panel scroll", tabindex: 0, role: "region", "aria-label": t.title },
        el(
          "table",
          {},
          el(
            "thead",
            {},
            el(
              "tr",
              {},
              t.header.map((name) => el("th", { scope: "col" }, name)),
            ),
          ),
          el(
            "tbody",
            {},
            t.rows.map(([name, ...rest]) =>
              el(
                "tr",
                {},
                el("th", { scope: "row" }, stageNames.includes(name) ? stageTag(name) : name),
                rest.map((cell) => el("td", {}, cell === "-" ? "–" : cell)),
              ),
            ),
          ),
        ),
      ),
    ),
  );
}

function figure(s, browse) {
  const test = s.test;
  const change = (kind, word) =>
    el(
      "button",
      { type: "button", class: "link", onclick: () => browse({ changed: `${test.against}>${s.name}:${kind}` }) },
      `${whole(test[kind])} ${word}`,
    );
  return el(
    "div",
    { class: "panel figure stage", "data-stage": stageColour(s.name) },
    el("div", { class: "name" }, el("span", { class: "swatch" }), s.name),
    el("p", { class: "big" }, percent(s.accuracy), el("small", {}, `${whole(s.correct)} of ${whole(s.n)}`)),
    s.accuracy === null ? null : intervalBar(s.accuracy, s.interval, s.name),
    test && test.n
      ? el(
          "p",
          {},
          `${points(test.difference)} points on ${test.against}: `,
          change("fixed", "fixed"),
          ", ",
          change("broke", "broken"),
          ` (${pValue(test.p)}${test.p < 0.05 ? "" : ", no clear difference"})`,
        )
      : el("p", { class: "soft" }, test ? `no decided question shared with ${test.against}` : "the starting point"),
  );
}

function table() {
  const head = [
    "stage",
    "questions",
    "accuracy",
    "95 % interval",
    "difference, points",
    "fixed, broken",
    ...report.table.header,
  ];
  const rows = report.stages.map((s, i) => {
    const test = s.test && s.test.n ? s.test : null,
      known = s.accuracy !== null;
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, stageTag(s.name)),
      el(
        "td",
        {},
        whole(s.n),
        s.undecided ? el("div", { class: "soft small" }, `+ ${whole(s.undecided)} undecided`) : null,
      ),
      el("td", { class: "strong" }, percent(s.accuracy)),
      el(
        "td",
        {},
        known
          ? [
              intervalBar(s.accuracy, s.interval, s.name),
              el("div", { class: "soft small" }, `${percent(s.interval[0])} to ${percent(s.interval[1])}`),
            ]
          : "–",
      ),
      el(
        "td",
        {},
        test
          ? [
              el("span", { class: "strong" }, points(test.difference)),
              el("div", { class: "soft small" }, `${points(test.interval[0])} to ${points(test.interval[1])}`),
            ]
          : "–",
      ),
      el(
        "td",
        {},
        test
          ? [
              el("span", { class: "right" }, `+${test.fixed}`),
              "  ",
              el("span", { class: "wrong" }, `−${test.broke}`),
              el("div", { class: "soft small" }, pValue(test.p)),
            ]
          : "–",
      ),
      report.table.rows[i].map((cell) => el("td", {}, cell === "-" ? "–" : cell)),
    );
  });
  return el(
    "table",
    {},
    el("caption", { class: "sr" }, "Stages compared on the same questions"),
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        head.map((name) => el("th", { scope: "col" }, name)),
      ),
    ),
    el("tbody", {}, rows),
  );
}

function drawBreakdown(browse) {
  const section = byId("breakdown");
  if (!report.stages.length)
    return section.append(note("Accuracy by difficulty and by task appears with the evaluation."));
  const kinds = [
    ["By difficulty", "by_hardness", "hardness"],
    ["By task", "by_task", "task"],
  ];
  section.append(
    el(
      "div",
      { class: "groups" },
      kinds.map(([title, key, filter]) =>
        el(
          "div",
          { class: "panel" },
          el("h3", {}, title),
          groups(key).map((name) => group(name, key, filter, browse)),
        ),
      ),
    ),
  );
}

const LEVELS = ["easy", "medium", "hard", "extra"];

function groups(key) {
  const names = new Set(report.stages.flatMap((s) => Object.keys(s[key])));
  const rank = (name) => (LEVELS.includes(name) ? LEVELS.indexOf(name) : LEVELS.length);
  return [...names].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

function group(name, key, filter, browse) {
  const lines = report.stages
    .filter((s) => s[key][name])
    .map((s) => {
      const [right, n, low, high] = s[key][name];
      return el(
        "div",
        { class: "contents" },
        stageTag(s.name),
        intervalBar(right / n, [low, high], s.name),
        el("span", { class: "num" }, percent(right / n, 0)),
        el("span", { class: "num soft" }, `of ${whole(n)}`),
      );
    });
  return el(
    "div",
    { class: "group" },
    el("span", {}, el("button", { type: "button", class: "link", onclick: () => browse({ [filter]: name }) }, name)),
    el("div", { class: "lines" }, lines),
  );
}
