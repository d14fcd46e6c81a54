// The page that compares two runs: curves over each other by step, and mean scores by prompt.
"use strict";

const PROMPT_COLUMNS = [
  { title: "samples here", value: (pair) => pair.here.count },
  { title: "mean here", value: (pair) => pair.here.mean },
  { title: "samples there", value: (pair) => pair.there.count },
  { title: "mean there", value: (pair) => pair.there.mean },
  { title: "difference", value: (pair) => pair.difference, class: (pair) => (pair.difference > 0 ? "good" : pair.difference < 0 ? "bad" : "") },
  { title: "prompt", value: (pair) => pair.prompt, wide: true },
];

// Prompts that both runs have sampled, with the mean score of each.
function promptPairs(one, two) {
  const gathered = [one, two].map((run) => {
    const prompts = new Map();
    for (const group of tableOf(run).groups) {
      if (group.key == null || !group.count || group.kind !== "train") continue;
      const found = prompts.get(group.key) ?? { scores: [], prompt: null, row: group.rows[0] };
      found.scores.push(...group.scores.values());
      found.prompt ??= group.prompt;
      prompts.set(group.key, found);
    }
    return prompts;
  });
  const pairs = [];
  for (const [key, here] of gathered[0]) {
    const there = gathered[1].get(key);
    if (!there) continue;
    const sides = [here, there].map(({ scores }) => ({ count: scores.length, mean: mean(scores) }));
    pairs.push({ key, here: sides[0], there: sides[1], difference: sides[0].mean - sides[1].mean, prompt: here.prompt ?? there.prompt ?? `prompt ${key}`, row: here.row });
  }
  return pairs;
}

// A metric of two runs on the steps of both.
function bothCurves(one, two, name) {
  const steps = [...new Set([...one.steps, ...two.steps])].sort((a, b) => a - b);
  const on = (run) => { const places = new Map(run.steps.map((step, index) => [step, index])); return steps.map((step) => (places.has(step) ? run.metrics[name]?.[places.get(step)] ?? null : null)); };
  return { steps, values: [on(one), on(two)] };
}

class ComparePage {
  constructor(host) {
    this.extra = "";
    this.note = el("p", { class: "muted", role: "status" });
    this.choice = el("select", { "aria-label": "one more metric", onchange: (event) => { this.extra = event.target.value; this.show(); } });
    this.charts = el("div", { class: "grid" });
    this.table = new Table("prompts of both runs", PROMPT_COLUMNS, (pair) => go("trajectory", pair.row.id));
    this.scatter = new Scatter("mean here", "mean there", (pair) => go("trajectory", pair.row.id));
    this.byPrompt = el("div", {}, el("h3", {}, "By prompt"), el("div", { class: "beside" }, this.table.node, el("div", { class: "card chart" }, this.scatter.node)));
    this.head = el("div", { class: "section-head" }, el("h2", {}, "Compare"), el("label", { class: "control" }, "one more metric", this.choice));
    host.append(this.head, this.note, this.charts, this.byPrompt);
  }

  show() {
    const one = RUN, two = OTHER;
    this.byPrompt.hidden = this.charts.hidden = !two;
    if (!two) { this.note.textContent = "Give a second run: hybridflow view RUN --against OTHER, or the same with --live."; return; }
    const shared = Object.keys(one.metrics).filter((name) => name in two.metrics);
    if (this.choice.options.length !== shared.length + 1) this.choice.replaceChildren(el("option", { value: "" }, "none"), ...shared.map((name) => el("option", { value: name, selected: name === this.extra }, name)));
    const firstOf = (card) => { const found = shared.filter((name) => card.match.test(name)); return card.sort ? sorted(found, card.sort)[0] : found[0]; };
    const names = [this.extra, ...CARDS.map(firstOf)].filter((name, index, all) => name && all.indexOf(name) === index);
    const colours = ["var(--s0)", "var(--s1)"], titles = [one.title || "here", two.title || "there"];
    if (titles[0] === titles[1]) titles[1] += " (other)";
    this.charts.replaceChildren(...names.map((name) => {
      const { steps, values } = bothCurves(one, two, name), plot = el("div", { class: "plot" });
      const series = values.map((column, index) => ({ name: `${titles[index]} ${name}`, label: titles[index], values: column, color: colours[index] }));
      const node = el("div", { class: "card chart" }, el("div", { class: "chart-head" }, el("span", { class: "chart-title" }, name, el("span", { class: "chart-unit" }, aboutOf(one, name).unit))),
        el("div", { class: "legend" }, series.map((each) => el("span", {}, el("span", { class: "swatch", style: `background:${each.color}` }), `${each.label} `, el("b", {}, format([...each.values].reverse().find((value) => value != null)))))), plot);
      queueMicrotask(() => drawChart(plot, steps, series));
      return node;
    }));
    const pairs = promptPairs(one, two), better = pairs.filter((pair) => pair.difference > 0).length, worse = pairs.filter((pair) => pair.difference < 0).length;
    this.note.textContent = `${titles[0]} and ${titles[1]}: ${shared.length} metrics and ${pairs.length} prompts in common; ${better} prompts are better here, ${worse} there.`;
    this.byPrompt.hidden = !pairs.length;
    this.table.set(sorted(pairs, (pair) => -Math.abs(pair.difference)));
    if (pairs.length) this.scatter.set(pairs, (pair) => pair.here.mean, (pair) => pair.there.mean, (pair) => (pair.difference > 0 ? "--s2" : pair.difference < 0 ? "--s1" : "--s7"),
      [["--s2", "better here"], ["--s1", "better there"], ["--s7", "the same"]]);
  }
}
