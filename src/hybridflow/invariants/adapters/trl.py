"""TRL's trainers without a model: a bare object has the methods of GRPOTrainer or RLOOTrainer, and what they
read of a trainer is set by hand.

`_compute_loss` gets log-probs where it would ask the model for them, and `_generate_and_score_completions`
gets responses and rewards. Everything between is TRL's. Its advantages are of whole responses, whose groups
are neighbours of equal size; an input of another form is not offered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any
from unittest import mock

import torch
import transformers
import trl
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from hybridflow.invariants.adapter import NotOffered, TrainerAdapter, resumed_rates

END = 2
PAD = 0
LOSS_TYPES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum": "luspo"}


class TRLTrainer(TrainerAdapter):
    """Methods of GRPOTrainer and RLOOTrainer, functions of `trl.trainer.utils`, SFTTrainer's collator."""

    version = f"trl {trl.__version__}, transformers {transformers.__version__}"

    def advantages(
        self,
        name: str,
        rewards: Tensor,
        mask: Tensor,
        groups: Sequence[Hashable],
        *,
        values: Tensor,
        baselines: Tensor,
        gamma: float,
        lam: float,
    ) -> Tensor:
        size = _group_size(groups)
        # a response has one reward, and none elsewhere; a masked response is cut, and left out by its key
        stray = mask.any(1) & ((rewards != 0) & ~mask).any(1)
        cut_out = mask.any(1) & (mask.int().diff(dim=1) > 0).any(1)
        if name not in ("grpo", "dr_grpo", "rloo") or size is None or bool((stray | cut_out).any()):
            raise NotOffered
        lengths = mask.sum(1).tolist()
        completions = [[5] * (each - 1) + [END] if each else [5] * mask.shape[1] for each in lengths]
        trainer = _bare(RLOOTrainer if name == "rloo" else GRPOTrainer)
        trainer.scale_rewards = "group" if name == "grpo" else "none"
        found: Tensor = _score(trainer, completions, rewards.sum(1), size)["advantages"]
        return found[:, None] * mask

    def policy_loss(
        self,
        name: str,
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        mode: str,
        whole: Tensor,
        parts: int,
        clip: tuple[float, float],
    ) -> Tensor:
        if name not in ("ppo", "gspo"):
            raise NotOffered
        trainer = _bare(GRPOTrainer)
        trainer.loss_type = LOSS_TYPES[mode]
        trainer.importance_sampling_level = "sequence" if name == "gspo" else "token"
        trainer.epsilon_low, trainer.epsilon_high = clip
        _cut_into(trainer, parts)
        return _compute_loss(trainer, log_prob, old_log_prob, advantages, mask, whole)

    def kl(self, name: str, log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
        if name != "k3":
            raise NotOffered
        # the term that beta adds to the loss, token by token: the mean over the one token of a row, which a
        # mask leaves out or not
        trainer = _bare(GRPOTrainer)
        trainer.beta = 1.0
        terms = []
        for row, column in torch.ones_like(mask).nonzero().tolist():
            token = (slice(row, row + 1), slice(column, column + 1))
            own = log_prob[token]
            kept = mask[token]
            terms.append(
                _compute_loss(
                    trainer, own, own.detach(), torch.zeros_like(own), kept, kept, ref_log_prob[token]
                )
            )
        return torch.stack(terms).view(mask.shape)

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        found: Tensor = selective_log_softmax(logits, tokens)
        return found

    def entropy(self, logits: Tensor) -> Tensor:
        found: Tensor = entropy_from_logits(logits)
        return found

    def response_mask(self, responses: Sequence[Sequence[int]], *, eos: int, pad: int) -> Tensor:
        trainer = _bare(GRPOTrainer)
        trainer.mask_truncated_completions = False
        trainer._tokenizer.pad_token_id = pad
        found = _score(trainer, responses, torch.zeros(len(responses)), len(responses))
        mask: Tensor = found["completion_mask"].bool()
        return mask

    def packed_positions(self, lengths: Sequence[int]) -> Sequence[int]:
        packed = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=True)
        examples = [{"input_ids": [5] * length} for length in lengths]
        positions: list[int] = packed(examples)["position_ids"][0].tolist()
        return positions

    def packed_outputs(self, rows: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        packed = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=True)
        batch = packed([{"input_ids": list(row)} for row in rows])
        del batch["labels"]
        with torch.no_grad():
            logits = _tiny_llama()(**batch, use_cache=False).logits  # as in training
        return list(logits[0].split([len(row) for row in rows]))

    def learning_rates(self, total: int, resumes: Sequence[int]) -> Sequence[float]:
        def new() -> tuple[torch.optim.Optimizer, Any]:
            trainer = _bare(GRPOTrainer)
            trainer.lr_scheduler = None
            trainer.args = transformers.TrainingArguments(lr_scheduler_type="cosine", warmup_steps=0)
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
            return optimizer, trainer.create_scheduler(total, optimizer)

        return resumed_rates(new, total, resumes)

    def mean_metric(self, values: Sequence[Tensor], masks: Sequence[Tensor]) -> float:
        trainer = _bare(GRPOTrainer)
        _cut_into(trainer, len(values))
        whole = torch.cat(list(masks), dim=1)
        for each, mask in zip(values, masks, strict=True):
            zeros = torch.zeros_like(each)
            _compute_loss(trainer, zeros, zeros, zeros, mask, whole, entropies=each)
        told: dict[str, float] = {}
        with mock.patch.object(transformers.Trainer, "log"):  # of the base class: callbacks
            trainer.log(told)
        return told["entropy"]


Adapter = TRLTrainer


class _Unset:
    """An object whose attributes are None, as options are that are off, unless they are set."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> None:
        return None


def _bare(kind: Any) -> Any:
    """Return a trainer without a model, data or processes, in training on one process."""
    logs: Any = defaultdict(list)
    logs["rewards"] = defaultdict(list)
    trainer: Any = object.__new__(type(kind.__name__, (_Unset, kind), {}))
    vars(trainer).update(
        model=_Unset(training=True),
        accelerator=_Unset(
            device=torch.device("cpu"),
            num_processes=1,
            process_index=0,
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
        ),
        args=_Unset(),
        _tokenizer=_Unset(pad_token_id=PAD),
        _metrics={"train": defaultdict(list)},
        _logs=logs,
        _pending_extra_logs={},
        _pending_metrics={},
        _get_per_token_logps_and_entropies=lambda model, ids, mask, keep, *_, **__: (
            torch.zeros(len(ids), keep),
            None,
            None,
        ),
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        loss_type="dapo",
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        mask_truncated_completions=True,
        eos_token_ids=[END],
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards="group",
        reward_weights=torch.ones(1),
        reward_func_names=["reward"],
    )
    _cut_into(trainer, 1)
    return trainer


def _cut_into(trainer: Any, parts: int) -> None:
    """Set the number of micro-batches of a step, all of one generation."""
    trainer.current_gradient_accumulation_steps = parts
    trainer.args.steps_per_generation = trainer.args.gradient_accumulation_steps = parts
    trainer.num_iterations = 1


def _score(trainer: Any, completions: Sequence[Sequence[int]], rewards: Tensor, size: int) -> Any:
    """Return what the trainer makes of completions and rewards [B], whose groups of `size` are neighbours."""
    prompts = [[4]] * len(completions)
    texts = [""] * len(completions)
    generated: Any = (prompts, list(completions), None, texts, None, {}, None, None)
    if isinstance(trainer, RLOOTrainer):
        generated = (prompts, list(completions), texts)
    trainer._generate = lambda *_: generated
    trainer._calculate_rewards = lambda *_: rewards[:, None]
    trainer.num_generations = size
    return trainer._generate_and_score_completions([{"prompt": "a"} for _ in completions])


def _compute_loss(
    trainer: Any,
    log_prob: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    whole: Tensor,
    reference: Tensor | None = None,
    entropies: Tensor | None = None,
) -> Tensor:
    """Return what `_compute_loss` makes of tensors [B, R]; `whole` is the mask of the generation batch."""
    if entropies is None:
        entropies = torch.zeros_like(log_prob)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_prob, entropies, None)
    prompt = torch.ones(len(mask), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": mask.long(),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": whole.sum(),
    }
    if reference is not None:
        inputs["ref_per_token_logps"] = reference
    loss: Tensor = trainer._compute_loss(None, inputs)
    return loss


def _group_size(groups: Sequence[Hashable]) -> int | None:
    """Return the size of groups that are neighbours and equally large, or None."""
    size = list(groups).count(groups[0])
    starts = range(0, len(groups), size)
    even = all(list(groups[start : start + size]) == [groups[start]] * size for start in starts)
    return size if even and len({groups[start] for start in starts}) == len(starts) else None


def _tiny_llama() -> Any:
    """Return a small model of transformers, with the same weights in every call."""
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()
