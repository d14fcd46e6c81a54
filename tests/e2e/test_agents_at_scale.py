"""Two thousand conversations at once, with tools that raise, hang and kill their process: the step completes,
each failure is counted under its cause, only what has not failed is learned from, and nothing is left over.

The engine says what a script says; all else is real: the tools, the environment, the worker processes, the
rows, the estimator and the update.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from tiny_run import Inputs, gsm8k_rows, small_run, write_parquet

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.models.tiny import create_tiny_tokenizer
from hybridflow.protocol.randomness import derive_seed
from hybridflow.rollout.base import EngineSession, GenerationOutput, GenerationRequest
from hybridflow.trainer.ppo.build import build

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "rollout"))

from scripted_engine import ScriptedEngine, ScriptedSession

TOOLS = '''
import random, time
from hybridflow.tools import tool

@tool
def work(how: str) -> str:
    """Work for a while."""
    time.sleep(random.random() * 0.01)
    if how == "raises":
        raise ValueError("as ordered")
    if how == "hangs":
        time.sleep(1e6)
    return "worked"
'''
WORLD = """
import os, random, time
from hybridflow.environments import Environment, Step
from hybridflow.tools import tool

class World(Environment):
    def __init__(self, fates, weights):
        self.fates, self.weights = fates, weights

    def reset(self, row):
        self.fate = random.Random(self.step_seed).choices(self.fates, self.weights)[0]
        return self.fate

    @tool
    def kill(self) -> str:
        "End the process that this runs in."
        os._exit(1)

    def step(self, text):
        if self.fate == "breaks":
            raise ValueError("as ordered")
        if self.fate == "sticks":
            time.sleep(1e6)
        return Step(done=True, reward=self.step_seed % 7)
"""
FATES = {
    "fine": 0.87,
    "raises": 0.05,  # the tool
    "hangs": 0.005,  # the tool, past its deadline
    "malformed": 0.01,  # the model's call
    "breaks": 0.05,  # the environment; tried again once
    "sticks": 0.005,  # the environment, past its deadline
    "kills": 0.01,  # its own process
}
CAUSES = {"breaks": "environment", "sticks": "deadline", "kills": "infrastructure"}
"""Fates that fail a trajectory; the others are told to the model, which goes on."""
GROUPS = 500
SAMPLES = 4
TOKENIZER = create_tiny_tokenizer()


def said(prompt: str) -> str:
    """What the model writes next: a call by the fate that the environment tells, then a plain answer."""
    first, *later = prompt.split("<|im_start|>assistant\n")
    if len(later) > 1:
        return "done"
    fate = first.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    if fate == "kills":
        return '<tool_call>{"name": "kill", "arguments": {}}</tool_call>'
    if fate == "malformed":
        return '<tool_call>{"name": "work", "arguments": </tool_call>'
    return f'<tool_call>{{"name": "work", "arguments": {{"how": "{fate}"}}}}</tool_call>'


class CrowdSession(ScriptedSession):
    """Says what the script says, from when a crowd of requests is there."""

    def __init__(self, engine: CrowdEngine) -> None:
        super().__init__(engine)
        self.end = TOKENIZER.eos_token_id
        self._said: dict[int, list[int]] = {}
        self.script = self._script

    def add(self, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        refused = super().add(requests)
        self.engine.most_rows = max(self.engine.most_rows, self.num_running)
        return refused

    def step(self) -> list[GenerationOutput]:
        if self.engine.most_rows < GROUPS * SAMPLES:
            threading.Event().wait(0.01)
            return []
        return super().step()

    def close(self) -> None:
        self.engine.left_over += self.num_running
        super().close()

    def _script(self, request: GenerationRequest) -> Sequence[int]:
        if request.request_id not in self._said:
            text = said(TOKENIZER.decode(list(request.prompt_token_ids)))
            self._said[request.request_id] = TOKENIZER.encode(text, add_special_tokens=False)
        return self._said[request.request_id]


class CrowdEngine(ScriptedEngine):
    most_rows = 0
    """Most requests that ran at once."""
    left_over = 0
    """Requests that ran when a session was closed."""

    def _new_session(self, closed: bool) -> EngineSession:
        return CrowdSession(self)


def config(inputs: Inputs, folder: Path) -> PPOConfig:
    (folder / "tools.py").write_text(TOOLS)
    (folder / "world.py").write_text(WORLD)
    train = write_parquet(folder / "many.parquet", gsm8k_rows(GROUPS, split="many"))
    rollout = "actor_rollout_ref.rollout"
    options = f"{{fates: [{', '.join(FATES)}], weights: [{', '.join(map(str, FATES.values()))}]}}"
    keys = (
        f"data.train_files={train}",
        f"data.train_batch_size={GROUPS}",
        f"data.environment='{folder / 'world.py'}:World'",
        f"data.environment_options={options}",
        "data.max_prompt_length=64",
        "data.max_response_length=120",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS}",
        f"{rollout}.exact=false",
        f"{rollout}.n={SAMPLES}",
        f"{rollout}.max_model_len=400",
        f"{rollout}.multi_turn.function_tool_path={folder / 'tools.py'}",
        f"{rollout}.agent.max_concurrent={GROUPS * SAMPLES}",
        f"{rollout}.agent.num_workers=4",
        f"{rollout}.agent.call_deadline=6",  # a loaded machine answers within it
        f"{rollout}.agent.retries={{infrastructure: 0, environment: 1, deadline: 0}}",
    )
    return prepare_config(PPOConfig, small_run(inputs, folder / "run", *keys, steps=1)).config


def seeds_of(seed: int) -> list[list[int]]:
    """The seeds of the tries of each trajectory of the first step."""
    found = []
    for row in range(GROUPS * SAMPLES):
        seeds = [derive_seed(seed, "rollout", 1, row)]
        if fate_of(seeds[0]) == "breaks":
            seeds.append(derive_seed(seeds[0], "again", 1))
        found.append(seeds)
    return found


def fate_of(seed: int) -> str:
    return random.Random(seed).choices(list(FATES), list(FATES.values()))[0]


def resources() -> dict[str, object]:
    """What could leak: processes, file descriptors, threads, tasks."""
    gc.collect()
    files = []
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists the folder
            files.append(os.readlink(f"/proc/self/fd/{file}").partition(":")[0])
    return {
        "processes": psutil.Process().children(recursive=True),
        "files": sorted(files),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": [each for each in gc.get_objects() if isinstance(each, asyncio.Task) and not each.done()],
    }


@pytest.mark.slow
def test_a_step_of_two_thousand_conversations(inputs: Inputs, tmp_path: Path) -> None:
    made = config(inputs, tmp_path)
    seeds = seeds_of(made.trainer.seed)
    last = [fate_of(tries[-1]) for tries in seeds]
    with build(made) as trainer:
        engine = CrowdEngine()
        trainer.source.roles.rollout.backend.worker("rollout").engine = engine  # type: ignore[attr-defined]
        before = resources()
        batch = trainer.source.next(1)
        trainer.source.pipeline.agents.close()
        after = resources()
        trained, metrics = trainer.step(batch.rows, 1)

    counted = batch.metrics.to_floats()
    whole = [number for number, fate in enumerate(last) if fate not in CAUSES]
    causes = Counter(CAUSES[fate] for fate in last if fate in CAUSES)
    prefix = "training/num_failed/"
    assert {name.removeprefix(prefix): n for name, n in counted.items() if name.startswith(prefix)} == causes
    assert set(causes) == {"environment", "deadline", "infrastructure"}, "each of them was ordered"
    assert counted["agent/num_retried/environment"] == sum(len(tries) == 2 for tries in seeds)
    told = {"raised": "raises", "deadline": "hangs", "malformed": "malformed"}
    for problem, fate in told.items():
        assert round(counted[f"agent/tools/{problem}"] * len(whole), 3) == last.count(fate) > 0
    assert counted["agent/num_turns/mean"] == 2.0
    assert counted["agent/max_concurrent"] == GROUPS * SAMPLES == engine.most_rows

    rows = trained.batch
    own = [number // SAMPLES * 4096 + number % SAMPLES for number in whole]
    assert rows["trajectory_id"].tolist() == [(1 << 32) + number for number in own], (
        "each that has not failed"
    )
    scores = rows["token_level_scores"].sum(-1)
    assert scores.tolist() == [float(seeds[number][-1] % 7) for number in whole]
    advantages = rows["advantages"].sum(-1) / rows["response_mask"].sum(-1)
    groups = torch.tensor([number // SAMPLES for number in whole])
    for group in groups.unique():
        those = groups == group
        wanted = torch.zeros(1)
        if int(those.sum()) > 1:
            wanted = (scores[those] - scores[those].mean()) / (scores[those].std() + 1e-6)
            assert torch.allclose(advantages[those], wanted, atol=1e-4), "by the samples that are left"
    assert metrics.to_floats()["actor/grad_norm"] > 0

    assert engine.left_over == 0, "no slot of the engine is kept"
    assert after == before
