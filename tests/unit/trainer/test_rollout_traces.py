"""A run with traces: what a collector gets of single responses and of conversations, and that the run is the
same to the bit, whether somebody takes the traces or not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_trainer import build, metrics_of, ppo_config

from collectors import collecting
from hybridflow.config import PPOConfig
from hybridflow.episodes.rollout_traces import with_turns
from hybridflow.observability import tracing
from hybridflow.protocol.spans import TraceSpan

TRACE = "actor_rollout_ref.rollout.trace"
WORLD = """
from hybridflow.environments import Environment, Step

class Twice(Environment):
    def __init__(self):
        self.left = 2

    def reset(self, row):
        return "1 + 1"

    def step(self, text):
        self.left -= 1
        if self.step_seed % 4 == 0:
            raise ValueError("as ordered")
        return Step("again", reward=0.5, done=not self.left)
"""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "LINGER_SECONDS", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")


def train(config: PPOConfig) -> dict[int, dict[str, float]]:
    """Train, and return the metrics of each step."""
    with build(config) as trainer:
        trainer.fit()
    return metrics_of(Path(config.trainer.default_local_dir))


def test_a_run_with_traces_is_the_same_and_each_response_has_one(model: Path, tmp_path: Path) -> None:
    without = train(ppo_config(model, tmp_path / "without"))
    traced = (f"{TRACE}.backend=otel", f"{TRACE}.token2text=true")
    with collecting() as server:
        taken = train(ppo_config(model, tmp_path / "taken", *traced, f"{TRACE}.endpoint='{server.address}'"))
        traces = server.traces()
    refused = f"{TRACE}.endpoint='{server.address}'"  # nobody listens there any more
    lost = train(ppo_config(model, tmp_path / "lost", *traced, refused))
    assert without == taken == lost
    trained = [trace for trace in traces if not trace.attributes["validate"]]
    held_out = [trace for trace in traces if trace.attributes["validate"]]
    assert len(trained) == 2 * 4 * 2 and len(held_out) == 5
    assert {trace.attributes["step"] for trace in held_out} == {2}
    assert len({(t.attributes["sample_index"], t.attributes["rollout_n"]) for t in trained}) == 16
    for step in (1, 2):
        of_step = [trace for trace in trained if trace.attributes["step"] == step]
        assert [trace.attributes["version_first"] for trace in of_step] == [step - 1] * 8
        scores = [trace.attributes["reward"] for trace in of_step]
        assert sum(scores) / 8 == pytest.approx(without[step]["critic/score/mean"])
    for trace in traces:
        assert trace.names() == ["trajectory", "generate", "reward"]
        generate, reward = trace.below
        assert trace.start == generate.start <= generate.end
        assert reward.attributes["score"] == trace.attributes["reward"]
        assert generate.attributes["response_tokens"] == trace.attributes["response_tokens"] <= 10
        assert generate.attributes["prompt_text"] == trace.attributes["prompt_text"] != ""
        assert trace.attributes["experiment_name"] == "run"


def test_conversations_have_turns_and_failures_their_cause(model: Path, tmp_path: Path) -> None:
    world = tmp_path / "world.py"
    world.write_text(WORLD)
    ends = ",".join(map(str, range(112)))
    with collecting() as server:
        config = ppo_config(
            model,
            tmp_path / "run",
            f"data.environment='{world}:Twice'",
            "data.task.name=null",
            "data.max_response_length=6",
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.rollout.stop_token_ids=[{ends}]",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.max_model_len=120",
            "actor_rollout_ref.rollout.agent.num_workers=0",
            "actor_rollout_ref.rollout.agent.retries.environment=0",
            f"{TRACE}.backend=otel",
            f"{TRACE}.endpoint='{server.address}'",
            f"{TRACE}.max_samples_per_step_per_worker=2",
        )
        with build(config) as trainer:
            failed = int(trainer.source.next(1).metrics.to_floats()["training/num_failed/environment"])
        traces = server.traces()
    assert failed and len(traces) == 2 * 8, "two of the four prompts, and all of their samples"
    turn = ["turn", "generate", "environment step"]
    whole = [trace for trace in traces if trace.attributes["outcome"] == "finished"]
    assert whole and len(whole) < 16
    for trace in whole:
        assert trace.names() == ["trajectory", "environment reset", turn, turn, "environment score"]
        assert [each.below[1].attributes["reward"] for each in trace.below[1:3]] == [0.5, 0.5]
        assert trace.attributes["reward"] == 1.0 and "prompt_text" not in trace.attributes
    for trace in [each for each in traces if each not in whole]:
        assert trace.attributes["cause"] == "environment" and "as ordered" in trace.error
        last = trace.below[-1].below[-1]
        assert last.name == "environment step" and last.error.startswith("TrajectoryFailed")


def test_a_single_call_has_no_turn_and_parallel_tools_share_one() -> None:
    spans = {
        "call": TraceSpan("generate", 0, 1),
        "tool": TraceSpan("tool", 1, 3),
        "other": TraceSpan("tool", 1, 2),
        "second": TraceSpan("generate", 3, 4),
        "reward": TraceSpan("reward", 5, 6),
    }
    assert [each.name for each in with_turns([spans["reward"], spans["call"]])] == ["generate", "reward"]
    first, second, reward = with_turns(list(spans.values()))
    assert [each.name for each in first.children] == ["generate", "tool", "tool"]
    assert (first.start, first.end, second.attributes["turn"], reward.name) == (0, 3, 1, "reward")
