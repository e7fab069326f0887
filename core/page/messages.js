// One message of an episode as nodes: SQL highlighted, results as tables, thoughts and answers told apart.

const SQL = new RegExp(
  [
    "(--[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$))",
    "('(?:[^']|'')*'?)",
    '("(?:[^"]|"")*"?|`[^`]*`?|\\[[^\\]]*\\]?)',
    "(\\b\\d+(?:\\.\\d+)?(?:e[+-]?\\d+)?\\b)",
    "([A-Za-z_]\\w*)",
  ].join("|"),
  "gi",
);
const KEYWORDS = new Set(
  (
    "select from where group by order having limit offset join inner left right full outer cross natural on using as and or not in is null " +
    "like glob between exists distinct all union except intersect case when then else end asc desc with recursive values cast count sum avg min max " +
    "create table primary key foreign references unique insert update delete into set over partition explain"
  ).split(" "),
);

function sql(text) {
  const out = [];
  let end = 0;
  for (const match of text.matchAll(SQL)) {
    const [token, comment, string, , digits, word] = match;
    const kind = comment ? "co" : string ? "st" : digits ? "nu" : word && KEYWORDS.has(word.toLowerCase()) ? "kw" : "";
    if (!kind) continue;
    out.push(text.slice(end, match.index), el("span", { class: kind }, token));
    end = match.index + token.length;
  }
  out.push(text.slice(end));
  return el("pre", {}, out);
}

const isQuery = (text) => /^\s*(--|\/\*|select|with|explain|pragma|values|create)\b/i.test(text);
const code = (text) => (isQuery(text) ? sql(text) : el("pre", {}, text));

// What the assistant wrote: fenced SQL, <think> and <answer> set apart, everything else as it stands
function prose(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(
    /```sql\s*\n?([\s\S]*?)(?:```|$)|<think>[\s\S]*?(?:<\/think>|$)|<answer>[\s\S]*?(?:<\/answer>|$)/gi,
  )) {
    parts.push(text.slice(end, match.index));
    if (match[1] !== undefined) parts.push(el("div", { class: "call" }, sql(match[1].trimEnd())));
    else parts.push(el("span", { class: /^<think/i.test(match[0]) ? "think" : "answer" }, match[0]));
    end = match.index + match[0].length;
  }
  parts.push(text.slice(end));
  return el("pre", {}, parts);
}

// A result as the SQL tool writes it (names, rows, "(n rows)") becomes a table; anything else stays text
function resultTable(text) {
  const lines = text.split("\n");
  if (lines.length < 2 || !/^\(.*rows?\b.*\)$/.test(lines[lines.length - 1])) return el("pre", {}, text);
  const [names, ...rows] = lines.slice(0, -1).map(cells);
  if (rows.some((row) => row.length !== names.length)) return el("pre", {}, text);
  return el(
    "div",
    {},
    el(
      "table",
      { class: "grid" },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          names.map((name) => el("th", { scope: "col" }, name)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row) =>
          el(
            "tr",
            {},
            row.map((c) => el("td", { class: /^-?\d+(\.\d+)?$/.test(c) ? "n" : null }, c)),
          ),
        ),
      ),
    ),
    el("div", { class: "soft small" }, lines[lines.length - 1]),
  );
}

// Cells are joined by " | "; one that holds it is quoted
function cells(line) {
  const out = [];
  for (const part of line.split(" | ")) {
    const open =
      out.length && out[out.length - 1].startsWith("'") && !/^'(?:[^']|'')*'(\.\.\..*)?$/.test(out[out.length - 1]);
    if (open) out[out.length - 1] += ` | ${part}`;
    else out.push(part);
  }
  return out;
}

function callBlock(call) {
  const [name, args] = call;
  const values = args && typeof args === "object" ? Object.entries(args) : [];
  const single = values.length === 1 && typeof values[0][1] === "string";
  return el(
    "div",
    { class: "call" },
    el("div", { class: "role" }, `calls ${name}`),
    single ? code(values[0][1]) : el("pre", {}, JSON.stringify(args)),
  );
}

// role: what stands above it; masked: the policy did not write it, so it carries no loss
function messageBlock(message, last) {
  const masked = message.role !== "assistant";
  const body = [];
  if (message.role === "tool") body.push(resultTable(message.content));
  else if (message.role === "assistant") {
    if (message.content) body.push(prose(message.content));
    for (const call of message.calls || []) body.push(callBlock(call));
    if (!body.length) body.push(el("span", { class: "empty" }, "empty message"));
  } else body.push(el("pre", {}, message.content));
  const role = message.role === "tool" ? `tool ${message.name || ""}` : message.role;
  const turn = message.turn && message.role !== "tool" ? `, turn ${message.turn}` : "";
  const right = masked ? "masked" : last && !message.calls ? "final message" : "";
  return el(
    "div",
    { class: "message" },
    el("div", { class: "role" }, el("span", {}, role + turn), el("span", {}, right)),
    el("div", { class: masked ? "masked" : "own-text" }, body),
  );
}
