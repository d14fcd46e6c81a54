// The page of curves: tiles, what the rules of advice find, notes, the grid of curves with its picker, configuration.
"use strict";

const CARDS = [
  { title: "Reward, mean", match: /^critic\/(rewards|score)\/mean$/ },
  { title: "Validation", match: /^val-core\//, sort: (name) => (/\/acc\//.test(name) ? 0 : 4) + (/\/mean@/.test(name) ? 0 : /\/best@/.test(name) ? 1 : 2) },
  { title: "Loss", match: /^(train|val)\/loss$/ },
  { title: "Response length", match: /^response_length\/(mean|max|min)$/, sort: (name) => (/mean$/.test(name) ? 0 : 1) },
  { title: "Entropy", match: /^actor\/entropy$/ },
  { title: "KL", match: /^actor\/(kl_loss|ppo_kl|reward_kl_penalty)$/ },
  { title: "Gradient norm", match: /^(actor|critic|train)\/grad_norm$/ },
  { title: "Rollout − training log-prob, max", match: /^training\/rollout_log_probs_diff_max$/, log: true },
  { title: "Throughput", match: /^perf\/throughput$/ },
  { title: "Time of a step, by part", match: /^timing_s\/(?!testing|save_checkpoint)/, label: (name) => name.slice(9), sort: (name) => -(lastOf(RUN, name) || 0) },
  { title: "Policy loss", match: /^actor\/pg_loss$/ },
  { title: "Value loss", match: /^critic\/vf_loss$/ },
  { title: "Clipped tokens", match: /^actor\/pg_clipfrac/ },
  { title: "Truncated responses", match: /^response_length\/clip_ratio$/ },
  { title: "Turns of a trajectory", match: /^agent\/num_turns\/(mean|max)$/ },
  { title: "Tool calls of a trajectory, by what came of them", match: /^agent\/tools\//, label: (name) => name.slice(12) },
  { title: "Failed trajectories, by cause", match: /^training\/num_failed\//, label: (name) => name.slice(20) },
  { title: "Trajectories tried again, by cause", match: /^agent\/num_retried\//, label: (name) => name.slice(18) },
  { title: "Experts: load and flips", match: /^(actor|critic|train)\/moe\/(load_entropy|load_max|flips)$/ },
  { title: "Learning rate", match: /^(actor|critic|train)\/lr$/ },
];
const LABELS = {
  greedy: "greedy accuracy", sampled: "sampled accuracy", num_questions: "held-out questions", sft_steps: "warm-up steps",
  seconds_sft: "time of the warm-up", seconds_rl: "time of reinforcement learning", seconds: "time in all",
};
const MACHINE = new Set(["card", "cards", "cpu", "threads", "vectors", "torch", "python"]); // in the subtitle
const MAX_SERIES = 8; // a card; `sort` puts first what matters most (accuracy before reward, means before best and majority)

// ---------------------------------------------------------------- tiles and advice

function tile(label, value, change, small, better = "higher") {
  const tone = !better || !change ? "" : (change > 0) === (better === "higher") ? " good" : " bad";
  const sign = change == null ? null : el("div", { class: `change${tone}` }, `${change >= 0 ? "+" : "−"}${format(Math.abs(change))}`);
  return el("div", { class: "card tile" }, el("div", { class: "label" }, label), el("div", { class: small ? "value small" : "value" }, value), sign);
}

function summaryTiles() {
  const summary = RUN.summary ?? {}, tiles = [], used = new Set();
  for (const key of Object.keys(summary)) {
    const stem = key.match(/^(.*)_before$/)?.[1];
    if (stem == null || !isNumber(summary[key]) || !isNumber(summary[`${stem}_after`])) continue;
    used.add(key).add(`${stem}_after`);
    tiles.push(tile(`${LABELS[stem] ?? stem.replaceAll("_", " ")}, before → after`, `${summary[key].toFixed(3)} → ${summary[`${stem}_after`].toFixed(3)}`, Number((summary[`${stem}_after`] - summary[key]).toFixed(4))));
  }
  for (const [key, value] of Object.entries(summary)) {
    if (used.has(key) || MACHINE.has(key) || value == null || typeof value === "object") continue;
    const text = /^seconds(_|$)|seconds$/.test(key) && isNumber(value) ? duration(value) : typeof value === "number" ? format(value) : String(value);
    tiles.push(tile(LABELS[key] ?? key.replaceAll("_", " "), text, null, text.length > 12));
  }
  return tiles;
}

function metricTiles() {
  const tiles = [];
  const reward = Object.keys(RUN.metrics).find((name) => name === "critic/rewards/mean") ?? Object.keys(RUN.metrics).find((name) => name === "critic/score/mean");
  // no change is shown where there is one point only
  const change = (name) => { const points = RUN.metrics[name].filter(isNumber); return points.length > 1 ? points[points.length - 1] - points[0] : null; };
  if (reward && isNumber(lastOf(RUN, reward))) tiles.push(tile("reward mean, last step", format(lastOf(RUN, reward)), change(reward), false, aboutOf(RUN, reward).better));
  const validation = Object.keys(RUN.metrics).find((name) => /^val-core\/.*(acc|reward|score)\/mean@/.test(name));
  if (validation && isNumber(lastOf(RUN, validation))) tiles.push(tile(validation.replace(/^val-core\//, ""), format(lastOf(RUN, validation)), change(validation), false, aboutOf(RUN, validation).better));
  const loss = Object.keys(RUN.metrics).find((name) => name === "train/loss");
  if (loss && isNumber(lastOf(RUN, loss))) tiles.push(tile("training loss, last step", format(lastOf(RUN, loss))));
  for (const [title, counts] of Object.entries(RUN.counts)) {
    const causes = Object.entries(counts).filter(([, count]) => count > 0), total = causes.reduce((sum, [, count]) => sum + count, 0);
    if (total) tiles.push(tile(title, `${total}: ${causes.map(([cause, count]) => `${count} ${cause}`).join(", ")}`, null, true));
  }
  const seconds = (RUN.metrics["timing_s/step"] ?? []).filter(isNumber);
  if (seconds.length) tiles.push(tile("time in steps", duration(seconds.reduce((sum, value) => sum + value, 0)), null, true));
  if (Object.keys(RUN.metrics).includes("perf/throughput")) tiles.push(tile("throughput, last step", `${format(lastOf(RUN, "perf/throughput"))} tokens/s`, null, true));
  return tiles;
}

// What a rule has found, with the keys that change it and their values in this run.
function adviceNode(entry) {
  const since = entry.first === entry.last ? `step ${entry.first}` : `steps ${entry.first} to ${entry.last}, ${entry.steps} of them`;
  const when = entry.now ? `now, ${since}` : since;
  return el("li", { class: `card advice${entry.now ? (entry.hint ? " hint" : " alarm") : ""}` },
    el("div", {}, el("b", {}, `${entry.hint ? "hint" : "alarm"}: ${entry.rule.replaceAll("_", " ")}`), el("span", { class: "muted" }, ` ${when}`)),
    el("div", {}, entry.message),
    entry.keys.length ? el("div", { class: "keys" }, "keys that change it, with their values now: ", entry.keys.map(({ key, value }) => el("code", { title: "its value in this run" }, value == null ? key : `${key}=${value}`))) : null);
}

// What steps wait for, with the keys to try and the seconds that they are forecast to save; as `hybridflow why` has it.
function waitNode(wait, ofStep) {
  const gain = wait.saved == null ? "no forecast" : `forecast to save ${format(wait.saved)} s, ${Math.round(100 * wait.saved / ofStep)} % of a step`;
  const words = wait.saved == null ? [wait.key].filter(Boolean) : wait.overrides;
  return el("li", { class: "card advice" },
    el("div", {}, el("b", {}, wait.cause.replaceAll("_", " ")), el("span", { class: "muted" }, ` ${format(wait.seconds)} s of a step, ${gain}`)),
    el("div", {}, wait.text),
    words.length ? el("div", { class: "keys" }, wait.saved == null ? "key: " : "try: ", words.map((word) => el("code", {}, word))) : null);
}

// ---------------------------------------------------------------- curves

function shortLabels(group, label) {
  if (label) return group.map(label);
  if (group.length === 1) return [""];
  const parts = group.map((name) => name.split("/"));
  const differ = parts[0].map((_, index) => parts.some((one) => one[index] !== parts[0][index]));
  return parts.map((one) => one.filter((_, index) => differ[index] !== false).join("/"));
}

// Of curves with the same values the first stays: it would lie under the others. Curves that are 0 throughout are not drawn;
// both can be chosen by name.
function withoutCopies(group) {
  const seen = new Set();
  return group.filter((name) => { const key = JSON.stringify(RUN.metrics[name]); return !seen.has(key) && seen.add(key); });
}

class OverviewPage {
  constructor(host) {
    this.picked = [];
    this.smoothing = 0;
    this.cards = [];
    this.names = "";
    const byId = (id) => document.getElementById(id);
    this.curves = byId("curves");
    this.slider = byId("smoothing");
    this.slider.addEventListener("input", () => {
      this.smoothing = Number(this.slider.value);
      byId("smoothing-value").textContent = this.slider.value;
      this.cards.forEach((card) => card.draw());
    });
    byId("picker-search").addEventListener("input", () => this.search(byId("picker-search").value.toLowerCase()));
    document.addEventListener("pointerdown", (event) => { if (!byId("picker").contains(event.target)) byId("picker").open = false; });
    host.addEventListener("keydown", (event) => { if (event.key === "Escape") byId("picker").open = false; });
    let width = 0;
    new ResizeObserver(([entry]) => {
      if (entry.contentRect.width && Math.abs(entry.contentRect.width - width) > 1) { width = entry.contentRect.width; this.cards.forEach((card) => card.draw()); }
    }).observe(this.curves);
  }

  show() {
    document.getElementById("tiles").replaceChildren(...summaryTiles(), ...metricTiles());
    const advice = document.getElementById("advice"), alarms = RUN.advice.filter((entry) => entry.now && !entry.hint);
    advice.replaceChildren(...RUN.advice.map(adviceNode));
    document.getElementById("advice-section").hidden = !RUN.steps.length;
    document.getElementById("advice-head").textContent = alarms.length ? `Advice: ${alarms.length} alarm${alarms.length > 1 ? "s" : ""} now` : RUN.advice.length ? "Advice: no alarm now" : "Advice: nothing to say";
    this.waits();
    this.notes();
    document.getElementById("config").textContent = RUN.config;
    document.getElementById("config-section").hidden = !RUN.config;
    document.getElementById("log").textContent = RUN.log;
    document.getElementById("log-section").hidden = !RUN.log;
    this.failure();
    this.drawCurves();
  }

  waits() {
    const waits = Array.isArray(RUN.waits?.waits) ? RUN.waits : null;
    document.getElementById("waits-section").hidden = !waits;
    if (!waits) return;
    const mean = `A mean step takes ${format(waits.seconds)} s (of ${waits.steps} steps after the first).`;
    document.getElementById("waits-head").textContent = waits.waits.length ? mean : `${mean} Nothing stands out: no wait is worth a key.`;
    document.getElementById("waits").replaceChildren(...waits.waits.map((wait) => waitNode(wait, waits.seconds)));
  }

  // The error that has ended the run; its configuration and its log are open then, since there may be no curve.
  failure() {
    const { failure } = RUN, host = document.getElementById("failure");
    host.hidden = !failure;
    if (!failure) return;
    host.replaceChildren(el("div", { class: "card failure" },
      el("h2", {}, `The run has failed after ${failure.steps_done} step${failure.steps_done === 1 ? "" : "s"}: ${failure.error}`),
      el("pre", {}, failure.message),
      el("details", {}, el("summary", {}, `traceback, ${failure.at}`), el("pre", {}, failure.traceback))));
    if (!RUN.steps.length) document.getElementById("log-section").open = true;
  }

  notes() {
    const folded = (head, ...body) => el("details", { class: "card notes" }, el("summary", {}, head), ...body);
    const nodes = Object.entries(RUN.failures).map(([cause, text]) => folded(`the first trajectory that failed by ${cause}`, el("pre", {}, text)));
    if (RUN.notes.length) nodes.push(folded(`${RUN.notes.length} note${RUN.notes.length > 1 ? "s" : ""} on what this page shows`, el("ul", {}, RUN.notes.map((note) => el("li", {}, note)))));
    document.getElementById("notes").replaceChildren(...nodes);
  }

  drawCurves() {
    const names = Object.keys(RUN.metrics).sort();
    document.getElementById("curves-section").hidden = !names.length;
    if (names.join() !== this.names) this.fillPicker(names);
    this.names = names.join();
    this.cards = [];
    this.curves.replaceChildren();
    for (const name of this.picked) if (name in RUN.metrics) this.add(name, [name], { picked: true });
    for (const card of CARDS) {
      const group = withoutCopies(names.filter((name) => card.match.test(name) && RUN.metrics[name].some((value) => value != null && value !== 0)));
      if (card.sort) group.sort((one, two) => card.sort(one) - card.sort(two) || one.localeCompare(two));
      if (group.length) this.add(card.title, group, card);
    }
    if (!this.cards.length) for (const name of names.slice(0, 6)) this.add(name, [name]);
    this.cards.forEach((card) => card.draw()); // once all are there, so that the page is laid out once
  }

  add(title, group, { log, label, picked } = {}) {
    const shown = group.slice(0, MAX_SERIES), labels = shortLabels(shown, label), about = aboutOf(RUN, group[0]);
    const series = shown.map((name, index) => ({ name, label: labels[index] || name, values: RUN.metrics[name], color: `var(--s${index})` }));
    const legend = el("div", { class: "legend" }, series.map((one, index) => el("span", { title: `${one.name}: ${aboutOf(RUN, one.name).meaning}` }, group.length > 1 ? el("span", { class: "swatch", style: `background:${one.color}` }) : null,
      el("span", { class: "key" }, `${labels[index] || one.name} `), el("b", {}, format(lastOf(RUN, one.name))))),
    group.length > shown.length ? el("span", {}, `and ${group.length - shown.length} more: choose metrics`) : null);
    const plot = el("div", { class: "plot" });
    const close = picked ? el("button", { type: "button", class: "chart-close", title: "remove", "aria-label": `remove ${title}`, onclick: () => this.pick(group[0], false) }, "×") : null;
    this.curves.append(el("div", { class: "card chart" }, el("div", { class: "chart-head" }, el("span", { class: "chart-title" }, title, el("span", { class: "chart-unit" }, about.unit)), close), legend, plot));
    this.cards.push({ draw: () => drawChart(plot, RUN.steps, series, { log, smoothing: this.smoothing }) });
  }

  pick(name, on) {
    this.picked = this.picked.filter((one) => one !== name);
    if (on) this.picked.unshift(name);
    const box = document.querySelector(`#picker-list input[value="${CSS.escape(name)}"]`);
    if (box) box.checked = on;
    this.drawCurves();
  }

  fillPicker(names) {
    const nodes = [];
    let group = null;
    for (const name of names) {
      const prefix = name.split("/")[0];
      if (prefix !== group) { group = prefix; nodes.push(el("div", { class: "picker-group", "data-group": prefix }, prefix)); }
      nodes.push(el("label", { class: "picker-item", "data-name": name }, el("input", { type: "checkbox", value: name, checked: this.picked.includes(name), onchange: (event) => this.pick(name, event.target.checked) }), name));
    }
    document.getElementById("picker-list").replaceChildren(...nodes);
  }

  search(wanted) {
    const list = document.getElementById("picker-list"), groups = new Set();
    for (const item of list.querySelectorAll(".picker-item")) {
      item.hidden = !item.dataset.name.toLowerCase().includes(wanted);
      item.style.display = item.hidden ? "none" : "";
      if (!item.hidden) groups.add(item.dataset.name.split("/")[0]);
    }
    for (const head of list.querySelectorAll(".picker-group")) head.style.display = groups.has(head.dataset.group) ? "" : "none";
  }
}
