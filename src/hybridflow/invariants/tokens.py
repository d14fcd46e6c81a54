"""Properties of what is read and learned: masks, conversations, packed rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from hybridflow.invariants.checking import AdapterCall, close, holds, same, that

CONVERSATION = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "alpha"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "gamma"},
)
ROWS = ([3, 14, 15, 9, 2], [6, 5, 3, 5])


@holds("response_mask", "TRL #4974")
def an_end_that_is_padding_is_learned(call: AdapterCall) -> None:
    """Where the end token is the padding token too, the mask covers the sampled end and no padding."""
    found = call([[5, 6, 7, 2], [5, 2]], eos=2, pad=2)
    same(found.bool(), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool())


@holds("response_mask", "TRL #4974")
def a_response_without_end_is_whole(call: AdapterCall) -> None:
    """A response that was cut at the limit is in the mask to its last token."""
    found = call([[5, 6, 7], [5, 2]], eos=2, pad=0)
    same(found.bool(), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool())


@holds("conversation", "slime #1563, slime #1418")
def both_answers_are_learned(call: AdapterCall) -> None:
    """Both answers of a conversation of two are learned, each as a run, and no question is."""
    runs = _learned(call)
    told = len(runs) == 2 and "alpha" in runs[0] and "gamma" in runs[1]
    that(told and not any("one" in run or "two" in run for run in runs), runs, "two runs, alpha and gamma")


@holds("conversation", "prime-rl #2471")
def the_role_is_not_learned(call: AdapterCall) -> None:
    """Learning of a turn begins with its first word, not with the opening that the template writes."""
    runs = _learned(call)
    opened = [run.lstrip().startswith(word) for run, word in zip(runs, ("alpha", "gamma"))]
    that(all(opened), runs, "runs that begin with alpha and gamma")


@holds("conversation", "prime-rl #2471, TRL #4974")
def the_end_of_a_turn_is_learned(call: AdapterCall) -> None:
    """The token that ends a turn is learned with it: else the model does not learn to stop."""
    runs = _learned(call)
    ended = [run.strip() != word and word in run for run, word in zip(runs, ("alpha", "gamma"))]
    that(len(ended) == 2 and all(ended), runs, "runs that go on after alpha and gamma")


@holds("packed_positions", "NeMo-RL #4167")
def positions_begin_anew_in_each_row(call: AdapterCall) -> None:
    """Packed rows count their positions from 0."""
    found = list(map(int, call([3, 1, 2])))
    that(found == [0, 1, 2, 0, 0, 1], found, "[0, 1, 2, 0, 0, 1]")


@holds("packed_outputs", "NeMo-RL #4167")
def packed_rows_do_not_see_each_other(call: AdapterCall) -> None:
    """Another first row changes no bit of the second row's outputs."""
    same(call([list(ROWS[0]), list(ROWS[1])])[1], call([[8, 8, 8, 8, 8], list(ROWS[1])])[1])


@holds("packed_outputs", "NeMo-RL #4167")
def a_packed_row_is_the_row_alone(call: AdapterCall) -> None:
    """A row's outputs behind another row are those that it has alone."""
    close(call([list(ROWS[0]), list(ROWS[1])])[1], call([list(ROWS[1])])[0], rtol=1e-4, atol=1e-5)


def _learned(call: AdapterCall) -> Sequence[str]:
    """Return the text of each run of learned tokens of the conversation."""
    tokens = call([dict(message) for message in CONVERSATION])
    runs = itertools.groupby(tokens, key=lambda token: int(token[1]))
    return ["".join(text for text, _ in run) for learned, run in runs if learned]
