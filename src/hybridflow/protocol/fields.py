"""The field table: what each field of a batch is, who writes it and who reads it.

B rows = prompts × n, P prompt tokens, R response tokens, T = P + R. Padded tensors are how the driver stores
them: prompts left-padded, responses right-padded; workers pack. `describe` turns the table into text for
documents and messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.protocol.columns import BatchError


@dataclass(frozen=True)
class Field:
    """One line of the table."""

    name: str
    axes: str
    """"B", "B,P", "B,R", "B,T" or "B,K", K keys of the reward."""
    dtype: str
    """A torch dtype by name, or "object" for a column of Python values."""
    unit: str
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    meaning: str


_ROWS = (
    Field(
        "prompts",
        "B,P",
        "int64",
        "token id",
        ("collate",),
        ("rollout", "viewer"),
        "prompt tokens, left-padded",
    ),
    Field(
        "responses",
        "B,R",
        "int64",
        "token id",
        ("collate",),
        ("engines", "rewards"),
        "response tokens, right-padded",
    ),
    Field(
        "input_ids",
        "B,T",
        "int64",
        "token id",
        ("collate",),
        ("engines",),
        "prompts and responses side by side",
    ),
    Field(
        "attention_mask", "B,T", "bool", "", ("collate",), ("engines",), "true on tokens, false on padding"
    ),
    Field(
        "response_mask",
        "B,R",
        "bool",
        "",
        ("collate",),
        ("rewards", "advantages"),
        "true only on tokens the policy sampled; never changes",
    ),
    Field(
        "loss_mask",
        "B,R",
        "bool",
        "",
        ("collate", "correction", "filters"),
        ("advantages", "losses", "metrics"),
        "subset of response_mask that may still be learned from; narrowed only by narrow_loss_mask",
    ),
    Field(
        "rollout_log_probs",
        "B,R",
        "float32",
        "nats",
        ("rollout",),
        ("correction", "metrics"),
        "log-probabilities when sampled",
    ),
    Field(
        "policy_version",
        "B,R",
        "int32",
        "version",
        ("rollout",),
        ("correction", "buffer"),
        "version of the weights that sampled it",
    ),
    Field(
        "call",
        "B,R",
        "int32",
        "",
        ("collate",),
        ("advantages",),
        "number of the call that sampled it, in the order of the trajectory's calls",
    ),
    Field(
        "trajectory_id",
        "B",
        "int64",
        "",
        ("collate",),
        ("advantages", "filters", "losses", "metrics"),
        "sample of a group: the rows of one trajectory share it",
    ),
    Field("lineage", "B", "int64", "", ("collate",), ("metrics",), "number of the row in its trajectory"),
    Field(
        "trajectory_rows",
        "B",
        "int64",
        "",
        ("mini-batches",),
        ("losses",),
        "rows of its trajectory that are learned from, where a trajectory has several",
    ),
    Field(
        "row_id",
        "B",
        "int64",
        "",
        ("collate",),
        ("advantages", "metrics"),
        "the row itself; a resampled duplicate gets a fresh one",
    ),
    Field(
        "rm_scores",
        "B",
        "float32",
        "score",
        ("reward model",),
        ("rewards",),
        "reward model's score; [B, R] where it is dense",
    ),
    Field(
        "token_level_scores",
        "B,R",
        "float32",
        "score",
        ("rewards",),
        ("KL penalty", "metrics"),
        "on the last sampled token or dense",
    ),
    Field(
        "token_level_rewards",
        "B,R",
        "float32",
        "score",
        ("KL penalty",),
        ("advantages",),
        "scores less the KL penalty",
    ),
    Field(
        "reward_baselines",
        "B",
        "float32",
        "score",
        ("trajectories",),
        ("advantages",),
        "ReMax: score of the prompt's greedy response",
    ),
    Field(
        "reward_components",
        "B,K",
        "float32",
        "score",
        ("driver",),
        ("advantages",),
        "GDPO: the reward's result by key",
    ),
    Field(
        "process_rewards",
        "B,R",
        "float32",
        "score",
        ("process reward model",),
        ("advantages",),
        "PRIME: implicit reward of a token",
    ),
    Field(
        "old_log_probs",
        "B,R",
        "float32",
        "nats",
        ("actor",),
        ("policy losses", "correction"),
        "log-probabilities before the update",
    ),
    Field(
        "entropys",
        "B,R",
        "float32",
        "nats",
        ("actor",),
        ("metrics",),
        "entropy of the distribution that sampled the token",
    ),
    Field(
        "sum_pi_squared",
        "B,R",
        "float32",
        "",
        ("actor",),
        ("advantages",),
        "sum of squared probabilities over the vocabulary",
    ),
    Field(
        "teacher_log_probs",
        "B,R",
        "float32",
        "nats",
        ("teacher",),
        ("advantages",),
        "log-probabilities of the teacher",
    ),
    Field(
        "ref_log_prob",
        "B,R",
        "float32",
        "nats",
        ("reference",),
        ("KL penalty", "KL loss"),
        "log-probabilities of the reference",
    ),
    Field(
        "values",
        "B,R",
        "float32",
        "score",
        ("critic",),
        ("advantages", "value loss"),
        "read at the position that predicts the token",
    ),
    Field(
        "advantages",
        "B,R",
        "float32",
        "score",
        ("advantages",),
        ("policy losses",),
        "better than expected by; 0 outside the mask",
    ),
    Field(
        "returns",
        "B,R",
        "float32",
        "score",
        ("advantages",),
        ("value loss",),
        "what the value should have been",
    ),
    Field(
        "rollout_is_weights",
        "B,R",
        "float32",
        "ratio",
        ("correction",),
        ("policy losses",),
        "importance against the rollout policy",
    ),
    Field(
        "positive",
        "B",
        "bool",
        "",
        ("driver",),
        ("losses",),
        "the response is right (acc is 1): the positive-example loss reads it",
    ),
    Field(
        "is_demonstration",
        "B",
        "bool",
        "",
        ("trajectories",),
        ("advantages", "metrics"),
        "SPIN: the data's answer, not a sampled one",
    ),
    Field(
        "group_ids",
        "B",
        "int64",
        "",
        ("driver",),
        ("advantages", "losses"),
        "number of the group: the same for the same uid",
    ),
    Field(
        "uid",
        "B",
        "object",
        "str",
        ("collate",),
        ("advantages", "filters", "metrics"),
        "group: the responses of one prompt share it",
    ),
    Field(
        "finish_reason", "B", "object", "str", ("rollout",), ("filters", "metrics"), "stop, length or abort"
    ),
    Field(
        "solution_str",
        "B",
        "object",
        "str",
        ("collate",),
        ("rewards",),
        "text of the response without special tokens",
    ),
    Field(
        "overlong_reward",
        "B",
        "object",
        "float",
        ("overlong shaping",),
        ("metrics",),
        "what was added to the score; 0 or less",
    ),
    Field("data_source", "B", "object", "str", ("data",), ("rewards", "validation"), "name of the data set"),
    Field("reward_model", "B", "object", "dict", ("data",), ("rewards",), "style and ground_truth"),
    Field("extra_info", "B", "object", "dict", ("data",), ("rewards",), "further facts of the data row"),
)

FIELDS: dict[str, Field] = {row.name: row for row in _ROWS}


def field(name: str) -> Field:
    """The table's line for a field. Raises BatchError for a name that is not in it (per-key scores are a
    user's own).
    """
    if name not in FIELDS:
        raise BatchError(f"no field {name!r} in the field table: it has {', '.join(FIELDS)}")
    return FIELDS[name]


def describe() -> str:
    """The table as Markdown."""
    lines = [
        "| field | axes | dtype | unit | written by | read by | meaning |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in _ROWS:
        people = (", ".join(row.writers), ", ".join(row.readers))
        lines.append(
            f"| `{row.name}` | [{row.axes}] | {row.dtype} | {row.unit} | {people[0]} | {people[1]} | "
            f"{row.meaning} |"
        )
    return "\n".join(lines)
