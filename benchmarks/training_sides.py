"""The sides of training.py: each has log-probs of a batch and one optimizer step on it, on the same rows.

Ours     the actor's worker on its engine: packed micro-batches
Plain    a padded transformers loop as one writes it
TRL      the functions of TRL's `GRPOTrainer`, all rows padded to the longest
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_models
import side_by_side as kit


@dataclass(frozen=True)
class Work:
    """The rows of a batch, by token ids, and where the model that learns from them is."""

    folder: Path
    """The model's folder; `tokenizer` and `prompts.jsonl` are beside it."""
    prompts: list[list[int]]
    responses: list[list[int]]
    at_a_time: int
    """Rows in a forward pass of `Plain`."""

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return len(self.responses)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each response."""
        return [len(response) for response in self.responses]

    @property
    def tokens(self) -> int:
        """Tokens of the batch without padding, a prompt once for its responses."""
        return self.rows // kit.GROUP * kit.PROMPT + sum(self.lengths)


def make_work(folder: Path, rows: int, at_a_time: int, pattern: str) -> Work:
    """Return random rows with the lengths of a pattern, always the same ones."""
    draw = random.Random(1)
    vocabulary = bench_models.config_of(folder)["vocab_size"]
    prompts = [[draw.randrange(2, vocabulary) for _ in range(kit.PROMPT)] for _ in range(rows // kit.GROUP)]
    responses = [
        [draw.randrange(2, vocabulary) for _ in range(length)] for length in kit.lengths_of(rows, pattern)
    ]
    return Work(folder, [prompts[row // kit.GROUP] for row in range(rows)], responses, at_a_time)


class Ours:
    """The actor's worker on its engine."""

    def __init__(self, work: Work, keys: list[str]) -> None:
        import torch

        from hybridflow.algorithms.aggregation import LossScale
        from hybridflow.config import PPOConfig
        from hybridflow.config.load import prepare_config
        from hybridflow.engines import BatchLimits
        from hybridflow.engines.build import build_engine
        from hybridflow.protocol import DataProto
        from hybridflow.protocol.packing import make_rows as padded
        from hybridflow.workers import ActorWorker

        config = prepare_config(
            PPOConfig,
            [
                f"actor_rollout_ref.model.path='{work.folder}'",
                f"data.tokenizer='{work.folder.parent / 'tokenizer'}'",
                f"data.train_files='{work.folder.parent / 'prompts.jsonl'}'",
                "actor_rollout_ref.actor.use_kl_loss=false",
                *keys,
            ],
            recipe="grpo",
        ).config.actor_rollout_ref
        engine = build_engine(
            "policy",
            {"path": work.folder, "device": "cpu", "dtype": "float32"},
            name="actor",
            optim=config.actor.optim,
            grad_clip=1.0,
        )
        self.actor = ActorWorker(
            engine,
            config.actor,
            temperature=1.0,
            log_prob_limits=BatchLimits(
                config.actor.ppo_max_token_len_per_gpu, share_prompts=bool(config.actor.use_prefix_grouper)
            ),
        )
        columns = padded(work.prompts, work.responses, kit.PAD)
        self.batch = DataProto.from_dict(columns | {"loss_mask": columns["response_mask"]})
        self.scale = LossScale.count(self.batch.batch["loss_mask"])
        self.advantages = (
            torch.randn(work.rows, 1, generator=torch.Generator().manual_seed(0))
            .expand(columns["responses"].shape)
            .contiguous()
        )
        self.log_probs()

    def log_probs(self) -> Any:
        """[B, R]."""
        self.old = self.actor.log_probs(self.batch, with_entropy=False).batch["old_log_probs"]
        return self.old

    def update(self) -> None:
        """One optimizer step."""
        from hybridflow.protocol import DataProto

        batch = self.batch | DataProto.from_dict({"old_log_probs": self.old, "advantages": self.advantages})
        self.actor.update_mini_batch(batch, scale=self.scale)


class Padded:
    """The common part of TRL and a plain loop: a transformers model and padded rows."""

    def __init__(self, work: Work) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32)
        self.work = work
        self.lengths = work.lengths
        longest = max(self.lengths)
        self.ids = torch.tensor(
            [
                prompt + response + [kit.PAD] * (longest - len(response))
                for prompt, response in zip(work.prompts, work.responses)
            ]
        )
        self.mask = torch.tensor(
            [[1] * (kit.PROMPT + length) + [0] * (longest - length) for length in self.lengths]
        )
        self.advantages = torch.randn(work.rows, generator=torch.Generator().manual_seed(0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.01, fused=True)

    def finish(self) -> None:
        """Clip, step, forget."""
        import torch

        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Plain(Padded):
    """A padded loop as one writes it, each micro-batch cut to its longest row."""

    def _log_probs(self, first: int) -> Any:
        part = slice(first, first + self.work.at_a_time)
        width = kit.PROMPT + max(self.lengths[part])
        ids = self.ids[part, :width]
        mask = self.mask[part, :width]
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, kit.PROMPT - 1 : -1]
        return logits.log_softmax(-1).gather(-1, ids[:, kit.PROMPT :, None])[..., 0]

    def log_probs(self) -> Any:
        """[B, R] in parts."""
        import torch

        with torch.no_grad():
            return [self._log_probs(first) for first in range(0, self.work.rows, self.work.at_a_time)]

    def update(self) -> None:
        """One optimizer step."""
        import torch

        total = sum(self.lengths)
        for first in range(0, self.work.rows, self.work.at_a_time):
            log_probs = self._log_probs(first)
            part = slice(first, first + self.work.at_a_time)
            mask = self.mask[part, kit.PROMPT : kit.PROMPT + log_probs.shape[1]]
            ratio = (log_probs - log_probs.detach()).exp()
            advantages = self.advantages[part, None]
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            ((loss * mask).sum() / total).backward()
        self.finish()


class TRL(Padded):
    """TRL's own functions."""

    def __init__(self, work: Work, rows: int) -> None:
        import torch
        from datasets import Dataset
        from transformers import AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        super().__init__(work)
        settings = GRPOConfig(
            output_dir=str(work.folder.parent / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=work.rows // rows,
            num_generations=kit.GROUP,
            report_to="none",
            disable_tqdm=True,
        )
        self.rows = rows
        self.trainer = GRPOTrainer(
            self.model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * work.rows}),
            processing_class=AutoTokenizer.from_pretrained(
                work.folder.parent / "tokenizer", padding_side="left"
            ),
        )
        self.trainer.current_gradient_accumulation_steps = work.rows // rows
        self.total = torch.tensor(sum(self.lengths))
        self.model.train()

    def log_probs(self) -> Any:
        """[B, R]."""
        import torch

        with torch.no_grad():
            found = self.trainer._get_per_token_logps_and_entropies(
                self.model, self.ids, self.mask, self.ids.shape[1] - kit.PROMPT, batch_size=self.rows
            )
        return found[0]

    def update(self) -> None:
        """One optimizer step."""
        for first in range(0, self.work.rows, self.rows):
            part = slice(first, first + self.rows)
            inputs = {
                "prompt_ids": self.ids[part, : kit.PROMPT],
                "prompt_mask": self.mask[part, : kit.PROMPT],
                "completion_ids": self.ids[part, kit.PROMPT :],
                "completion_mask": self.mask[part, kit.PROMPT :],
                "advantages": self.advantages[part],
                "num_items_in_batch": self.total,
            }
            self.trainer.compute_loss(self.model, inputs).backward()
        self.finish()
