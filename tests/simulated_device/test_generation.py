"""Generation and serving on the device: what is recorded, what is refused in a recording, and answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_accelerator import counts
from simulated_accelerator.row import ROW
from transformers.integrations import moe

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "unit" / "rollout")]

from rollout_models import prompts, requests_for, run  # noqa: E402
from serving import TOKENIZER, ids, serve_client  # noqa: E402

from hybridflow.models.files.build import build_policy  # noqa: E402
from hybridflow.models.tiny import create_tiny_model  # noqa: E402
from hybridflow.protocol.prompt import Prompt  # noqa: E402
from hybridflow.rollout.base import GenerationRequest, SamplingParams  # noqa: E402
from hybridflow.rollout.native import sampling  # noqa: E402
from hybridflow.rollout.native.engine import NativeEngine  # noqa: E402
from hybridflow.rollout.native.responses import Row  # noqa: E402
from hybridflow.rollout.native.session import Session  # noqa: E402
from hybridflow.rollout.server.build import ServeSettings, build_service  # noqa: E402

SIZES: dict[str, Any] = {"hidden": 32, "intermediate": 64, "heads": 2, "kv_heads": 1}


def greedy(policy: Any, **settings: Any) -> tuple[NativeEngine, list[list[int]]]:
    """An engine, and its greedy answers to a few prompts."""
    engine = NativeEngine(policy, eos_token_ids=(), **settings)
    requests = requests_for(prompts(5), sampling=SamplingParams(8, greedy=True))
    outputs = run(engine, requests)
    return engine, [outputs[request.request_id].token_ids for request in requests]


@pytest.mark.skipif(not ROW.records_steps, reason="this kind of device records no steps")
@pytest.mark.parametrize("falls_back", [False, True])
def test_a_product_of_experts_that_waits_within_is_refused_in_the_recording(
    falls_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fallback is one operator that reads its offsets on the host; generation goes on without graphs."""
    model = create_tiny_model(tmp_path / "experts", experts=4, **SIZES)
    _, wanted = greedy(build_policy(model, device="cpu"))
    if falls_back:
        monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *tensors: False)
    engine, found = greedy(build_policy(model, device="sim"), kv_cache="slots")
    assert found == wanted
    assert engine.graphs is not None
    if falls_back:
        assert engine.graphs.num_recorded == 0 and engine.graphs.problem is not None
        assert "not permitted when a stream is capturing" in engine.graphs.problem
    else:
        assert engine.graphs.problem is None and engine.graphs.num_recorded > 0


@pytest.mark.parametrize("leaders", [4, 16])
def test_every_kind_of_choice_is_that_of_the_cpu(
    leaders: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded, where the device records, and with rows that are taken back: their leaders do not suffice."""
    for name, value in {"ONE_LEVEL": 8, "BLOCK": 8, "LEADERS": 4, "MANY_LEADERS": leaders}.items():
        monkeypatch.setattr(sampling, name, value)
    together: list[int] = []
    own = Session._take_back

    def take_back(session: Session, rows: Sequence[Row]) -> None:
        together.append(len(rows))
        own(session, rows)

    monkeypatch.setattr(Session, "_take_back", take_back)
    kinds: list[dict[str, Any]] = [
        {},
        {"greedy": True},
        {"top_p": 0.95, "temperature": 2.0},
        {"top_k": 3},
        {"top_k": 12, "top_p": 0.99},
        {"min_p": 0.05},
    ]
    requests = [
        replace(one, sampling=SamplingParams(10 + row, **kinds[row % len(kinds)]))
        for row, one in enumerate(requests_for(prompts(14)))
    ]
    model = create_tiny_model(tmp_path / "tiny", **SIZES)
    found: dict[str, Any] = {}
    for device in ("cpu", "sim"):
        policy = build_policy(model, device=device, dtype="float64")
        engine = NativeEngine(policy, eos_token_ids=(5, 7), max_num_seqs=6, kv_cache="slots")
        outputs = run(engine, requests)
        found[device] = [outputs[one.request_id].token_ids for one in requests]
    assert found["sim"] == found["cpu"]
    assert together and max(together) > 1
    if ROW.records_steps:
        assert engine.sampler is not None and engine.sampler.problem is None
        assert engine.sampler.num_recorded > 1


def test_a_served_model_answers_as_on_the_cpu(tmp_path: Path) -> None:
    model = create_tiny_model(tmp_path / "tiny", **SIZES)
    engine = NativeEngine(build_policy(model, device="cpu"), eos_token_ids=[TOKENIZER.eos_token_id])
    prompt = "user: 3 + 4 = "
    request = GenerationRequest(0, Prompt(tuple(ids(prompt))), SamplingParams(16, greedy=True), 0)
    (output,) = engine.generate([request])
    service = build_service(
        ServeSettings(str(model), "tiny", devices=("sim",), max_num_seqs=8, max_model_len=256)
    )
    with serve_client(service.client, service.model) as served:
        answer = served.openai.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=16,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
    (choice,) = answer.choices
    assert choice.model_extra is not None and choice.model_extra["token_ids"] == output.token_ids
    assert (counts.total.launches["replay"] > 0) == ROW.records_steps, "decode steps are recorded"
