// What the page knows of a run: curves, advice, times, rollouts and their groups; merged from one answer after another.
"use strict";

const FIELDS_OF_HEAD = ["title", "summary", "machine", "config", "counts", "failures", "failure", "waits", "log", "advice", "notes", "details", "pictures"];
// Kinds of files that one rollout can be in: numbers of all of them, texts of all, texts and tokens of a few.
const KIND_OF = { recorded: "train", rollout_data: "train", samples: "train", validation: "validation" };
const TEXTS = ["samples", "validation", "rollout_data"];

function emptyRun() {
  return {
    title: "", summary: null, machine: null, config: "", counts: {}, failures: {}, failure: null, waits: null, log: "", advice: [], notes: [], details: {}, pictures: {},
    steps: [], metrics: {}, about: {}, timeline: new Map(), rollouts: new Map(), files: new Set(), cursor: "", written: null,
  };
}

// Take an answer of the server, or the data of the file, into a run. False: the run has to be asked for anew.
function merge(run, answer) {
  if (answer.reset) Object.assign(run, emptyRun());
  run.cursor = answer.cursor ?? "";
  run.written = answer.written;
  if (!answer.steps) return true;
  for (const name of FIELDS_OF_HEAD) if (name in answer) run[name] = answer[name];
  Object.assign(run.about, answer.about);
  mergeCurves(run, answer.steps, answer.metrics);
  for (const { step, spans } of answer.timeline) run.timeline.set(step, spans);
  for (const file of answer.rollouts) {
    const name = `${file.kind}/${file.step}`;
    if (run.files.has(name)) { run.cursor = ""; return false; } // its rows may be others now
    run.files.add(name);
    mergeRollouts(run, file);
  }
  run.table = null;
  return true;
}

function mergeCurves(run, steps, metrics) {
  const places = new Map(run.steps.map((step, index) => [step, index]));
  const inOrder = steps.every((step) => places.has(step) || !run.steps.length || step > run.steps[run.steps.length - 1]);
  if (!inOrder) { // rare: a step between two others
    const all = [...new Set([...run.steps, ...steps])].sort((one, two) => one - two);
    for (const name of Object.keys(run.metrics)) run.metrics[name] = all.map((step) => (places.has(step) ? run.metrics[name][places.get(step)] : null));
    run.steps = all;
  } else run.steps = [...run.steps, ...steps.filter((step) => !places.has(step))];
  const index = new Map(run.steps.map((step, place) => [step, place]));
  for (const [name, values] of Object.entries(metrics)) {
    const column = run.metrics[name] ??= [];
    values.forEach((value, number) => { if (value != null) column[index.get(steps[number])] = value; });
  }
  for (const column of Object.values(run.metrics)) for (let place = 0; place < run.steps.length; place++) column[place] ??= null;
}

function mergeRollouts(run, { kind, step, total, columns }) {
  const names = Object.keys(columns);
  const count = names.length ? columns[names[0]].length : 0;
  for (let index = 0; index < count; index++) {
    const number = columns.row_id?.[index] ?? index;
    const id = `${KIND_OF[kind]}/${step}/${number}`;
    let row = run.rollouts.get(id);
    if (!row) run.rollouts.set(id, row = { id, kind: KIND_OF[kind], step, index });
    for (const name of names) { // the prompt's key of the record of all rollouts is that of all runs, so it stays
      const value = columns[name][index];
      if (value != null && (name !== "key" || row.key == null || kind === "recorded")) row[name] = value;
    }
    if (TEXTS.includes(kind) && (row.source == null || TEXTS.indexOf(kind) < TEXTS.indexOf(row.source.kind))) row.source = { kind, index };
  }
}

// All rollouts, and their groups: samples of one prompt in one step. Made when it is asked for, and kept until news come.
function tableOf(run) {
  if (run.table) return run.table;
  const rows = [...run.rollouts.values()];
  const groups = new Map();
  for (const row of rows) {
    row.group = null;
    if (row.uid == null) continue;
    const id = `${row.kind}/${row.step}/${row.uid}`;
    let group = groups.get(id);
    if (!group) groups.set(id, group = { id, kind: row.kind, step: row.step, uid: row.uid, key: row.key, prompt: row.prompt, rows: [], scores: new Map() });
    group.rows.push(row);
    group.prompt ??= row.prompt;
    if (isNumber(row.score)) group.scores.set(row.trajectory_id ?? row.id, row.score); // each trajectory counts once
    row.group = group;
  }
  for (const group of groups.values()) {
    const scores = [...group.scores.values()];
    group.count = scores.length;
    group.mean = mean(scores);
    group.low = Math.min(...scores);
    group.high = Math.max(...scores);
    group.equal = scores.length > 1 && group.low === group.high;
    group.length = mean(group.rows.map((row) => row.num_tokens).filter(isNumber));
  }
  return run.table = { rows, groups: [...groups.values()] };
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const lastOf = (run, name) => [...(run.metrics[name] ?? [])].reverse().find((value) => value != null);
const aboutOf = (run, name) => run.about[name] ?? { meaning: "", unit: "", better: "" }; // a metric of the user's own is not there

// The whole rows of the trajectory that a rollout belongs to, and their pictures; none where only its numbers were recorded.
async function trajectoryOf(run, number, row) {
  if (!row.source) return { rows: [], pictures: {} };
  if (!LIVE) {
    const rows = run.details[`${row.source.kind}/${row.step}`] ?? [], own = rows[row.source.index];
    const shared = own?.trajectory_id == null ? [own].filter(Boolean) : rows.filter((other) => other.trajectory_id === own.trajectory_id);
    return { rows: shared, pictures: run.pictures };
  }
  return ask(`/trajectory?run=${number}&kind=${row.source.kind}&step=${row.step}&index=${row.source.index}`);
}

async function ask(target) {
  const answer = await fetch(target, { headers: { Authorization: `Bearer ${TOKEN}` } });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
