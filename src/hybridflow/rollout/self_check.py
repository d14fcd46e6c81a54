"""Check whether exact mode holds for this model, on this machine, with these threads; once before a run.

    a few requests ──generate, in three compositions──► tokens, log-probs ─┐
    the same rows  ──training forward, in three compositions──► log-probs ─┴──► the first token that differs

Engine and module are those of the run, with whatever they do to go faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.models.attention.rope import longest_generated
from hybridflow.models.exact_mode import ExactMode, uneven_layer
from hybridflow.models.files.probe import varied_tokens
from hybridflow.models.policy import PolicyModel
from hybridflow.models.vision import Vision
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack
from hybridflow.protocol.prompt import MEDIA, Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutEngine, SamplingParams

SMALL_MODEL = 20_000_000
"""Parameters up to which the check takes all its rows and compositions. For a larger model, of which a pass
takes a second, it takes half the rows, short answers, and one composition of each row in training.
"""


ALONE = ReplicaRanks()


@dataclass(frozen=True)
class Mismatch:
    """The first token whose log-probs differ."""

    what: str
    row: int
    token: int
    first: float
    second: float

    def __str__(self) -> str:
        where = f"{self.what}: row {self.row}, token {self.token}"
        return f"{where} has log-prob {self.first!r} and {self.second!r}"


def choose_exact_mode(
    engine: RolloutEngine,
    policy: PolicyModel,
    *,
    longest: int,
    temperature: float,
    ranks: ReplicaRanks = ALONE,
) -> ExactMode | str:
    """Return the cheapest mode in which this awake engine and this module agree to the bit, or why none does.

    `longest`: tokens of the longest row of the run; `ranks`: those that generate together, which all call
    this. The policy is left as it was: the caller switches it.
    """
    refusal = why_never_exact(policy)
    if refusal is not None:
        return refusal
    before = policy.exact
    found: Mismatch | str | None = None
    try:
        for mode in ExactMode.choices(policy.text, longest):
            policy.exact = mode
            found = uneven_layer(policy.text, mode)
            if not ranks.smallest(int(found is None)):  # a rank has slices of its own
                found = found or "a dense layer of another rank depends on the number of rows"
            else:
                found = self_check(engine, policy, longest=longest, temperature=temperature)
            if found is None:
                return mode
    finally:
        policy.exact = before
    return (
        f"the self-check of {type(policy.hf).__name__} with {torch.get_num_threads()} thread(s) found a "
        f"difference: {found}"
    )


def why_never_exact(policy: PolicyModel) -> str | None:
    """Return the reason why exact mode is impossible for this model and device, or None."""
    kinds = {parameter.dtype for parameter in policy.parameters()}
    if policy.device.type != "cpu":
        return (
            f"the model is on {policy.device.type}, whose matrix products depend on the number of rows; "
            "exact mode is for the CPU"
        )
    if kinds != {torch.float32}:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        return f"the model computes in {names}, and exact mode in float32"
    return None


def self_check(
    engine: RolloutEngine, policy: PolicyModel, *, longest: int, temperature: float
) -> Mismatch | None:
    """Compare generation in different batches, and with training in micro-batches, under `policy.exact`."""
    requests = _requests(policy, longest, temperature)
    together = _generate(engine, requests)
    different = _in_other_batches(engine, requests, together)
    return different or _in_training(policy, requests, together, temperature)


def _in_other_batches(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], together: dict[int, GenerationOutput]
) -> Mismatch | None:
    """Generate some requests again, alone and in another order, and return the first difference."""
    for what, some in (("five rows", requests[-1:-6:-1]), ("one row", requests[3:4])):
        for row, output in _generate(engine, some).items():
            known = together[row]
            where = f"generated with {what} and with all"
            different = _first_difference(where, row, output.log_probs, known.log_probs)
            if different is None and output.token_ids != known.token_ids:
                where = f"{where}, another token"
                different = Mismatch(where, row, 0, output.log_probs[0], known.log_probs[0])
            if different is not None:
                return different
    return None


def _in_training(
    policy: PolicyModel,
    requests: Sequence[GenerationRequest],
    together: dict[int, GenerationOutput],
    temperature: float,
) -> Mismatch | None:
    """Score the generated rows with gradients and without; return the first difference."""
    rows = list(together)
    cuts = {
        "all in one micro-batch": [rows],
        "one row": [[row] for row in rows[:8]],
        "a few rows": [rows[1::3], rows[2::3]],
    }
    if not _is_small(policy):
        cuts = {
            "half of the rows": [rows[::2]],
            "one row": [[row] for row in rows[3::4]],
            "a few rows": [rows[1::4]],
        }
    training = [module for module in policy.modules() if module.training]
    try:
        for what, parts in cuts.items():
            policy.train(what != "one row")
            for part in parts:
                outputs = [together[row] for row in part]
                scored = _score(policy, [requests[row] for row in part], outputs, temperature)
                where = f"generated and trained, {what}"
                for row, output, values in zip(part, outputs, scored, strict=True):
                    different = _first_difference(where, row, output.log_probs, values)
                    if different is not None:
                        return different
    finally:
        policy.eval()
        for module in training:
            module.training = True
    return None


def _requests(policy: PolicyModel, longest: int, temperature: float) -> list[GenerationRequest]:
    """Return requests of many lengths, some twice, without random numbers; rows leave at different times."""
    vocabulary = policy.head.weight.shape[0]
    positions = longest_generated(policy.config) or longest
    room = max(2, min(longest, positions))
    lengths = (1, 7, room // 3, 16, room // 2, room // 5, room // 4, room)
    num_prompts = 8
    spread = 3
    if _is_small(policy):
        lengths = (1, 7, room // 3, 16, room // 2, 3 * room // 4, room // 4, room)
        num_prompts = 16
        spread = 10
    num_rows = 3 * num_prompts // 2
    answers = [min(room - 1, 3 + (5 * row) % spread) for row in range(num_rows)]
    requests = []
    for row, answer in enumerate(answers):
        prompt = row % num_prompts
        wanted = lengths[prompt % 8] + prompt // 8
        length = max(1, min(wanted, room - max(answers)))
        ids = tuple(varied_tokens(prompt, length, vocabulary))
        sampling = SamplingParams(max_tokens=answer, temperature=temperature, ignore_eos=True)
        read = Prompt(ids)
        if policy.vision is not None and prompt % 3 == 0:
            read = _with_picture(policy.vision, ids, room - max(answers))
        requests.append(GenerationRequest(row, read, sampling, seed=1000 + row))
    return requests


def _is_small(policy: PolicyModel) -> bool:
    return policy.num_parameters <= SMALL_MODEL


def _with_picture(vision: Vision, ids: tuple[int, ...], room: int) -> Prompt:
    """Return the prompt of these tokens behind a picture, where both fit into `room` tokens."""
    medium = vision.sample()
    if medium.length + 1 > room:
        return Prompt(ids)
    placeholders = (vision.placeholder,) * medium.length
    return Prompt(placeholders + ids[: room - medium.length], (medium,))


def _generate(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> dict[int, GenerationOutput]:
    outputs = list(engine.generate(requests))
    return {output.request_id: output for output in sorted(outputs, key=lambda output: output.request_id)}


def _score(
    policy: PolicyModel,
    requests: Sequence[GenerationRequest],
    outputs: Sequence[GenerationOutput],
    temperature: float,
) -> list[list[float]]:
    """Return the log-probs of the responses as an update computes them, these rows in one micro-batch."""
    prompts = [request.prompt_token_ids for request in requests]
    responses = [output.token_ids for output in outputs]
    media = {MEDIA: [request.prompt.media for request in requests]}
    packed = pack(DataProto.from_dict(make_rows(prompts, responses, pad_id=0), media))
    with torch.set_grad_enabled(policy.training):
        log_probs = policy(packed, temperature=temperature).log_probs.detach()
    return [part.tolist() for part in log_probs.split([len(response) for response in responses])]


def _first_difference(
    what: str, row: int, first: Sequence[float], second: Sequence[float]
) -> Mismatch | None:
    for token, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return Mismatch(what, row, token, one, other)
    return None
