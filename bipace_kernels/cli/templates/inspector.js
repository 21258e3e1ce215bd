"use strict";
// Texts of rollouts enter the page by textContent only.

const PAGE = 100;
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a900"];  // Okabe and Ito
const BRANCHES = { singleton: "no peers", pace: "with peers", leave_one_out: "leave one out" };
const $ = (selector) => document.querySelector(selector);

let data, columns, count, members, letters, joined;
const shown = { estimator: "", partition: "", group: 0, step: -1, page: 0, groupSort: [0, 1], stepSort: [0, 1] };
const usual = {};  // values of the controls that a link leaves out
const KEPT = ["estimator", "partition", "above", "view", "file", "outcome", "only-spread", "find-group", "scope",
  "ended", "least", "disagree", "find-step"];  // controls that a link holds
const OF_GROUP = ["cluster", "second"];  // the same, whose choices depend on the prompt group

function make(tag, content, properties) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  for (const child of [content].flat()) if (child !== undefined && child !== null) node.append(child);
  return node;
}

const stateOf = (name) => ($(`#${name}`).type === "checkbox" ? String($(`#${name}`).checked) : $(`#${name}`).value);

function setState(name, value) {
  const control = $(`#${name}`);
  if (control.type === "checkbox") control.checked = value === "true";
  else if (!control.options || [...control.options].some((one) => one.value === value)) control.value = value;
}

const option = (value, text) => make("option", text, { value });
const heading = (text, title) => make("h3", text, { title });

function picture(tag, attributes, children = []) {
  const node = document.createElementNS($("#drawing").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const long = size >= 1e5 || (size > 0 && size < 5e-4);
  const text = long ? value.toExponential(1) : value.toFixed(size < 100 ? 3 : 1);  // the data have four digits
  return text.replace("-", "−");
}
const signed = (value) => (value > 0 ? "+" : "") + number(value);
const direction = (value) => (value > 0 ? "above" : value < 0 ? "below" : "");
const colour = (value) => `var(--${direction(value) || "none"})`;
const percent = (value) => (value === null ? "–" : Math.round(100 * value) + " %");

function text(index) {
  const found = data.texts[index];
  return typeof found === "string" ? found : found.start;
}
function full(index) {
  const found = data.texts[index];
  return typeof found === "string" ? found
    : `${found.start}… (${found.more.toLocaleString("en")} more characters in the file)`;
}
const flat = (long) => long.slice(0, 300).replace(/\s+/g, " ").trim();
const oneLine = (index) => flat(text(index));
// In cells and lists: what is compared, which may stand between tags at the end of a long response, or its tool calls.
function actionOf(i) {
  const whole = text(columns.action[i]), tagged = data.action_tag && /<action>(.*?)<\/action>/s.exec(whole);
  const calls = [...whole.matchAll(/<tool_call>(.*?)<\/tool_call>/gs)].map(([, body]) => shortCall(body));
  return flat((tagged && tagged[1].trim()) || calls.join(" ") || whole);
}

// add(3) for {"name": "add", "arguments": {"number": 3}}; calls in another format stay as they are.
function shortCall(body) {
  let call;
  try {
    call = JSON.parse(body);
  } catch {
    return body.trim();
  }
  if (typeof call?.name !== "string" || typeof call.arguments !== "object") return body.trim();
  const values = Object.values(call.arguments ?? {});
  return `${call.name}(${values.map((x) => (typeof x === "string" ? x : JSON.stringify(x))).join(", ")})`;
}
const place = (i) => `${data.rollouts[columns.rollout[i]].name} · ${columns.step[i]}`;
const ofGroup = (g) => members.group.get(g) || [];
const outcome = (path) => ({ true: "success", false: "failure" }[data.rollouts[path].success] || "");
const clusterOf = (i) => columns.cluster[shown.partition][i];
const mean = (rows, column) => rows.reduce((sum, i) => sum + column[i], 0) / rows.length;

function membersBy(column) {
  const found = new Map();
  column.forEach((key, i) => { if (!found.has(key)) found.set(key, []); found.get(key).push(i); });
  return found;
}

// The steps outlined with step i: its cluster, or under a partition without one (of GAE) its nearest states.
function peersOf(i) {
  if (i < 0 || clusterOf(i) < 0) return new Set();
  return new Set(joined[shown.partition] ? members[shown.partition].get(clusterOf(i)) : columns.neighbours[i]);
}

// A, B, ... of the clusters of two or more records in a prompt group, the largest first.
function nameClusters(g) {
  const sizes = new Map();
  for (const i of ofGroup(g)) if (clusterOf(i) >= 0) sizes.set(clusterOf(i), (sizes.get(clusterOf(i)) || 0) + 1);
  const several = [...sizes].filter(([, size]) => size > 1).sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  return new Map(several.map(([cluster, size], at) => {
    let name = "";
    for (let rest = at; rest >= 0; rest = Math.floor(rest / 26) - 1)
      name = String.fromCharCode(65 + (rest % 26)) + name;
    return [cluster, { name, size, colour: COLOURS[at] || "var(--none)" }];
  }));
}

// ---- tables

// Rows as a grid that arrow keys move in; choose(row) follows the focus.
function fill(table, headings, rows, sort, resort, choose, empty) {
  const head = table.tHead.rows[0], body = table.tBodies[0];
  head.replaceChildren(...headings.map(({ name, title, cls }, at) => {
    const mark = sort[0] === at ? (sort[1] > 0 ? " ▲" : " ▼") : "";
    const button = make("button", name + mark, { type: "button", title: title || name, onclick: () => resort(at) });
    return make("th", button, { className: cls || "", scope: "col", role: "columnheader",
      "aria-sort": mark ? (sort[1] > 0 ? "ascending" : "descending") : "none" });
  }));
  body.replaceChildren(...rows.map(({ key, cells, selected }) => {
    const row = make("tr", cells, { tabIndex: -1, role: "row", "aria-selected": String(!!selected) });
    for (const one of cells) one.setAttribute("role", "gridcell");
    row.dataset.key = key;
    row.onclick = () => { row.focus(); choose(key); };
    return row;
  }));
  const none = make("td", empty, { className: "empty", role: "gridcell" });
  if (!rows.length) body.append(make("tr", none, { role: "row" }));
  const first = rows.length && (body.querySelector('[aria-selected="true"]') || body.rows[0]);
  if (first) {
    first.tabIndex = 0;
    reveal(first);
  }
  body.onkeydown = (event) => {
    const row = event.target.closest("tr"),
      go = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (event.target !== row || !(go || event.key === "Enter")) return;
    event.preventDefault();
    const next = go ? row[go] : row;
    if (next) { next.focus(); choose(Number(next.dataset.key)); }
  };
}

// Scrolls a panel, and not the page, until the node shows.
function reveal(node) {
  const panel = node && node.closest(".scroll");
  if (!panel) return;
  const [inner, outer] = [node.getBoundingClientRect(), panel.getBoundingClientRect()];
  if (node.matches(".cell")) {  // beside the column of names
    const left = outer.left + panel.querySelector("th").offsetWidth;
    if (inner.left < left) panel.scrollLeft -= left - inner.left;
    if (inner.right > outer.right) panel.scrollLeft += inner.right - outer.right;
  }
  const head = (panel.querySelector("thead, h3") || node).offsetHeight;
  const above = outer.top + head - inner.top, below = inner.bottom - outer.bottom;
  if (node.matches(".turn")) panel.scrollTop -= above;  // to read from here on
  else if (above > 0) panel.scrollTop -= above;
  else if (below > 0) panel.scrollTop += below;
}

function select(table, key) {
  for (const row of table.tBodies[0].rows) {
    const here = row.dataset.key === String(key);
    row.setAttribute("aria-selected", String(here));
    row.tabIndex = here ? 0 : -1;
  }
  const body = table.tBodies[0];
  const first = body.querySelector('tr[tabindex]');
  if (first && !body.querySelector('[tabindex="0"]')) first.tabIndex = 0;
  reveal(body.querySelector('[aria-selected="true"]'));
}

const cell = (content, cls) => make("td", content, { className: cls || "" });
const numeric = (value, write = number) => cell(write(value), "number " + (write === signed ? direction(value) : ""));

function sorted(rows, value, way) {
  const key = (row) => { const found = value(row); return found === null || found === undefined ? -Infinity : found; };
  return rows.slice().sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    const order = typeof x === "string" && typeof y === "string" ? x.localeCompare(y, "en", { numeric: true })
      : x < y ? -1 : x > y ? 1 : 0;
    return way * order || a - b;
  });
}
const turned = (sort, at, up) => [at, sort[0] === at ? -sort[1] : up ? 1 : -1];

// ---- prompt groups

const GROUPS = [
  { name: "task", title: "the prompt, by its task id; hover over one for its text",
    value: (g) => data.groups[g].task, cls: "text" },
  { name: "rollouts", title: "number of rollouts", value: (g) => data.groups[g].rollouts, cls: "number",
    write: String },
  { name: "success", title: "share of rollouts that succeeded", value: (g) => data.groups[g].success, cls: "number",
    write: percent },
  { name: "spread", title: "standard deviation of the rollouts' sums of rewards", value: (g) => data.groups[g].std,
    cls: "number" },
  { name: "|A|", title: "mean of |A|, of the advantage chosen above", value: (g) => meanSize(g), cls: "number" },
  { name: "disagree\u00adment", title: "mean over its steps of the largest minus the smallest A/rms(A)",
    value: (g) => mean(ofGroup(g), columns.spread), cls: "number" },
];

function meanSize(g) {
  return ofGroup(g).reduce((sum, i) => sum + Math.abs(columns.advantage[shown.estimator][i]), 0) / ofGroup(g).length;
}

// The first observation: a recorded run has only numbers as task ids.
const promptOf = (g) => text(columns.observation[ofGroup(g)[0]]);
const OUTCOMES = { "": () => true, all: (x) => x === 1, some: (x) => x > 0 && x < 1, none: (x) => x === 0 };

function wantedGroups() {
  const needle = $("#find-group").value.toLowerCase(), file = $("#file").value, fits = OUTCOMES[$("#outcome").value];
  return data.groups.map((_, g) => g).filter((g) => {
    const group = data.groups[g];
    return (file === "" || group.file === Number(file)) && fits(group.success)
      && (group.std > 0 || !$("#only-spread").checked)
      && `${group.task} ${data.files[group.file]} ${promptOf(g)}`.toLowerCase().includes(needle);
  });
}

function drawGroups() {
  const [at, way] = shown.groupSort, several = data.files.length > 1;
  const rows = sorted(wantedGroups(), GROUPS[at].value, way);
  fill($("#groups table"), GROUPS, rows.map((g) => ({
    key: g, selected: g === shown.group,
    cells: GROUPS.map((column) => {
      const found = column.value(g);
      if (column.cls !== "text") return cell((column.write || number)(found), "number");
      const file = several ? make("span", ` ${fileName(data.groups[g].file)}`, { className: "soft" }) : null;
      return make("td", [found, file], { className: "text", title: `${found}: ${promptOf(g).trim().slice(-300)}` });
    }),
  })), shown.groupSort, (column) => { shown.groupSort = turned(shown.groupSort, column, column === 0); drawGroups(); },
    chooseGroup, "No prompt group matches the filters.");
}

function saveGroups() {
  const names = GROUPS.map(({ name }) => name.replace("\u00ad", ""));
  const rows = sorted(wantedGroups(), GROUPS[shown.groupSort[0]].value, shown.groupSort[1]);
  save("groups.csv", [["file", ...names],
    ...rows.map((g) => [data.files[data.groups[g].file], ...GROUPS.map(({ value }) => value(g))])]);
}

// A file of comma-separated values.  Texts that a spreadsheet would take for a formula begin with an apostrophe.
function save(name, rows) {
  const field = (value) => {
    const written = String(value ?? "");
    const plain = typeof value === "number" ? written : written.replace(/^(?=[=+\-@\t\r])/, "'");
    return /[",\r\n]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
  };
  const lines = rows.map((row) => row.map(field).join(",") + "\r\n");
  const address = URL.createObjectURL(new Blob(lines, { type: "text/csv" }));
  make("a", null, { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// ---- the timeline

function drawTimeline() {
  const group = data.groups[shown.group], rows = ofGroup(shown.group), table = $("#timeline table");
  const several = data.files.length > 1;
  $("#timeline-title").textContent = `Timeline of task ${group.task}${several ? `, ${fileName(group.file)}` : ""}`;
  const legend = $("#timeline .legend"), multiple = letters.size;
  const alone = rows.filter((i) => !letters.has(clusterOf(i))).length;
  legend.replaceChildren(
    `${group.rollouts} rollouts, ${group.records} steps, success ${percent(group.success)}, `,
    `mean total reward ${number(group.mean)}, SD ${number(group.std)}. `,
    joined[shown.partition]
      ? `Letters: clusters of two or more steps, ${multiple} here; dashed: no peers, ${alone} here. `
      : `No two steps share a cluster; outlined: the nearest states of the chosen one, by GAE's kernel${unrecorded()}. `,
    "Colour and number: ",
    make("span", "+ advantage above 0", { className: "above" }), ", ",
    make("span", "− below 0", { className: "below" }), ".",
  );
  const steps = [...new Set(rows.map((i) => columns.step[i]))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, k) => [step, k]));
  const headings = steps.map((step) => make("th", String(step), { scope: "col", title: `step ${step} of each rollout` }));
  const first = make("th", "rollout", { scope: "col", title: "the rollout, its outcome and its sum of rewards" });
  table.tHead.replaceChildren(make("tr", [first, ...headings]));
  const largest = Math.max(1e-30, ...rows.map((i) => Math.abs(columns.advantage[shown.estimator][i])));
  const paths = membersBy(rows.map((i) => columns.rollout[i]));
  table.tBodies[0].replaceChildren(...[...paths].map(([path, own]) => {
    const rollout = data.rollouts[path], cells = steps.map(() => make("td"));
    for (const i of own.map((k) => rows[k])) cells[at.get(columns.step[i])].append(drawCell(i, largest));
    const end = rollout.success === null ? "" : rollout.success ? "✓ success" : "✗ failure";
    return make("tr", [make("th", [rollout.name, make("span", `${end} ${number(rollout.total)}`)],
      { scope: "row", title: rollout.name }), ...cells]);
  }));
  drawHeat(paths, rows, at, largest);
  fitCells();
  chooseRollouts();
  markCells();
}

// The whole group: a small cell for each step, coloured by A, with a stripe and where there is room a letter of its
// cluster.  The cells below are its zoom.
function drawHeat(paths, rows, at, largest) {
  const box = $("#heat");
  box.style.setProperty("--steps", at.size);
  const nodes = [];
  [...paths].forEach(([path, own], r) => {
    const name = make("button", data.rollouts[path].name, { type: "button", className: "go",
      title: `Rollout ${data.rollouts[path].name}${outcome(path) && `, ${outcome(path)}`}: read it` });
    name.style.gridArea = `${r + 1} / 1`;
    name.onclick = () => readRollout(path);
    nodes.push(name);
    for (const i of own.map((k) => rows[k])) {
      const value = columns.advantage[shown.estimator][i], cluster = letters.get(clusterOf(i));
      const dot = make("i", cluster ? cluster.name : "", { className: "dot", "--sign": colour(value),
        "--share": `${Math.round((80 * Math.abs(value)) / largest)}%`,
        "--cluster": cluster ? cluster.colour : "transparent",
        title: `${place(i)}: A ${signed(value)}${cluster ? `, cluster ${cluster.name}` : ""}` });
      dot.style.gridArea = `${r + 1} / ${at.get(columns.step[i]) + 2}`;
      dot.dataset.key = i;
      nodes.push(dot);
    }
  });
  box.replaceChildren(...nodes);
}

// ---- rollouts to read, one or two

// The chosen step's rollout, and one with another outcome.
function chooseRollouts() {
  const paths = [...new Set(ofGroup(shown.group).map((i) => columns.rollout[i]))];
  for (const list of [$("#first"), $("#second")]) {
    list.replaceChildren(...paths.map((path) =>
      option(String(path), `${data.rollouts[path].name}${outcome(path) && ` (${outcome(path)})`}`)));
  }
  const first = shown.step < 0 ? paths[0] : columns.rollout[shown.step];
  const others = paths.filter((path) => path !== first);
  $("#first").value = String(first);
  $("#second").value = String(others.find((path) => outcome(path) !== outcome(first)) ?? others[0] ?? first);
  drawTranscript();
}

function readRollout(path) {
  if ($("#view").value === "cells") $("#view").value = "transcript";
  shown.step = ofGroup(shown.group).find((i) => columns.rollout[i] === path);
  if ($("#view").value === "pair") {
    $("#first").value = String(path);
    drawTranscript();
  } else chooseRollouts();
  chooseStep(shown.step);
}

function drawTranscript() {
  const view = $("#view").value, pair = view === "pair", box = $("#transcript");
  $("#cells").hidden = view !== "cells";
  $("#first").hidden = box.hidden = view === "cells";
  $("#second").hidden = !pair;
  if (view === "cells") return box.replaceChildren();
  const paths = [Number($("#first").value), ...(pair ? [Number($("#second").value)] : [])];
  const rows = ofGroup(shown.group), steps = [...new Set(rows.map((i) => columns.step[i]))].sort((a, b) => a - b);
  const largest = Math.max(1e-30, ...rows.map((i) => Math.abs(columns.advantage[shown.estimator][i])));
  const titles = paths.map((path) => {
    const { name, total } = data.rollouts[path];
    return make("h3", [name, make("span", ` ${outcome(path)} ${number(total)}`, { className: "soft" })],
      { title: "the rollout, its outcome and its sum of rewards" });
  });
  const turns = steps.map((step) => paths.map((path) => {
    const here = rows.filter((i) => columns.rollout[i] === path && columns.step[i] === step);
    return make("div", here.map((i) => drawTurn(i, largest)));
  })).filter((line) => line.some((one) => one.hasChildNodes()));
  box.classList.toggle("pair", pair);
  box.replaceChildren(...titles, ...turns.flat());
}

function drawTurn(i, largest) {
  const value = columns.advantage[shown.estimator][i];
  const open = make("button", place(i), { type: "button", className: "go", title: "Shows this step in its panel" });
  open.onclick = () => chooseStep(i);
  const turn = make("article", [
    make("div", [
      open, make("b", `A ${signed(value)}`, { className: `number ${direction(value)}` }), bar(value, largest),
      make("span", `R ${number(columns.returns[i])}`, { className: "number soft" }), make("span", drawMark(i)),
    ], { className: "credit" }),
    make("div", [make("pre", full(columns.observation[i])),
      ...(data.has_actions ? [make("pre", full(columns.action[i]) || "(no action)", { className: "did" })] : [])]),
  ], { className: "turn" });
  turn.dataset.key = i;
  return turn;
}

// Widths of names and cells: whole cells fill the panel, so that no number is cut at its edge.
function fitCells() {
  const box = $("#cells"), steps = $("#cells thead").rows[0].cells.length - 1;
  const width = box.clientWidth, least = width < 480 ? 88 : 110;
  const room = Math.max(1, Math.floor((width - least) / 100)), wide = Math.floor((width - least) / room);
  box.style.setProperty("--cell", steps > room ? `${wide - 2}px` : "104px");
  box.style.setProperty("--names", `${steps > room ? width - room * wide : least}px`);
  $("#heat").classList.toggle("narrow", ($("#heat-box").clientWidth - 100) / steps <= 14);
}

function drawCell(i, largest) {
  const value = columns.advantage[shown.estimator][i], cluster = letters.get(clusterOf(i)),
    action = actionOf(i);
  const name = cluster ? cluster.name : joined[shown.partition] ? "·" : "";
  const button = make("button", [
    make("span", [make("b", name), make("span", signed(value))], { className: "top" }),
    make("span", action || (data.has_actions ? "(no action)" : ""), { className: "action" }),
  ], {
    type: "button", tabIndex: -1, title: oneLine(columns.action[i]),
    className: "cell" + (cluster || !joined[shown.partition] ? "" : " alone"),
    "aria-label": `rollout ${place(i)}, cluster ${cluster ? name : "of one"}, advantage ${signed(value)}, ${action}`,
    "--sign": colour(value), "--share": `${Math.round((45 * Math.abs(value)) / largest)}%`,
    "--cluster": cluster ? cluster.colour : "transparent",
  });
  button.dataset.key = i;
  button.onclick = () => chooseStep(i);
  return button;
}

function markCells() {
  const peers = peersOf(shown.step);
  let any = false;
  for (const button of document.querySelectorAll("#timeline .cell")) {
    const i = Number(button.dataset.key), here = i === shown.step;
    button.setAttribute("aria-pressed", String(here));
    if (here) reveal(button);
    button.tabIndex = here ? 0 : -1;
    any = any || here;
    button.classList.toggle("peer", !here && peers.has(i));
  }
  const first = $("#timeline .cell");
  if (!any && first) first.tabIndex = 0;
  for (const node of document.querySelectorAll("#heat .dot, #transcript .turn")) {
    const i = Number(node.dataset.key), here = i === shown.step;
    node.classList.toggle("here", here);
    node.classList.toggle("peer", !here && peers.has(i));
    if (here) reveal(node);
  }
}

function moveInTimeline(event) {
  const way = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (!way || !event.target.matches(".cell")) return;
  event.preventDefault();
  const td = event.target.closest("td"), rows = [...$("#timeline tbody").rows];
  let r = rows.indexOf(td.parentElement), c = td.cellIndex;
  for (;;) {  // over empty places
    r += way[0];
    c += way[1];
    const next = rows[r] && rows[r].cells[c];
    if (!next || c < 1) return;
    const button = next.querySelector(".cell");
    if (button) { chooseStep(Number(button.dataset.key)); button.focus(); return; }
  }
}

// ---- the list of steps

function stepColumns() {
  return [
    { name: "rollout · step", title: "the rollout, and the number of the step in it", value: (i) => i, cls: "text",
      draw: (i) => {
        const whole = $("#scope").value === "all";
        const name = whole ? `${data.groups[columns.group[i]].task} · ${place(i)}` : place(i);
        return make("td", name, { className: "text", title: name });
      } },
    joined[shown.partition]
      ? { name: "cluster", title: "records in its cluster", value: (i) => clusterSize(i),
        draw: (i) => cell(drawMark(i)) }
      : { name: "V̂", title: "value of its state by GAE; no two steps share a cluster", value: valueOf, cls: "number",
        draw: (i) => numeric(valueOf(i)) },
    { name: "action", title: "its text; hover over one for the observation",
      value: actionOf, cls: "text",
      draw: (i) => {
        const title = oneLine(columns.observation[i]);
        return make("td", actionOf(i), { className: "text", title });
      } },
    { name: "R", title: "discounted return-to-go", value: (i) => columns.returns[i], cls: "number",
      draw: (i) => numeric(columns.returns[i]) },
    { name: "A", title: "sorted by size, |A|", value: (i) => Math.abs(columns.advantage[shown.estimator][i]),
      cls: "number", draw: (i) => numeric(columns.advantage[shown.estimator][i], signed) },
    { name: "disagree\u00adment", title: "largest minus smallest A/rms(A) of the estimators",
      value: (i) => columns.spread[i], cls: "number", draw: (i) => numeric(columns.spread[i]) },
  ];
}

const valueOf = (i) => (columns.trained.value || columns.value)[i];
const clusterSize = (i) => (clusterOf(i) < 0 ? 0 : members[shown.partition].get(clusterOf(i)).length);

function drawMark(i) {
  if (clusterOf(i) < 0) return "set aside";
  const own = columns.group[i] === shown.group && letters.get(clusterOf(i));
  const size = clusterSize(i);
  const alone = joined[shown.partition] ? "no peers" : "";
  return make("span", own ? `${own.name} (${size})` : size > 1 ? `(${size})` : alone,
    { className: "mark", "--cluster": own ? own.colour : "transparent" });
}

function wantedSteps() {
  const all = $("#scope").value === "all", least = Number($("#least").value), apart = Number($("#disagree").value);
  const cluster = $("#cluster").value, needle = $("#find-step").value.toLowerCase();
  const advantage = columns.advantage[shown.estimator];
  const matches = needle && new Set(data.texts.map((_, k) => k).filter((k) => text(k).toLowerCase().includes(needle)));
  const rows = all ? wantedGroups().flatMap(ofGroup).sort((a, b) => a - b) : ofGroup(shown.group);
  const ended = $("#ended").value;
  return rows.filter((i) =>
    (ended === "" || data.rollouts[columns.rollout[i]].success === (ended === "1")) &&
    Math.abs(advantage[i]) >= least && columns.spread[i] >= apart
    && (cluster === "" || (cluster === "several" ? clusterSize(i) > 1
      : cluster === "alone" ? clusterSize(i) <= 1 : clusterOf(i) === Number(cluster)))
    && (!needle || matches.has(columns.observation[i]) || matches.has(columns.action[i])));
}

function drawSteps() {
  const table = stepColumns(), [at, way] = shown.stepSort;
  const rows = sorted(wantedSteps(), table[at].value, way);
  const pages = Math.max(1, Math.ceil(rows.length / PAGE));
  shown.page = Math.min(shown.page, pages - 1);
  const part = rows.slice(shown.page * PAGE, (shown.page + 1) * PAGE);
  const lines = part.map((i) => ({ key: i, selected: i === shown.step, cells: table.map((column) => column.draw(i)) }));
  fill($("#steps table"), table, lines, shown.stepSort, (column) => {
    shown.stepSort = turned(shown.stepSort, column, column === 0);
    shown.page = 0;
    drawSteps();
  }, chooseStep, "No step matches the filters.");
  const first = shown.page * PAGE, all = rows.length.toLocaleString("en");
  $("#count").textContent = rows.length ? `${first + 1} to ${first + part.length} of ${all} steps`
    : "0 steps";
  $("#back").disabled = shown.page === 0;
  $("#more").disabled = shown.page === pages - 1;
  drawHistograms(rows);
}

function drawHistograms(rows) {
  const bins = 25, most = 3, edge = (k) => number((2 * most * k) / bins - most);
  $("#histograms").replaceChildren(...data.estimators.map(({ key, label, meaning }) => {
    const counts = Array(bins).fill(0);
    for (const i of rows) {
      const bin = Math.floor(((columns.scaled[key][i] + most) * bins) / (2 * most));
      counts[Math.max(0, Math.min(bins - 1, bin))] += 1;
    }
    const largest = Math.max(1, ...counts);
    const bars = counts.map((n, k) => {
      const height = (60 * n) / largest, side = k < (bins - 1) / 2 ? "below" : k > (bins - 1) / 2 ? "above" : "";
      const range = k === 0 ? `below ${edge(1)}` : k === bins - 1 ? `from ${edge(k)}` : `${edge(k)} to ${edge(k + 1)}`;
      return picture("rect", { x: 8 * k, y: 62 - height, width: 7, height, class: side },
        [picture("title", {}, [`${n} steps with A/rms ${range}`])]);
    });
    const axis = picture("line", { x1: 0, x2: 8 * bins, y1: 62.5, y2: 62.5 });
    const ends = [[0, "−3", "start"], [4 * bins, "0", "middle"], [8 * bins, "3", "end"]].map(([x, text, anchor]) =>
      picture("text", { x, y: 74, "text-anchor": anchor }, [text]));
    const name = make("figcaption", label, { title: meaning });
    const described = { role: "img", "aria-label": `${label}: histogram of A/rms` };
    const drawn = picture("svg", { viewBox: `0 0 ${8 * bins} 78`, ...described }, [...bars, axis, ...ends]);
    return make("figure", rows.length ? [name, drawn] : [name, "no step"]);
  }));
}

function saveSteps() {
  const [at, way] = shown.stepSort, keys = data.estimators.map(({ key }) => key);
  const names = ["file", "record", "task", "rollout", "outcome", "total", "step", "action", "observation",
    "reward", "R", "cluster", "disagreement", ...keys.map((key) => `A_${key}`)];
  save("steps.csv", [names, ...sorted(wantedSteps(), stepColumns()[at].value, way).map((i) => {
    const group = data.groups[columns.group[i]], path = columns.rollout[i], { name, total } = data.rollouts[path];
    return [data.files[group.file], columns.line[i], group.task, name, outcome(path), total, columns.step[i],
      full(columns.action[i]), full(columns.observation[i]), columns.reward[i], columns.returns[i], clusterOf(i),
      columns.spread[i], ...keys.map((key) => columns.advantage[key][i])];
  })]);
}

function drawClusterChoice() {
  const list = $("#cluster"), before = list.value;
  list.replaceChildren(option("", "any"), option("several", "with peers"), option("alone", "no peers"),
    ...[...letters].map(([cluster, { name, size }]) => option(String(cluster), `${name} (${size} steps)`)));
  list.value = before;
  $("#of-cluster").hidden = !joined[shown.partition];
  if (list.selectedIndex < 0 || $("#of-cluster").hidden) list.value = "";
}

// ---- one step

const WHERE = ["rollout · step", "", "a click shows the step"], ACTION = ["action", "", "equal actions have one line"];
const SAME = "steps that count as the same state", RETURN = ["R", "number", "discounted return-to-go"];

function small(headings, rows) {
  return make("table", [
    make("thead", make("tr", headings.map(([name, cls, title]) =>
      make("th", name, { className: cls || "", title: title || "", scope: "col" })))),
    make("tbody", rows.map((cells) => make("tr", cells))),
  ]);
}

const go = (i) => make("button", place(i),
  { type: "button", className: "go", onclick: () => { chooseStep(i); $("#step").focus(); } });

function bar(value, largest) {
  const width = (50 * Math.abs(value)) / largest;
  const inner = make("i", null, { "--sign": colour(value) });
  inner.style.left = `${value < 0 ? 50 - width : 50}%`;
  inner.style.width = `${width}%`;
  return make("div", inner, { className: "bar", "aria-hidden": "true" });
}

function drawStep() {
  const i = shown.step, body = $("#step .body");
  if (i < 0) return;
  const rollout = data.rollouts[columns.rollout[i]], group = data.groups[columns.group[i]];
  $("#step-title").textContent = `Step ${columns.step[i]} of rollout ${rollout.name}`;
  const facts = {
    task: group.task,
    "return R": `${number(columns.returns[i])}, reward of this step ${number(columns.reward[i])}, γ = ${data.gamma}`,
    rollout: (rollout.success === null ? "" : rollout.success ? "success, " : "failure, ")
      + `sum of rewards ${number(rollout.total)}`,
    source: `${data.files[group.file]}, record ${columns.line[i]}`,
  };
  body.replaceChildren(
    make("dl", Object.entries(facts).flatMap(([name, value]) => [make("dt", name), make("dd", value)])),
    heading("Observation", "what the agent saw before it acted"),
    make("pre", full(columns.observation[i]), { id: "observation", tabIndex: 0 }),
    ...(data.has_actions ? [heading("Action", "what it did"),
      make("pre", full(columns.action[i]) || "(none)", { id: "action" })] : []),
    ...drawReason(i),
    heading("Advantage by estimator", "A of this step, under each estimator"), drawEstimators(i),
    make("p", "A/rms: divided by the estimator's root mean square over the file, so that they compare.",
      { className: "soft" }),
    ...drawPeers(i), ...drawNeighbours(i),
  );
  body.scrollTop = 0;
}

// What a training run with GAE recorded of the step.
function drawReason(i) {
  const { value, returns, delta, step_term: term } = columns.trained;
  if (!value || !delta || !returns || !term) return [];
  const table = small([["V̂", "number", "value of the step's state, estimated from the batch"],
    ["R", "number", "discounted return-to-go, with the run's γ"],
    ["δ", "number", "reward + γ V̂(next state) − V̂"],
    ["A_S", "number", "step term: GAE(λ) of the δ from here on, averaged and divided as configured"]],
  [[numeric(value[i]), numeric(returns[i]), numeric(delta[i], signed), numeric(term[i], signed)]]);
  table.id = "reason";
  return [heading("Why, as trained (GAE)", "what the training run recorded of this step"), table];
}

function drawEstimators(i) {
  const recomputed = data.estimators.at(-1).key === "trained" ? " by n-grams" : "";
  const largest = Math.max(1e-30, ...data.estimators.map(({ key }) => Math.abs(columns.scaled[key][i])));
  const table = small([["estimator", "", "hover over a name for its meaning"], ["A", "number", "advantage"],
    ["A/rms", "number", "divided by its root mean square"], ["", "", "A/rms as a bar, 0 in the middle"],
    ["step term", "", "what it was compared with"]], data.estimators.map((row) => [
    make("th", row.label, { scope: "row", title: row.meaning }),
    numeric(columns.advantage[row.key][i], signed), numeric(columns.scaled[row.key][i], signed),
    cell(bar(columns.scaled[row.key][i], largest)),
    cell(row.partition === "" ? "none" : row.key === "trained" ? "recorded"
      : row.partition === "kernel" ? `V̂ = ${number(columns.value[i])}${recomputed}`
      : BRANCHES[data.branches[columns.branch[row.key][i]]]),
  ]));
  table.id = "estimators";
  return table;
}

function drawPeers(i) {
  const cluster = clusterOf(i), title = data.partitions.find((row) => row.key === shown.partition).label;
  if (!joined[shown.partition]) return [];
  const rows = cluster < 0 ? [] : members[shown.partition].get(cluster);
  if (rows.length < 2) {
    const why = cluster < 0 ? "Set aside: it takes no part." : "No other step of the prompt group shares its state";
    return [heading("Cluster", SAME), make("p", `${why} (${title}).`, { className: "soft" })];
  }
  const letter = letters.has(cluster) ? letters.get(cluster).name : "";
  const found = [heading(`Cluster ${letter} of ${rows.length} steps: ${title}`, SAME)];
  const name = letters.get(cluster);
  if (data.has_actions) {
    const firsts = [...membersBy(rows.map((k) => columns.same_action[k])).values()].map((own) => rows[own[0]]);
    const actions = sorted(firsts, (k) => -withActionOf(k, rows).length, 1);
    const average = number(mean(rows, columns.returns));
    found.push(make("p", `Mean return of the cluster ${average}; by action (▸ this step's):`, { className: "soft" }));
    const headings = [ACTION, ["steps", "number", "of the cluster, with this action"],
      ["mean R", "number", "of these steps"]];
    found.push(small(headings, actions.map((k) => {
      const own = withActionOf(k, rows), here = columns.same_action[k] === columns.same_action[i];
      const label = actionOf(k) || "(none)";
      return [make("td", here ? make("b", `▸ ${label}`) : label, { className: "text", title: label }),
        cell(String(own.length), "number"), numeric(mean(own, columns.returns))];
    })));
  }
  const others = rows.filter((k) => k !== i);
  const table = small([WHERE, ACTION, RETURN, ["A", "number", "advantage, by the estimator chosen above"]],
    others.slice(0, 50).map((k) => [
    cell(go(k)), make("td", actionOf(k), { className: "text", title: oneLine(columns.action[k]) }),
    numeric(columns.returns[k]), numeric(columns.advantage[shown.estimator][k], signed),
  ]));
  table.id = "peers";
  found.push(heading("Its peers", "the other steps of its cluster"), table);
  if (others.length > 50) found.push(make("p",
    `${others.length - 50} more: filter the list of steps by cluster ${name ? name.name : ""}.`,
    { className: "soft" }));
  return found;
}

const withActionOf = (k, rows) => rows.filter((other) => columns.same_action[other] === columns.same_action[k]);

function drawNeighbours(i) {
  const near = columns.neighbours[i];
  const name = data.neighbours === "trained" ? "Neighbours as trained (GAE)" : "Kernel neighbours (GAE)";
  const found = [heading(name, "the states that count most in V̂ of this one")];
  if (!near.length) return [...found, make("p", "None: the prompt group has no other usable state.",
    { className: "soft" })];
  const table = small([WHERE, ACTION, RETURN,
    ["k", "number", "kernel of state and time, at most 1"]], near.map((k, at) => [
    cell(go(k)), make("td", actionOf(k), { className: "text", title: oneLine(columns.action[k]) }),
    numeric(columns.returns[k]), numeric(columns.kernel[i][at]),
  ]));
  table.id = "neighbours";
  const which = `The steps of this prompt group nearest by the kernel${unrecorded()}. `;
  const others = "Other prompts count too, through landmarks.";
  return [...found, make("p", which + others, { className: "soft" }), table];
}

// A run with a value of its own, or on several processes, records no neighbours: those shown are not what trained.
const unrecorded = () => (data.estimators.at(-1).key === "trained" && data.neighbours !== "trained"
  ? ", computed for this page since the run recorded none" : "");

// ---- updates of a run, or files

// Number of the update whose records a file holds, else its name.
function updateOf(file) {
  const found = /^update_0*(\d+)\.parquet$/.exec(data.files[file]);
  return found ? Number(found[1]) : data.files[file];
}

const fileName = (file) => (typeof updateOf(file) === "number" ? `update ${updateOf(file)}` : data.files[file]);
const average = (values) => (values.length ? values.reduce((sum, x) => sum + x, 0) / values.length : null);
const share = (rows, holds) => average(rows.map((row) => Number(holds(row))));

const COURSE = [
  { name: "success", title: "share of rollouts that succeeded",
    of: ({ paths }) => share(paths.filter(({ success }) => success !== null), ({ success }) => success) },
  { name: "total reward", title: "mean of the rollouts' sums of rewards",
    of: ({ paths }) => average(paths.map(({ total }) => total).filter((total) => total !== null)) },
  { name: "steps", title: "mean number of steps of a rollout", of: ({ paths, rows }) => rows.length / paths.length },
  { name: "with spread", title: "share of prompt groups whose rollouts have different sums of rewards",
    of: ({ groups }) => share(groups, ({ std }) => std > 0) },
  { name: "mean |A|", title: "of the advantage chosen above",
    of: ({ rows }) => average(rows.map((i) => Math.abs(columns.advantage[shown.estimator][i]))) },
  { name: "with peers", title: "share of steps that share a cluster, by the partition chosen above",
    of: ({ rows }) => (joined[shown.partition] ? share(rows, (i) => clusterSize(i) > 1) : null) },
  { name: "V̂ explains", title: "1 − Σ(R − V̂)² / Σ(R − the group's mean)²: as recorded by the run, else from n-grams",
    of: ({ rows }) => explained(rows) },
];

function explained(all) {
  const [value, returns] = [columns.trained.value || columns.value, columns.trained.returns || columns.returns];
  const taken = (i) => Object.values(columns.cluster).every((column) => column[i] >= 0);  // others were set aside
  const rows = all.filter(taken), squares = (of) => rows.reduce((sum, i) => sum + (returns[i] - of(i)) ** 2, 0);
  const groups = [...new Set(rows.map((i) => columns.group[i]))];
  const means = new Map(groups.map((g) => [g, mean(ofGroup(g).filter(taken), returns)]));
  const whole = squares((i) => means.get(columns.group[i]));
  return whole > 1e-6 * squares(() => 0) ? 1 - squares((i) => value[i]) / whole : null;  // less is rounding
}

function drawCourse() {
  const several = data.files.length > 1, here = data.groups[shown.group].file;
  $("#updates").hidden = !several;
  if (!several) return;
  const order = fileOrder(), files = order.map((file) => {
    const groups = data.groups.filter((group) => group.file === file);
    const rows = columns.group.map((_, i) => i).filter((i) => data.groups[columns.group[i]].file === file);
    return { file, groups, rows, paths: data.rollouts.filter(({ group }) => data.groups[group].file === file) };
  });
  $("#slider").max = order.length - 1;
  $("#slider").value = order.indexOf(here);
  $("#update").textContent = $("#file").value === "" ? `all ${order.length}; the group shown: ${fileName(here)}`
    : `${fileName(here)} (${order.indexOf(here) + 1} of ${order.length})`;
  const ofRun = order.every((file) => typeof updateOf(file) === "number");
  $("#updates-title").textContent = ofRun ? "Updates" : "Files";
  const nodes = COURSE.map(({ name, title, of }) => {
    const values = files.map(of), finite = values.filter((value) => value !== null);
    if (!finite.length) return null;
    const [low, high] = [Math.min(...finite), Math.max(...finite)];
    const x = (k) => 6 + (188 * k) / Math.max(1, files.length - 1);
    const y = (value) => 44 - (36 * (value - low)) / (high - low || 1);
    const points = values.map((value, k) => [k, value]).filter(([, value]) => value !== null);
    const line = picture("polyline", { points: points.map(([k, value]) => `${x(k)},${y(value)}`).join(" ") });
    const dots = points.map(([k, value]) => {
      const dot = picture("circle", { cx: x(k), cy: y(value), r: 4, class: files[k].file === here ? "here" : "" },
        [picture("title", {}, [`${fileName(files[k].file)}: ${number(value)}`])]);
      dot.onclick = () => chooseFile(files[k].file);
      return dot;
    });
    const now = number(values[order.indexOf(here)]);
    return make("figure", [make("figcaption", [`${name} `, make("b", now, { className: "now" })], { title }),
      picture("svg", { viewBox: "0 0 200 52", role: "img", "aria-label": `${name} by ${ofRun ? "update" : "file"}` },
        ofRun ? [line, ...dots] : dots)]);
  });
  $("#course").replaceChildren(...nodes.filter(Boolean));
}

// Files by the number of their update, in the order given where they have none.
function fileOrder() {
  const key = (file) => (typeof updateOf(file) === "number" ? updateOf(file) : file);
  return data.files.map((_, file) => file).sort((a, b) => key(a) - key(b));
}

function chooseFile(file) {
  $("#file").value = String(file);
  const step = informative((group) => group.file === file);
  if (step !== undefined) chooseStep(step);
  drawCourse();
  drawGroups();
  drawSteps();
}

// Successes where the file has none: of totals above the threshold.
function judge() {
  if (data.success_above === null) return;
  const above = Number($("#above").value);
  for (const path of data.rollouts) path.success = path.total === null ? null : path.total > above;
  data.groups.forEach((group, g) => {
    const known = data.rollouts.filter((path) => path.group === g && path.success !== null);
    group.success = share(known, ({ success }) => success);
  });
}

// ---- choosing

function chooseGroup(g) {
  shown.group = g;
  letters = nameClusters(g);
  drawCourse();
  shown.page = 0;
  drawClusterChoice();
  drawTimeline();
  select($("#groups table"), g);
  if (shown.step < 0 || columns.group[shown.step] !== g) chooseStep(ofGroup(g)[0]);
  else drawSteps();
}

function chooseStep(i) {
  if (i === undefined || i < 0 || i >= count) return;
  shown.step = i;
  if (columns.group[i] !== shown.group) { chooseGroup(columns.group[i]); return keep(); }
  const path = String(columns.rollout[i]), pair = $("#view").value === "pair";
  if (pair && ![$("#first").value, $("#second").value].includes(path)) {
    $("#first").value = path;
    drawTranscript();
  } else if (!pair && $("#first").value !== path) chooseRollouts();
  markCells();
  const here = [...$("#steps tbody").rows].some((row) => row.dataset.key === String(i));
  if (here && $("#steps").contains(document.activeElement)) select($("#steps table"), i);
  else drawSteps();
  drawStep();
  keep();
}

function keep() {
  drawStep();
  history.replaceState(null, "", `#${address()}`);
}

// The step, and what is not chosen as usual.
function address() {
  const chosen = KEPT.filter((name) => stateOf(name) !== usual[name]);
  if ($("#cluster").value) chosen.push("cluster");
  if ($("#view").value === "pair") chosen.push("second");
  return new URLSearchParams([["step", shown.step], ...chosen.map((name) => [name, stateOf(name)])]).toString();
}

function follow() {
  const wanted = new URLSearchParams(location.hash.slice(1)), step = Number(wanted.get("step") || NaN);
  const above = stateOf("above");
  for (const name of KEPT) setState(name, wanted.get(name) ?? usual[name]);
  if (stateOf("above") !== above) judge();
  shown.estimator = $("#estimator").value;
  shown.partition = $("#partition").value;
  shown.step = Number.isInteger(step) && step >= 0 && step < count ? step : informative();
  shown.group = columns.group[shown.step];
  redraw();
  for (const name of OF_GROUP.filter((one) => wanted.has(one))) setState(name, wanted.get(name));
  drawTranscript();
  markCells();
  drawSteps();
}

async function copyLink() {
  keep();
  const href = location.href;
  try { await navigator.clipboard.writeText(href); } catch {  // a browser that keeps the clipboard from files
    const field = make("textarea", href);
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  $("#link").textContent = "Copied";
  setTimeout(() => { $("#link").textContent = "Copy link"; }, 2000);
}

function redraw() {
  shown.estimator = $("#estimator").value;
  shown.partition = $("#partition").value;
  letters = nameClusters(shown.group);
  drawClusterChoice();
  drawCourse();
  drawGroups();
  drawTimeline();
  drawSteps();
  drawStep();
}

// Of the group that shows most (outcomes that differ, then disagreement) the step with the largest |A| that all
// rollouts reach.
function informative(wanted = () => true) {
  const score = (g) => (data.groups[g].std > 0 ? 1e6 : 0) + mean(ofGroup(g), columns.spread);
  const [g] = data.groups.map((_, k) => k).filter((k) => wanted(data.groups[k]))
    .sort((a, b) => score(b) - score(a) || a - b);
  if (g === undefined) return undefined;
  const value = columns.advantage[shown.estimator];
  const members = [...membersBy(ofGroup(g).map((i) => columns.rollout[i])).values()];
  const shortest = Math.min(...members.map((own) => columns.step[ofGroup(g)[own.at(-1)]]));
  return ofGroup(g).filter((i) => columns.step[i] <= shortest)
    .sort((a, b) => Math.abs(value[b]) - Math.abs(value[a]) || a - b)[0];
}

function theme(wanted) {
  const dark = wanted === "dark";
  document.documentElement.dataset.theme = wanted;
  $("#theme").textContent = dark ? "Light" : "Dark";
  $("#theme").title = dark ? "Light colours" : "Dark colours";
  $("#theme").onclick = () => theme(dark ? "light" : "dark");
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  if (event.key === "/") { event.preventDefault(); $("#find-step").focus(); }
  const next = { "[": -1, "]": 1 }[event.key];
  if (next && columns.group[shown.step + next] === shown.group) chooseStep(shown.step + next);
}

async function start() {
  const packed = Uint8Array.from(atob($("#data").textContent), (c) => c.charCodeAt(0));
  data = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  columns = data.columns;
  count = columns.group.length;
  members = { group: membersBy(columns.group) };
  for (const [name, column] of Object.entries(columns.cluster)) members[name] = membersBy(column);
  joined = Object.fromEntries(Object.keys(columns.cluster).map((name) =>
    [name, [...members[name]].some(([cluster, rows]) => cluster >= 0 && rows.length > 1)]));
  const sizes = [count, data.rollouts.length, data.groups.length];
  const [steps, rollouts, groups] = sizes.map((n) => n.toLocaleString("en"));
  const files = data.files.length > 3 ? `${data.files.length} files` : data.files.join(", ");
  $("#about").textContent = `${files}: ${steps} steps of ${rollouts} rollouts in ${groups} prompt groups`;
  $("#estimator").append(...data.estimators.map((row) => option(row.key, row.label)));
  $("#partition").append(...data.partitions.map((row) => option(row.key, row.label)));
  const trained = data.partitions.some((row) => row.key === "trained");  // a training run's own credit comes first
  $("#estimator").value = trained ? "trained" : data.has_actions ? "bipace" : "bigpo";  // which use the clusters shown
  $("#partition").value = trained ? "trained" : "cosine";
  $("#file").append(option("", "any"), ...fileOrder().map((file) => option(String(file), fileName(file))));
  $("#above").value = data.success_above ?? 0;
  for (const name of KEPT) usual[name] = stateOf(name);
  $("#of-file").hidden = data.files.length < 2;
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.onchange = () => theme(system.matches ? "dark" : "light");
  system.onchange();
  if (!count) throw new Error("no record of the file takes part; all are padding");
  $("#problem").hidden = true;
  $("main").hidden = false;
  follow();
  onhashchange = follow;
  $("#estimator").onchange = $("#partition").onchange = () => { redraw(); keep(); };
  $("#of-success").hidden = data.success_above === null;
  $("#above").oninput = () => { judge(); redraw(); keep(); };
  $("#slider").oninput = () => chooseFile(fileOrder()[Number($("#slider").value)]);
  $("#every").onclick = () => { $("#file").value = ""; drawCourse(); drawGroups(); drawSteps(); keep(); };
  $("#link").onclick = copyLink;
  const form = $("#steps form"), again = () => { shown.page = 0; drawSteps(); keep(); };
  $("#groups form").oninput = () => { drawCourse(); drawGroups(); again(); };
  form.oninput = again;
  form.onsubmit = $("#groups form").onsubmit = (event) => event.preventDefault();
  form.onreset = () => setTimeout(again);
  $("#save-groups").onclick = saveGroups;
  $("#save-steps").onclick = saveSteps;
  $("#view").onchange = () => { drawTranscript(); markCells(); fitCells(); keep(); };
  $("#first").onchange = () => readRollout(Number($("#first").value));
  $("#second").onchange = () => { drawTranscript(); markCells(); keep(); };
  $("#heat").onclick = (event) => {
    const dot = event.target.closest(".dot");
    if (dot) chooseStep(Number(dot.dataset.key));
  };
  $("#back").onclick = () => { shown.page -= 1; drawSteps(); };
  $("#more").onclick = () => { shown.page += 1; drawSteps(); };
  $("#timeline table").onkeydown = moveInTimeline;
  document.onkeydown = keys;
  new ResizeObserver(fitCells).observe($("#timeline"));
}

start().catch((error) => {
  $("#problem").textContent = `The page cannot be shown: ${error.message}`;
  $("#problem").hidden = false;
});
