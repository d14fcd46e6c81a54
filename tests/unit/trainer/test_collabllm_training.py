"""CollabLLM end to end, with a local server as the endpoint of the user and of the judge."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_trainer import build, ppo_config

from hybridflow.errors import ConfigError, RewardError
from hybridflow.interactions.collabllm_interaction import END, CollabLLMInteraction
from hybridflow.rewards.functions.collabllm import compute_score, number_in

WEIGHTS = "{accuracy: 1.0, interactivity: 2.0, token_amount: -0.25}"
CLASS = "hybridflow.interactions.collabllm_interaction.CollabLLMInteraction"
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a b"}]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The requests that a model of user and judge has got; the user leaves after one turn."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            content = asked[-1]["messages"][0]["content"]
            said = END if "tell me more" in content else "tell me more"
            for metric, answer in (("accuracy", "Yes: {"), ("interactivity", "So so: {")):
                if f'"{metric}"' in content:
                    said = f'{answer}}} {{"{metric}": {int(metric == "accuracy")}}}'
            body = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
            self.send_response(200 if self.path == "/v1/chat/completions" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1/")
    yield asked
    server.shutdown()
    server.server_close()


def test_an_answer_is_trained_by_what_its_continuations_are_worth(
    model: Path, tmp_path: Path, endpoint: list[dict[str, Any]]
) -> None:
    user = {"name": "collabllm", "class_name": CLASS, "config": {"user_model": "u", "temperature": 0.5}}
    (tmp_path / "user.yaml").write_text(yaml.safe_dump({"interaction": [user]}))
    row = {
        "prompt": [{"role": "user", "content": "help"}],
        "data_source": "collabllm",
        "reward_model": {"ground_truth": "2"},
        "extra_info": {
            "interaction_kwargs": {"name": "collabllm", "single_turn_prompt": "1 + 1", "task_desc": "sums"}
        },
    }
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    agent = "actor_rollout_ref.rollout.agent"
    reward = "reward.custom_reward_function"
    keys = (
        "algorithm.adv_estimator=grpo",
        "data.task.name=null",
        f"data.train_files={tmp_path / 'rows.jsonl'}",
        "actor_rollout_ref.rollout.max_model_len=200",
        f"actor_rollout_ref.rollout.stop_token_ids=[{','.join(map(str, range(112)))}]",
        f"{agent}.default_agent_loop=hybridflow.agent.collabllm:CollabLLM",
        f"{agent}.options.interaction_config_path={tmp_path / 'user.yaml'}",
        f"{agent}.options.num_repeat_rollouts=2",
        f"{reward}.path=hybridflow.rewards.functions.collabllm",
        f"{reward}.reward_kwargs.metric_weights={WEIGHTS}",
        f"{reward}.reward_kwargs.llm_judge_kwargs={{model: j}}",
    )
    with build(ppo_config(model, tmp_path / "run", *keys)) as trainer:
        made = trainer.source.next(1)
        _, metrics = trainer.step(made.rows, 1)
    rows = made.rows
    assert made.metrics.to_floats()["agent/num_turns/mean"] == 1.0
    assert rows.batch["response_mask"].sum(-1).tolist() == [1] * 8, "only the answer is a row"
    assert metrics.to_floats()["training/rollout_log_probs_diff_max"] < 1e-4
    continued = 0
    for place, info in enumerate(rows.non_tensor_batch["extra_info"]):
        score = float(rows.batch["token_level_scores"][place].sum())
        if not info["conversations"]:
            assert score == -1.0
            continue
        continued += 1
        assert len(info["conversations"]) == 2
        words = 0
        for talk in info["conversations"]:
            assert [each["role"] for each in talk] == ["user", "assistant", "user", "assistant"]
            assert talk[2]["content"] == "tell me more"
            words += sum(len(each["content"].split()) for each in talk[1:])
        assert score == pytest.approx(1.0 - 0.25 * words / 2)
    assert continued
    asked = [request["model"] for request in endpoint]
    assert asked.count("u") == asked.count("j") == 4 * continued
    assert {request.get("temperature") for request in endpoint} == {0.5, None}
    assert "1 + 1" in endpoint[0]["messages"][0]["content"]


def test_a_user_may_follow_a_script() -> None:
    user = CollabLLMInteraction({"replies": ["first", "second"]})

    async def turns() -> list[Any]:
        instance = await user.start_interaction(single_turn_prompt="")
        said = [await user.generate_response(instance, list(TALK)) for _ in range(3)]
        await user.finalize_interaction(instance)
        return said

    assert [(done, said) for done, said, *_ in asyncio.run(turns())] == [
        (False, "first"),
        (False, "second"),
        (True, ""),
    ]
    with pytest.raises(ConfigError, match="set user_model"):
        CollabLLMInteraction({})


def test_what_a_judge_has_to_say() -> None:
    assert number_in('I think {so} {"accuracy": 1}', "accuracy") == 1.0
    for answer in ("1", '{"accuracy": 2}', '{"accuracy": "yes"}', '{"interactivity": 1}', "[]"):
        with pytest.raises(RewardError, match="the judge gave no accuracy"):
            number_in(answer, "accuracy")
    info = {"conversations": [TALK], "num_prompt_messages": 1}
    score = asyncio.run(compute_score("", "", "", info, metric_weights={"token_amount": -0.1}))
    assert score == {"score": -0.2, "token_amount": 2.0}
    with pytest.raises(ConfigError, match="got \\['bleu'\\], wanted some of accuracy"):
        asyncio.run(compute_score("", "", "", info, metric_weights={"bleu": 1}))
