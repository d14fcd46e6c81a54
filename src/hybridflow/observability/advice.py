"""Advice on a run: what goes wrong, and which key to set.

metrics of a step ──History──► alarms, or on a healthy run hints ──AdviceWatch──► log, console, webhook
an open phase ──StallWatch──► the alarm of a phase that takes far longer than before
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

MIN_ENTROPY = 1e-3
"""Nats per token below which a policy no longer explores: e^0.001 is 1.001 choices a token."""
COLLAPSED = 0.02
"""Part of its first entropy to which the entropy falls in a collapse, where the score has not risen."""
MAX_TRUNCATED = 0.25
MAX_ZERO_VARIANCE = 0.5
MAX_FAILED = 0.05
MAX_LOG_PROB_DIFF = 1e-2
MAX_CORRECTED_KL = 0.1
"""Nats a token; weights rounded to fp8, with rounded inputs, gave 0.04 on a real model."""
MISMATCH_GROWTH = 3.0
LEAST_MISMATCH = 1e-3
"""Mean difference of probabilities below which its growth does not matter."""
MAX_KL = 0.5
"""Nats per token between the policy and the one that sampled, or the reference, in a blow-up."""
KL_GROWTH = 10.0
MAX_CLAMPED = 0.05
"""Part of the tokens that a KL estimate at its clamp no longer pulls back."""
MAX_LENGTH_RATIO = 3.0
MAX_REPETITION = 0.3
MAX_DIVERGENCE = 0.05
"""Part of the largest score by which the training score has risen and the held-out one has fallen."""
MAX_IDLE = 0.5
MAX_PREEMPTED = 0.1
"""Preemptions for each request."""
MIN_PREFIX_HITS = 0.1
MIN_MFU = 0.15
FIRST_STEPS = 10
"""Number of steps whose median represents the beginning of a run."""
RECENT_STEPS = 5
"""Number of steps whose median represents now, so that one outlier triggers no rule."""
HELD_OUT = "val-core/"
_KEPT_VALIDATIONS = 20
REPEAT_EVERY = 20
"""Steps after which the advice of a rule that stays broken is given again."""
STALLED = 6.0
"""Times its median that a part of a step may take."""
LEAST_SECONDS = 30.0
"""A part that has taken less is no stall, however short it was before."""
LEAST_STEPS = 3
_POLL_SECONDS = 5.0
_KEPT_STEPS = 50

KEYS = {
    "gen": ("actor_rollout_ref.rollout.agent.deadline", "trainer.worker_timeout"),
    "wait_for_rollouts": ("actor_rollout_ref.rollout.agent.deadline", "trainer.worker_timeout"),
    "reward": ("reward.timeout", "reward.num_workers"),
    "save_checkpoint": ("actor_rollout_ref.actor.checkpoint.async_save",),
}
"""Keys by section; the others are calls of the workers."""


@dataclass(frozen=True)
class Advice:
    """A finding of a rule about a run."""

    rule: str
    """Name of the rule."""
    message: str
    """The number that shows it, and what it means."""
    keys: tuple[str, ...]
    """Keys of the configuration that change it, the most likely one first; none where only the user's own
    data or code can.
    """

    def __str__(self) -> str:
        if not self.keys:
            return self.message
        return f"{self.message} (keys: {', '.join(self.keys)})"


class History:
    """First and recent values of each metric. Only steps count that have the metric."""

    def __init__(self) -> None:
        self.now: Mapping[str, float] = {}
        """The metrics of the newest step."""
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._scores: dict[int, float | None] = {}
        """The training score of each step's time."""
        self.validations: deque[tuple[Mapping[str, float], float | None]] = deque(maxlen=_KEPT_VALIDATIONS)
        """The held-out scores of the last validations, each with the training score of its time."""

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of the next step, or further ones of a step that was taken."""
        self.now = metrics
        for name, value in metrics.items():
            first = self._first.setdefault(name, [])
            if len(first) < FIRST_STEPS:
                first.append(value)
            self._recent.setdefault(name, deque(maxlen=RECENT_STEPS)).append(value)
        held_out = {name: metrics[name] for name in metrics if name.startswith(HELD_OUT) and "/mean@" in name}
        if step >= next(reversed(self._scores), 0):
            self._scores[step] = self.recent("critic/score/mean")
        if held_out:
            self.validations.append((held_out, self._scores.get(step)))

    def recent(self, name: str) -> float | None:
        """Return the median of the last steps, or None before there are enough."""
        recent = self._recent.get(name, ())
        return median(recent) if len(recent) == RECENT_STEPS else None

    def change(self, name: str) -> tuple[float, float] | None:
        """Return the medians of the first and of the last steps, or None where there are not enough yet."""
        first = self._first.get(name, ())
        recent = self.recent(name)
        if len(first) < FIRST_STEPS or recent is None:
            return None
        return median(first), recent

    def total(self, prefix: str) -> float:
        """Return the sum of the newest step's metrics whose names begin with `prefix`."""
        return sum(value for name, value in self.now.items() if name.startswith(prefix))

    def score_rose(self) -> bool:
        """Return whether the training score is higher than in the beginning."""
        change = self.change("critic/score/mean")
        return change is not None and change[1] > change[0] + MAX_DIVERGENCE * abs(change[0])


def entropy_collapse(run: History) -> Iterator[Advice]:
    """Find a policy that no longer explores."""
    entropy = run.now.get("actor/entropy")
    change = run.change("actor/entropy")
    fall = ""
    if entropy is None:
        return
    if entropy < MIN_ENTROPY:
        fall = f"actor/entropy is {entropy:.2g}"
    elif change is not None and change[1] < COLLAPSED * change[0] and not run.score_rose():
        fall = f"from {change[0]:.2g} to {change[1]:.2g}"
    if fall:
        yield Advice(
            "entropy",
            f"entropy has collapsed: {fall} nats a token: lower the learning rate, raise the upper clip "
            "bound or add an entropy bonus",
            (f"{ACTOR}.optim.lr", f"{ACTOR}.clip_ratio_high", f"{ACTOR}.entropy_coeff"),
        )


def equal_rewards(run: History) -> Iterator[Advice]:
    """Find a step that has nothing to learn from."""
    low = run.now.get("critic/score/min")
    if low is not None and low == run.now.get("critic/score/max"):
        yield Advice(
            "rewards",
            f"all rewards of this step are {low:g}, so there is nothing to learn from: check the reward "
            "function and the difficulty of the data, or sample more responses to a prompt",
            (f"{ROLLOUT}.n",),
        )


def zero_variance(run: History) -> Iterator[Advice]:
    """Find data that is too easy or too hard for groups to teach anything."""
    share = run.recent("training/zero_variance_groups")
    if share is not None and share > MAX_ZERO_VARIANCE:
        yield Advice(
            "zero_variance",
            f"{share:.0%} of the groups have equal scores and teach nothing: filter them, sample more "
            "responses to a prompt, or take data of another difficulty",
            ("algorithm.filter_groups.enable", f"{ROLLOUT}.n", "data.train_files"),
        )


def truncated(run: History) -> Iterator[Advice]:
    """Find responses that are cut."""
    share = run.now.get("response_length/clip_ratio", 0.0)
    if share > MAX_TRUNCATED:
        limits = ("max_model_len", "multi_turn.max_assistant_turns")
        keys = ("data.max_response_length", *(f"{ROLLOUT}.{limit}" for limit in limits))
        yield Advice("truncated", f"{share:.0%} of the responses were cut at a limit", keys)


def mismatch(run: History) -> Iterator[Advice]:
    """Find generation and training that disagree about log-probs."""
    keys = ("algorithm.rollout_correction.rollout_is", f"{ROLLOUT}.dtype", f"{ROLLOUT}.exact")
    way_out = "use the same dtype for both, or correct for it"
    corrected = bool(run.now.get("rollout_corr/corrected"))
    apart = run.now.get("rollout_corr/k3_kl", 0.0)
    if corrected and apart > MAX_CORRECTED_KL:
        yield Advice(
            "log_probs",
            f"generation and training are {apart:.2g} nats a token apart, more than importance weights can "
            "bridge: look for other weights, another dtype, or too coarse rounding",
            (f"{ROLLOUT}.quantization", *keys[1:]),
        )
    worst = run.now.get("training/rollout_log_probs_diff_max", 0.0)
    if worst > MAX_LOG_PROB_DIFF and not corrected:
        text = f"log-probs of generation and training differ by up to {worst:.2g} nats: {way_out}"
        yield Advice("log_probs", text, keys)
    change = run.change("training/rollout_probs_diff_mean")
    if change is not None and change[1] > max(MISMATCH_GROWTH * change[0], LEAST_MISMATCH):
        yield Advice(
            "log_probs",
            f"the mean difference between probabilities of generation and training has grown from "
            f"{change[0]:.2g} to {change[1]:.2g}: {way_out}",
            keys,
        )


def kl_blow_up(run: History) -> Iterator[Advice]:
    """Find a policy that runs away from the one that sampled, or from the reference."""
    for name, keys in (
        ("actor/ppo_kl", (f"{ACTOR}.optim.lr", f"{ACTOR}.clip_ratio", f"{ACTOR}.ppo_epochs")),
        ("actor/kl_loss", (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.optim.lr")),
        ("actor/reward_kl_penalty", ("algorithm.kl_ctrl.kl_coef", f"{ACTOR}.optim.lr")),
    ):
        change = run.change(name)
        if change is not None and change[1] > max(KL_GROWTH * abs(change[0]), MAX_KL):
            text = f"KL has blown up: {name} went from {change[0]:.2g} to {change[1]:.2g} nats"
            yield Advice("kl", text, keys)


def clamped_kl(run: History) -> Iterator[Advice]:
    """Find tokens so far from the reference that k3, which is clamped there, pulls none of them back."""
    for name, key, way_out in (
        ("actor/kl_clamped_fraction", f"{ACTOR}.kl_loss_type", "k3+ has a gradient there too"),
        ("actor/reward_kl_clamped_fraction", "algorithm.kl_penalty", "kl, which is k1, grows on"),
    ):
        share = run.recent(name)
        if share is not None and share > MAX_CLAMPED:
            yield Advice(
                "kl_clamped",
                f"{share:.0%} of the tokens are so far from the reference that the KL estimate k3 is clamped "
                f"to 10 nats and no longer pulls them back: {way_out}",
                (key, f"{ACTOR}.optim.lr"),
            )


def length_blow_up(run: History) -> Iterator[Advice]:
    """Find responses that grow, or repeat themselves, without being better for it."""
    buffer = "reward.reward_kwargs.overlong_buffer_cfg.enable"
    keys = (buffer, "data.max_response_length", f"{ACTOR}.loss_agg_mode")
    repetition = run.recent("reward_watch/repetition")
    if repetition is not None and repetition > MAX_REPETITION:
        text = f"responses repeat themselves: {repetition:.0%} of their runs of tokens"
        yield Advice("length", text, keys)
    change = run.change("response_length/mean")
    if change is not None and change[1] > MAX_LENGTH_RATIO * change[0] and not run.score_rose():
        growth = f"from {change[0]:.0f} to {change[1]:.0f} tokens"
        yield Advice("length", f"responses have grown {growth}, and the score has not risen", keys)


def failures(run: History) -> Iterator[Advice]:
    """Find trajectories and rewards that fail."""
    finished = run.now.get("training/num_trajectories", 0.0)
    failed = run.total("training/num_failed/")
    errors = run.now.get("reward/num_errors", 0.0)
    if failed > MAX_FAILED * (finished + failed):
        yield Advice(
            "failures",
            f"{failed:.0f} of {finished + failed:.0f} trajectories have failed; failures.json in the run "
            "folder has the first of each cause",
            (f"{ROLLOUT}.agent.retries.infrastructure", f"{ROLLOUT}.agent.deadline"),
        )
    if errors > MAX_FAILED * finished:
        text = f"the reward of {errors:.0f} of {finished:.0f} trajectories has failed"
        yield Advice("failures", text, ("reward.timeout", "reward.on_error"))


def hacking(run: History) -> Iterator[Advice]:
    """Find a score that rises in training while the held-out one falls."""
    best: dict[str, tuple[float, float | None]] = {}
    latest: dict[str, tuple[float, float | None]] = {}
    largest = 0.0
    for held_out, training in run.validations:
        for name, value in held_out.items():
            largest = max(largest, abs(value), abs(training or 0.0))
            latest[name] = (value, training)
            if name not in best or value > best[name][0]:
                best[name] = (value, training)
    least = MAX_DIVERGENCE * largest
    for name, (value, training) in latest.items():
        before, training_before = best[name]
        if training is None or training_before is None:
            continue
        if before - value > least and training - training_before > least:
            yield Advice(
                "hacking",
                f"the policy may please the reward and nothing else: {name} fell from {before:.3g} to "
                f"{value:.3g} while the training score rose from {training_before:.3g} to {training:.3g}",
                ("algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss", "reward.custom_reward_function.path"),
            )


def skipped_steps(run: History) -> Iterator[Advice]:
    """Find optimizer steps that were not taken."""
    for name, value in run.now.items():
        if name.endswith("/num_skipped_steps") and value > 0:
            yield Advice(
                "skipped_steps",
                f"{value:g} optimizer step(s) of {name.split('/')[0]} were skipped because the loss or "
                "gradient was not finite",
                (f"{ACTOR}.optim.lr", f"{ACTOR}.grad_clip", "trainer.max_nonfinite_steps"),
            )


def not_finite(run: History) -> Iterator[Advice]:
    """Find metrics that are no numbers."""
    broken = [name for name, value in run.now.items() if not math.isfinite(value)]
    if broken:
        text = f"{len(broken)} metrics are not finite: {', '.join(broken[:5])}"
        yield Advice("not_finite", text, ())


def idle_rollout(run: History) -> Iterator[Advice]:
    """Find devices that wait for the other half of the run."""
    generating = run.recent("fully_async/rollouter/idle_ratio")
    training = run.recent("fully_async/trainer/idle_ratio")
    if generating is not None and generating > MAX_IDLE:
        yield Advice(
            "idle",
            f"the engines had nothing to generate for {generating:.0%} of the time: let them run further "
            "ahead, or give the trainer more devices",
            ("trainer.async.run_ahead", "trainer.resource_pools"),
        )
    if training is not None and training > MAX_IDLE:
        yield Advice(
            "idle",
            f"the trainer waited for rollouts for {training:.0%} of the time: give generation more devices",
            ("trainer.resource_pools", "trainer.async.max_concurrent_groups"),
        )


def cache_thrash(run: History) -> Iterator[Advice]:
    """Find a cache of keys and values that is too small, or that conversations do not come back to."""
    memory = f"{ROLLOUT}.gpu_memory_utilization"
    requests = run.now.get("rollout/requests", 0.0)
    preempted = run.now.get("rollout/preemptions", 0.0)
    if requests and preempted > MAX_PREEMPTED * requests:
        yield Advice(
            "cache",
            f"{preempted:.0f} of {requests:.0f} requests were preempted because the cache of keys and "
            "values was full, and their tokens were computed again: give it more memory, or run fewer rows",
            (memory, f"{ROLLOUT}.max_num_seqs"),
        )
    hits = run.recent("rollout/prefix_hit_ratio")
    turns = run.recent("agent/num_turns/mean")
    if hits is not None and turns is not None and turns >= 2 and hits < MIN_PREFIX_HITS:
        yield Advice(
            "cache",
            f"conversations of {turns:.1f} turns find only {hits:.0%} of their tokens in the cache: keep "
            "what was computed, and give it memory",
            (f"{ROLLOUT}.enable_prefix_caching", memory),
        )


def low_mfu(run: History) -> Iterator[Advice]:
    """Find updates that use little of the devices."""
    used = run.recent("perf/mfu/actor")
    if used is not None and used < MIN_MFU:
        yield Advice(
            "mfu",
            f"updates of the actor use {used:.0%} of what the devices can compute: put more tokens into a "
            "forward pass, or shard over fewer ranks",
            (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.fsdp_config.fsdp_size"),
        )


Rule = Callable[[History], Iterator[Advice]]
"""Looks at a run and yields what it finds, of which the first counts; nothing where metrics are absent."""
ALARMS: tuple[Rule, ...] = (
    not_finite,
    skipped_steps,
    failures,
    equal_rewards,
    zero_variance,
    truncated,
    entropy_collapse,
    kl_blow_up,
    clamped_kl,
    length_blow_up,
    mismatch,
    hacking,
)
"""Rules about runs that go wrong."""
HINTS: tuple[Rule, ...] = (idle_rollout, cache_thrash, low_mfu)
"""Rules about healthy runs that could be faster; they speak only where no alarm does."""


def find_advice(history: History) -> tuple[list[Advice], list[Advice]]:
    """Return the alarms that hold now, and the hints: none where there is an alarm."""
    alarms = [advice for rule in ALARMS if (advice := next(rule(history), None))]
    if alarms:
        return alarms, []
    return [], [advice for rule in HINTS if (advice := next(rule(history), None))]


class AdviceWatch:
    """Watches one run, step by step."""

    def __init__(self, repeat_every: int = REPEAT_EVERY) -> None:
        self.history = History()
        self._repeat_every = repeat_every
        self._said: dict[str, int] = {}

    def look(self, metrics: Mapping[str, float], step: int) -> list[Advice]:
        """Return the advice that is due after this step: alarms, or hints where there is no alarm."""
        self.history.add(metrics, step)
        alarms, hints = find_advice(self.history)
        due = []
        for advice in alarms or hints:
            if advice.rule not in self._said or step - self._said[advice.rule] >= self._repeat_every:
                self._said[advice.rule] = step
                due.append(advice)
        return due


class StallWatch:
    """Compares the open parts of a step with what they took in earlier steps, in a background thread.

    `running` returns the seconds that each open part has taken so far; `say` is called with a stall, once for
    each time that the part is open.
    """

    def __init__(self, running: Callable[[], Mapping[str, float]], say: Callable[[Advice], None]) -> None:
        self._running = running
        self._say = say
        self._seconds: dict[str, deque[float]] = {}
        self._said: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def finished(self, metrics: Mapping[str, float]) -> None:
        """Take the times of a step that has ended, from its metrics `timing_s/…`."""
        for name, seconds in metrics.items():
            if name.startswith("timing_s/"):
                section = name.removeprefix("timing_s/")
                self._seconds.setdefault(section, deque(maxlen=_KEPT_STEPS)).append(seconds)

    def check(self) -> None:
        """Look at the open parts once."""
        running = self._running()
        self._said &= set(running)
        for section, seconds in running.items():
            before = list(self._seconds.get(section, ()))
            if section in self._said or section == "step" or len(before) < LEAST_STEPS:
                continue
            usual = median(before)
            if seconds > max(STALLED * usual, LEAST_SECONDS):
                self._said.add(section)
                self._say(
                    Advice(
                        "stall",
                        f"timing_s/{section} has taken {seconds:.0f} s so far, and {usual:.1f} s in the "
                        "steps before: something may hang",
                        KEYS.get(section, ("trainer.worker_timeout",)),
                    )
                )

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            self.check()
