// The frame: which page is shown, light and dark, and the news of a run that goes on.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const LIVE = DATA.live ?? 0; // runs that the server follows; 0: this is a file, and DATA has all there is
const TOKEN = LIVE ? new URLSearchParams(location.search).get("token") : "";
const POLL_SECONDS = 1, SLOW_POLL_SECONDS = 5;
const TITLES = { overview: "Overview", rollouts: "Rollouts", trajectory: "Trajectory", timeline: "Timeline", compare: "Compare" };

const RUN = emptyRun();
let OTHER = null;
const PAGES = {};
let current = "overview", argument = "";

function header() {
  const { steps } = RUN, count = Object.keys(RUN.metrics).length, { machine } = RUN;
  const card = machine?.card ? `${machine.cards} × ${machine.card}, ` : "";
  const facts = machine ? `${card}${machine.cpu}, ${machine.threads} thread${machine.threads === 1 ? "" : "s"}, torch ${machine.torch}` : "";
  const range = steps.length ? `${count} metrics, steps ${steps[0]} to ${steps[steps.length - 1]}` : "";
  document.getElementById("title").textContent = RUN.title || (LIVE ? "Waiting for the run" : "");
  document.getElementById("subtitle").textContent = [range, facts].filter(Boolean).join(" · ");
  document.title = `${TITLES[current]} · ${RUN.title} · hybridflow`;
}

// ---------------------------------------------------------------- routes: #/rollouts, #/trajectory/train/3/17

function go(page, what = "") { location.hash = `#/${page}${what ? `/${what}` : ""}`; }

function route() {
  const [, page, ...rest] = location.hash.split("/");
  const moved = page !== current;
  current = page in TITLES ? page : "overview";
  argument = decodeURIComponent(rest.join("/"));
  for (const name of Object.keys(TITLES)) {
    document.getElementById(`page-${name}`).hidden = name !== current;
    const link = document.getElementById(`to-${name}`);
    if (name === current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  tooltip.hide();
  header();
  PAGES[current].show(argument);
  if (moved) {
    scrollTo(0, 0);
    say(`${TITLES[current]} is shown`);
  }
}

function theme() {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const set = (isDark) => {
    root.dataset.theme = isDark ? "dark" : "light";
    if (PAGES[current]) { PAGES.trajectory.shown = null; PAGES[current].show(argument); } // canvases have no colours of the style
  };
  set(dark.matches);
  dark.addEventListener("change", () => set(dark.matches));
  document.getElementById("theme").addEventListener("click", () => set(root.dataset.theme !== "dark"));
}

// ---------------------------------------------------------------- news

async function news() {
  const status = document.getElementById("status");
  let changed = false;
  try {
    const runs = OTHER ? [RUN, OTHER] : [RUN];
    for (const [number, run] of runs.entries()) {
      const answer = await ask(`/changes?run=${number}&after=${encodeURIComponent(run.cursor)}`);
      changed = "steps" in answer || answer.reset || changed;
      if (!merge(run, answer)) merge(run, await ask(`/changes?run=${number}&after=`));
      if (!number) status.textContent = standing(run, answer.now);
    }
    status.classList.remove("lost");
  } catch (error) {
    status.textContent = `the server does not answer (${error.message}); what is shown may be old`;
    status.classList.add("lost");
  }
  if (changed) { header(); PAGES[current].show(argument); }
  setTimeout(news, 1000 * (document.hidden ? SLOW_POLL_SECONDS : POLL_SECONDS));
}

function standing(run, now) {
  if (run.failure) return `the run has failed after ${run.failure.steps_done} steps`;
  if (run.written == null) return "waiting for metrics.jsonl";
  const step = run.steps[run.steps.length - 1], ago = duration(Math.max(0, now - run.written)).replace(/\.\d s/, " s");
  return run.summary ? `step ${step}, the run has ended` : `live, step ${step}, written ${ago} ago`;
}

function start() {
  const makers = { overview: OverviewPage, rollouts: RolloutsPage, trajectory: TrajectoryPage, timeline: TimelinePage, compare: ComparePage };
  for (const [name, Maker] of Object.entries(makers)) PAGES[name] = new Maker(document.getElementById(`page-${name}`));
  if (LIVE > 1 || DATA.other) OTHER = emptyRun();
  if (!LIVE) {
    merge(RUN, DATA);
    if (OTHER) merge(OTHER, DATA.other);
  }
  // by script: in a notebook the page is in a frame, where such a link would lead to the notebook
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#/"]');
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(link.getAttribute("href").slice(2));
  });
  theme();
  PAGES.rollouts.refresh(); // the page of a trajectory goes through its rows
  addEventListener("hashchange", route);
  route();
  document.getElementById("status").hidden = !LIVE;
  if (LIVE) news();
}

start();
