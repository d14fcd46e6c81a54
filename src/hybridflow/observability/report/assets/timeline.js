// The page of times: what ran when, lane by lane, and the seconds of each part where starts were not recorded.
"use strict";

const LANE_HEIGHT = 22, MAX_LANES = 60;
const PARTS = ["gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights", "testing", "save_checkpoint"];
// The whole step and waiting cover what runs inside them.
const isOuter = (name) => name === "step";
const colourOf = (() => {
  const given = new Map();
  return (name) => {
    if (!given.has(name)) given.set(name, `--s${(PARTS.includes(name) ? PARTS.indexOf(name) : given.size) % 8}`);
    return given.get(name);
  };
})();

class TimelinePage {
  constructor(host) {
    this.first = null;
    this.count = 1;
    this.follows = true;
    const change = (event) => { this.first = Number(event.target.value); this.follows = false; this.show(); };
    this.start = el("input", { type: "number", class: "number", "aria-label": "first step", onchange: change });
    this.number = el("select", { "aria-label": "number of steps", onchange: (event) => { this.count = Number(event.target.value); this.show(); } },
      [1, 2, 5, 10].map((count) => el("option", { value: count }, `${count} step${count > 1 ? "s" : ""}`)));
    const move = (by) => () => { this.follows = false; this.first = (this.first ?? 0) + by * this.count; this.show(); };
    this.note = el("p", { class: "muted", role: "status" });
    this.canvas = el("canvas", { role: "img", onpointermove: (event) => this.point(event), onpointerleave: () => tooltip.hide() });
    this.lanes = el("div", { class: "card chart lanes", tabindex: 0, role: "group", "aria-label": "swim lanes: left and right change the step", onkeydown: (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (by) { event.preventDefault(); move(by)(); }
    } }, this.canvas);
    this.table = el("table", { class: "plain" });
    host.append(el("div", { class: "section-head" }, el("h2", {}, "Timeline"), el("span", { class: "controls" },
      el("button", { type: "button", onclick: move(-1) }, "‹ earlier"), "from step", this.start, this.number, el("button", { type: "button", onclick: move(1) }, "later ›"),
      el("button", { type: "button", onclick: () => { this.follows = true; this.show(); } }, "newest"))),
    this.note, this.lanes, el("h3", {}, "Seconds of each part"), el("div", { class: "card scrolls", tabindex: 0, role: "group", "aria-label": "seconds of each part" }, this.table));
  }

  show() {
    const steps = RUN.timeline.size ? [...RUN.timeline.keys()].sort((one, two) => one - two) : RUN.steps.filter((_, index) => RUN.metrics["timing_s/step"]?.[index] != null);
    if (!steps.length) { this.note.textContent = "The run has recorded no times yet."; this.lanes.hidden = true; return; }
    const last = steps[steps.length - 1];
    if (this.follows || this.first == null) this.first = Math.max(steps[0], last - this.count + 1);
    this.first = Math.min(last, Math.max(steps[0], this.first));
    this.start.value = this.first;
    const shown = steps.filter((step) => step >= this.first && step < this.first + this.count);
    this.lanes.hidden = !RUN.timeline.size;
    this.spans = shown.flatMap((step) => (RUN.timeline.get(step) ?? []).map(([lane, name, start, end]) => ({ lane, name, start, end, step })));
    this.note.textContent = RUN.timeline.size ? `Steps ${shown[0]} to ${shown[shown.length - 1]}, ${this.spans.length} spans.` : "This run has recorded how long each part took, and not when it began.";
    if (this.spans.length) this.draw();
    this.fill(shown);
  }

  draw() {
    const start = Math.min(...this.spans.map((span) => span.start)), end = Math.max(...this.spans.map((span) => span.end));
    const names = [...new Set(this.spans.map((span) => span.lane))];
    names.sort((one, two) => one.startsWith("trajectory") - two.startsWith("trajectory")); // devices first; the rest as recorded
    const cut = Math.max(0, names.length - MAX_LANES), lanes = names.slice(0, MAX_LANES);
    const ratio = devicePixelRatio || 1, width = Math.max(400, this.lanes.clientWidth - 24), height = lanes.length * LANE_HEIGHT + 34;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.canvas.setAttribute("aria-label", `${lanes.length} lanes over ${duration(end - start)}: ${lanes.slice(0, 8).join(", ")}`);
    const context = this.canvas.getContext("2d"), look = getComputedStyle(document.documentElement), ink = (name) => look.getPropertyValue(name);
    const left = 130, place = (time) => left + ((time - start) / (end - start || 1)) * (width - left - 6);
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    this.boxes = [];
    lanes.forEach((lane, index) => {
      context.fillStyle = ink("--muted");
      context.fillText(lane, 0, index * LANE_HEIGHT + 15, left - 8);
      context.fillStyle = ink("--grid");
      context.fillRect(left, (index + 1) * LANE_HEIGHT - 1, width - left, 1);
    });
    for (const span of [...this.spans].sort((one, two) => two.end - two.start - one.end + one.start)) { // long ones lie under short ones
      const index = lanes.indexOf(span.lane);
      if (index < 0) continue;
      const box = { span, x: place(span.start), y: index * LANE_HEIGHT + 2, width: Math.max(1, place(span.end) - place(span.start)), height: LANE_HEIGHT - 5 };
      context.globalAlpha = isOuter(span.name) ? 0.15 : 0.8;
      context.fillStyle = ink(colourOf(span.name));
      context.fillRect(box.x, box.y, box.width, box.height);
      context.globalAlpha = 1;
      if (box.width > context.measureText(span.name).width + 8 && !isOuter(span.name)) { context.fillStyle = ink("--card"); context.fillText(span.name, box.x + 4, box.y + 13); }
      this.boxes.push(box);
    }
    context.fillStyle = ink("--muted");
    const { ticks, step } = niceTicks(0, end - start || 1, 8);
    for (const tick of ticks) context.fillText(`${tickText(tick, step)} s`, place(start + tick), lanes.length * LANE_HEIGHT + 16);
    for (const span of this.spans.filter((one) => one.name === "update_weights")) { // from here on engines have newer weights
      context.fillStyle = ink("--accent");
      context.fillRect(place(span.end), 0, 1.5, lanes.length * LANE_HEIGHT);
      context.textAlign = "right";
      context.fillText(`version ${span.step}`, place(span.end), lanes.length * LANE_HEIGHT + 30);
    }
    if (cut) this.note.textContent += ` ${cut} further lanes are not drawn.`;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const hit = (this.boxes ?? []).filter((one) => x >= one.x - 1 && x <= one.x + one.width + 1 && y >= one.y && y <= one.y + one.height).pop();
    if (!hit) { tooltip.hide(); return; }
    tooltip.show(event, hit.span.name, [["lane", hit.span.lane], ["step", hit.span.step], ["seconds", format(hit.span.end - hit.span.start)]]);
  }

  // The same as a table: all that was measured of these steps.
  fill(steps) {
    const names = Object.keys(RUN.metrics).filter((name) => name.startsWith("timing_s/")), places = steps.map((step) => RUN.steps.indexOf(step));
    const rows = names.map((name) => [name, places.map((place) => RUN.metrics[name][place])]).filter(([, values]) => values.some((value) => value != null));
    rows.sort((one, two) => (two[1][0] ?? 0) - (one[1][0] ?? 0));
    const most = Math.max(...rows.flatMap(([, values]) => values.filter(isNumber)), 1e-9);
    this.table.replaceChildren(el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "part"), steps.map((step) => el("th", { scope: "col" }, `step ${step}`)))),
      el("tbody", {}, rows.map(([name, values]) => el("tr", {}, el("th", { scope: "row", title: aboutOf(RUN, name).meaning }, name.slice(9)), values.map((value) => el("td", {},
        el("span", { class: "bar", style: `width:${isNumber(value) ? Math.max(1, (100 * value) / most).toFixed(1) : 0}px; background:var(${colourOf(name.slice(9))})` }), value == null ? "" : format(value)))))));
  }
}
