// An agent's sample: its conversation with tool calls and their answers, and the rows of one trajectory side by side.
"use strict";

// All rows of the same trajectory that are embedded, in the order of their first calls.
const siblings = (row, rows) => (row.trajectory_id == null ? [row] : rows.filter((other) => other.trajectory_id === row.trajectory_id));

function conversation(messages) {
  return el("div", { class: "conversation" }, messages.map((message) => el("div", { class: `message ${message.role.split(" ")[0]}` },
    el("span", { class: "role" }, message.role), el("div", {}, message.content),
    message.calls.map((call) => el("div", { class: "call" }, `⚙ ${call}`)))));
}

// The rewards of a group's trajectories, each counted once; null outside of agents' runs.
function groupRewards(uid, rows) {
  const scores = new Map(rows.filter((row) => row.uid === uid && row.trajectory_id != null && isNumber(row.score)).map((row) => [row.trajectory_id, row.score]));
  if (!scores.size) return null;
  const values = [...scores.values()], mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return `${values.length} samples, mean reward ${format(mean)}`;
}

// A prompt with its pictures in their places; one that the run did not keep is named there.
function withMedia(text, media = []) {
  let rest = text;
  const nodes = media.flatMap((medium, index) => {
    const at = rest.indexOf(medium.placeholder), before = at < 0 ? rest : rest.slice(0, at), src = DATA.pictures[medium.digest];
    rest = at < 0 ? "" : rest.slice(at + medium.placeholder.length);
    const name = `${medium.kind} ${index + 1} of ${media.length}, ${medium.tokens} tokens`;
    return [before, src ? el("img", { class: "medium", src, alt: name, title: name }) : el("span", { class: "muted" }, `[${name}, not kept]`)];
  });
  return [...nodes, rest];
}
