"""The interface of all generation engines: requests, outputs, statistics, and the engine itself.

    GenerationRequest (ids, sampling, seed) ──RolloutEngine──► GenerationOutput (ids, log-probs, versions)

Tokens in, tokens out: text is for templates and rewards, and a sampled token is never tokenised again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.errors import RolloutError
from hybridflow.protocol.prompt import Prompt, Units

if TYPE_CHECKING:  # an engine's clients need this module, and no model library
    from hybridflow.models.policy import PolicyModel

FinishReason = Literal["stop", "length", "abort", "error"]

TEMPERATURES = (1e-20, 1e20)
"""Lowest and highest temperature of a request that samples: float32 logits divided by it stay finite."""
PENALTIES = (1e-6, 1e6)
"""Lowest and highest repetition penalty, for the same reason."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends; RolloutError for values out of range."""

    max_tokens: int
    """The response has at most this many tokens, the stop token included."""
    temperature: float = 1.0
    """Divisor of the logits; 0 means greedy."""
    top_k: int = -1
    """Keep the k most probable tokens; -1 or 0: all."""
    top_p: float = 1.0
    """Of those, keep the fewest whose probabilities sum to this; 1: all."""
    greedy: bool = False
    """Take the most probable token; its log-prob is then the one at temperature 1."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response besides the model's end tokens; kept in it."""
    ignore_eos: bool = False
    """Go on after the model's end tokens; `stop_token_ids` and `stop` still end the response."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one."""
    repetition_penalty: float = 1.0
    """Divide the positive and multiply the negative logits of tokens that the prompt or the response has
    (Keskar et al. 2019, CTRL).
    """
    min_tokens: int = 0
    """No token that would end the response is chosen before it has this many."""
    stop: tuple[str, ...] = ()
    """Texts that end the response; the token that completes one is the last, and is kept."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, number that is added to its logit)."""
    top_log_probs: int = 0
    """Number of most probable tokens whose log-probs are returned at each place."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RolloutError(
                f"max_tokens={self.max_tokens}: a response has at least 1 token (data.max_response_length)"
            )
        low, high = TEMPERATURES
        if self.temperature != 0 and not low <= self.temperature <= high:
            raise RolloutError(
                f"temperature={self.temperature}: use a number from {low:g} to {high:g}, or 0 for greedy"
            )
        if self.top_k < -1:
            raise RolloutError(f"top_k={self.top_k}: use -1 for all tokens, or at least 1")
        if not 0 < self.top_p <= 1:
            raise RolloutError(f"top_p={self.top_p}: use a number above 0 and at most 1 (1 keeps all tokens)")
        if not 0 <= self.min_p <= 1:
            raise RolloutError(f"min_p={self.min_p}: use a number from 0 (keeps all tokens) to 1")
        low, high = PENALTIES
        if not low <= self.repetition_penalty <= high:
            raise RolloutError(
                f"repetition_penalty={self.repetition_penalty}: use a number above 0, from {low:g} to "
                f"{high:g} (1 changes nothing)"
            )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RolloutError(
                f"min_tokens={self.min_tokens}: use a number from 0 to max_tokens={self.max_tokens}"
            )
        if self.top_log_probs < 0:
            raise RolloutError(f"top_log_probs={self.top_log_probs}: use 0 for none, or how many")
        if "" in self.stop:
            raise RolloutError("stop has an empty text, which every response ends with: leave it out")
        for text in self.stop:
            if not is_unicode(text):
                raise RolloutError(
                    f"stop has the text {text!a}, half of a surrogate pair: send whole characters"
                )

    @property
    def takes_argmax(self) -> bool:
        """Whether the most probable token is taken: greedy, or temperature 0."""
        return self.greedy or self.temperature == 0

    @property
    def limits_tokens(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return not self.takes_argmax and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


TopTokens = list[tuple[int, float]]
"""(id, log-prob) of the most probable tokens at one place, the most probable first."""


@dataclass(frozen=True)
class PartialResponse:
    """The part of its response that a request has; RolloutError for tuples that are not equally long."""

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """Nats, as in `GenerationOutput`."""
    policy_versions: tuple[int, ...] = ()
    """Version of the weights that sampled each token."""
    top_log_probs: tuple[TopTokens, ...] | None = None
    """As in `GenerationOutput`."""

    def __post_init__(self) -> None:
        columns = (self.token_ids, self.log_probs, self.policy_versions, self.top_log_probs)
        lengths = [len(column) for column in columns if column is not None]
        if len(set(lengths)) > 1:
            raise RolloutError(
                f"partial_response has {lengths[0]} tokens, {lengths[1]} log-probs, {lengths[2]} versions"
                f"{f' and {lengths[3]} top log-probs' if len(lengths) > 3 else ''}: give one of each for "
                "each token"
            )

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class GenerationRequest:
    """One response to be sampled, or continued."""

    request_id: int
    """Number that no other request has which an engine serves at the same time."""
    prompt: Prompt
    sampling: SamplingParams
    seed: int
    """Key of this request's draws, for example `derive_seed(seed, "rollout", step, row)`; nothing else enters
    its random numbers.
    """
    partial_response: PartialResponse = PartialResponse()
    """What was generated of the response before. It is part of the context and of the output; max_tokens,
    min_tokens, the repetition penalty and stop texts count it, and draws go on at the place where it stopped.
    """

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt, placeholders included."""
        return self.prompt.token_ids

    @property
    def context(self) -> Units:
        """Identity of what the next token follows: the prompt and what was generated before."""
        return self.prompt.key + self.partial_response.token_ids

    def continued(self, output: GenerationOutput) -> GenerationRequest:
        """Return the request that goes on after `output`, which is this one's response so far."""
        top = None
        if output.top_log_probs is not None:
            top = tuple(output.top_log_probs)
        partial_response = PartialResponse(
            tuple(output.token_ids), tuple(output.log_probs), tuple(output.policy_versions), top
        )
        return replace(self, partial_response=partial_response)

    @property
    def most_tokens(self) -> int:
        """Most tokens that prompt and response may have together."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def deal_key(self) -> Units:
        """Requests of one prompt stay together when distributed over replicas: they share its prefill."""
        return self.prompt.key

    @property
    def deal_cost(self) -> float:
        """Most tokens that the request may come to; how long its response becomes is not known before."""
        return float(self.most_tokens)


@dataclass(frozen=True)
class GenerationOutput:
    """The outcome of one request; the three lists are equally long."""

    request_id: int
    token_ids: list[int]
    """Response tokens, the stop token included."""
    log_probs: list[float]
    """Nats, of the temperature-scaled full distribution of the raw logits, as in training: top_k, top_p,
    min_p, repetition_penalty, logit_bias and min_tokens change which token is chosen and not its log-prob.
    """
    finish_reason: FinishReason
    policy_versions: list[int]
    """Version of the weights that sampled each token."""
    error: str | None = None
    """Reason of the failure, when `finish_reason` is "error"."""
    stop_reason: int | str | None = None
    """Token or text that ended the response, when `finish_reason` is "stop"."""
    top_log_probs: list[TopTokens] | None = None
    """The most probable tokens at the place of each token; None where not asked for."""
    refused: bool = False
    """True when `error` is the request's own fault, found before anything was generated."""
    routes: NDArray[np.int16] | None = field(default=None, compare=False)
    """Experts [tokens, W] that prompt and response went to in each sparse layer, but for the last token,
    which no pass has read; None where they are not recorded.
    """

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for another process: of a token its id, its log-prob and no more."""
        versions = [(version, len(list(run))) for version, run in groupby(self.policy_versions)]
        lists = {"token_ids": _ids(self.token_ids), "log_probs": _floats(self.log_probs)}
        return {**self.__dict__, **lists, "policy_versions": versions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        versions = [version for version, count in state["policy_versions"] for _ in range(count)]
        lists = {"token_ids": state["token_ids"].tolist(), "log_probs": state["log_probs"].tolist()}
        self.__dict__.update({**state, **lists, "policy_versions": versions})


def _ids(values: Sequence[int]) -> array[int]:
    """Return integers as the narrowest array that holds them."""
    for code in "BHi":
        try:
            return array(code, values)
        except OverflowError:
            continue
    return array("q", values)


def _floats(values: Sequence[float]) -> array[float]:
    """Return floats as an array of 4 bytes each where that changes none, as it is with what a model gives."""
    narrow = array("f", values)
    if narrow.tolist() == list(values):
        return narrow
    return array("d", values)


@dataclass(frozen=True)
class PartialOutput:
    """The newest tokens of a running request; the lists are equally long."""

    request_id: int
    start: int
    """Response tokens before these."""
    token_ids: list[int]
    log_probs: list[float]
    """Nats, as in `GenerationOutput`."""
    top_log_probs: list[TopTokens] | None = None
    """As in `GenerationOutput`."""


@dataclass
class RolloutStats:
    """Counts of one or several sessions of an engine."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed; prompts that several requests share count once."""
    requests: int = 0
    """Requests that were admitted; one that was preempted counts again."""
    prompt_tokens: int = 0
    """Tokens of their prompts, those that were found in the cache or shared among them too."""
    preemptions: int = 0
    """Requests that had to wait again because the cache was full."""
    decode_steps: int = 0
    """Decode steps of all replicas."""
    max_rows: int = 0
    """Most rows that one replica decoded together."""
    draft_tokens: int = 0
    """Tokens that were drafted and verified."""
    accepted_draft_tokens: int = 0
    """Those of them that were right."""
    seconds: float = 0.0

    @classmethod
    def join(cls, parts: Sequence[RolloutStats], *, together: bool) -> RolloutStats:
        """Add up counts; the seconds are those of the slowest where they worked `together`, else the sum."""
        seconds = [part.seconds for part in parts]
        return cls(
            generated_tokens=sum(part.generated_tokens for part in parts),
            prefill_tokens=sum(part.prefill_tokens for part in parts),
            requests=sum(part.requests for part in parts),
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            preemptions=sum(part.preemptions for part in parts),
            decode_steps=sum(part.decode_steps for part in parts),
            max_rows=max((part.max_rows for part in parts), default=0),
            draft_tokens=sum(part.draft_tokens for part in parts),
            accepted_draft_tokens=sum(part.accepted_draft_tokens for part in parts),
            seconds=max(seconds, default=0.0) if together else sum(seconds),
        )

    def as_metrics(self) -> dict[str, float]:
        """Return the counts under the names that go to the trackers."""
        rate = self.generated_tokens / self.seconds if self.seconds > 0 else 0.0
        of_cache = {}
        if self.prompt_tokens:  # an engine that counts them
            of_cache = {
                "rollout/requests": float(self.requests),
                "rollout/prompt_tokens": float(self.prompt_tokens),
                "rollout/preemptions": float(self.preemptions),
                "rollout/prefix_hit_ratio": 1.0 - self.prefill_tokens / self.prompt_tokens,
            }
        of_drafts = {}
        if self.draft_tokens:
            of_drafts = {
                "rollout/draft_tokens": float(self.draft_tokens),
                "rollout/draft_acceptance": self.accepted_draft_tokens / self.draft_tokens,
            }
        return {
            **of_cache,
            **of_drafts,
            "rollout/generated_tokens": float(self.generated_tokens),
            "rollout/prefill_tokens": float(self.prefill_tokens),
            "rollout/decode_steps": float(self.decode_steps),
            "rollout/max_rows": float(self.max_rows),
            "perf/rollout_tokens_per_second": rate,
        }


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: a lone surrogate such as "\\ud800" cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class SomeWeights:
    """Some of the weights, as (name, tensor); the sender knows that the others are in place."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = weights

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._weights)


class WeightSource(Protocol):
    """Keeper of an engine's weights while it sleeps; they are fetched when it wakes up."""

    def acquire(self, version: int) -> None:
        """Fill the engine's module with the weights of this version; RolloutError where they arrive wrong."""
        ...

    def release(self) -> None:
        """Free the memory of the weights; does nothing where there are none."""
        ...


class EngineSession(Protocol):
    """A session of an engine: requests join and leave between two steps. One thread at a time calls it."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that tokens sampled now carry."""
        ...

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        ...

    @property
    def num_running(self) -> int:
        """Number of requests that get tokens now, as far as the engine says."""
        ...

    def add(self, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        """Add requests; those that cannot be served come back at once."""
        ...

    def step(self) -> list[GenerationOutput]:
        """Run one step, and return the outputs that it finishes."""
        ...

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End these requests; their partial responses are returned. Unknown ones are ignored."""
        ...

    def so_far(self, since: Mapping[int, int]) -> list[PartialOutput]:
        """Return the tokens of requests beyond the first `since[request_id]` ones."""
        ...

    def close(self) -> None:
        """Drop running requests, and release the engine for other uses."""
        ...


@runtime_checkable
class SharedModule(Protocol):
    """Interface of the engines that generate with a module of ours, which may be the one that trains."""

    policy: PolicyModel


class RolloutEngine(Protocol):
    """Engine that turns requests into outputs; it knows nothing of rewards or batches."""

    def open(self, *, closed: bool = False) -> EngineSession:
        """Return a session; RolloutError when asleep or in use. A `closed` one gets one call of `add`."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationOutput]:
        """One output for each request, as they finish; with an error where it cannot be served."""
        ...

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End these requests of the running `generate`; what they have comes back, with reason "abort"."""
        ...

    def sleep(self, level: int = 1) -> None:
        """Free the memory that only generation needs."""
        ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Fetch what `sleep` freed, so that `generate` works again."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over weights by their Hugging Face names; tokens sampled from now on carry `version`."""
        ...

    def set_version(self, version: int) -> None:
        """Set the version of the weights that are shared with the trainer, which has changed them."""
        ...

    @property
    def policy_version(self) -> int: ...

    @property
    def stats(self) -> RolloutStats: ...
