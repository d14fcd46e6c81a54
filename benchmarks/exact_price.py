"""The price of exact mode: generation, forward and update at some lengths, and whole steps of the demo. Read
by exact_mode.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.models.exact_mode import ExactMode
from hybridflow.models.files.build import build_policy
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.self_check import choose_exact_mode
from hybridflow.trainer.ppo.build import build

LENGTHS = (128, 256, 512)
ROWS = 64
PROMPT = 16
REPEATS = 5
STEPS = 6


def policy_of(model: Path) -> PolicyModel:
    """The policy of a folder, in float32."""
    return build_policy(str(model), device="cpu")


def price(model: Path, folder: Path) -> list[dict[str, Any]]:
    """Lines with `what`, and CPU seconds `fast` and `exact`."""
    lines = []
    for length in LENGTHS:
        lines += _at(model, length)
    return [*lines, *_steps(model, folder)]


def _at(model: Path, length: int) -> list[dict[str, Any]]:
    policy = policy_of(model)
    engine = NativeEngine(policy, eos_token_ids=(2,), max_num_seqs=ROWS)
    mode = choose_exact_mode(engine, policy, longest=length, temperature=1.0)
    assert isinstance(mode, ExactMode), mode
    sampling = SamplingParams(max_tokens=length - PROMPT, ignore_eos=True)
    requests = [
        GenerationRequest(
            row, Prompt(tuple(3 + (row + place) % 90 for place in range(PROMPT))), sampling, seed=row
        )
        for row in range(ROWS)
    ]
    outputs = {output.request_id: output for output in engine.generate(requests)}
    responses = [outputs[row].token_ids for row in range(ROWS)]
    packed = pack(
        DataProto.from_dict(make_rows([one.prompt_token_ids for one in requests], responses, pad_id=0))
    )

    def forward() -> None:
        with torch.no_grad():
            policy.eval()(packed)

    def update() -> None:
        policy.zero_grad()
        policy.train()(packed).log_probs.sum().backward()

    works = {"generation": lambda: list(engine.generate(requests)), "forward": forward, "update": update}
    return [
        _in_turn(policy, mode, f"{what}, {ROWS} rows of {length} tokens", work)
        for what, work in works.items()
    ]


def _in_turn(policy: PolicyModel, mode: ExactMode, what: str, work: Callable[[], Any]) -> dict[str, Any]:
    """The fastest of some tries in each mode."""
    best = {"fast": float("inf"), "exact": float("inf")}
    for attempt in range(REPEATS + 1):
        for name, kind in (("fast", None), ("exact", mode)):
            policy.exact = kind
            start = time.process_time()
            work()
            if attempt:  # the first one warms up
                best[name] = min(best[name], time.process_time() - start)
    policy.exact = None
    return {"what": what, **best, "repeats": REPEATS}


def _steps(model: Path, folder: Path) -> list[dict[str, Any]]:
    """Steps of the demo's recipe with and without exact mode, each on the same prompts; both learn, so rows
    grow apart a little.
    """
    sections = {
        "gen": "generation",
        "old_log_prob": "old log-probs",
        "update_actor": "update",
        "step": "whole step",
    }
    best = {section: {"fast": float("inf"), "exact": float("inf")} for section in sections}
    with ExitStack() as stack:
        trainers = {}
        for name, value in (("fast", "false"), ("exact", "true")):
            keys = [
                f"actor_rollout_ref.model.path='{model}'",
                f"trainer.default_local_dir='{folder / name}'",
                f"actor_rollout_ref.rollout.exact={value}",
                "trainer.save_freq=-1",
                "trainer.test_freq=-1",
                "trainer.logger=[]",
            ]
            trainer = stack.enter_context(build(prepare_config(PPOConfig, keys, recipe="tiny/grpo").config))
            for timer in (trainer.timer, trainer.source.timer):
                timer._clock = time.process_time
            trainers[name] = trainer
        for step in range(1, STEPS + 2):
            for name, trainer in trainers.items():
                _, logged = trainer._train_step(step)
                for section in sections if step > 1 else ():
                    best[section][name] = min(best[section][name], logged.get(f"timing_s/{section}", 0.0))
    return [
        {"what": f"step of the demo: {what}", **best[section], "repeats": STEPS}
        for section, what in sections.items()
    ]
