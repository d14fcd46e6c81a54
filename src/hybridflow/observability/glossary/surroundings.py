"""Entries of the glossary: other runs, validation, agents, rewards, generation and speed."""

from __future__ import annotations

from hybridflow.observability.glossary.entry import MetricEntry

SURROUNDINGS: dict[str, tuple[MetricEntry, ...]] = {
    "Supervised runs, preferences, reward models": (
        MetricEntry(
            "train/loss",
            "Training loss: nats per token of conversations, the mean over the items of comparisons.",
            "nats",
            "lower",
            ("line", "report"),
        ),
        MetricEntry("val/loss", "The same loss on the validation data.", "nats", "lower", ("report",)),
        MetricEntry(
            "train/accuracy",
            "Part of the pairs, answers or steps that are ordered right.",
            "fraction",
            "higher",
            ("line",),
        ),
        MetricEntry("val/accuracy", "The same part of the validation data.", "fraction", "higher"),
        MetricEntry("train/reward_chosen", "Mean reward of the chosen answers.", "reward"),
        MetricEntry("val/reward_chosen", "The same on the validation data.", "reward"),
        MetricEntry("train/reward_rejected", "Mean reward of the rejected answers.", "reward"),
        MetricEntry("val/reward_rejected", "The same on the validation data.", "reward"),
        MetricEntry(
            "val/margin", "Mean reward of the chosen less that of the rejected answers.", "reward", "higher"
        ),
        MetricEntry("train/share_right", "Part of the steps that are labelled as right.", "fraction"),
        MetricEntry("val/share_right", "The same on the validation data.", "fraction"),
    ),
    "Validation and evaluation": (
        MetricEntry(
            "val-core/{source}/{variable}/mean@{n}",
            "Mean of acc, where the reward returns it, else of the reward.",
            "reward",
            "higher",
            ("report", "reward watch", "health"),
        ),
        MetricEntry(
            "val-core/{source}/{variable}/best@{k}/mean",
            "Expected best of k responses.",
            "reward",
            "higher",
            ("report",),
        ),
        MetricEntry(
            "val-core/{source}/{variable}/worst@{k}/mean",
            "Expected worst of k responses.",
            "reward",
            "higher",
            ("report",),
        ),
        MetricEntry(
            "val-core/{source}/{variable}/maj@{k}/mean",
            "Expected score of the answer that most of k responses give.",
            "reward",
            "higher",
            ("report",),
        ),
        MetricEntry(
            "val-core/{source}/{variable}/std@{n}",
            "Standard deviation over the responses to a prompt, the mean over prompts.",
            "reward",
            "",
            ("report",),
        ),
        MetricEntry(
            "val-core/{source}/mean@{n}",
            "Mean score of `hybridflow eval`.",
            "reward",
            "higher",
            ("report", "reward watch", "health"),
        ),
        MetricEntry(
            "val-core/{source}/pass@{k}",
            "Chance that one of k responses is right (`hybridflow eval`).",
            "probability",
            "higher",
            ("report",),
        ),
        MetricEntry(
            "val-core/{source}/best@{k}",
            "Expected best of k responses (`hybridflow eval`).",
            "reward",
            "higher",
            ("report",),
        ),
        MetricEntry(
            "val-core/{source}/maj@{k}",
            "Expected score of the majority's answer (`hybridflow eval`).",
            "reward",
            "higher",
            ("report",),
        ),
        MetricEntry("val-aux/response_length/mean", "Mean length of the validation's responses.", "tokens"),
        MetricEntry(
            "val-aux/response_length/clip_ratio",
            "Part of the validation's responses that were cut at a limit.",
            "fraction",
            "lower",
        ),
        MetricEntry("val-aux/{source}/{variable}/mean@{n}", "Mean of another number of the reward's.", "1"),
        MetricEntry(
            "val-aux/{source}/{variable}/best@{k}/mean", "Expected largest of k responses' numbers.", "1"
        ),
        MetricEntry(
            "val-aux/{source}/{variable}/worst@{k}/mean", "Expected smallest of k responses' numbers.", "1"
        ),
        MetricEntry(
            "val-aux/{source}/{variable}/maj@{k}/mean", "Expected number of the majority's answer.", "1"
        ),
        MetricEntry(
            "val-aux/{source}/{variable}/std@{n}", "Its deviation over the responses to a prompt.", "1"
        ),
    ),
    "Agents": (
        MetricEntry(
            "agent/num_turns/mean",
            "Calls to the model in a trajectory, mean.",
            "calls",
            "",
            ("report", "health"),
        ),
        MetricEntry(
            "agent/num_turns/max", "Most calls to the model in a trajectory.", "calls", "", ("report",)
        ),
        MetricEntry(
            "agent/num_rows/mean", "Rows of the batch that a trajectory became, mean.", "rows", "lower"
        ),
        MetricEntry(
            "agent/num_messages", "Messages of a conversation that an agent loop counted.", "messages"
        ),
        MetricEntry("agent/generate_sequences", "Time in which the model answered an agent loop.", "s"),
        MetricEntry("agent/tool_calls", "Time in which tools answered an agent loop.", "s"),
        MetricEntry("agent/compute_score", "Time in which an agent loop scored.", "s"),
        MetricEntry("agent/num_preempted", "Preemptions that an agent loop reports.", "preemptions", "lower"),
        MetricEntry("agent/tools/tool_calls", "Tool calls of a trajectory.", "calls", "", ("report",)),
        MetricEntry(
            "agent/tools/malformed", "Tool calls that could not be parsed.", "calls", "lower", ("report",)
        ),
        MetricEntry(
            "agent/tools/unknown", "Calls of tools that there are not.", "calls", "lower", ("report",)
        ),
        MetricEntry("agent/tools/raised", "Tool calls that raised.", "calls", "lower", ("report",)),
        MetricEntry("agent/tools/deadline", "Tool calls that took too long.", "calls", "lower", ("report",)),
        MetricEntry(
            "agent/tools/too_many", "Tool calls beyond the limit of a turn.", "calls", "lower", ("report",)
        ),
        MetricEntry(
            "agent/boundary_merges",
            "Places where the chat template would have joined tokens of two messages.",
            "places",
            "lower",
        ),
        MetricEntry(
            "agent/template_differences",
            "Part of the conversations that the chat template would have tokenised differently as a whole.",
            "fraction",
            "lower",
        ),
        MetricEntry(
            "agent/num_retried/{cause}",
            "Trajectories that failed and were tried again, by their cause.",
            "trajectories",
            "lower",
            ("report",),
        ),
        MetricEntry(
            "agent/num_failed/{cause}",
            "Trajectories of a validation that failed, by their cause.",
            "trajectories",
            "lower",
        ),
        MetricEntry("agent/max_concurrent", "Most trajectories that ran at the same time.", "trajectories"),
        MetricEntry("agent/processes/calls", "Calls of the user's code in worker processes.", "calls"),
        MetricEntry("agent/processes/deaths", "Worker processes that died.", "processes", "lower"),
        MetricEntry(
            "agent/processes/kills", "Worker processes that were ended at a deadline.", "processes", "lower"
        ),
        MetricEntry(
            "agent/environment/{name}", "Mean of a number that the environment reports.", "the environment's"
        ),
        MetricEntry("agent/{name}", "Mean of a number that an agent of yours reports.", "the agent's"),
    ),
    "Rewards": (
        MetricEntry("reward/num_errors", "Rows whose reward function failed.", "rows", "lower", ("health",)),
        MetricEntry("reward/num_errors/{kind}", "The same, by the kind of the error.", "rows", "lower"),
        MetricEntry("reward/num_timeouts", "Rows whose reward took longer than it may.", "rows", "lower"),
        MetricEntry("reward/num_retries", "Further tries of rewards that failed.", "tries", "lower"),
        MetricEntry("reward/num_cached", "Rows whose score was known from an equal row.", "rows"),
        MetricEntry("reward/seconds", "Time that was waited for rewards after generation.", "s", "lower"),
        MetricEntry("reward/seconds_per_row_max", "Longest time that a row's reward took.", "s", "lower"),
        MetricEntry(
            "reward_watch/repetition",
            "Part of the runs of four tokens that stood in the response before.",
            "fraction",
            "lower",
            ("reward watch", "health"),
        ),
        MetricEntry(
            "reward_watch/format_only",
            "Part of the responses whose form is right and whose answer is wrong.",
            "fraction",
            "lower",
            ("reward watch",),
        ),
        MetricEntry("reward_watch/length", "Mean length of the responses.", "tokens", "", ("reward watch",)),
    ),
    "Checkpoints": (
        MetricEntry(
            "checkpoint/failed_copies",
            "Copies to trainer.remote_checkpoint_dir that could not be completed, since the run began.",
            "copies",
            "lower",
        ),
    ),
    "Speed and generation": (
        MetricEntry("perf/total_num_tokens", "Tokens of prompts and responses in the batch.", "tokens"),
        MetricEntry(
            "perf/time_per_step", "Time of the step without its validation.", "s", "lower", ("line",)
        ),
        MetricEntry(
            "perf/throughput",
            "Tokens of the batch for each second of the step.",
            "tokens/s",
            "higher",
            ("line", "report"),
        ),
        MetricEntry(
            "perf/rollout_tokens_per_second",
            "Tokens sampled for each second of generation.",
            "tokens/s",
            "higher",
        ),
        MetricEntry(
            "perf/driver_bytes", "Bytes that the driver sent and received by value.", "bytes", "lower"
        ),
        MetricEntry(
            "perf/predicted/{section}",
            "Time that a part of the step should take for its rows, by the model of `hybridflow plan`. The "
            "first step is predicted by the devices' figures alone, and corrects the later ones.",
            "s",
        ),
        MetricEntry(
            "perf/mfu/{role}",
            "Part of the accelerators' peak that the updates of a role use (model FLOPs utilisation).",
            "fraction",
            "higher",
            ("health",),
        ),
        MetricEntry(
            "perf/peak_memory",
            "Most memory of a process of the actor in the step: of its GPU, or main memory on a CPU.",
            "GiB",
            "lower",
        ),
        MetricEntry(
            "perf/predicted/peak_memory",
            "The same by the estimate of `config --explain`, which the first step corrects by what the "
            "libraries take.",
            "GiB",
        ),
        MetricEntry("rollout/generated_tokens", "Tokens that were sampled.", "tokens"),
        MetricEntry(
            "rollout/prefill_tokens", "Prompt tokens that were computed; shared ones count once.", "tokens"
        ),
        MetricEntry(
            "rollout/requests",
            "Requests that were admitted; a preempted one counts again.",
            "requests",
            "",
            ("health",),
        ),
        MetricEntry("rollout/prompt_tokens", "Tokens of the prompts of admitted requests.", "tokens"),
        MetricEntry(
            "rollout/preemptions",
            "Requests that had to wait again because the cache of keys and values was full.",
            "requests",
            "lower",
            ("health",),
        ),
        MetricEntry(
            "rollout/prefix_hit_ratio",
            "Part of the prompts' tokens that were found in the cache or shared within a group.",
            "fraction",
            "higher",
            ("health",),
        ),
        MetricEntry("rollout/decode_steps", "Decode steps of all replicas.", "steps", "lower"),
        MetricEntry("rollout/max_rows", "Most rows that one replica decoded together.", "rows"),
        MetricEntry(
            "fully_async/trainer/idle_ratio",
            "Share of the time since the last step's line in which the trainer waited for rollouts; under "
            "the schedules that generate ahead.",
            "fraction",
            "lower",
            ("health",),
        ),
        MetricEntry(
            "fully_async/rollouter/idle_ratio",
            "Share of the same time in which the engines, on the mean, were not stepped for any request. "
            "With trainer.num_collectors a group counts as one until it is scored.",
            "fraction",
            "lower",
            ("health",),
        ),
        MetricEntry(
            "fully_async/rollouter/standing_ratio",
            "The part of it in which they had requests: new weights came, or their devices trained. In the "
            "rest there were none: no group may be admitted, or rewards and tools are awaited.",
            "fraction",
            "lower",
        ),
        MetricEntry("timing_s/{section}", "Time of a part of the step.", "s", "lower", ("line", "report")),
    ),
}
