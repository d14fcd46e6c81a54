"""A run whose reward asks a generative reward model of its own, and its scores without the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from tiny_trainer import ppo_config, tiny_model

from hybridflow.config import PPOConfig
from hybridflow.controller.build import hosting
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.rewards.build import build_reward_manager
from hybridflow.rewards.manager import ScoredBatch
from hybridflow.rewards.result import ScoreRequest
from hybridflow.trainer.ppo.build import judge_server
from hybridflow.trainer.roles.roles import needed_roles
from hybridflow.trainer.roles.worker_groups import start_judge, start_roles

# what verl gives to such a function; the verdict is a number of the judge's text, whatever it writes
REWARD = """
import hashlib, json, urllib.request

def number(text):
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)

def read(text):
    return number(text) % 11

def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address,
                  reward_model_tokenizer, factor=1.0):
    body = {"model": "any", "max_tokens": 6, "seed": number(solution_str) % 1000,
            "messages": [{"role": "user", "content": solution_str + "?"}]}
    request = urllib.request.Request(f"http://{reward_router_address}/v1/chat/completions",
                                     json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        said = json.loads(answer.read())["choices"][0]["message"]["content"]
    return {"score": factor * read(said), "said": said, "tokens": len(reward_model_tokenizer.encode(said))}
"""
TEXTS = ["1 + 1", "so 2", "the end", "#### 7", "12345", "no"]


def judged_config(folder: Path, *overrides: str) -> PPOConfig:
    """A run with a policy and a judge of random weights, which its own function asks."""
    model = folder / "model"
    judge = folder / "judge"
    if not model.exists():
        tiny_model(model)
        tiny_model(judge, layers=1, seed=3)
        (folder / "asks.py").write_text(REWARD)
    return ppo_config(
        model,
        folder / "run",
        "algorithm.adv_estimator=grpo",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model.path='{judge}'",
        f"reward.custom_reward_function.path='{folder / 'asks.py'}'",
        "reward.timeout=300",
        "trainer.test_freq=-1",
        *overrides,
    )


def scored(config: PPOConfig, scores: Callable[[Sequence[ScoreRequest]], ScoredBatch]) -> ScoredBatch:
    """The scores of the texts, each as the response to one question."""
    asked = {"role": "user", "content": "Sum?"}
    return scores(
        [
            ScoreRequest("sums", text, "4", {}, messages=[asked, {"role": "assistant", "content": text}])
            for text in TEXTS
        ]
    )


@contextmanager
def judging(config: PPOConfig, folder: Path) -> Iterator[Callable[[], ScoredBatch]]:
    """Start the roles of a run and its judge; give what scores the texts."""
    tokenizer = load_tokenizer(str(config.data.tokenizer), False)
    with (
        hosting(config.trainer, config.ray_kwargs, needed_roles(config)) as start,
        judge_server(config) as judge,
    ):
        assert judge is not None
        roles = start_roles(config, tokenizer, start, 1, folder, {})
        start_judge(config, tokenizer, start, roles, folder, judge)
        with closing(build_reward_manager(config.reward, 0, judge.access)) as manager:

            def scores(requests: Sequence[ScoreRequest]) -> ScoredBatch:
                with manager.open() as session:
                    for place, request in enumerate(requests):
                        session.add(place, request)
                    return session.result()

            yield lambda: scored(config, scores)
