"""SGLang without SGLang: its words, our draws in its sampler, its options, memory given back."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridflow.config.actor_rollout_ref import EngineKwargsConfig, RolloutConfig
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.remote.http import Address, free_port
from hybridflow.rollout.remote.model import ModelFacts
from hybridflow.rollout.sglang import loader
from hybridflow.rollout.sglang.engine import (
    command_line,
    positions_of,
    server_arguments,
    sglang_params,
    sglang_problem,
)
from hybridflow.rollout.sglang.server import SGLangServer

ROWS, TOKENS = 4000, 6


def info(**limits: Any) -> SimpleNamespace:
    """What a batch of SGLang says of its rows."""
    plain = {"top_ks": torch.full((ROWS,), 1 << 30), "top_ps": torch.ones(ROWS), "min_ps": torch.zeros(ROWS)}
    needs = {f"need_{name}_sampling": f"{name}s" in limits for name in ("top_k", "top_p", "min_p")}
    return SimpleNamespace(**{**plain, **limits}, **needs, sampling_seed=torch.arange(ROWS) * 7919)


def test_draws_follow_the_probabilities_and_depend_on_seed_and_place_alone() -> None:
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05, 0.0]).repeat(ROWS, 1)
    places = torch.full((ROWS,), 9)
    tokens = loader.drawn(probs, info(), places, simple=True)
    counts = torch.bincount(tokens, minlength=TOKENS) / ROWS
    assert counts[5] == 0 and (counts - probs[0]).abs().max() < 4 * (0.25 / ROWS) ** 0.5
    alone = SimpleNamespace(**{**vars(info()), "sampling_seed": torch.tensor([17 * 7919])})
    assert int(loader.drawn(probs[:1], alone, places[:1], simple=True)) == int(tokens[17])
    assert not torch.equal(loader.drawn(probs, info(), places + 1, simple=True), tokens)


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [
        ({"top_ks": torch.full((ROWS,), 2)}, 2),
        ({"top_ps": torch.full((ROWS,), 0.8)}, 3),
        ({"min_ps": torch.full((ROWS,), 0.3)}, 3),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_only_allowed_tokens_are_drawn(limits: dict[str, torch.Tensor], allowed: int) -> None:
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05, 0.0]).repeat(ROWS, 1)
    before = probs.clone()
    tokens = loader.drawn(probs, info(**limits), torch.zeros(ROWS), simple=False)
    assert set(tokens.tolist()) == set(range(allowed)) and torch.equal(probs, before)


def test_batches_get_seeds_log_probs_their_bare_logits_and_penalties_the_prompt() -> None:
    class Batch:
        logit_bias: Any = None
        acc_additive_penalties = acc_scaling_penalties = penalizer_orchestrator = None
        device = "cpu"

        @classmethod
        def from_schedule_batch(cls, batch: Any, vocab_size: int) -> Any:
            return cls()

        def apply_logits_bias(self, logits: torch.Tensor) -> None:
            logits += self.logit_bias if self.logit_bias is not None else 0

    class Draws:
        def forward(
            self, logits_output: Any, sampling_info: Any, return_logprob: bool, logprob_logits: Any = None
        ) -> Any:
            return logprob_logits

    class Penalizer:
        def __init__(self) -> None:
            self.cumulated_repetition_penalties = torch.ones(2, TOKENS)
            params = [SimpleNamespace(repetition_penalty=value) for value in (1.0, 1.5)]
            requests = [
                SimpleNamespace(sampling_params=each, origin_input_ids=[1, 3], output_ids=[])
                for each in params
            ]
            self.orchestrator = SimpleNamespace(reqs=lambda: requests)

        def _prepare(self) -> None:
            pass

    loader.give_seeds(Batch)
    loader.keep_bare_logits(Batch, Draws)
    loader.count_prompts(Penalizer)
    requests = [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in (5, None)]
    batch = Batch.from_schedule_batch(SimpleNamespace(reqs=requests), 9)
    assert batch.sampling_seed.tolist() == [5, 0]
    logits, bias = torch.zeros(1, 3), torch.ones(1, 3)
    batch.apply_logits_bias(logits)
    assert Draws().forward(None, batch, True) is None  # nothing was shifted: SGLang's own do
    batch.logit_bias = bias
    batch.apply_logits_bias(logits)
    assert torch.equal(Draws().forward(None, batch, True), torch.zeros(1, 3)) and torch.equal(logits, bias)
    assert Draws().forward(None, batch, True) is None  # not those of an earlier step
    penalizer = Penalizer()
    penalizer._prepare()
    assert penalizer.cumulated_repetition_penalties.tolist() == [[1.0] * 6, [1.0, 1.5, 1.0, 1.5, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"temperature": 1e-7}, "use greedy, or a higher one"),
        ({"repetition_penalty": 2.5}, "at most 2"),
        ({"logit_bias": ((50, 1.0),)}, "vocabulary is 0..49"),
        ({"logit_bias": ((5, float("-inf")),)}, "finite"),
        ({"stop": ("a",)}, "use stop_token_ids"),
        ({"ignore_eos": True, "stop_token_ids": (5,), "min_tokens": 2}, "leave one of them out"),
        ({"greedy": True, "top_k": 5, "min_tokens": 2, "repetition_penalty": 2.0}, None),
    ],
)
def test_what_it_cannot_serve_is_said(sampling: dict[str, Any], says: str | None) -> None:
    found = sglang_problem(SamplingParams(4, **sampling), vocabulary=50, texts=False)
    assert found is None if says is None else says in str(found)


def test_stop_tokens_are_its_own_unless_end_tokens_are_ignored() -> None:
    def asked(**sampling: Any) -> dict[str, Any]:
        return sglang_params(
            GenerationRequest(0, Prompt((5,)), SamplingParams(4, **sampling), seed=1 << 63), (2,)
        )

    plain = asked(stop_token_ids=(7,), top_log_probs=2)
    assert plain["sampling_params"]["stop_token_ids"] == [2, 7]
    assert plain["cuts"] == []
    assert plain["top_logprobs_num"] == 2
    assert plain["sampling_params"]["sampling_seed"] == 0 and "top_k" not in plain["sampling_params"]
    ignoring = asked(stop_token_ids=(7,), ignore_eos=True)
    assert "stop_token_ids" not in ignoring["sampling_params"] and ignoring["cuts"] == [7]


def test_keys_become_options(tmp_path: Any) -> None:
    facts = ModelFacts(str(create_tiny_model(tmp_path / "model", seed=0)), torch.device("cpu"), "float32")
    own = EngineKwargsConfig(sglang={"max_total_tokens": 99})
    config = RolloutConfig(
        name="sglang", max_model_len=64, max_num_seqs=4, enable_prefix_caching=False, engine_kwargs=own
    )
    options = command_line(server_arguments(config, facts))
    given = dict(zip(options, [*options[1:], ""], strict=True))
    wanted = {
        "--context-length": "64",
        "--max-running-requests": "4",
        "--dtype": "float32",
        "--max-total-tokens": "99",
        "--device": "cpu",
    }
    assert wanted.items() <= given.items()
    assert "--disable-radix-cache" in options
    assert "--enable-memory-saver" not in options
    assert given["--custom-weight-loader"] == "hybridflow.rollout.sglang.loader.load"
    assert positions_of(config, facts) == 64
    counted = server_arguments(RolloutConfig(name="sglang", max_model_len=64, max_num_seqs=4), facts)[
        "max_total_tokens"
    ]
    assert counted == 4 * 65


def test_memory_is_taken_again_only_where_it_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, Any]] = []
    server = SGLangServer(
        Address("http://127.0.0.1:1"),
        None,
        vocabulary=5,
        positions=9,
        max_streams=1,
        timeout=1,
        bucket_bytes=64,
    )
    monkeypatch.setattr(server, "_post", lambda path, body: said.append((path, body)))
    server.sleep(1)
    server.wake_up(["weights"])
    server.wake_up(["kv_cache", "weights"])
    server.wake_up(["kv_cache", "weights"])
    assert [(path.split("_")[0], body["tags"]) for path, body in said] == [
        ("/release", ["kv_cache", "weights"]),
        ("/resume", ["weights"]),
        ("/resume", ["kv_cache"]),
    ]
    server.sleep(2)
    assert ("/update_weight_version", {"new_version": "hybridflow:-1", "abort_all_requests": False}) in said
    server.sleep(2)
    assert [path for path, _ in said].count("/release_memory_occupation") == 2, "nothing is given back twice"
    server.close()


def test_a_sender_that_is_gone_does_not_end_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    gone = {"host": "127.0.0.1", "report_port": free_port(), "report_token": "t", "timeout": 1}
    loader.load(None, [("receipt", torch.tensor(list(json.dumps(gone).encode()), dtype=torch.uint8))])
    assert "nobody hears how a push of weights went" in caplog.text
