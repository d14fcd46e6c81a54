"""The engine against what a real SGLang server answered once (`sglang_recording.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from sglang_recording import RECORD, Replay, connect, scenario, serving

from hybridflow.errors import RolloutError
from hybridflow.rollout.sglang import loader
from hybridflow.weight_sync.wire.receiver import Receiver

GIVEN = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4)}


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replay]:
    """With the weights' side of SGLang in this process, and without its sampler."""
    monkeypatch.setattr(loader, "install", lambda: None)
    monkeypatch.setattr(loader, "_RECEIVED", Receiver())
    yield Replay(json.loads(RECORD.read_text(encoding="utf-8"))["entries"], {})


def test_it_asks_what_was_recorded_and_reads_what_was_answered(replay: Replay) -> None:
    with serving(replay.answer) as url:
        outputs = scenario(
            connect(url), lambda seed: [(name, tensor + seed) for name, tensor in GIVEN.items()]
        )
    assert not replay.unexpected and not any(replay.left.values())
    assert [output.pop("routes") for output in outputs] == [None] * len(outputs)  # the recording is older
    assert json.loads(json.dumps(outputs)) == json.loads(RECORD.read_text(encoding="utf-8"))["outputs"]
    greedy, every, cut, refused, later = outputs
    assert len(greedy["token_ids"]) == len(greedy["log_probs"]) == len(greedy["top_log_probs"]) <= 6
    assert every["finish_reason"] in ("stop", "length") and len(every["token_ids"]) >= 2
    assert (cut["finish_reason"], cut["token_ids"][-1]) == ("stop", cut["stop_reason"])
    assert refused["finish_reason"] == "error" and "sglang refused it" in refused["error"]
    assert set(greedy["policy_versions"]) == {1} and set(later["policy_versions"]) == {2}
    assert all(torch.equal(replay.received[name], tensor + 1) for name, tensor in GIVEN.items())


def test_a_weight_that_is_lost_is_told_by_the_worker(replay: Replay) -> None:
    with serving(replay.answer) as url:
        engine = connect(url)
        engine.update_weights(GIVEN.items(), 1)
        with pytest.raises(
            RolloutError, match="1 tensors that an earlier push had are not in this one, such as b"
        ):
            engine.update_weights([("a.weight", GIVEN["a.weight"])], 2)


def test_a_server_without_our_loader_is_refused(replay: Replay) -> None:
    for entries in replay.left.values():
        for entry in entries:
            entry["answer"] = [
                text.replace(loader.QUALIFIED_NAME, "another.load") for text in entry["answer"]
            ]
    with (
        serving(replay.answer) as url,
        pytest.raises(RolloutError, match="start it with --custom-weight-loader hybridflow"),
    ):
        connect(url)
