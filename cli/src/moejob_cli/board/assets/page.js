"use strict";
// Everything that comes from a run is text: it is set by textContent, never as markup.
const embedded = (() => { const text = document.getElementById("data").textContent; return text ? JSON.parse(text) : null; })();
const VIEWS = ["Curves", "Timeline", "Samples", "Experts", "Layout", "Job", "Compare"];
const FIRST = ["loss", "reward", "evalLoss", "evalScore", "gradNorm", "learningRate", "tokensPerSecondPerGpu", "seconds", "expertImbalance", "routerEntropy", "idleExperts", "entropy"];
const KINDS = ["starting", "training", "waiting", "saving", "evaluating", "recovering", "stopped"];
const SHORT = { tensor: "tp", context: "cp", data: "dp", pipeline: "pp", expert: "ep", expert_tensor: "etp", expert_data: "edp" };
const state = { runs: [], current: 0, overlaid: new Set(), view: 0, zoom: null, filter: "", details: new Map(), curves: new Map(), file: null };

function make(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const runColor = (number) => color("c" + (number % 8));

// --- data ------------------------------------------------------------------------------------------------------------
async function ask(path) {
  const reply = await fetch(path);
  if (!reply.ok) throw new Error(path + ": " + reply.status);
  return reply;
}
function decode(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Float64Array(bytes.buffer);
}
async function loadDetails(run) {
  if (embedded) return embedded.runs[run];
  if (!state.details.has(run)) state.details.set(run, (await ask("/api/run?run=" + run)).json());
  return state.details.get(run);
}
async function loadCurve(run, name) {
  const key = run + "/" + name;
  if (!state.curves.has(key)) state.curves.set(key, readCurve(run, name).then(([steps, values]) => buildCurve(steps, values)));
  return state.curves.get(key);
}
async function readCurve(run, name) {
  if (embedded) {
    const curve = embedded.runs[run].curves[name];
    return curve ? curve.map(decode) : [new Float64Array(), new Float64Array()];
  }
  const numbers = new Float64Array(await (await ask("/api/curve?run=" + run + "&name=" + encodeURIComponent(name))).arrayBuffer());
  return [numbers.subarray(0, numbers.length / 2), numbers.subarray(numbers.length / 2)];
}
async function loadSamples(run, file) {
  if (embedded) return embedded.runs[run].sampleRows[file] || [];
  return (await ask("/api/samples?run=" + run + "&file=" + encodeURIComponent(file))).json();
}

// The last line of a step counts: steps come again after a restart.
function buildCurve(steps, values) {
  let x = [], y = [];
  for (let i = 0; i < steps.length; i++) {
    if (!Number.isFinite(values[i])) continue;
    while (x.length && x[x.length - 1] >= steps[i]) { x.pop(); y.pop(); }
    x.push(steps[i]); y.push(values[i]);
  }
  x = Float64Array.from(x); y = Float64Array.from(y);
  // Level n has the least and greatest of each 8^n neighbours, so a drawing looks at some thousand numbers only.
  const levels = [];
  for (let low = y, high = y; low.length > 2048;) {
    const count = Math.ceil(low.length / 8), lows = new Float64Array(count), highs = new Float64Array(count);
    for (let i = 0; i < count; i++) {
      let least = Infinity, most = -Infinity;
      for (let j = i * 8; j < Math.min(low.length, i * 8 + 8); j++) { least = Math.min(least, low[j]); most = Math.max(most, high[j]); }
      lows[i] = least; highs[i] = most;
    }
    levels.push([lows, highs]); low = lows; high = highs;
  }
  return { x, y, levels };
}
function findRow(x, value) {
  let low = 0, high = x.length;
  while (low < high) { const middle = (low + high) >> 1; if (x[middle] < value) low = middle + 1; else high = middle; }
  return low;
}
function nearestRow(x, value) {
  const row = Math.min(findRow(x, value), x.length - 1);
  return row > 0 && Math.abs(x[row - 1] - value) <= Math.abs(x[row] - value) ? row - 1 : row;
}

// --- charts ----------------------------------------------------------------------------------------------------------
function shownNumber(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(3).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(6)));
}
function niceTicks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return ticks;
}
const charts = new Set();
class Chart {
  constructor(name, series) {
    this.name = name; this.series = series;
    this.output = make("output", {});
    this.canvas = make("canvas", { tabIndex: 0, role: "img", "aria-label": name + " by step" });
    this.element = make("section", { class: "card" }, make("h3", {}, make("span", {}, name), this.output), this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { for (const chart of charts) chart.hover(null); });
    this.canvas.addEventListener("pointerdown", (event) => { if (event.button === 0) this.dragFrom = this.stepAt(event.offsetX); });
    this.canvas.addEventListener("pointerup", (event) => this.drop(event));
    this.canvas.addEventListener("dblclick", () => zoomTo(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    charts.add(this);
  }
  range() {
    let low = Infinity, high = -Infinity;
    for (const { curve } of this.series) if (curve.x.length) { low = Math.min(low, curve.x[0]); high = Math.max(high, curve.x[curve.x.length - 1]); }
    return state.zoom || (low < high ? [low, high] : [low - 1, low + 1]);
  }
  draw() {
    const box = this.canvas.getBoundingClientRect(), ratio = devicePixelRatio || 1;
    if (!box.width) return;
    this.canvas.width = box.width * ratio; this.canvas.height = box.height * ratio;
    const context = this.canvas.getContext("2d"), [from, to] = this.range();
    context.scale(ratio, ratio);
    const left = 52, right = box.width - 8, top = 6, bottom = box.height - 18;
    let least = Infinity, most = -Infinity;
    const parts = this.series.map(({ curve, number }) => {
      const first = Math.max(0, findRow(curve.x, from) - 1), last = Math.min(curve.x.length, findRow(curve.x, to) + 1);
      const columns = thin(curve, first, last, Math.max(64, right - left));
      for (const [, low, high] of columns) { least = Math.min(least, low); most = Math.max(most, high); }
      return [number, columns];
    });
    if (!(least <= most)) { context.fillStyle = color("quiet"); context.fillText("no values here", left, bottom / 2); return; }
    if (least === most) { least -= Math.abs(least) * 0.05 || 1; most += Math.abs(most) * 0.05 || 1; }
    const margin = (most - least) * 0.05; least -= margin; most += margin;
    const px = (x) => left + (x - from) / (to - from) * (right - left), py = (y) => bottom - (y - least) / (most - least) * (bottom - top);
    this.scale = { from, to, left, right, px, py };
    context.font = "11px system-ui, sans-serif"; context.strokeStyle = color("line"); context.fillStyle = color("quiet"); context.lineWidth = 1;
    context.textAlign = "right"; context.textBaseline = "middle";
    for (const tick of niceTicks(least, most, 4)) { line(context, left, py(tick), right, py(tick)); context.fillText(shownNumber(tick), left - 6, py(tick)); }
    context.textAlign = "center"; context.textBaseline = "top";
    for (const tick of niceTicks(from, to, Math.max(3, (right - left) / 70))) if (Number.isInteger(tick)) context.fillText(String(tick), Math.min(px(tick), right - 12), bottom + 5);
    context.save(); context.beginPath(); context.rect(left, top - 4, right - left, bottom - top + 8); context.clip();
    for (const [number, columns] of parts) {
      context.strokeStyle = context.fillStyle = runColor(number); context.lineWidth = 1.5; context.lineJoin = "round"; context.beginPath();
      columns.forEach(([x, low, high, value], i) => {
        if (i === 0) context.moveTo(px(x), py(value)); else context.lineTo(px(x), py(value));
        if (low !== high) { context.moveTo(px(x), py(low)); context.lineTo(px(x), py(high)); context.moveTo(px(x), py(value)); }
      });
      context.stroke();
      if (columns.length === 1) { context.beginPath(); context.arc(px(columns[0][0]), py(columns[0][3]), 3, 0, 7); context.fill(); }
    }
    if (this.at !== null && this.at !== undefined) {
      const at = Math.round(px(this.at)) + 0.5;
      context.strokeStyle = color("quiet"); line(context, at, top, at, bottom);
      for (const { curve, number } of this.series) {
        if (!curve.x.length) continue;
        const row = nearestRow(curve.x, this.at);
        context.fillStyle = runColor(number); context.beginPath(); context.arc(px(curve.x[row]), py(curve.y[row]), 3.5, 0, 7); context.fill();
      }
    }
    if (this.dragFrom !== undefined && this.at !== null) {
      context.fillStyle = color("accent"); context.globalAlpha = 0.15;
      context.fillRect(px(this.dragFrom), top, px(this.at) - px(this.dragFrom), bottom - top);
    }
    context.restore();
  }
  stepAt(offset) {
    if (!this.scale) return 0;
    const { from, to, left, right } = this.scale;
    return from + Math.min(1, Math.max(0, (offset - left) / (right - left))) * (to - from);
  }
  point(event) { const step = this.stepAt(event.offsetX); for (const chart of charts) chart.hover(step); }
  hover(step) {
    this.at = step === null ? null : step;
    if (step === null) this.dragFrom = undefined;
    this.showValues(); requestDraw(this);
  }
  showValues() {
    const texts = this.series.filter(({ curve }) => curve.x.length).map(({ curve, number }) => {
      const row = this.at === null || this.at === undefined ? curve.x.length - 1 : nearestRow(curve.x, this.at);
      return [curve.x[row], curve.y[row], number];
    });
    const isPointed = this.at !== null && this.at !== undefined;
    this.output.replaceChildren(...texts.slice(0, 4).map(([step, value, number], place) => {
      const isNewStep = isPointed && (place === 0 || step !== texts[place - 1][0]);
      const part = make("span", { title: String(value) }, (isNewStep ? "step " + step + ": " : "") + shownNumber(value) + " ");
      part.dataset.step = step; part.dataset.value = value;
      if (this.series.length > 1) part.style.color = runColor(number);
      return part;
    }));
  }
  drop(event) {
    const from = this.dragFrom, to = this.stepAt(event.offsetX); this.dragFrom = undefined;
    if (from !== undefined && this.scale && Math.abs(this.scale.px(from) - this.scale.px(to)) > 6) zoomTo([Math.min(from, to), Math.max(from, to)]);
    else requestDraw(this);
  }
  key(event) {
    const [from, to] = this.range(), middle = (from + to) / 2, width = to - from;
    if (event.key === "+" || event.key === "=") zoomTo([middle - width / 4, middle + width / 4]);
    else if (event.key === "-") zoomTo([middle - width, middle + width]);
    else if (event.key === "Escape") zoomTo(null);
    else return;
    event.preventDefault();
  }
}
function line(context, ax, ay, bx, by) { context.beginPath(); context.moveTo(ax, ay); context.lineTo(bx, by); context.stroke(); }
// Columns of [step, least, greatest, a value of the middle], about one for each pixel.
function thin(curve, first, last, pixels) {
  let width = 1, level = -1;
  while (level + 1 < curve.levels.length && (last - first) / (width * 8) > pixels) { width *= 8; level++; }
  const columns = [];
  if (level < 0 && last - first <= pixels * 2) {
    for (let row = first; row < last; row++) columns.push([curve.x[row], curve.y[row], curve.y[row], curve.y[row]]);
    return columns;
  }
  const [lows, highs] = level < 0 ? [curve.y, curve.y] : curve.levels[level];
  const begin = Math.floor(first / width), end = Math.ceil(last / width), step = Math.max(1, Math.floor((end - begin) / pixels));
  for (let i = begin; i < end; i += step) {
    let least = Infinity, most = -Infinity;
    for (let j = i; j < Math.min(end, i + step); j++) { least = Math.min(least, lows[j]); most = Math.max(most, highs[j]); }
    const row = Math.min(curve.x.length - 1, i * width + ((width * step) >> 1));
    columns.push([curve.x[row], least, most, curve.y[row]]);
  }
  return columns;
}
const waiting = new Set();
function requestDraw(chart) {
  if (!waiting.size) requestAnimationFrame(() => { const list = [...waiting]; waiting.clear(); for (const each of list) each.draw(); });
  waiting.add(chart);
}
function zoomTo(range) { state.zoom = range; for (const chart of charts) requestDraw(chart); }

// --- views -----------------------------------------------------------------------------------------------------------
function shownRuns() { return [state.current, ...[...state.overlaid].filter((number) => number !== state.current)]; }
async function showCurves(view) {
  const numbers = shownRuns();
  const names = [...new Set(numbers.flatMap((number) => state.runs[number].metrics))].filter((name) => name !== "time");
  names.sort((a, b) => (FIRST.indexOf(a) + 1 || 99) - (FIRST.indexOf(b) + 1 || 99));
  const search = make("input", { type: "search", placeholder: "Filter metrics", value: state.filter, "aria-label": "Filter metrics" });
  search.addEventListener("input", () => { state.filter = search.value; fill(); });
  const all = make("button", { type: "button", onclick: () => zoomTo(null) }, "All steps");
  const grid = make("div", { class: "grid" });
  view.replaceChildren(make("div", { class: "bar" }, search, all, make("span", { class: "quiet" }, numbers.length > 1 ? numbers.length + " runs overlaid" : "")), grid);
  if (!names.length) { grid.append(make("p", { class: "quiet" }, "No step has been reported yet.")); return; }
  let turn = 0;
  async function fill() {
    const mine = ++turn;
    charts.clear(); grid.replaceChildren();
    for (const name of names.filter((each) => each.toLowerCase().includes(state.filter.toLowerCase())).slice(0, 120)) {
      const series = await Promise.all(numbers.map(async (number) => ({ number, curve: await loadCurve(number, name) })));
      if (mine !== turn || !grid.isConnected) return;
      if (!series.some(({ curve }) => curve.x.length)) continue;
      const chart = new Chart(name, series);
      grid.append(chart.element); chart.showValues(); chart.draw();
    }
  }
  await fill();
}
function shownSeconds(seconds) {
  if (seconds < 60) return seconds.toFixed(seconds < 10 ? 1 : 0) + " s";
  if (seconds < 3600) return Math.floor(seconds / 60) + " min " + Math.round(seconds % 60) + " s";
  return Math.floor(seconds / 3600) + " h " + Math.round(seconds % 3600 / 60) + " min";
}
const shownTime = (time) => new Date(time * 1000).toISOString().replace("T", " ").slice(0, 19);
async function showTimeline(view) {
  const run = await loadDetails(state.current), { pieces, totals, failures } = run.ledger;
  const all = KINDS.reduce((sum, kind) => sum + totals[kind], 0);
  const parts = [make("h2", {}, "Time"), make("p", { class: "quiet" }, all ? shownSeconds(all) + " in all" + (failures.length ? ", " + failures.length + (failures.length > 1 ? " failures" : " failure") : "") : "No times are recorded.")];
  if (all) {
    const strip = make("div", { class: "strip", role: "img", "aria-label": "Timeline of the run" });
    // As wide as it lasted; within a piece each kind has its share of the height.
    for (const piece of pieces) {
      const kinds = KINDS.filter((kind) => piece.seconds[kind]);
      const column = make("div", { title: shownTime(piece.begin) + ": " + kinds.map((kind) => kind + " " + shownSeconds(piece.seconds[kind])).join(", ") });
      column.style.flexGrow = piece.end - piece.begin;
      for (const kind of kinds) {
        const bar = make("i", {}); bar.style.flexGrow = piece.seconds[kind]; bar.style.background = "var(--" + kind + ")";
        column.append(bar);
      }
      strip.append(column);
    }
    const legend = make("div", { class: "legend" });
    for (const kind of KINDS) if (totals[kind]) {
      const dot = make("i", { class: "dot" }); dot.style.background = "var(--" + kind + ")";
      legend.append(make("span", {}, dot, kind + " " + shownSeconds(totals[kind]) + " (" + (totals[kind] / all * 100).toFixed(1) + " %)"));
    }
    parts.push(strip, legend);
  }
  if (failures.length) {
    const rows = failures.map((failure) => make("tr", {}, ...[shownTime(failure.time), failure.attempt + (failure.restart ? ", restart " + failure.restart : ""), failure.step ?? "–", failure.message, shownSeconds(failure.recovery_seconds), failure.repeated_steps + " (" + shownSeconds(failure.repeated_seconds) + ")"].map((text) => make("td", {}, String(text)))));
    parts.push(make("h2", {}, "Failures and their cost"), make("div", { class: "scroll" }, make("table", {}, make("tr", {}, ...["time (UTC)", "attempt", "step", "failure", "until the next step", "steps done again"].map((text) => make("th", {}, text))), ...rows)));
  }
  parts.push(make("h2", {}, "Events"));
  if (!run.events.length) parts.push(make("p", { class: "quiet" }, "This run has no record: an older version wrote it, or no launcher has begun."));
  parts.push(...run.events.map(shownEvent));
  view.replaceChildren(...parts);
}
function shownEvent(event) {
  const isBad = ["RanksFailed", "RoundEnded"].includes(event.kind) || (event.kind === "LauncherEnded" && !["Completed", "Preempted"].includes(event.state));
  const facts = [event.pod !== undefined && event.pod !== null ? "pod " + event.pod : "", event.rank !== undefined ? "rank " + event.rank : "", event.node ? "node " + event.node : "", event.ranks ? "ranks " + event.ranks[0] + "–" + event.ranks[event.ranks.length - 1] : "", event.state || "", event.step !== undefined ? "step " + event.step : "", event.exitCode !== undefined ? "exit code " + event.exitCode : "", event.message || "", event.seconds ? Object.entries(event.seconds).map(([name, value]) => name.replace("_seconds", "") + " " + value + " s").join(", ") : ""];
  const body = make("div", {}, facts.filter(Boolean).join(" · "));
  if (event.lines) body.append(make("details", { open: false }, make("summary", {}, event.lines.length + " lines" + (event.cut ? ", the beginning is cut" : "")), make("pre", { class: "box" }, event.lines.join("\n"))));
  return make("div", { class: "event" }, make("small", {}, shownTime(event.time)), make("span", { class: isBad ? "bad" : "" }, event.kind), body);
}
async function showSamples(view) {
  const run = await loadDetails(state.current), files = run.samples;
  if (!files.length) { view.replaceChildren(make("p", { class: "quiet" }, "This run has no samples: grpo.loggedAnswers and evaluations with prompts write them.")); return; }
  if (!files.includes(state.file)) state.file = files[files.length - 1];
  const select = make("select", { "aria-label": "Step" }, ...files.map((name) => make("option", { value: name, selected: name === state.file }, name.replace(".jsonl", ""))));
  select.addEventListener("change", () => { state.file = select.value; showSamples(view); });
  const sort = make("select", { "aria-label": "Order" }, ...["as sampled", "best first", "worst first"].map((text) => make("option", {}, text)));
  const rows = await loadSamples(state.current, state.file), list = make("div", {});
  const rewardOf = (row) => row.reward ?? row.score ?? 0;
  const fill = () => {
    const order = sort.value === "as sampled" ? rows : [...rows].sort((a, b) => (rewardOf(b) - rewardOf(a)) * (sort.value === "best first" ? 1 : -1));
    list.replaceChildren(...order.map(shownSample));
  };
  sort.addEventListener("change", fill);
  const step = (by) => { const at = files.indexOf(state.file) + by; if (files[at]) { state.file = files[at]; showSamples(view); } };
  view.replaceChildren(make("div", { class: "bar" }, make("button", { type: "button", onclick: () => step(-1) }, "‹ earlier"), select, make("button", { type: "button", onclick: () => step(1) }, "later ›"), sort, make("span", { class: "quiet" }, rows.length + " answers")), list);
  fill();
}
function shownSample(row) {
  const score = row.advantage ?? 0;
  const facts = make("div", { class: "facts" });
  for (const [name, value] of Object.entries(row)) {
    if (["prompt", "answer", "completion", "text"].includes(name)) continue;
    const text = value !== null && typeof value === "object" ? Object.entries(value).map(([key, part]) => key + " " + part).join(", ") : typeof value === "number" ? shownNumber(value) : String(value);
    facts.append(make("span", {}, name + " ", make("b", {}, text)));
  }
  const parts = ["prompt", "answer", "completion", "text"].filter((name) => name in row).flatMap((name) => [make("div", { class: "who" }, name), make("pre", {}, String(row[name]))]);
  return make("article", { class: "sample" + (score > 0 ? " up" : score < 0 ? " down" : "") }, facts, ...parts);
}
async function loadExperts(run) {
  if (embedded) return embedded.runs[run].experts;
  return (await ask("/api/experts?run=" + run)).json();
}
// From nothing over the mean, which is the middle, to three times the mean.
function heatColor(share) {
  const isDark = document.documentElement.dataset.theme === "dark";
  if (share === 0) return isDark ? "#000" : "#222";
  const strength = Math.min(1, Math.abs(Math.log2(share)) / 1.6), hue = share < 1 ? 215 : 18;
  return isDark ? `hsl(${hue} 70% ${18 + strength * 44}%)` : `hsl(${hue} 75% ${95 - strength * 48}%)`;
}
async function showExperts(view) {
  const log = await loadExperts(state.current);
  if (!log.steps.length) { view.replaceChildren(make("p", { class: "quiet" }, "This run has not recorded the load of experts: it has none, or an older version wrote it.")); return; }
  const select = make("select", { "aria-label": "Layer" }, make("option", { value: "-1" }, "all layers: share of experts in use"), ...log.layers.map((layer, number) => make("option", { value: String(number) }, "layer " + layer + ": load of each expert")));
  const canvas = make("canvas", { class: "heat", role: "img", "aria-label": "Load of experts by step" }), text = make("output", { class: "quiet" });
  const loads = decodeBytes(log.loads), rowsOf = (number) => number < 0 ? log.layers.length : log.experts;
  const cell = (column, row, number) => number < 0 ? log.use[column][row] : loads[(column * log.layers.length + number) * log.experts + row] / 64;
  const draw = () => {
    const number = Number(select.value), rows = rowsOf(number), box = canvas.getBoundingClientRect();
    canvas.width = box.width; canvas.height = box.height;
    const context = canvas.getContext("2d"), width = box.width / log.steps.length, height = box.height / rows;
    for (let column = 0; column < log.steps.length; column++) for (let row = 0; row < rows; row++) {
      context.fillStyle = heatColor(number < 0 ? Math.max(0.01, cell(column, row, number)) : cell(column, row, number));
      context.fillRect(Math.floor(column * width), Math.floor(row * height), Math.ceil(width), Math.ceil(height));
    }
  };
  canvas.addEventListener("pointermove", (event) => {
    const number = Number(select.value), rows = rowsOf(number), box = canvas.getBoundingClientRect();
    const column = Math.min(log.steps.length - 1, Math.floor(event.offsetX / box.width * log.steps.length)), row = Math.min(rows - 1, Math.floor(event.offsetY / box.height * rows));
    const value = cell(column, row, number);
    text.textContent = "step " + log.steps[column] + ", " + (number < 0 ? "layer " + log.layers[row] + ": " + (value * 100).toFixed(1) + " % of the experts in use" : "expert " + row + ": " + (value >= 3.98 ? "4 or more" : value.toFixed(2)) + " times the mean");
  });
  select.addEventListener("change", draw);
  const keys = [[0, "no token"], [0.35, "a third"], [1, "the mean"], [2.8, "three times"]].map(([share, label]) => { const dot = make("i", { class: "dot" }); dot.style.background = heatColor(share); return make("span", {}, dot, label); });
  view.replaceChildren(make("div", { class: "bar" }, select, text), canvas, make("div", { class: "legend" }, make("span", {}, "steps " + log.steps[0] + " to " + log.steps[log.steps.length - 1] + ", from left to right"), ...keys));
  draw(); charts.add({ draw, hover() {} });
}
function decodeBytes(text) { return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)); }
async function showLayout(view) {
  const run = await loadDetails(state.current), groups = ["tensor", "context", "data", "pipeline", "expert", "expert_tensor", "expert_data"];
  if (!run.layout.length) { view.replaceChildren(make("p", { class: "quiet" }, "The run has not written its job yet.")); return; }
  const places = run.layout, used = groups.filter((group) => places.some((place) => place[group] > 0));
  const select = make("select", { "aria-label": "Group" }, ...(used.length ? used : ["data"]).map((group) => make("option", {}, group)));
  const text = make("p", { class: "quiet" }, "Point at a rank: its group, with which it talks, is marked.");
  const pods = new Map();
  for (const place of places) pods.set(place.node, [...(pods.get(place.node) || []), place]);
  const boxes = new Map();
  // Ranks of a group differ in its own coordinate only; experts divide the ranks a second time.
  const axes = (group) => group.startsWith("expert") ? ["pipeline", "expert", "expert_tensor", "expert_data"] : ["pipeline", "tensor", "context", "data"];
  const mark = (place) => {
    const near = places.filter((other) => axes(select.value).every((axis) => axis === select.value || other[axis] === place[axis]));
    for (const [rank, box] of boxes) { box.classList.toggle("near", near.some((each) => each.rank === rank)); box.classList.toggle("self", rank === place.rank); }
    text.textContent = "Rank " + place.rank + " talks to ranks " + near.map((each) => each.rank).join(", ") + " in its " + select.value + " group.";
  };
  const sections = [...pods].map(([pod, members]) => {
    const node = run.nodes.find((each) => each.pod === pod);
    return make("section", {}, make("h3", {}, "Pod " + pod + (node && (node.node || node.host) ? " on " + (node.node || node.host) : "")), make("div", {}, ...members.map((place) => {
      const box = make("button", { class: "place", type: "button", onpointerenter: () => mark(place), onfocus: () => mark(place) }, "rank " + place.rank, make("br", {}), make("small", {}, used.map((group) => SHORT[group] + " " + place[group]).join(" · ")));
      boxes.set(place.rank, box);
      return box;
    })));
  });
  view.replaceChildren(make("div", { class: "bar" }, make("label", {}, "Group ", select), text), ...sections);
  select.addEventListener("change", () => mark(places[0])); mark(places[0]);
}
async function showJob(view) {
  const run = await loadDetails(state.current);
  view.replaceChildren(make("h2", {}, run.name), make("p", { class: "quiet" }, run.folder), make("pre", { class: "box" }, run.job || "The run has not written its job yet."));
}
async function showCompare(view) {
  const numbers = shownRuns();
  if (numbers.length < 2) { view.replaceChildren(make("p", { class: "quiet" }, state.runs.length > 1 ? "Tick a second run on the left: its job is compared with this one." : "There is one run here; name several to compare them.")); return; }
  const runs = await Promise.all(numbers.map(loadDetails));
  const written = runs.filter((run) => Object.keys(run.fields).length), waiting = runs.filter((run) => !written.includes(run)).map((run) => run.name);
  const paths = [...new Set(runs.flatMap((run) => Object.keys(run.fields)))].filter((path) => new Set(written.map((run) => run.fields[path])).size > 1).sort();
  const rows = paths.map((path) => make("tr", {}, make("td", {}, path), ...runs.map((run) => make("td", {}, run.fields[path] ?? "–"))));
  view.replaceChildren(make("h2", {}, paths.length ? paths.length + (paths.length > 1 ? " fields differ" : " field differs") : "No field differs"), make("p", { class: "quiet" }, waiting.length ? "Not written yet: the job of " + waiting.join(", ") : ""), make("div", { class: "scroll" }, make("table", {}, make("tr", {}, make("th", {}, "field"), ...runs.map((run) => make("th", {}, run.name))), ...rows)));
}

// --- frame -----------------------------------------------------------------------------------------------------------
const SHOW = [showCurves, showTimeline, showSamples, showExperts, showLayout, showJob, showCompare];
let turns = 0;
async function show() {
  const turn = ++turns;
  charts.clear(); delete document.body.dataset.ready;
  document.getElementById("tabs").replaceChildren(...VIEWS.map((name, number) => make("button", { type: "button", role: "tab", "aria-selected": String(number === state.view), onclick: () => { state.view = number; show(); } }, name)));
  document.querySelector("#tabs [aria-selected=true]").scrollIntoView({ block: "nearest", inline: "nearest" });
  document.getElementById("runs").replaceChildren(...state.runs.map((run, number) => {
    const dot = make("i", { class: "dot" }); dot.style.background = "var(--c" + number % 8 + ")";
    const tick = make("input", { type: "checkbox", checked: state.overlaid.has(number) || number === state.current, title: "Overlay" });
    tick.addEventListener("click", (event) => { event.stopPropagation(); toggle(number); });
    return make("div", { class: "run-row" }, make("button", { class: "run", type: "button", title: run.folder, "aria-selected": String(number === state.current), onclick: () => { state.current = number; show(); } }, state.runs.length > 1 ? tick : null, dot, make("span", { class: "name" }, run.name), make("small", {}, run.step === null ? "" : String(run.step))));
  }));
  document.title = state.runs[state.current].name + " · moejob";
  location.replace("#" + VIEWS[state.view].toLowerCase() + "-" + shownRuns().join("+"));
  const view = make("div", {});
  document.getElementById("view").replaceChildren(view);
  try { await SHOW[state.view](view); } catch (error) { view.replaceChildren(make("p", { class: "bad" }, String(error))); }
  if (turn === turns) document.body.dataset.ready = VIEWS[state.view];
}
function toggle(number) { if (!state.overlaid.delete(number)) state.overlaid.add(number); show(); }
function setTheme(theme) { document.documentElement.dataset.theme = theme; for (const chart of charts) requestDraw(chart); }
document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
addEventListener("resize", () => { for (const chart of charts) requestDraw(chart); });
addEventListener("keydown", (event) => {
  if (["INPUT", "SELECT"].includes(event.target.tagName) && event.key !== "Escape") return;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = {
    ArrowRight: () => { state.view = (state.view + 1) % VIEWS.length; show(); },
    ArrowLeft: () => { state.view = (state.view + VIEWS.length - 1) % VIEWS.length; show(); },
    ArrowDown: () => { state.current = Math.min(state.runs.length - 1, state.current + 1); show(); },
    ArrowUp: () => { state.current = Math.max(0, state.current - 1); show(); },
    d: () => document.getElementById("theme").click(),
    "/": () => { const search = document.querySelector("input[type=search]"); if (search) search.focus(); },
    Escape: () => { if (document.activeElement) document.activeElement.blur(); },
  };
  if (event.key === " " && event.target === document.body) { moves[" "] = () => toggle((state.current + 1) % state.runs.length); }
  if (moves[event.key]) { moves[event.key](); event.preventDefault(); }
});
(async () => {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  state.runs = embedded ? embedded.runs : await (await ask("/api/runs")).json();
  const place = /^#([a-z]+)-(\d+(?:\+\d+)*)$/.exec(location.hash);
  // The runs of a file were named one by one, to be seen beside each other.
  let numbers = embedded && state.runs.length <= 8 ? state.runs.map((_, number) => number) : [0];
  if (place) { state.view = Math.max(0, VIEWS.findIndex((name) => name.toLowerCase() === place[1])); numbers = place[2].split("+").map(Number).filter((number) => number < state.runs.length); }
  state.current = numbers[0] ?? 0;
  if (numbers.length > 1) state.overlaid = new Set(numbers);
  await show();
})();
