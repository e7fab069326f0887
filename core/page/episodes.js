// The browser of episodes: filters, a list that only draws what is visible, and one question with its stages side by side.

const ITEM = 54; // pixels, as in the style sheet
const MARK = {
  true: ["✓", "right", "right"],
  false: ["✗", "wrong", "wrong"],
  null: ["?", "unknown", "undecided"],
  undefined: ["·", "soft", "not played"],
};
const markOf = (row, stage) => MARK[row.stages[stage] ? row.stages[stage].correct : undefined];

// Gzip of JSON in base64: 5,000 questions x 3 stages stay a file that can be mailed
async function unpack() {
  const text = byId("episode-data").textContent.trim();
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const OUTCOMES = {
  right: (e) => e.correct === true,
  wrong: (e) => e.correct === false,
  undecided: (e) => e.correct === null,
  "no tool call": (e) => !e.error && e.tool_calls === 0,
  "a tool error": (e) => e.tool_errors > 0,
  "cut short": (e) => e.truncated,
};

function changedFilters() {
  const pairs = report.stages.filter((s) => s.test).map((s) => [s.test.against, s.name]);
  if (stageNames.length > 2) pairs.push([stageNames[0], stageNames[stageNames.length - 1]]);
  return pairs;
}

function matches(row, f) {
  if (f.task && row.task !== f.task) return false;
  if (f.hardness && row.hardness !== f.hardness) return false;
  if (f.outcome) {
    const at = f.outcome.indexOf(":"),
      episode = row.stages[stageNames[+f.outcome.slice(0, at)]];
    if (!episode || !OUTCOMES[f.outcome.slice(at + 1)](episode)) return false;
  }
  if (f.changed) {
    const [pair, kind] = [
      f.changed.slice(0, f.changed.lastIndexOf(":")),
      f.changed.slice(f.changed.lastIndexOf(":") + 1),
    ];
    const [a, b] = changedFilters()
      .find(([x, y]) => `${x}>${y}` === pair)
      .map((name) => row.stages[name]?.correct);
    if (!(kind === "fixed" ? a === false && b === true : a === true && b === false)) return false;
  }
  return (
    !f.search ||
    f.search
      .toLowerCase()
      .split(/\s+/)
      .every((word) => row.haystack.includes(word))
  );
}

function prepare(data) {
  for (const row of data.rows) {
    const said = Object.values(row.stages).flatMap((e) =>
      e.messages.flatMap((m) => [m.content, ...(m.calls || []).map((c) => JSON.stringify(c[1]))]),
    );
    row.haystack = [row.id, row.question, row.gold, row.db_id, ...said].join("\n").toLowerCase();
  }
}

// Returns browse(filter): what the other parts of the page call to show some episodes
function drawEpisodes() {
  const section = byId("episodes");
  if (!report.episodes) {
    section.append(note("Every episode of the evaluation can be read here once there is one."));
    return () => {};
  }
  if (typeof DecompressionStream === "undefined") {
    section.append(
      note(
        "This browser cannot unpack the episodes (it lacks DecompressionStream: Chrome 80, Firefox 113 or Safari 16.4 can). They stand in episodes.jsonl beside this page.",
      ),
    );
    return () => {};
  }
  const waiting = section.appendChild(note(`Unpacking ${whole(report.episodes)} questions…`));
  let apply = null,
    wanted = null;
  unpack()
    .then((data) => {
      prepare(data);
      waiting.remove();
      apply = browser(section, data);
      if (wanted) apply(wanted);
    })
    .catch((error) => {
      waiting.textContent = `The episodes in this page cannot be read (${error.message}). Make it again: python -m core.report RUN`;
    });
  return (filter) => {
    location.hash = "episodes";
    if (apply) apply(filter);
    else wanted = filter;
  };
}

function browser(section, data) {
  const rows = data.rows,
    find = new Map(rows.map((row, i) => [row.id, i]));
  let shown = rows.map((_, i) => i),
    selected = null,
    ready = false; // before it is ready the address is read, not written
  const option = (value, text) => el("option", { value }, text);
  const unique = (key) =>
    [...new Set(rows.map((row) => row[key]).filter(Boolean))].sort(
      (a, b) => LEVELS.indexOf(a) - LEVELS.indexOf(b) || a.localeCompare(b),
    );
  const picker = (label, options) =>
    el("select", { "aria-label": label, onchange: filter }, option("", label), options);
  const input = {
    search: el("input", {
      type: "search",
      placeholder: "Search questions, SQL, answers",
      "aria-label": "Search questions, SQL, answers",
      oninput: filter,
    }),
    task: picker(
      "Any task",
      unique("task").map((t) => option(t, t)),
    ),
    hardness: picker(
      "Any difficulty",
      unique("hardness").map((t) => option(t, t)),
    ),
    outcome: picker(
      "Any outcome",
      stageNames.map((s, i) =>
        el(
          "optgroup",
          { label: s },
          Object.keys(OUTCOMES).map((name) => option(`${i}:${name}`, `${s}: ${name}`)),
        ),
      ),
    ),
    changed: picker(
      "Changed or not",
      changedFilters().flatMap(([a, b]) => [
        option(`${a}>${b}:fixed`, `fixed, ${a} → ${b}`),
        option(`${a}>${b}:broke`, `broken, ${a} → ${b}`),
      ]),
    ),
  };
  if (stageNames.length < 2) input.changed.hidden = true;
  const count = el("span", { class: "count", role: "status" });
  const clear = el("button", { type: "button", class: "quiet", onclick: () => set({}) }, "Clear");
  const pad = el("div", { class: "pad", role: "presentation" });
  const list = el(
    "div",
    {
      class: "panel list",
      role: "listbox",
      tabindex: 0,
      "aria-label": "Questions",
      onscroll: drawList,
      onkeydown: listKeys,
    },
    pad,
  );
  const detail = el("article", { class: "panel detail", "aria-label": "Episode", tabindex: -1 });
  section.append(
    el("div", { class: "filters" }, Object.values(input), clear, count),
    el("div", { class: "browser" }, list, detail),
    el(
      "p",
      { class: "hint keys" },
      el("kbd", {}, "j"),
      " ",
      el("kbd", {}, "k"),
      " next and previous question, ",
      el("kbd", {}, "/"),
      " search, arrows, Page, Home and End in the list. The address names the question: it can be sent to others with this file.",
    ),
  );

  function set(values) {
    for (const [name, control] of Object.entries(input)) control.value = values[name] || "";
    filter();
  }
  function filter() {
    const f = Object.fromEntries(Object.entries(input).map(([name, control]) => [name, control.value.trim()]));
    shown = rows.map((_, i) => i).filter((i) => matches(rows[i], f));
    clear.hidden = !Object.values(f).some(Boolean);
    count.textContent =
      shown.length === rows.length
        ? `${whole(rows.length)} questions`
        : `${whole(shown.length)} of ${whole(rows.length)} questions`;
    pad.style.height = `${shown.length * ITEM}px`;
    list.scrollTop = 0;
    if (shown.length && !shown.includes(selected)) choose(shown[0], ready);
    else if (!shown.length) {
      selected = null;
      detail.replaceChildren(note("No question matches these filters."));
    }
    reveal();
    drawList();
  }
  function drawList() {
    const first = Math.max(0, Math.floor(list.scrollTop / ITEM) - 4),
      last = Math.min(shown.length, first + Math.ceil(list.clientHeight / ITEM) + 8);
    pad.replaceChildren(...shown.slice(first, last).map((i, n) => item(rows[i], i, first + n)));
    if (shown.includes(selected)) list.setAttribute("aria-activedescendant", `row-${selected}`);
    else list.removeAttribute("aria-activedescendant");
  }
  function item(row, i, place) {
    const marks = stageNames.map((s) =>
      el("span", { class: markOf(row, s)[1], title: `${s}: ${markOf(row, s)[2]}` }, markOf(row, s)[0]),
    );
    const node = el(
      "div",
      {
        class: "item",
        role: "option",
        id: `row-${i}`,
        "aria-selected": String(i === selected),
        "aria-posinset": place + 1,
        "aria-setsize": shown.length,
        "aria-label": `${row.question} ${stageNames.map((s) => `${s} ${markOf(row, s)[2]}`).join(", ")}`,
        onclick: () => {
          choose(i);
          if (innerWidth <= 860) detail.scrollIntoView();
        },
      },
      el("div", { class: "q" }, row.question),
      el(
        "div",
        { class: "sub" },
        el("span", { class: "marks" }, marks),
        el("span", { class: "id" }, row.id),
        el("span", {}, row.hardness),
      ),
    );
    node.style.top = `${place * ITEM}px`;
    return node;
  }
  function choose(i, address = true) {
    selected = i;
    detail.replaceChildren(...detailOf(rows[i], data, step));
    if (address) history.replaceState(null, "", `#episode=${encodeURIComponent(rows[i].id)}`);
    reveal();
    drawList();
  }
  function reveal() {
    const top = shown.indexOf(selected) * ITEM;
    if (top < 0) return;
    const above = list.scrollTop - top,
      below = top + ITEM - list.scrollTop - list.clientHeight;
    if (Math.max(above, below) > ITEM)
      list.scrollTop = top - (list.clientHeight - ITEM) / 2; // a jump: with what is around it
    else if (above > 0) list.scrollTop = top;
    else if (below > 0) list.scrollTop += below;
  }
  function step(by) {
    if (!shown.length) return;
    const at = shown.indexOf(selected);
    choose(shown[Math.max(0, Math.min(shown.length - 1, at + by))]);
  }
  function listKeys(event) {
    const page = Math.max(1, Math.floor(list.clientHeight / ITEM) - 1);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length }[
      event.key
    ];
    if (by === undefined) return;
    event.preventDefault();
    step(by);
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
    else if (event.key === "/") {
      event.preventDefault();
      input.search.focus();
    }
  });
  function follow() {
    // the question that the address names
    const match = location.hash.match(/^#episode=(.*)$/);
    if (!match) return;
    let id = match[1];
    try {
      id = decodeURIComponent(id);
    } catch {
      /* not an encoded one */
    }
    if (!find.has(id)) {
      detail.replaceChildren(note(`This report has no question ${id}.`));
      section.scrollIntoView();
      return;
    }
    if (!shown.includes(find.get(id))) set({});
    choose(find.get(id), false);
    (innerWidth <= 860 ? detail : section).scrollIntoView();
  }
  addEventListener("hashchange", follow);
  new ResizeObserver(drawList).observe(list);
  filter();
  follow();
  ready = true;
  return set;
}

function detailOf(row, data, step) {
  const played = stageNames.filter((s) => row.stages[s]);
  const prompts = [...new Set(played.map((s) => row.stages[s].prompt))];
  const prompt = (index, title) =>
    el(
      "details",
      { class: "prompt" },
      el("summary", {}, title),
      data.prompts[index].map((m) => messageBlock(m, false)),
    );
  const one = prompts.length === 1;
  return [
    el(
      "div",
      { class: "title" },
      el("h3", {}, row.question),
      el("button", { type: "button", "aria-label": "Previous question", onclick: () => step(-1) }, "←"),
      el("button", { type: "button", "aria-label": "Next question", onclick: () => step(1) }, "→"),
    ),
    el(
      "div",
      { class: "chips" },
      el("a", { href: `#episode=${encodeURIComponent(row.id)}` }, row.id),
      [row.task, row.hardness, row.db_id && `database ${row.db_id}`].filter(Boolean).map((t) => el("span", {}, t)),
    ),
    el(
      "div",
      { class: "gold" },
      el("div", { class: "label" }, "Gold (for the judge only; the model never sees it)"),
      code(row.gold),
    ),
    one ? prompt(prompts[0], "Prompt, the same for every stage") : null,
    el(
      "div",
      { class: "columns" },
      played.map((s) => column(s, row.stages[s], one ? null : prompt(row.stages[s].prompt, "Prompt of this stage"))),
    ),
    el(
      "p",
      { class: "hint" },
      "Hatched: not written by the policy and so without loss (prompt, tool results). The strip shows the episode's tokens in order, the policy's own in colour.",
    ),
  ].filter(Boolean);
}

function column(stage, episode, prompt) {
  const [sign, tone, word] = MARK[episode.correct];
  const facts = [
    `${episode.turns} turn${episode.turns === 1 ? "" : "s"}`,
    `${episode.tool_calls} call${episode.tool_calls === 1 ? "" : "s"}`,
  ];
  if (episode.tool_errors) facts.push(`${episode.tool_errors} failed`);
  facts.push(`${number(episode.tokens)} tokens`, `${episode.seconds.toFixed(1)} s`);
  if (episode.truncated) facts.push("cut short");
  const total = episode.mask.reduce((a, b) => a + b, 0);
  const strip = total
    ? el(
        "div",
        {
          class: "strip",
          role: "img",
          "aria-label": `${episode.tokens} of ${total} tokens written by the policy`,
          title: `${episode.tokens} of ${total} tokens written by the policy; prompt ${episode.prompt_tokens}`,
        },
        episode.mask.map((n, i) => el("i", { class: i % 2 ? null : "own", "--n": n })),
      )
    : null; // runs alternate, the policy's first
  const rewards = Object.entries(episode.rewards).map(([name, value]) => [
    el("span", { class: "soft" }, name),
    el("div", { class: "meter", "--at": `${100 * Math.max(0, Math.min(1, value ?? 0))}%` }, el("i", {})),
    el("span", { class: "num" }, value === null ? "–" : String(+value.toFixed(2))),
  ]);
  return el(
    "section",
    { class: "column stage", "data-stage": stageColour(stage), "aria-label": stage },
    el("div", { class: "head" }, stage, el("span", { class: tone }, `${sign} ${word}`)),
    el("div", { class: "meta" }, facts.join(" · ")),
    el("div", { class: "rewards" }, rewards),
    episode.answer &&
      el("div", { class: "verdict" }, el("div", { class: "soft small" }, "judged answer"), code(episode.answer)),
    episode.error && el("p", { class: "wrong small" }, episode.error),
    strip,
    prompt,
    episode.messages.map((m, i) => messageBlock(m, i === episode.messages.length - 1)),
  );
}
