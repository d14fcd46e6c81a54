// The sample browser: choose where from, which step and which scores; read a response with its tokens coloured.
"use strict";

const COLOURS = [
  ["rollout_log_probs", "log-prob at generation"],
  ["old_log_probs", "log-prob in training"],
  ["difference", "log-prob difference"],
  ["advantages", "advantage"],
  ["mask", "mask"],
];
const FIELD_NAMES = {
  rollout_log_probs: "log-prob, generation", old_log_probs: "log-prob, training", ref_log_prob: "log-prob, reference",
  advantages: "advantage", values: "value", response_mask: "sampled by the policy", loss_mask: "learned from",
};
const HEAT_RANGE = 5; // nats: colours saturate at a log-prob of −5, a probability of 0.7 %

function startSamples(samples) {
  const state = { kind: samples.samples.length ? "samples" : "validation", stepIndex: 0, low: "", high: "", text: "", colour: null, row: 0, rows: [] };
  const controls = document.getElementById("sample-controls"), list = document.getElementById("sample-list"), detail = document.getElementById("sample-detail");
  const kinds = [["samples", "training rollouts"], ["validation", "validation"]].filter(([kind]) => samples[kind].length);
  state.stepIndex = samples[state.kind].length - 1;

  const kindSelect = el("select", { "aria-label": "where from", onchange: (event) => { state.kind = event.target.value; state.stepIndex = samples[state.kind].length - 1; fillSteps(); refresh(); } },
    kinds.map(([kind, name]) => el("option", { value: kind }, name)));
  const stepSelect = el("select", { "aria-label": "step", onchange: (event) => { state.stepIndex = Number(event.target.value); refresh(); } });
  const move = (by) => { state.stepIndex = Math.min(samples[state.kind].length - 1, Math.max(0, state.stepIndex + by)); stepSelect.value = state.stepIndex; refresh(); };
  const previous = el("button", { type: "button", title: "previous step", onclick: () => move(-1) }, "‹"), next = el("button", { type: "button", title: "next step", onclick: () => move(1) }, "›");
  const bound = (key, label) => el("input", { type: "number", step: "any", style: "width:5.2em", placeholder: label, "aria-label": `${label} score`, oninput: (event) => { state[key] = event.target.value; refresh(); } });
  const search = el("input", { type: "search", placeholder: "text in prompt or response", style: "width:15em", oninput: (event) => { state.text = event.target.value.toLowerCase(); refresh(); } });
  const count = el("span", {});
  controls.append(kindSelect, el("span", { class: "control" }, "step", previous, stepSelect, next), el("span", { class: "control" }, "score", bound("low", "min"), "to", bound("high", "max")), search, count);

  function fillSteps() {
    stepSelect.replaceChildren(...samples[state.kind].map((item, index) => el("option", { value: index }, item.step)));
    stepSelect.value = state.stepIndex;
  }

  function refresh() {
    const item = samples[state.kind][state.stepIndex];
    previous.disabled = state.stepIndex === 0;
    next.disabled = state.stepIndex === samples[state.kind].length - 1;
    state.rows = item.rows.filter((row) => (state.low === "" || row.score >= Number(state.low)) && (state.high === "" || row.score <= Number(state.high))
      && (!state.text || `${row.prompt}\n${row.response}`.toLowerCase().includes(state.text)));
    state.row = Math.min(state.row, Math.max(0, state.rows.length - 1));
    count.textContent = `${state.rows.length} of ${item.rows.length}${item.total > item.rows.length ? ` embedded (${item.total} in the file)` : ""}`;
    fillList();
    fillDetail();
  }

  function fillList() {
    const scores = samples[state.kind][state.stepIndex].rows.map((row) => row.score).filter(isNumber), best = Math.max(...scores), worst = Math.min(...scores);
    const nodes = [];
    let group = null;
    state.rows.forEach((row, index) => {
      if (row.uid != null && row.uid !== group) {
        group = row.uid;
        const rewards = groupRewards(row.uid, samples[state.kind][state.stepIndex].rows);
        nodes.push(el("div", { class: "group-head", title: row.prompt }, lastLine(row.prompt), rewards ? el("div", {}, rewards) : null));
      }
      nodes.push(el("button", { type: "button", class: "sample-item", "aria-current": String(index === state.row), onclick: () => choose(index) },
        el("span", { class: "line" }, shortened(row.response)),
        el("span", { class: "meta" }, scoreChip(row.score, worst, best), row.finish_reason && row.finish_reason !== "stop" ? el("span", { class: "chip" }, row.finish_reason) : null,
          row.lineage ? el("span", { class: "chip" }, `row ${row.lineage + 1}`) : null, row.num_tokens != null ? `${row.num_tokens} tokens` : null)));
    });
    list.replaceChildren(...(nodes.length ? nodes : [el("div", { class: "empty" }, "No sample fits the filter.")]));
  }

  function choose(index) {
    state.row = index;
    for (const [number, node] of [...list.querySelectorAll(".sample-item")].entries()) {
      node.setAttribute("aria-current", String(number === index));
      if (number === index) node.scrollIntoView({ block: "nearest" });
    }
    fillDetail();
  }
  list.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by && state.rows[state.row + by]) { event.preventDefault(); choose(state.row + by); }
  });

  function fillDetail() {
    tooltip.hide();
    const row = state.rows[state.row];
    if (!row) { detail.replaceChildren(el("div", { class: "empty" }, "Nothing to show.")); return; }
    const rows = siblings(row, samples[state.kind][state.stepIndex].rows), messages = rows.find((one) => one.messages)?.messages;
    const hidden = new Set(["prompt", "response", "tokens", "tokens_cut", "step", "messages", "media"]);
    const facts = Object.entries(row).filter(([name, value]) => !hidden.has(name) && value != null && value !== "")
      .map(([name, value]) => el("span", {}, el("span", { class: "muted" }, name.replaceAll("_", " ")), Number.isInteger(value) ? String(value) : typeof value === "number" ? format(value) : typeof value === "string" ? value : JSON.stringify(value)));
    const choices = COLOURS.filter(([name]) => hasColour(row.tokens, name));
    if (!choices.some(([name]) => name === state.colour)) state.colour = choices.length ? choices[0][0] : null;
    const colour = el("select", { "aria-label": "colour tokens by", onchange: (event) => { state.colour = event.target.value; fillDetail(); } },
      choices.map(([name, label]) => el("option", { value: name, selected: name === state.colour }, label)), el("option", { value: "none", selected: state.colour === "none" }, "nothing"));
    detail.replaceChildren(
      el("div", { class: "facts" }, facts),
      ...(messages ? [el("div", { class: "block-head" }, "conversation"), conversation(messages)] : []),
      ...(rows.length > 1 ? [el("div", { class: "block-head" }, el("span", {}, `${rows.length} rows of one trajectory`), choices.length ? el("span", { class: "control" }, scaleOf(row, state.colour), "tokens by", colour) : null),
        el("div", { class: "lineages" }, rows.map((one) => el("div", { class: one === row ? "lineage chosen" : "lineage" }, rowNodes(one, state.colour, choices.length > 0, el("span", {}, `row ${one.lineage + 1}`)))))]
        : rowNodes(row, state.colour, choices.length > 0, choices.length ? el("span", { class: "control" }, scaleOf(row, state.colour), "tokens by", colour) : el("span", {}, "no token-level data in this file"))));
  }

  document.getElementById("samples-section").hidden = !kinds.length;
  if (kinds.length) { fillSteps(); refresh(); }
}

const rowNodes = (row, colour, tokenLevel, aside) => [
  el("div", { class: "block-head" }, "prompt"), el("div", { class: "text" }, withMedia(row.prompt ?? "", row.media)),
  el("div", { class: "block-head" }, el("span", {}, "response"), aside), responseNode(row, colour, tokenLevel),
];

function hasColour(tokens, name) {
  if (!tokens?.text) return false;
  if (name === "difference") return Boolean(tokens.rollout_log_probs && tokens.old_log_probs);
  return name === "mask" ? Boolean(tokens.loss_mask || tokens.response_mask) : Boolean(tokens[name]);
}

const difference = (tokens, index) => tokens.old_log_probs[index] - tokens.rollout_log_probs[index];
const largest = (values) => Math.max(1e-12, ...values.filter(isNumber).map(Math.abs));

function responseNode(row, colour, tokenLevel) {
  const tokens = row.tokens;
  if (!tokenLevel) return el("div", { class: "text" }, row.response ?? "");
  const range = colour === "advantages" ? largest(tokens.advantages) : colour === "difference" ? largest(tokens.text.map((_, index) => difference(tokens, index))) : 1;
  const spans = tokens.text.map((text, index) => {
    const span = el("span", { class: "token" }, visible(text));
    if (tokens.response_mask && !tokens.response_mask[index]) span.classList.add("given");
    else if (colour === "mask") {
      if (tokens.loss_mask && !tokens.loss_mask[index]) span.classList.add("narrowed");
    } else if (colour && colour !== "none") span.style.background = background(colour, colour === "difference" ? difference(tokens, index) : tokens[colour][index], range);
    span.addEventListener("pointermove", (event) => tooltip.show(event, `token ${index}: ${JSON.stringify(text)}`, tokenFacts(tokens, index)));
    span.addEventListener("pointerleave", () => tooltip.hide());
    return span;
  });
  if (row.tokens_cut) spans.push(el("span", { class: "muted" }, ` … ${row.tokens_cut} more tokens`));
  return el("div", { class: "text" }, spans);
}

function tokenFacts(tokens, index) {
  const facts = Object.keys(tokens).filter((name) => name !== "text").map((name) => {
    const value = tokens[name][index];
    return [FIELD_NAMES[name] ?? name, name.endsWith("mask") ? (value ? "yes" : "no") : format(value)];
  });
  if (tokens.rollout_log_probs && isNumber(tokens.rollout_log_probs[index])) facts.splice(0, 0, ["probability", (Math.exp(tokens.rollout_log_probs[index]) * 100).toPrecision(3) + " %"]);
  if (hasColour(tokens, "difference")) facts.push(["difference, training − generation", format(difference(tokens, index))]);
  return facts;
}

function background(colour, value, range) {
  if (!isNumber(value)) return "rgba(var(--neg), 0.9)";
  if (colour.endsWith("log_probs")) return `rgba(var(--heat), ${(0.75 * Math.min(1, -value / HEAT_RANGE) ** 0.6 || 0).toFixed(3)})`;
  return `rgba(var(${value < 0 ? "--neg" : "--pos"}), ${(0.62 * Math.min(1, Math.abs(value) / range)).toFixed(3)})`;
}

function scaleOf(row, colour) {
  if (colour === "mask") return el("span", { class: "scale" }, el("span", { class: "token given" }, "given, not sampled"), el("span", { class: "token narrowed" }, "not learned from"));
  if (!colour || colour === "none") return null;
  if (colour.endsWith("log_probs")) return el("span", { class: "scale" }, "0", el("i", { style: "background:linear-gradient(90deg, transparent, rgba(var(--heat), .42) 30%, rgba(var(--heat), .75))" }), `≤ −${HEAT_RANGE} nats`);
  const range = colour === "advantages" ? largest(row.tokens.advantages) : largest(row.tokens.text.map((_, index) => difference(row.tokens, index)));
  return el("span", { class: "scale" }, "−" + format(range), el("i", { style: "background:linear-gradient(90deg, rgba(var(--neg), .62), transparent, rgba(var(--pos), .62))" }), "+" + format(range));
}

function scoreChip(score, worst, best) {
  if (score == null) return null;
  const side = !isNumber(score) || worst === best ? (score > 0 ? "good" : "bad") : score - worst > best - score ? "good" : "bad";
  return el("span", { class: `chip ${side}` }, format(score));
}

const visible = (text) => (text === "\n" ? "↵\n" : text.replaceAll("\t", "⇥\t"));
const shortened = (text) => (text ?? "").trim().replaceAll(/\s*\n\s*/g, " ↵ ").slice(0, 160) || "(empty)";
// A chat prompt ends in markers; its last line with a word or digit in it outside such markers says most.
const lastLine = (text) => (text ?? "").split("\n").map((line) => line.replaceAll(/<[^<>]*>/g, "").trim()).filter((line) => /[\p{L}\p{N}]/u.test(line) && !/^(assistant|user|system)$/i.test(line)).pop() ?? shortened(text);
