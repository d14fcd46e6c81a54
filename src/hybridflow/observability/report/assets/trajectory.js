// The page of one trajectory: its facts, conversation, pictures, and its rows with a strip for each quantity of tokens.
"use strict";

const PIECE = 800; // tokens whose text is shown at first
const HEAT_RANGE = 5; // nats: colours saturate at a log-prob of −5, a probability of 0.7 %
const column = (name) => ({ has: (tokens) => Boolean(tokens[name]), at: (tokens, index) => tokens[name][index] });
// look: signed (around 0), heat (from 0), version (one colour each), mask
const QUANTITIES = [
  { name: "advantages", title: "advantage", look: "signed", ...column("advantages") },
  { name: "rollout_log_probs", title: "log-prob, generation", look: "heat", unit: "nats", ...column("rollout_log_probs") },
  { name: "old_log_probs", title: "log-prob, training", look: "heat", unit: "nats", ...column("old_log_probs") },
  { name: "difference", title: "training − generation", look: "signed", unit: "nats", has: (tokens) => Boolean(tokens.rollout_log_probs && tokens.old_log_probs),
    at: (tokens, index) => tokens.old_log_probs[index] - tokens.rollout_log_probs[index] },
  { name: "ref_log_prob", title: "log-prob, reference", look: "heat", unit: "nats", ...column("ref_log_prob") },
  { name: "entropys", title: "entropy", look: "heat", unit: "nats", ...column("entropys") },
  { name: "values", title: "value", look: "signed", ...column("values") },
  { name: "policy_version", title: "version", look: "version", ...column("policy_version") },
  { name: "mask", title: "mask", look: "mask", has: (tokens) => Boolean(tokens.loss_mask || tokens.response_mask),
    at: (tokens, index) => (tokens.response_mask && !tokens.response_mask[index] ? 0 : tokens.loss_mask && !tokens.loss_mask[index] ? 1 : 2) },
];
const MASKS = ["given", "sampled, not learned from", "learned from"];
const HIDDEN = new Set(["prompt", "response", "tokens", "tokens_cut", "messages", "media"]);
const isGiven = (tokens, index) => Boolean(tokens.response_mask && !tokens.response_mask[index]);

class TrajectoryPage {
  constructor(host) {
    this.host = host;
    this.colour = "advantages";
    this.shown = null;
    this.body = el("div", { class: "card sample-detail" });
    this.heading = el("h2", { tabindex: -1 }, "Trajectory");
    this.back = el("a", { class: "button", href: "#/rollouts" }, "all rollouts");
    this.before = el("button", { type: "button", onclick: () => this.step(0) }, "‹ previous");
    this.after = el("button", { type: "button", onclick: () => this.step(1) }, "next ›");
    host.append(el("div", { class: "section-head" }, this.heading, this.back, this.before, this.after), this.body);
    host.addEventListener("keydown", (event) => {
      if (event.target.closest("input, select, .strips")) return;
      if (event.key === "ArrowLeft") this.step(0);
      if (event.key === "ArrowRight") this.step(1);
    });
  }

  step(which) {
    const row = PAGES.rollouts.neighbours(this.id)[which];
    if (row) go("trajectory", row.id);
  }

  async show(id) {
    if (id) this.id = id;
    const rows = PAGES.rollouts.rollouts.rows, row = RUN.rollouts.get(this.id) ?? rows[0] ?? [...RUN.rollouts.values()].pop();
    if (!row) { this.body.replaceChildren(el("div", { class: "empty" }, "The run has recorded no rollouts yet.")); return; }
    this.id = row.id;
    const [before, after] = PAGES.rollouts.neighbours(row.id);
    this.before.disabled = !before;
    this.after.disabled = !after;
    const key = `${row.id}/${row.source?.kind}`;
    if (this.shown === key) return; // news of the run change nothing here
    this.shown = key;
    this.heading.textContent = `Trajectory: ${row.kind === "train" ? "" : "validation, "}step ${row.step}, group ${row.uid ?? "–"}`;
    let whole = { rows: [], pictures: {} };
    let trouble = "";
    try { whole = await trajectoryOf(RUN, 0, row); } catch (error) { trouble = String(error.message); }
    if (this.shown === key) this.fill(row, whole, trouble);
  }

  fill(row, { rows, pictures }, trouble) {
    tooltip.hide();
    this.pictures = pictures;
    const first = rows[0] ?? row, messages = rows.find((one) => one.messages)?.messages;
    const parts = [factsNode(rows.length ? first : { step: row.step, uid: row.uid, score: row.score, num_tokens: row.num_tokens, finish_reason: row.finish_reason })];
    if (row.group) parts.push(el("p", { class: "muted" }, `Its group has ${row.group.count} samples with a mean score of ${format(row.group.mean)}${row.group.equal ? ", all the same" : ""}.`));
    if (trouble || !rows.length) {
      const why = trouble || (row.source ? "Its text is not in this file: `hybridflow view --live` shows it." : "Of this rollout the run has kept numbers only; trainer.rollout_data_dir keeps the text of all.");
      parts.push(el("p", {}, why), el("div", { class: "text" }, [row.prompt, row.response].filter(Boolean).join("\n…\n")));
    }
    parts.push(...this.times(row));
    if (messages) parts.push(el("div", { class: "block-head" }, turnsOf(messages)), conversation(messages));
    const tokens = rows.filter((one) => one.tokens?.text);
    this.choices = QUANTITIES.filter((one) => tokens.some((each) => one.has(each.tokens)));
    for (const one of rows) parts.push(...this.rowNodes(one, rows.length));
    this.body.replaceChildren(...parts);
    for (const strips of this.body.querySelectorAll(".strips")) strips.draw();
  }

  // When its calls and tools ran, where the run has recorded it.
  times(row) {
    const own = (RUN.timeline.get(row.step) ?? []).filter(([lane]) => lane === `trajectory ${row.trajectory_id ?? row.uid}`);
    if (!own.length) return [];
    const start = Math.min(...own.map((span) => span[2]));
    return [el("p", { class: "muted" }, own.map(([, name, from, to]) => `${name} ${duration(to - from)} (from ${duration(from - start)})`).join(" · "))];
  }

  rowNodes(row, count) {
    const name = count > 1 ? `, row ${(row.lineage ?? 0) + 1} of ${count}` : "";
    const nodes = [el("div", { class: "block-head" }, `prompt${name}`), el("div", { class: "text", tabindex: 0 }, withMedia(row.prompt ?? "", row.media, this.pictures, false))];
    if (!row.tokens?.text) return [...nodes, el("div", { class: "block-head" }, "response"), el("div", { class: "text", tabindex: 0 }, withMedia(row.response ?? "", row.media, this.pictures, true))];
    if (row.media?.some((medium) => medium.in_response)) nodes.push(el("div", { class: "block-head" }, "pictures of the response"), el("div", { class: "text" }, withMedia("", row.media, this.pictures, true)));
    const choices = this.choices.filter((one) => one.has(row.tokens));
    if (!choices.some((one) => one.name === this.colour)) this.colour = choices[0]?.name ?? "none";
    const text = el("div", { class: "text", tabindex: 0 });
    const facts = el("div", { class: "token-facts", role: "status" }, "Choose a token: arrow keys on the strips, or the pointer.");
    const paint = () => paintTokens(text, row, choices.find((one) => one.name === this.colour));
    const colour = el("select", { "aria-label": "colour tokens by", onchange: (event) => { this.colour = event.target.value; paint(); } },
      choices.map((one) => el("option", { value: one.name, selected: one.name === this.colour }, one.title)), el("option", { value: "none", selected: this.colour === "none" }, "nothing"));
    paint();
    const strips = stripsNode(row.tokens, choices, (index) => {
      facts.textContent = factsOfToken(row.tokens, index).map(([title, value]) => `${title} ${value}`).join(" · ");
      text.chosen?.classList.remove("at");
      text.chosen = text.querySelectorAll(".token")[index]; // none where its text is not shown
      text.chosen?.classList.add("at");
      text.chosen?.scrollIntoView({ block: "nearest" });
    });
    return [...nodes, el("div", { class: "block-head" }, el("span", {}, "response"), el("span", { class: "control" }, "tokens by", colour)), text, strips, facts];
  }
}

function factsNode(row) {
  const text = (value) => (typeof value === "string" ? value : typeof value === "number" ? cell(value) : JSON.stringify(value));
  return el("div", { class: "facts" }, Object.entries(row).filter(([name, value]) => !HIDDEN.has(name) && value != null && value !== "")
    .map(([name, value]) => el("span", {}, el("span", { class: "muted" }, name.replaceAll("_", " ")), text(value))));
}

function turnsOf(messages) {
  const turns = messages.filter((message) => message.role.startsWith("assistant")).length, calls = messages.reduce((sum, message) => sum + message.calls.length, 0);
  return `conversation: ${messages.length} messages, ${turns} by the policy, ${calls} tool calls`;
}

function conversation(messages) {
  return el("div", { class: "conversation", tabindex: 0, role: "group", "aria-label": "conversation" }, messages.map((message) => el("div", { class: `message ${message.role.split(" ")[0]}` },
    el("span", { class: "role" }, message.role), el("div", {}, message.content), message.calls.map((call) => el("div", { class: "call" }, `⚙ ${call}`)))));
}

// A prompt, or a response, with its pictures in their places; one that the run did not keep is named there. Nothing is fetched.
function withMedia(text, media = [], pictures = {}, inResponse) {
  let rest = text;
  const nodes = media.flatMap((medium, index) => {
    if (Boolean(medium.in_response) !== inResponse) return [];
    const at = rest.indexOf(medium.placeholder), before = at < 0 ? rest : rest.slice(0, at), src = pictures[medium.digest];
    rest = at < 0 ? "" : rest.slice(at + medium.placeholder.length);
    const name = `${medium.kind} ${index + 1} of ${media.length}, ${medium.tokens} tokens`;
    return [before, src ? el("img", { class: "medium", src, alt: name, title: name }) : el("span", { class: "muted" }, `[${name}, not kept]`)];
  });
  return [...nodes, rest];
}

// ---------------------------------------------------------------- tokens

const largest = (values) => values.filter(isNumber).reduce((most, value) => Math.max(most, Math.abs(value)), 1e-12);
const rangeOf = (tokens, quantity) => (quantity.name.includes("log_prob") ? HEAT_RANGE : largest(tokens.text.map((_, index) => (isGiven(tokens, index) ? null : quantity.at(tokens, index)))));

// The colour of a value as [name of a CSS colour triple, opacity].
function shade(quantity, value, range) {
  if (quantity.look === "mask") return [["--given", "--neg", "--pos"][value], value === 2 ? 0.6 : 0.45];
  if (!isNumber(value)) return ["--neg", 0.9];
  if (quantity.look === "version") return [`--v${((value % 6) + 6) % 6}`, 0.6];
  const part = Math.min(1, Math.abs(value) / range);
  return quantity.look === "heat" ? ["--heat", 0.75 * part ** 0.6] : [value < 0 ? "--neg" : "--pos", 0.65 * part];
}

// Tokens as text with colours; of a long response the first ones, and the others when they are asked for.
function paintTokens(host, row, quantity) {
  const { tokens } = row, range = quantity ? rangeOf(tokens, quantity) : 1;
  const span = (index) => {
    const node = el("span", { class: isGiven(tokens, index) ? "token given" : "token" }, visible(tokens.text[index]));
    if (quantity && !(isGiven(tokens, index) && quantity.look !== "mask")) {
      const [name, opacity] = shade(quantity, quantity.at(tokens, index), range);
      if (opacity > 0.02) node.style.background = `rgba(var(${name}), ${opacity.toFixed(2)})`;
    }
    return node;
  };
  const first = Array.from({ length: Math.min(PIECE, tokens.text.length) }, (_, index) => span(index));
  host.replaceChildren(...first, row.tokens_cut ? el("span", { class: "muted" }, ` … ${row.tokens_cut} more tokens`) : "");
  if (tokens.text.length > PIECE) {
    const more = el("button", { type: "button", onclick: () => more.replaceWith(...tokens.text.slice(PIECE).map((_, index) => span(PIECE + index))) }, `show ${tokens.text.length - PIECE} more tokens`);
    first[PIECE - 1].after(more);
  }
  host.onpointermove = (event) => {
    const index = [...host.children].indexOf(event.target);
    if (event.target.classList.contains("token")) tooltip.show(event, `token ${index}: ${JSON.stringify(tokens.text[index])}`, factsOfToken(tokens, index).slice(1));
    else tooltip.hide();
  };
  host.onpointerleave = () => tooltip.hide();
}

function factsOfToken(tokens, index) {
  const facts = [[`token ${index}`, JSON.stringify(tokens.text[index])]];
  if (isNumber(tokens.rollout_log_probs?.[index]) && !isGiven(tokens, index)) facts.push(["probability", `${(Math.exp(tokens.rollout_log_probs[index]) * 100).toPrecision(3)} %`]);
  for (const quantity of QUANTITIES) {
    if (!quantity.has(tokens) || (isGiven(tokens, index) && quantity.look !== "mask")) continue;
    const value = quantity.at(tokens, index);
    facts.push([quantity.title, quantity.look === "mask" ? MASKS[value] : `${format(value)}${quantity.unit ? ` ${quantity.unit}` : ""}`]);
  }
  return facts;
}

// One strip for each quantity, a column for each token, on one canvas; arrow keys and the pointer choose a token.
function stripsNode(tokens, quantities, choose) {
  const count = tokens.text.length, height = 18, left = 210;
  let at = 0;
  let width = 600;
  const canvas = el("canvas"), base = el("canvas"); // the strips are drawn once, and copied under the mark of a token
  const node = el("div", { class: "strips", tabindex: 0, role: "slider", "aria-label": "tokens of the response", "aria-valuemin": 0, "aria-valuemax": Math.max(0, count - 1), "aria-valuenow": 0 }, canvas);
  const place = (index) => left + (index / count) * (width - left - 1);
  node.draw = () => {
    const ratio = devicePixelRatio || 1, look = getComputedStyle(document.documentElement), colours = {};
    width = node.clientWidth || 600;
    for (const one of [canvas, base]) Object.assign(one, { width: width * ratio, height: (quantities.length * height + 4) * ratio });
    Object.assign(canvas.style, { width: `${width}px`, height: `${quantities.length * height + 4}px` });
    const context = base.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    const columns = Math.min(count, Math.floor(width - left)), each = count / columns, wide = (width - left - 1) / columns;
    quantities.forEach((quantity, number) => {
      const range = rangeOf(tokens, quantity), top = number * height + 2;
      context.globalAlpha = 1;
      context.fillStyle = look.getPropertyValue("--muted");
      const most = quantity.look === "mask" || quantity.look === "version" ? "" : ` ≤ ${format(range)}`;
      context.fillText(quantity.title + most, 0, top + 12, left - 8);
      for (let column = 0; column < columns; column++) {
        let strongest = null; // of the tokens that share a column
        for (let index = Math.floor(column * each); index < Math.floor((column + 1) * each); index++) {
          if (isGiven(tokens, index) && quantity.look !== "mask") continue;
          const found = shade(quantity, quantity.at(tokens, index), range);
          if (!strongest || found[1] > strongest[1]) strongest = found;
        }
        if (!strongest) continue;
        const [name, opacity] = strongest;
        context.globalAlpha = opacity;
        context.fillStyle = colours[name] ??= `rgb(${look.getPropertyValue(name)})`;
        context.fillRect(left + column * wide, top, wide, height - 3);
      }
    });
    mark();
  };
  const mark = () => {
    const context = canvas.getContext("2d"), ratio = devicePixelRatio || 1;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(base, 0, 0);
    context.scale(ratio, ratio);
    context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
    context.lineWidth = 1.5;
    if (count) context.strokeRect(place(at), 1, Math.max(3, place(at + 1) - place(at)), quantities.length * height);
  };
  const move = (index) => {
    at = Math.min(count - 1, Math.max(0, index));
    node.setAttribute("aria-valuenow", at);
    node.setAttribute("aria-valuetext", factsOfToken(tokens, at).map((fact) => fact.join(" ")).join(", "));
    mark();
    choose(at);
  };
  node.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (by && count) { event.preventDefault(); event.stopPropagation(); move(at + by); }
  });
  node.addEventListener("pointerdown", (event) => {
    const box = canvas.getBoundingClientRect();
    if (count) move(Math.floor(((event.clientX - box.left - left) / (box.width - left)) * count));
  });
  return node;
}

const visible = (text) => (text === "\n" ? "↵\n" : text.replaceAll("\t", "⇥\t"));
