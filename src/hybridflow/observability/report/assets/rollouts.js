// The page of rollouts: filters, a table of rollouts or of their groups, and a scatter of length and score.
"use strict";

const NO_FILTER = { kind: "train", step: "", low: "", high: "", shortest: "", longest: "", finish: "", text: "", uid: "", equal: false };
const ROLLOUT_COLUMNS = [
  { name: "step", title: "step", value: (row) => row.step },
  { name: "uid", title: "group", value: (row) => row.uid, hint: "group: samples of the same prompt" },
  { name: "score", title: "score", value: (row) => row.score, class: (row) => (row.group?.equal ? "equal" : "") },
  { name: "length", title: "tokens", value: (row) => row.num_tokens },
  { name: "turns", title: "turns", value: (row) => row.num_turns },
  { name: "finish", title: "end", value: (row) => row.finish_reason },
  { name: "source", title: "source", value: (row) => row.data_source },
  { name: "prompt", title: "prompt", value: (row) => row.prompt, wide: true },
  { name: "response", title: "response", value: (row) => row.response, wide: true },
];
const GROUP_COLUMNS = [
  { title: "step", value: (group) => group.step },
  { title: "group", value: (group) => group.uid },
  { title: "samples", value: (group) => group.count },
  { title: "mean score", value: (group) => group.mean },
  { title: "lowest", value: (group) => (group.count ? group.low : null) },
  { title: "highest", value: (group) => (group.count ? group.high : null) },
  { title: "equal scores", value: (group) => Number(group.equal), text: (group) => (group.equal ? "equal" : ""), class: (group) => (group.equal ? "equal" : "") },
  { title: "mean tokens", value: (group) => group.length },
  { title: "prompt", value: (group) => group.prompt, wide: true },
];

// Whether a rollout is wanted, as a function: bounds and the text are read once.
function matcher(filter) {
  const bound = (text, none) => (text === "" ? none : Number(text));
  const low = bound(filter.low, -Infinity), high = bound(filter.high, Infinity);
  const shortest = bound(filter.shortest, -Infinity), longest = bound(filter.longest, Infinity);
  const text = filter.text.toLowerCase(), step = filter.step === "" ? null : Number(filter.step);
  const bounded = filter.low !== "" || filter.high !== "";
  return (row) => (!filter.kind || row.kind === filter.kind) && (step == null || row.step === step) && (!filter.uid || row.uid === filter.uid)
    && (!bounded || (row.score >= low && row.score <= high)) && (!filter.finish || row.finish_reason === filter.finish)
    && (row.num_tokens == null || (row.num_tokens >= shortest && row.num_tokens <= longest)) && (!filter.equal || row.group?.equal)
    && (!text || `${row.prompt ?? ""}\n${row.response ?? ""}`.toLowerCase().includes(text));
}

class RolloutsPage {
  constructor(host) {
    this.filter = { ...NO_FILTER };
    this.byGroup = false;
    this.count = el("span", { role: "status" });
    this.rollouts = new Table("rollouts", ROLLOUT_COLUMNS, (row) => go("trajectory", row.id));
    this.groups = new Table("groups", GROUP_COLUMNS, (group) => this.openGroup(group));
    this.scatter = new Scatter("tokens", "score", (row) => go("trajectory", row.id));
    this.summary = el("p", { class: "muted" });
    this.controls = el("form", { class: "controls", onsubmit: (event) => event.preventDefault() });
    this.fill();
    host.append(el("div", { class: "section-head" }, el("h2", {}, "Rollouts"), this.count), this.controls, this.summary,
      el("div", { class: "beside" }, el("div", {}, this.rollouts.node, this.groups.node),
        el("div", { class: "card chart" }, el("div", { class: "chart-title" }, "Length and score"), this.scatter.node)));
  }

  fill() {
    const change = (key) => (event) => { this.filter[key] = event.target.type === "checkbox" ? event.target.checked : event.target.value; this.refresh(); };
    const input = (key, label, type = "number", hint = label.split(" ")[0]) => el("input", { type, step: "any", class: type, placeholder: hint, "aria-label": label, oninput: change(key) });
    const select = (key, label, options) => el("select", { "aria-label": label, onchange: change(key) }, options.map(([value, text]) => el("option", { value }, text)));
    this.finishes = select("finish", "end of the response", [["", "any end"]]);
    this.steps = el("input", { type: "number", class: "number", min: 0, placeholder: "step", "aria-label": "step", oninput: change("step") });
    this.view = el("select", { "aria-label": "rows of the table", onchange: (event) => { this.byGroup = event.target.value === "groups"; this.refresh(); } },
      el("option", { value: "rollouts" }, "rollouts"), el("option", { value: "groups" }, "groups"));
    this.controls.append(this.view, select("kind", "where from", [["train", "training"], ["validation", "validation"], ["", "both"]]), this.steps,
      el("span", { class: "control" }, "score", input("low", "least score"), "to", input("high", "largest score")),
      el("span", { class: "control" }, "tokens", input("shortest", "least tokens"), "to", input("longest", "most tokens")), this.finishes,
      input("text", "text at the beginning of prompt or response", "search", "text of prompt, response"),
      el("label", { class: "control" }, el("input", { type: "checkbox", onchange: change("equal") }), "groups with equal scores only"),
      this.only = el("button", { type: "button", onclick: () => { this.filter.uid = ""; this.refresh(); } }, "all groups"));
  }

  openGroup(group) {
    Object.assign(this.filter, { uid: group.uid, step: String(group.step) });
    this.steps.value = group.step;
    this.view.value = "rollouts";
    this.byGroup = false;
    this.refresh();
    this.rollouts.node.focus();
  }

  show() { this.refresh(); }

  refresh() {
    const { rows, groups } = tableOf(RUN), wanted = matcher(this.filter);
    const known = new Set(rows.map((row) => row.finish_reason).filter(Boolean));
    for (const reason of known) if (![...this.finishes.options].some((one) => one.value === reason)) this.finishes.append(el("option", { value: reason }, reason));
    const kept = rows.filter(wanted);
    const keptGroups = new Set(kept.map((row) => row.group).filter(Boolean));
    this.rollouts.node.hidden = this.byGroup;
    this.groups.node.hidden = !this.byGroup;
    this.only.hidden = !this.filter.uid;
    if (this.byGroup) this.groups.set(groups.filter((group) => keptGroups.has(group)));
    else this.rollouts.set(kept);
    this.count.textContent = `${kept.length} of ${rows.length} rollouts`;
    const equal = [...keptGroups].filter((group) => group.equal).length;
    this.summary.textContent = keptGroups.size ? `${keptGroups.size} groups; in ${equal} of them (${Math.round((100 * equal) / keptGroups.size)} %) all scores are equal, so they teach nothing.` : "";
    if (!rows.length) this.summary.textContent = "The run has recorded no rollouts yet.";
    this.scatter.set(kept.filter((row) => isNumber(row.num_tokens) && isNumber(row.score)), (row) => row.num_tokens, (row) => row.score,
      (row) => (row.finish_reason === "length" ? "--s1" : row.group?.equal ? "--s7" : "--s0"));
  }

  // Rollouts before and after one, in the order of the table.
  neighbours(id) {
    const rows = this.rollouts.rows, at = rows.findIndex((row) => row.id === id);
    return at < 0 ? [null, null] : [rows[at - 1] ?? null, rows[at + 1] ?? null];
  }
}

const FEW_LEVELS = 8;

// Points on a canvas; the nearest one is told under the pointer and opened by a click.
class Scatter {
  constructor(across, up, open) {
    Object.assign(this, { across, up, points: [], shown: null });
    this.canvas = el("canvas", { role: "img", class: "scatter", onclick: () => this.shown && open(this.shown.row),
      onpointermove: (event) => this.point(event), onpointerleave: () => tooltip.hide() });
    this.legend = el("div", { class: "legend" });
    this.node = el("div", {}, this.legend, this.canvas);
  }

  set(rows, x, y, colour, legend) {
    this.canvas.width = 0; // before its host is measured
    const ratio = devicePixelRatio || 1, width = Math.max(260, this.node.clientWidth), height = 330;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.canvas.setAttribute("aria-label", `${rows.length} points, ${this.across} across and ${this.up} up, correlation ${format(correlation(rows.map(x), rows.map(y)))}`);
    this.legend.replaceChildren(...(legend ?? [["--s0", "ended"], ["--s1", "cut at a limit"], ["--s7", "group with equal scores"]])
      .map(([name, text]) => el("span", {}, el("span", { class: "swatch", style: `background:var(${name})` }), text)));
    const context = this.canvas.getContext("2d"), look = getComputedStyle(document.documentElement);
    context.scale(ratio, ratio);
    this.points = [];
    if (!rows.length) return;
    const few = new Set(rows.map(y)).size <= FEW_LEVELS; // points of one level would hide each other
    const ys = yAxis(rows.map(y), false), xs = yAxis(rows.map(x), false);
    const box = { left: 46, right: width - 10, top: 18, bottom: height - 46 };
    const place = { x: (value) => box.left + xs.place(value) * (box.right - box.left), y: (value) => box.bottom - ys.place(value) * (box.bottom - box.top) };
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = look.getPropertyValue("--muted");
    context.strokeStyle = look.getPropertyValue("--grid");
    context.textAlign = "right";
    for (const { value, text } of ys.ticks) { context.strokeRect(box.left, place.y(value), box.right - box.left, 0); context.fillText(text, box.left - 6, place.y(value) + 4); }
    context.textAlign = "center";
    for (const { value, text } of xs.ticks) context.fillText(text, place.x(value), box.bottom + 27);
    context.fillText(`${this.across} across, ${this.up} up${few ? ", spread where equal" : ""}`, (box.left + box.right) / 2, height - 4);
    context.globalAlpha = rows.length > 2000 ? 0.35 : 0.7;
    const colours = {};
    for (const [index, row] of rows.entries()) {
      const spread = few ? ((index * 37) % 25) - 12 : 0;
      const name = colour(row), point = { row, x: place.x(x(row)), y: place.y(y(row)) + spread };
      context.fillStyle = colours[name] ??= look.getPropertyValue(name);
      context.fillRect(point.x - 2, point.y - 2, 4, 4);
      this.points.push(point);
    }
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = null, least = 200;
    for (const point of this.points) {
      const far = (point.x - x) ** 2 + (point.y - y) ** 2;
      if (far < least) { least = far; best = point; }
    }
    this.shown = best;
    this.canvas.style.cursor = best ? "pointer" : "default";
    if (!best) { tooltip.hide(); return; }
    const { row } = best;
    tooltip.show(event, row.prompt ?? `group ${row.uid ?? ""}`, [["step", cell(row.step)], ["score", cell(row.score ?? row.mean)], ["tokens", cell(row.num_tokens)]]);
  }
}

function correlation(one, two) {
  const a = mean(one), b = mean(two);
  let both = 0, first = 0, second = 0;
  one.forEach((value, index) => { const x = value - a, y = two[index] - b; both += x * y; first += x * x; second += y * y; });
  return first && second ? both / Math.sqrt(first * second) : null;
}
