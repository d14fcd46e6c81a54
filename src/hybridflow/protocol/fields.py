"""The field table: what each field of a batch is, who writes it and who reads it.

B rows = prompts × n, P prompt tokens, R response tokens, T = P + R. Padded tensors are how the driver stores
them: prompts left-padded, responses right-padded; workers pack.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from hybridflow.protocol.columns import BatchError

_TOKEN_IDS = ("prompts", "responses", "input_ids")
_FILL = {"policy_version": -1, "routed_experts": -1}


@dataclass(frozen=True)
class Field:
    """One line of the table."""

    name: str
    axes: str
    """"B", "B,P", "B,R", "B,T" or "B,K", K keys of the reward."""
    dtype: str
    """A torch dtype by name, or "object" for a column of Python values."""
    unit: str
    writers: str
    readers: str
    meaning: str


_TABLE = """
prompts | B,P | int64 | token id | collate | rollout, viewer | prompt tokens, left-padded
responses | B,R | int64 | token id | collate | engines, rewards | response tokens, right-padded
input_ids | B,T | int64 | token id | collate | engines | prompts and responses side by side
attention_mask | B,T | bool | | collate | engines | true on tokens, false on padding
response_mask | B,R | bool | | collate | rewards, advantages | \
true only on tokens the policy sampled; never changes
loss_mask | B,R | bool | | collate, correction, filters | advantages, losses, metrics | \
subset of response_mask that may still be learned from; narrowed only by narrow_loss_mask
rollout_log_probs | B,R | float32 | nats | rollout | correction, metrics | log-probabilities when sampled
routed_experts | B,T | int16 | expert | rollout or actor | actor | \
[B, T, layers · experts of a token]: where each token went in each sparse layer; -1 without a route
policy_version | B,R | int32 | version | rollout | correction, buffer | version of the weights that sampled it
call | B,R | int32 | | collate | advantages | \
number of its call, in the order of the trajectory's calls; 0 where given
trajectory_id | B | int64 | | collate | advantages, filters, losses, metrics | \
sample of a group: rows of one trajectory share it
lineage | B | int64 | | collate | metrics | number of the row in its trajectory
trajectory_rows | B | int64 | | mini-batches | losses | \
rows of its trajectory that are learned from, where some trajectory has several
row_id | B | int64 | | collate | advantages, metrics | the row itself; a resampled duplicate gets a fresh one
rm_scores | B | float32 | score | reward model | rewards | reward model's score; [B, R] where it is dense
token_level_scores | B,R | float32 | score | rewards | KL penalty, metrics | \
on the last sampled token or dense
token_level_rewards | B,R | float32 | score | KL penalty | advantages | scores less the KL penalty
reward_baselines | B | float32 | score | trajectories | advantages | \
ReMax: score of the prompt's greedy response
reward_components | B,K | float32 | score | driver | advantages | GDPO: the reward's result by key
process_rewards | B,R | float32 | score | process reward model | advantages | \
PRIME: implicit reward of a token
old_log_probs | B,R | float32 | nats | actor | policy losses, correction | log-probabilities before the update
entropys | B,R | float32 | nats | actor | metrics | entropy of the distribution that sampled the token
sum_pi_squared | B,R | float32 | | actor | advantages | sum of squared probabilities over the vocabulary
teacher_log_probs | B,R | float32 | nats | teacher | advantages | log-probabilities of the teacher
teacher_top_outcomes | B,R | float32 | id, nats | teacher | actor | \
[B, R, 2k + 1]: ids of the teacher's k most likely tokens, their log-probabilities and that of all others
ref_log_prob | B,R | float32 | nats | reference | KL penalty, KL loss | log-probabilities of the reference
ref_log_prob_sum | B | float32 | nats | reference | preference losses | \
sum of the reference's log-probabilities over the tokens of loss_mask
preference | B | int64 | | data | preference losses | \
1: the chosen or a desirable answer, 0: the other, -1: one to another prompt (kto)
margin | B | float32 | score | data | reward model | by how much the chosen answer of its pair is better
step_labels | B,R | float32 | | data | reward model | \
1 where a right step ends, 0 elsewhere; loss_mask marks the ends of all steps
reference_point | B | float32 | nats | driver | preference losses | kto: what log-ratios are compared with
values | B,R | float32 | score | critic | advantages, value loss | \
read at the position that predicts the token
advantages | B,R | float32 | score | advantages | policy losses | better than expected by; 0 outside the mask
returns | B,R | float32 | score | advantages | value loss | what the value should have been
rollout_is_weights | B,R | float32 | ratio | correction | policy losses | \
importance against the rollout policy
source_weight | B | float32 | | driver | losses | weight of the row's data source in the loss, where \
algorithm.by_source gives one
source_kl_coef | B | float32 | | driver | losses | coefficient of the KL in the loss, where \
algorithm.by_source gives one
positive | B | bool | | driver | losses | the response is right (acc is 1): the positive-example loss reads it
is_demonstration | B | bool | | trajectories | advantages, metrics | \
SPIN, GKD: the data's answer, not a sampled one
group_ids | B | int64 | | driver | advantages, losses | number of the group: the same for the same uid
media | B | object | tuple | data | engines | pictures and videos of the row (`Medium`), those of a prompt \
the same objects in all its rows; a batch without any lacks the column
uid | B | object | str | collate | advantages, filters, metrics | group: the responses of one prompt share it
finish_reason | B | object | str | rollout | filters, metrics | stop, length or abort
solution_str | B | object | str | collate | rewards | text of the response without special tokens
repetition | B | float64 | share | collectors | reward watch | \
runs of tokens that stood in the response before, where the driver has no responses
overlong_reward | B | object | float | overlong shaping | metrics | what was added to the score; 0 or less
data_source | B | object | str | data | rewards, validation | name of the data set
reward_model | B | object | dict | data | rewards | style and ground_truth
extra_info | B | object | dict | data | rewards | further facts of the data row
"""
"""One line for each field, with its cells in the order of `Field`; a backslash goes on with the line."""

_ROWS = [Field(*map(str.strip, line.split("|"))) for line in _TABLE.strip().splitlines()]
FIELDS: dict[str, Field] = {row.name: row for row in _ROWS}


def field(name: str) -> Field:
    """The table's line for a field. Raises BatchError for a name that is not in it (per-key scores are a
    user's own).
    """
    if name not in FIELDS:
        raise BatchError(f"no field {name!r} in the field table: it has {', '.join(FIELDS)}")
    return FIELDS[name]


def fit_column(name: str, tensor: Tensor, old: tuple[int, int], new: tuple[int, int], pad_id: int) -> Tensor:
    """Return a column of rows with widths (P, R) `old` as one of widths `new`: padded, or cut."""
    axes = FIELDS[name].axes if name in FIELDS else "B"
    fill = pad_id if name in _TOKEN_IDS else _FILL.get(name, 0)
    left = new[0] - old[0] if axes in ("B,P", "B,T") else 0
    right = new[1] - old[1] if axes in ("B,R", "B,T") else 0
    if not left and not right:
        return tensor
    behind = (0, 0) * (tensor.dim() - 2)
    return pad(tensor, (*behind, left, right), value=fill)
