"""All roles of a step on tiny models, and rows for them."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.model import OptimConfig
from hybridflow.config.reward import ProcessRewardModelConfig
from hybridflow.config.root import CriticConfig
from hybridflow.controller import LocalBackend, RankInfo
from hybridflow.engines import BatchLimits
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.workers import (
    ActorGroup,
    ActorWorker,
    CriticGroup,
    CriticWorker,
    ProcessRewardGroup,
    ProcessRewardWorker,
    ReferenceGroup,
    ReferenceWorker,
    RolloutGroup,
    RolloutWorker,
    TeacherGroup,
)
from hybridflow.workers.mini_batches import MiniBatchPlan
from hybridflow.workers.reference import TEACHER_COLUMN
from hybridflow.workers.sft import SFTGroup, SFTWorker

ENGINE_STATE = ("model", "optimizer", "scheduler")
LIMITS = BatchLimits(max_tokens=24, max_rows=3)
OPTIM = OptimConfig(lr=1e-2)
PLAN = MiniBatchPlan(groups=2, epochs=2, shuffle=True, seed=0, step=1)


def llama(seed: int = 0) -> LlamaForCausalLM:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = LlamaConfig(
        vocab_size=32,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=0,
        **sizes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM._from_config(config, attn_implementation="eager")


class House:
    """All roles of a step on tiny models; the rollout has the actor's module."""

    def __init__(
        self, config: ActorConfig | None = None, process: ProcessRewardModelConfig | None = None
    ) -> None:
        config = config or ActorConfig(ppo_max_token_len_per_gpu=24)
        self.policy, self.frozen, self.value = (
            PolicyModel(llama()),
            PolicyModel(llama()).requires_grad_(False),
            ValueModel(llama()),
        )

        def actor(info: RankInfo) -> ActorWorker:
            engine = FSDPEngine(self.policy, name="actor", optim=OPTIM, grad_clip=1.0)
            return ActorWorker(engine, config, temperature=0.7, log_prob_limits=LIMITS)

        def critic(info: RankInfo) -> CriticWorker:
            engine = FSDPEngine(self.value, name="critic", optim=OPTIM)
            return CriticWorker(engine, CriticConfig(), forward_limits=LIMITS, loss_scale_factor=None)

        def reference(info: RankInfo) -> ReferenceWorker:
            return ReferenceWorker(
                FSDPEngine(self.frozen, name="reference", optim=None), temperature=0.7, limits=LIMITS
            )

        def rollout(info: RankInfo) -> RolloutWorker:
            return RolloutWorker(NativeEngine(self.policy, eos_token_ids=[2]))

        def teacher(info: RankInfo) -> ReferenceWorker:
            engine = FSDPEngine(PolicyModel(llama(seed=1)).requires_grad_(False), name="teacher", optim=None)
            return ReferenceWorker(engine, temperature=0.7, limits=LIMITS, column=TEACHER_COLUMN)

        def process_reward(info: RankInfo) -> ProcessRewardWorker:
            engine = FSDPEngine(PolicyModel(llama()), name="process_reward", optim=OPTIM)
            return ProcessRewardWorker(
                engine, process or ProcessRewardModelConfig(), temperature=0.7, limits=LIMITS
            )

        def sft(info: RankInfo) -> SFTWorker:
            return SFTWorker(FSDPEngine(self.policy, name="train", optim=OPTIM), LIMITS)

        factories = {"actor": actor, "critic": critic, "reference": reference, "rollout": rollout, "sft": sft}
        backend = self.backend = LocalBackend(
            lambda host: {**factories, "teacher": teacher, "process_reward": process_reward}
        )
        self.actor = ActorGroup(backend, "actor", also_read={ActorWorker.update_mini_batch: ["ref_log_prob"]})
        self.critic = CriticGroup(backend, "critic")
        self.reference, self.rollout = ReferenceGroup(backend, "reference"), RolloutGroup(backend, "rollout")
        self.teacher, self.process_reward = (
            TeacherGroup(backend, "teacher"),
            ProcessRewardGroup(backend, "process_reward"),
        )
        self.sft = SFTGroup(backend, "sft")


def rows() -> DataProto:
    draw = torch.Generator().manual_seed(3)
    lengths = [(3, 5), (3, 2), (6, 4), (6, 1), (2, 7), (2, 3)]
    prompts, responses = (
        [torch.randint(3, 32, (pair[i],), generator=draw).tolist() for pair in lengths] for i in (0, 1)
    )
    columns = make_rows(prompts, responses, pad_id=0)
    columns["loss_mask"] = columns["response_mask"].clone()
    columns["positive"] = torch.tensor([True, False, True, False, False, True])
    for name in ("advantages", "returns"):
        columns[name] = torch.randn(columns["responses"].shape, generator=draw)
    return DataProto.from_dict(columns, {"uid": [*"aabbcc"], "text": [*"uvwxyz"]})


def prepared(house: House) -> DataProto:
    batch = rows()
    batch |= house.actor.log_probs(batch)
    batch |= house.reference.log_probs(batch)
    batch |= house.critic.values(batch)
    return batch
