"""The hf engine as the rollout of a run: on the actor's module and on pushed weights.

On shards of the module it is in `test_rollout_worker.py`.
"""

from __future__ import annotations

from test_rollout_worker import (
    EOS,
    HF,
    actor_engine,
    actor_worker,
    folder,  # noqa: F401
    generated,
    learn,
    model,
    requests,
    tokens,
)

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.models.attention.layouts import ATTENTION_NAME
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.hf.engine import HFEngine
from hybridflow.workers.rollout_build import build_rollout_worker


def test_it_shares_the_actors_module(folder: str) -> None:  # noqa: F811
    engine = actor_engine(folder)
    ours = build_rollout_worker(RolloutConfig(), actor_engine=engine, model=model(folder), eos_token_ids=EOS)
    worker = build_rollout_worker(HF, actor_engine=engine, model=model(folder), eos_token_ids=EOS)
    assert (
        isinstance(worker.engine, HFEngine)
        and isinstance(engine.module, PolicyModel)
        and worker.engine.model is engine.module.hf
    )
    seen = []
    for version in (0, 1):
        for each in (worker, ours):
            each.renew_weights(version=version)
        outputs = generated(worker, requests())
        assert tokens(outputs) == tokens(generated(ours, requests()))
        assert {each for output in outputs for each in output.policy_versions} == {version}
        seen.append(tokens(outputs))
        learn(engine)  # with our attention
        assert engine.module.config._attn_implementation == ATTENTION_NAME
    assert seen[0] != seen[1]


def test_it_takes_pushed_weights(folder: str) -> None:  # noqa: F811
    engine = actor_engine(folder)
    actor = actor_worker(engine)
    worker = build_rollout_worker(HF, actor_engine=None, model=model(folder), eos_token_ids=EOS)
    learn(engine)
    worker.update_weights([actor.export_buckets(1)], version=1)
    shared = build_rollout_worker(HF, actor_engine=engine, model=model(folder), eos_token_ids=EOS)
    outputs = generated(worker, requests())
    assert tokens(outputs) == tokens(generated(shared, requests()))
    assert {each for output in outputs for each in output.policy_versions} == {1}
