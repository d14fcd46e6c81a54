// The page: header tiles, notes, the grid of curves with its picker, samples, configuration.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
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
  { title: "Time of a step, by part", match: /^timing_s\/(?!testing|save_checkpoint)/, label: (name) => name.slice(9), sort: (name) => -(last(name) || 0) },
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
const MACHINE = new Set(["cpu", "threads", "vectors", "torch", "python"]); // in the subtitle
const MAX_SERIES = 8; // a card; `sort` puts first what matters most (accuracy before reward, means before best and majority)
const names = Object.keys(DATA.metrics);
const about = (name) => DATA.about[name] ?? { meaning: "", unit: "", better: "" }; // of the glossary; a metric of the user's own is not there
const last = (name) => [...(DATA.metrics[name] ?? [])].reverse().find((value) => value != null);

// ---------------------------------------------------------------- header

function tile(label, value, change, small, better = "higher") {
  const tone = !better || !change ? "" : (change > 0) === (better === "higher") ? " good" : " bad";
  const sign = change == null ? null : el("div", { class: `change${tone}` }, `${change >= 0 ? "+" : "−"}${format(Math.abs(change))}`);
  return el("div", { class: "card tile" }, el("div", { class: "label" }, label), el("div", { class: small ? "value small" : "value" }, value), sign);
}

function summaryTiles() {
  const summary = DATA.summary ?? {}, tiles = [], used = new Set();
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
  const reward = names.find((name) => name === "critic/rewards/mean") ?? names.find((name) => name === "critic/score/mean");
  // no change is shown where there is one point only
  const change = (name) => { const points = DATA.metrics[name].filter(isNumber); return points.length > 1 ? points[points.length - 1] - points[0] : null; };
  if (reward && isNumber(last(reward))) tiles.push(tile("reward mean, last step", format(last(reward)), change(reward), false, about(reward).better));
  const validation = names.find((name) => /^val-core\/.*(acc|reward|score)\/mean@/.test(name));
  if (validation && isNumber(last(validation))) tiles.push(tile(validation.replace(/^val-core\//, ""), format(last(validation)), change(validation), false, about(validation).better));
  const loss = names.find((name) => name === "train/loss");
  if (loss && isNumber(last(loss))) tiles.push(tile("training loss, last step", format(last(loss))));
  for (const [title, counts] of Object.entries(DATA.counts)) {
    const causes = Object.entries(counts).filter(([, count]) => count > 0), total = causes.reduce((sum, [, count]) => sum + count, 0);
    if (total) tiles.push(tile(title, `${total}: ${causes.map(([cause, count]) => `${count} ${cause}`).join(", ")}`, null, true));
  }
  const seconds = (DATA.metrics["timing_s/step"] ?? []).filter(isNumber);
  if (seconds.length) tiles.push(tile("time in steps", duration(seconds.reduce((sum, value) => sum + value, 0)), null, true));
  if (names.includes("perf/throughput")) tiles.push(tile("throughput, last step", `${format(last("perf/throughput"))} tokens/s`, null, true));
  return tiles;
}

function header() {
  document.title = `${DATA.title} · hybridflow report`;
  document.getElementById("title").textContent = DATA.title;
  const { steps } = DATA;
  const machine = DATA.machine ? `${DATA.machine.cpu}, ${DATA.machine.threads} thread${DATA.machine.threads === 1 ? "" : "s"}, torch ${DATA.machine.torch}` : "";
  const range = steps.length ? `${names.length} metrics, steps ${steps[0]} to ${steps[steps.length - 1]}` : "";
  document.getElementById("subtitle").textContent = [range, machine].filter(Boolean).join(" · ");
  document.getElementById("tiles").replaceChildren(...summaryTiles(), ...metricTiles());
  for (const [cause, text] of Object.entries(DATA.failures)) document.getElementById("notes").append(el("details", { class: "card notes" },
    el("summary", {}, `the first trajectory that failed by ${cause}`), el("pre", {}, text)));
  if (DATA.notes.length) document.getElementById("notes").append(el("details", { class: "card notes" },
    el("summary", {}, `${DATA.notes.length} note${DATA.notes.length > 1 ? "s" : ""} on what this page shows`), el("ul", {}, DATA.notes.map((note) => el("li", {}, note)))));
  document.getElementById("config").textContent = DATA.config;
  document.getElementById("config-section").hidden = !DATA.config;
}

function theme() {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const set = (isDark) => { root.dataset.theme = isDark ? "dark" : "light"; };
  set(dark.matches);
  dark.addEventListener("change", () => set(dark.matches));
  document.getElementById("theme").addEventListener("click", () => set(root.dataset.theme !== "dark"));
}

// ---------------------------------------------------------------- curves

const cards = []; // {node, plot, draw}
let smoothing = 0;

function shortLabels(group, label) {
  if (label) return group.map(label);
  if (group.length === 1) return [""];
  const parts = group.map((name) => name.split("/"));
  const differ = parts[0].map((_, index) => parts.some((one) => one[index] !== parts[0][index]));
  return parts.map((one) => one.filter((_, index) => differ[index] !== false).join("/"));
}

function addCard(title, group, { log, label, picked } = {}) {
  const shown = group.slice(0, MAX_SERIES), labels = shortLabels(shown, label);
  const series = shown.map((name, index) => ({ name, label: labels[index] || name, values: DATA.metrics[name], color: `var(--s${index})` }));
  const legend = el("div", { class: "legend" }, series.map((one, index) => el("span", { title: `${one.name}: ${about(one.name).meaning}` }, group.length > 1 ? el("span", { class: "swatch", style: `background:${one.color}` }) : null,
    labels[index] ? el("span", { class: "key" }, `${labels[index]} `) : el("span", { class: "key" }, `${one.name} `), el("b", {}, format(last(one.name))))),
    group.length > shown.length ? el("span", {}, `and ${group.length - shown.length} more: choose metrics`) : null);
  const plot = el("div", { class: "plot" });
  const close = picked ? el("button", { type: "button", class: "chart-close", title: "remove", onclick: () => togglePicked(group[0], false) }, "×") : null;
  const node = el("div", { class: "card chart" }, el("div", { class: "chart-head" }, el("span", { class: "chart-title" }, title, el("span", { class: "chart-unit" }, about(group[0]).unit)), close), legend, plot);
  document.getElementById("curves")[picked ? "prepend" : "append"](node);
  const card = { node, name: picked ? group[0] : null, draw: () => drawChart(plot, DATA.steps, series, { log, smoothing }) };
  cards.push(card);
  card.draw();
}

// Of curves with the same values the first stays: it would lie under the others. Curves that are 0 throughout are not drawn;
// both can be chosen by name.
function withoutCopies(group) {
  const seen = new Set();
  return group.filter((name) => { const key = JSON.stringify(DATA.metrics[name]); return !seen.has(key) && seen.add(key); });
}

function curves() {
  const section = document.getElementById("curves-section");
  if (!names.length) { section.hidden = true; return; }
  for (const card of CARDS) {
    const group = withoutCopies(names.filter((name) => card.match.test(name) && DATA.metrics[name].some((value) => value != null && value !== 0)));
    if (card.sort) group.sort((one, two) => card.sort(one) - card.sort(two) || one.localeCompare(two));
    if (group.length) addCard(card.title, group, card);
  }
  if (!cards.length) for (const name of names.slice(0, 6)) addCard(name, [name]);
  const slider = document.getElementById("smoothing");
  slider.addEventListener("input", () => {
    smoothing = Number(slider.value);
    document.getElementById("smoothing-value").textContent = slider.value;
    cards.forEach((card) => card.draw());
  });
  let width = 0;
  new ResizeObserver(([entry]) => { if (Math.abs(entry.contentRect.width - width) > 1) { width = entry.contentRect.width; cards.forEach((card) => card.draw()); } }).observe(document.getElementById("curves"));
  picker();
}

function togglePicked(name, on) {
  const index = cards.findIndex((card) => card.name === name);
  if (on && index < 0) addCard(name, [name], { picked: true });
  if (!on && index >= 0) cards.splice(index, 1)[0].node.remove();
  const box = document.querySelector(`#picker-list input[value="${CSS.escape(name)}"]`);
  if (box) box.checked = on;
}

function picker() {
  const list = document.getElementById("picker-list"), search = document.getElementById("picker-search");
  let group = null;
  for (const name of names) {
    const prefix = name.split("/")[0];
    if (prefix !== group) { group = prefix; list.append(el("div", { class: "picker-group", "data-group": prefix }, prefix)); }
    list.append(el("label", { class: "picker-item", "data-name": name }, el("input", { type: "checkbox", value: name, onchange: (event) => togglePicked(name, event.target.checked) }), name));
  }
  search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase(), groups = new Set();
    for (const item of list.querySelectorAll(".picker-item")) {
      item.hidden = !item.dataset.name.toLowerCase().includes(wanted);
      item.style.display = item.hidden ? "none" : "";
      if (!item.hidden) groups.add(item.dataset.name.split("/")[0]);
    }
    for (const head of list.querySelectorAll(".picker-group")) head.style.display = groups.has(head.dataset.group) ? "" : "none";
  });
  document.addEventListener("pointerdown", (event) => { const panel = document.getElementById("picker"); if (!panel.contains(event.target)) panel.open = false; });
}

theme();
header();
curves();
startSamples(DATA.samples);
