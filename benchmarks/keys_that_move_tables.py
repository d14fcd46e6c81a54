"""The tables of keys_that_move.py: base runs, other values of keys, what keys act on, and kinds of keys that
shape no number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridflow.algorithms.catalog import AGGREGATIONS, ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES

Settings = Mapping[str, Any]
ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
VALIDATION = f"{ROLLOUT}.val_kwargs"
DIVERGENCE = "distillation.distillation_loss"
CORRECTION = "algorithm.rollout_correction"
GROUPS = "algorithm.filter_groups"
PROCESS = "reward.process_reward_model"
JUDGE = "reward.reward_model"
CUSTOM = "reward.custom_reward_function"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
ESTIMATOR = "algorithm.adv_estimator"
STEPS = "trainer.total_training_steps"
STOPS = list(range(20, 60))
"""Tokens that end a response, so that lengths differ and some responses are cut."""

BASE: Settings = {
    f"{MODEL}.path": "{folder}/model",
    f"{MODEL}.enable_gradient_checkpointing": False,
    "data.task.name": "arithmetic_chain",
    "data.task.size": 64,
    "data.task.val_size": 0,
    "data.train_batch_size": 4,
    "data.max_prompt_length": 32,
    "data.max_response_length": 8,
    f"{ACTOR}.ppo_mini_batch_size": 2,
    f"{ACTOR}.ppo_epochs": 2,
    f"{ACTOR}.optim.lr": 1e-3,
    f"{ROLLOUT}.n": 3,
    f"{ROLLOUT}.exact": False,
    f"{ROLLOUT}.stop_token_ids": STOPS,
    ESTIMATOR: "grpo",
    "reward.num_workers": 0,
    f"{CUSTOM}.path": "{folder}/reward.py",
    "trainer.logger": [],
    "trainer.num_threads": 1,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.val_before_train": False,
    "trainer.default_local_dir": "{folder}/run",
    STEPS: 1,
}
"""The base run: GRPO, four prompts of three responses, four optimizer steps in one step."""

BASE_OF_PAIRS: Settings = {
    "model.path": "{folder}/model",
    "model.enable_gradient_checkpointing": False,
    "data.task.name": "arithmetic_preferences",
    "data.task.size": 16,
    "data.task.val_size": 0,
    "data.train_batch_size": 4,
    "optim.lr": 3e-3,
    "trainer.logger": [],
    "trainer.num_threads": 1,
    "trainer.default_local_dir": "{folder}/run",
    STEPS: 4,
}
"""The base run of preference optimisation: DPO, four optimizer steps on four pairs."""

CODE = """
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.02):
    share = sum(c.islower() for c in solution_str) / max(1, len(solution_str))
    score = share + bonus * len(solution_str) + sum(map(ord, solution_str)) % 7 / 100
    return {"score": score, "acc": float(share > 0.5), "share": share}


def other_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) / 100


def fails_at_times(data_source, solution_str, ground_truth, extra_info):
    if len(solution_str) % 2:
        raise ValueError("an odd length")
    return other_score(data_source, solution_str, ground_truth, extra_info)


def own_loss(inputs, *, strength=1.0):
    from hybridflow.algorithms.aggregation import LossOutput, aggregate

    tokens = inputs.tokens
    loss = -strength * tokens.advantages * tokens.log_prob
    return LossOutput(aggregate(loss, tokens.mask, "token-mean", inputs.scale), {})


def own_estimator(token_level_rewards, response_mask, *, strength=1.0):
    from hybridflow.algorithms.advantages.types import Advantages

    scores = strength * token_level_rewards.sum(-1, keepdim=True) * response_mask
    return Advantages(scores, scores)
"""
"""The rewards, the loss and the estimator of a user."""


@dataclass(frozen=True)
class Trial:
    """Other values of a key, and keys that give them something to act on.

    A name that begins with a dot is one of the key's own block.
    """

    values: tuple[Any, ...] = ()
    """None given: they are derived from the type and from the value in the run."""
    beside: Settings = field(default_factory=dict)
    """Keys of both runs."""
    also: Settings = field(default_factory=dict)
    """Further keys of the run with the other value."""
    alone: bool = True
    """Whether it is tried without those keys too; False where rows decide what is found then."""


def each(values: Iterable[Any], beside: Settings | None = None, **also: Settings) -> list[Trial]:
    """Return a trial for each value; `also` has further keys of single values."""
    return [
        Trial((value,), beside or {}, also.get(str(value), {}), alone=str(value) not in also)
        for value in values
    ]


KL_LOSS: Settings = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 1.0}
KL_REWARD: Settings = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1, STEPS: 2}
KL_CONTROL = "algorithm.kl_ctrl"
ADAPTIVE: Settings = {**KL_REWARD, f"{KL_CONTROL}.type": "adaptive", f"{KL_CONTROL}.horizon": 50, STEPS: 3}
EXPERTS: Settings = {f"{MODEL}.path": "{folder}/experts"}
HELD_OUT: Settings = {"data.task.val_size": 12}
GREEDY: Settings = {f"{ROLLOUT}.do_sample": False}
SAMPLED: Settings = {**HELD_OUT, f"{VALIDATION}.do_sample": True, f"{VALIDATION}.temperature": 1.0}
ROUNDED: Settings = {f"{ROLLOUT}.quantization": "int8"}
WEIGHTED: Settings = {**ROUNDED, f"{CORRECTION}.rollout_is": "token"}
REINFORCE: Settings = {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "reinforce"}
BYPASS: Settings = {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token"}
ADAPTERS: Settings = {".lora_rank": 4}
DYNAMIC: Settings = {f"{GROUPS}.enable": True, f"{GROUPS}.max_num_gen_batches": 0}
DRAWN: Settings = {"algorithm.use_pf_ppo": True}
BUFFER: Settings = {OVERLONG + ".enable": True, OVERLONG + ".len": 4}
TASK_REWARD: Settings = {f"{CUSTOM}.path": None}
WSD: Settings = {".lr_scheduler_type": "wsd", ".lr_wsd_decay_steps": 3}
COVARIANCES: Settings = {
    f"{LOSS}.clip_cov_ratio": 0.5,
    f"{LOSS}.clip_cov_lb": -9.0,
    f"{LOSS}.clip_cov_ub": 9.0,
}

TEACHER: Settings = {
    ESTIMATOR: "on_policy_distillation",
    "distillation.teacher_model.path": "{folder}/teacher",
}
MIXED: Settings = {
    **TEACHER,
    f"{DIVERGENCE}.loss_mode": "jsd",
    f"{DIVERGENCE}.use_task_rewards": False,
    f"{ROLLOUT}.n": 1,
    "data.max_response_length": 40,
}

ROLES: Mapping[str, Settings] = {
    f"{DIVERGENCE}.": {**TEACHER, f"{DIVERGENCE}.loss_mode": "jsd_topk", f"{DIVERGENCE}.topk": 4},
    "critic.": {ESTIMATOR: "gae", "critic.optim.lr": 3e-3},
    f"{PROCESS}.": {
        ESTIMATOR: "prime",
        f"{PROCESS}.optim.lr": 3e-3,
        f"{PROCESS}.ppo_mini_batch_size": 2,
        STEPS: 2,
    },
    f"{JUDGE}.": {**TASK_REWARD, f"{JUDGE}.enable": True, f"{JUDGE}.model.path": "{folder}/judge"},
}
"""Keys with which the role of a block is there."""
FOR_ESTIMATORS: Mapping[str, Settings] = {
    "gdpo": {"algorithm.gdpo_reward_keys": ["share", "acc"]},
    "sppo": {f"{LOSS}.loss_mode": "sppo"},
    "online_dpo": {f"{LOSS}.loss_mode": "dpo"},
    "spin": {f"{LOSS}.loss_mode": "dpo"},
    "on_policy_distillation": TEACHER,
}
FOR_LOSSES: Mapping[str, Settings] = {
    "sppo": {ESTIMATOR: "sppo"},
    "dpo": {ESTIMATOR: "online_dpo"},
    "gspo": {f"{ACTOR}.clip_ratio": 0.5},  # its own bounds, and narrow ones, clip all rows of a tiny model
    "clip_cov": COVARIANCES,
    "kl_cov": {f"{LOSS}.kl_cov_ratio": 0.5},
}
"""Keys that an estimator, or a loss, needs beside it."""
TERMS = ("entropy_coeff", "use_kl_loss", "positive_lm_loss_coef", "loss_agg_mode", "loss_scale_factor")
"""Keys of the actor that act beside every loss."""

SHARED: Mapping[str, list[Trial]] = {
    "optim.betas": [Trial(([0.5, 0.9],)), Trial(([0.5, 0.9],), {".optimizer": "SGD"})],
    "optim.eps": [Trial((1e-3,)), Trial((1e-3,), {".optimizer": "SGD"})],
    "optim.weight_decay": [Trial((0.5,))],
    "optim.momentum": [Trial((0.5,), {".optimizer": name}) for name in ("SGD", "Muon")],
    "optim.muon_ns_steps": [Trial((2,), {".optimizer": "Muon"})],
    "optim.muon_adjust_lr": [Trial((), {".optimizer": "Muon"})],
    "optim.lr_scheduler_type": each(("linear", "cosine", "wsd"), wsd={".lr_wsd_decay_steps": 3}),
    "optim.lr_wsd_decay_steps": [Trial((2,), WSD)],
    "optim.lr_wsd_decay_style": [Trial((), WSD)],
    "optim.lr_warmup_steps": [Trial((2,))],
    "optim.lr_warmup_steps_ratio": [Trial((0.5,)), Trial((0.5,), {".lr_warmup_steps": 2})],
    "optim.min_lr_ratio": [Trial((0.5,), {".lr_scheduler_type": kind}) for kind in ("linear", "cosine")]
    + [Trial((0.5,), WSD)],
    "optim.num_cycles": [Trial((1.5,), {".lr_scheduler_type": "cosine"})],
    "optim.total_training_steps": [Trial((8,), {".lr_scheduler_type": "linear"})],
    "model.lora_rank": [Trial((4,))],
    "model.lora_alpha": [Trial((64,), ADAPTERS)],
    "model.lora_dropout": [Trial((0.5,), ADAPTERS)],
    "model.target_modules": [Trial((["q_proj"],), ADAPTERS)],
    "model.exclude_modules": [Trial((["q_proj"],), ADAPTERS)],
    "model.quantization": [Trial(("nf4",), ADAPTERS)],
    "grad_clip": [Trial((1e-3,)), Trial((None,), {".grad_clip": 1e-3}, alone=False)],
}
"""Trials of keys by the end of their path, which blocks share."""

OTHER_THAN_K3 = {each: name for name, each in KL_ESTIMATORS.items() if name not in ("low_var_kl", "k3")}
"""A name of each estimate of the KL but the default one, by its formula."""
MODES = [mode for mode in AGGREGATIONS if mode != "token-mean"]
TRIALS: Mapping[str, list[Trial]] = {
    f"{ACTOR}.ppo_mini_batch_size": [Trial((4,))],
    f"{ACTOR}.ppo_epochs": [Trial((1,))],
    f"{ACTOR}.clip_ratio": [Trial((1e-3,))],
    f"{ACTOR}.clip_ratio_low": [Trial((1e-3,))],
    f"{ACTOR}.clip_ratio_high": [Trial((1e-3,))],
    f"{ACTOR}.clip_ratio_c": [Trial((1.001,))],
    f"{ACTOR}.loss_agg_mode": each(MODES),
    f"{ACTOR}.loss_scale_factor": [Trial((3.0,), {".loss_agg_mode": "seq-mean-token-sum-norm"})],
    f"{ACTOR}.kl_loss_coef": [Trial((0.5,), KL_LOSS)],
    f"{ACTOR}.kl_loss_type": each([*OTHER_THAN_K3.values(), "low_var_kl+", "abs+", "full"], KL_LOSS),
    f"{ACTOR}.router_aux_loss_coef": [Trial((1.0,), EXPERTS)],
    f"{ACTOR}.router_replay.mode": [
        Trial(("R2",), EXPERTS),
        Trial(("R3",), EXPERTS, {f"{ROLLOUT}.enable_rollout_routing_replay": True}),
    ],
    f"{LOSS}.loss_mode": each((name for name in POLICY_LOSSES if name != "vanilla"), **FOR_LOSSES),
    f"{LOSS}.options": [Trial(({"strength": 3.0},), {".loss_mode": "{folder}/reward.py:own_loss"})],
    f"{LOSS}.clip_cov_ratio": [Trial((0.9,))],
    f"{LOSS}.clip_cov_lb": [Trial((0.0,))],
    f"{LOSS}.clip_cov_ub": [Trial((0.0,))],
    f"{LOSS}.kl_cov_ratio": [Trial((0.9,))],
    f"{LOSS}.dpo_label_smoothing": [Trial((0.3,))],
    f"{ROLLOUT}.n": [Trial((4,))],
    f"{ROLLOUT}.temperature": [Trial((0.5,))],
    f"{ROLLOUT}.ignore_eos": [
        Trial((True,), {".n": 24, ".temperature": 3.0, ".stop_token_ids": []}, alone=False)
    ],
    f"{ROLLOUT}.stop": [Trial((["*", ";", "N"],))],
    f"{ROLLOUT}.stop_token_ids": [Trial(([*STOPS, *range(60, 100)],))],
    f"{ROLLOUT}.top_k": [Trial((2,)), Trial((2,), GREEDY)],
    f"{ROLLOUT}.top_p": [Trial((0.3,)), Trial((0.3,), GREEDY)],
    f"{ROLLOUT}.min_p": [Trial((0.5,)), Trial((0.5,), GREEDY)],
    f"{ROLLOUT}.repetition_penalty": [Trial((2.0,))],
    f"{ROLLOUT}.quantization": each(("int8", "float16"), {f"{CORRECTION}.rollout_is": "token"}),
    f"{ROLLOUT}.reuse_log_probs_within": [Trial((100.0,))],
    f"{ROLLOUT}.enable_rollout_routing_replay": [
        Trial((True,), EXPERTS, {f"{ACTOR}.router_replay.mode": "R3"}),
    ],
    f"{VALIDATION}.do_sample": [Trial((True,), HELD_OUT, {f"{VALIDATION}.temperature": 1.0})],
    f"{VALIDATION}.temperature": [Trial((0.3,), HELD_OUT), Trial((0.3,), SAMPLED)],
    f"{VALIDATION}.n": [Trial((3,), SAMPLED)],
    f"{VALIDATION}.top_k": [Trial((2,), HELD_OUT), Trial((2,), SAMPLED)],
    f"{VALIDATION}.top_p": [Trial((0.3,), HELD_OUT), Trial((0.3,), SAMPLED)],
    f"{VALIDATION}.min_p": [Trial((0.5,), HELD_OUT), Trial((0.5,), SAMPLED)],
    f"{VALIDATION}.repetition_penalty": [Trial((2.0,), HELD_OUT), Trial((2.0,), SAMPLED)],
    "critic.ppo_mini_batch_size": [Trial((4,))],
    "critic.ppo_epochs": [Trial((1,))],
    "critic.shuffle": [Trial((False,))],
    "critic.enable": [Trial((True,))],
    "critic.cliprange_value": [Trial((1e-3,))],
    "critic.loss_agg_mode": each(MODES),
    ESTIMATOR: each((name for name in ESTIMATORS if name != "grpo"), **FOR_ESTIMATORS),
    "algorithm.options": [Trial(({"strength": 3.0},), {ESTIMATOR: "{folder}/reward.py:own_estimator"})],
    "algorithm.gamma": [Trial((0.5,))],
    "algorithm.lam": [Trial((0.5,))],
    "algorithm.lam_critic": [Trial((0.5,))],
    "algorithm.lam_length_alpha": [Trial((0.5,))],
    "algorithm.gdpo_reward_keys": [Trial((["share"],))],
    "algorithm.gdpo_reward_weights": [Trial(([1.0, 3.0],))],
    "algorithm.use_kl_in_reward": [Trial((True,), {STEPS: 2}, {f"{KL_CONTROL}.kl_coef": 1.0}, alone=False)],
    "algorithm.kl_penalty": each(("abs", "mse", "low_var_kl"), KL_REWARD),
    f"{KL_CONTROL}.type": [Trial((), {**ADAPTIVE, f"{KL_CONTROL}.type": "fixed"})],
    f"{KL_CONTROL}.kl_coef": [Trial((), KL_REWARD)],
    f"{KL_CONTROL}.horizon": [Trial((), KL_REWARD), Trial((), ADAPTIVE)],
    f"{KL_CONTROL}.target_kl": [
        Trial((1e-6,), KL_REWARD),
        Trial((1e-6,), {**ADAPTIVE, ".target_kl": 100.0, "algorithm.kl_penalty": "mse"}),
    ],
    "algorithm.by_source": [Trial(({"arithmetic_chain": {"adv_estimator": "reinforce_plus_plus"}},))],
    "algorithm.ref_update_freq": [Trial((1,), {**KL_LOSS, STEPS: 2})],
    f"{GROUPS}.metric": [Trial(("share",), DYNAMIC)],
    f"{GROUPS}.max_num_gen_batches": [Trial((1,), DYNAMIC)],
    f"{GROUPS}.min_mean": [Trial((0.5,), DYNAMIC)],
    f"{GROUPS}.max_mean": [Trial((0.3,), {**DYNAMIC, ".metric": "score"})],
    "algorithm.pf_ppo.reweight_method": [Trial((), DRAWN)],
    "algorithm.pf_ppo.weight_pow": [
        Trial((8.0,), {**DRAWN, ".reweight_method": "max_min"}),
        Trial((8.0,), DRAWN),
    ],
    "algorithm.pf_ppo.max_age": [Trial((1,), {**DRAWN, f"{CORRECTION}.bypass_mode": True, STEPS: 2})],
    f"{CORRECTION}.rollout_is": [Trial(("token", "sequence"), REINFORCE)],
    f"{CORRECTION}.rollout_is_threshold": [Trial((1.00001, "0.99999_1.00001"), WEIGHTED)],
    f"{CORRECTION}.rollout_is_batch_normalize": [Trial((True,), WEIGHTED)],
    f"{CORRECTION}.rollout_rs": each(
        ("token_k1", "seq_mean_k1", "seq_max_k2"),
        REINFORCE,
        token_k1={".rollout_rs_threshold": 1.1},
        seq_mean_k1={".rollout_rs_threshold": 1.1},
        seq_max_k2={".rollout_rs_threshold": 1e-3},
    ),
    f"{CORRECTION}.rollout_rs_threshold": [
        Trial((1.00001,), {**ROUNDED, ".rollout_rs": "token_k1", ".rollout_rs_threshold": 2.0})
    ],
    f"{CORRECTION}.loss_type": [Trial((), BYPASS)],
    "reward.function": [Trial(("random",), TASK_REWARD)],
    "reward.terms": [Trial(([{"name": "length", "weight": -0.1, "max_chars": 4}],), TASK_REWARD)],
    f"{CUSTOM}.path": [Trial(("{folder}/reward.py:other_score",))],
    f"{CUSTOM}.name": [Trial(("other_score",)), Trial(("other_score",), TASK_REWARD)],
    f"{CUSTOM}.reward_kwargs": [Trial(({"bonus": 0.5},))],
    f"{OVERLONG}.len": [Trial((2,), BUFFER)],
    f"{OVERLONG}.penalty_factor": [Trial((), BUFFER)],
    "reward.reward_kwargs.max_resp_len": [Trial((6,), BUFFER)],
    "reward.on_error": [
        Trial(("drop", "raise"), {f"{CUSTOM}.name": "fails_at_times", ".on_error": "zero"}, alone=False)
    ],
    f"{PROCESS}.enable": [Trial((True,))],
    f"{PROCESS}.ppo_mini_batch_size": [Trial((4,))],
    f"{PROCESS}.model.quantization": [
        # one folder, the actor's, has one rounding for both
        Trial(("nf4",), {**ADAPTERS, f"{PROCESS}.model.path": "{folder}/teacher"}),
    ],
    f"{JUDGE}.enable": [Trial((True,), TASK_REWARD, {".model.path": "{folder}/judge"})],
    f"{JUDGE}.kind": [
        Trial(("token_score",), {}, {f"{JUDGE}.model.path": "{folder}/steps", f"{JUDGE}.step_separator": "N"})
    ],
    f"{JUDGE}.step_separator": [Trial(("N",), {".kind": "token_score", ".model.path": "{folder}/steps"})],
    f"{JUDGE}.step_reduce": [
        Trial((), {".kind": "token_score", ".model.path": "{folder}/steps", ".step_separator": "N"}),
    ],
    "distillation.lmbda": [Trial((0.3,), MIXED)],
    f"{DIVERGENCE}.jsd_beta": [Trial((0.2,))],
    f"{DIVERGENCE}.loss_max_clamp": [Trial((0.01,))],
    "trainer.critic_warmup": [Trial((1,), {ESTIMATOR: "gae", STEPS: 2})],
    "trainer.grad_clip": [Trial((1e-3,)), Trial((None,), {".grad_clip": 1e-3}, alone=False)],
    "algorithm.loss": [Trial()],
    "algorithm.beta": [Trial((0.5,), {".loss": loss}) for loss in ("dpo", "ipo", "kto", "simpo", "orpo")],
    "algorithm.label_smoothing": [Trial((0.3,))],
    "algorithm.simpo_margin": [Trial((3.0,), {".loss": "simpo"})],
    "algorithm.odds_weight": [Trial((1.0,), {".loss": "orpo"})],
    "algorithm.desirable_weight": [Trial((2.0,), {".loss": "kto"})],
    "algorithm.undesirable_weight": [Trial((2.0,), {".loss": "kto"})],
}
"""What cannot be derived: values, and keys that give a key something to act on."""

NOTHING: Mapping[str, str] = {
    "data.*": "which rows there are; the tests of the data hold what their keys do",
    "trainer.*": "length of the run, machine, logging, checkpoints; the order of work has tests of its own",
    "ray_kwargs.*": "processes of the cluster",
    "global_profiler.*": "what is recorded of some steps",
    "distillation.enabled": "says again that there is a teacher",
    f"{DIVERGENCE}.use_policy_gradient": "says again what loss_mode is",
    "distillation.teachers": "which models teach which rows",
    "distillation.teacher_model.*": "which model the teacher is",
    "actor_rollout_ref.ref.*": "which model the reference is, its layout, and tokens of one pass",
    "engine.*": "layout over processes and memory",
    "*.fsdp_config.*": "layout over processes and memory: the same up to rounding (cluster_parity.md)",
    "*.ulysses_sequence_parallel_size": "layout over processes",
    "*.strategy": "the training engine: the same numbers up to rounding (make test-megatron)",
    "*checkpoint.*": "what a checkpoint holds",
    "*_per_gpu": "rows and tokens of one pass: memory and speed",
    "algorithm.share_prompts": "computes a prompt once: the same numbers up to rounding",
    "*.use_prefix_grouper": "computes a prompt once: the same numbers up to rounding",
    "*model.path": "which model it is",
    "*model.tokenizer_path": "which tokenizer it is",
    "*model.trust_remote_code": "which code is loaded",
    "*model.external_lib": "which code is loaded",
    "*model.override_config": "which model it is",
    "*model.dtype": "precision of all that is computed",
    "*model.use_liger": "kernels of CUDA",
    "*model.enable_*": "memory of activations",
    "*model.freeze_vision_tower": "models that read pictures",
    "*model.lora_adapter_path": "which model it is",
    f"{JUDGE}.model.*": "which model the judge is: it does not train",
    f"{JUDGE}.rollout.*": "engines of a generative judge: which verdicts they give is the same",
    f"{JUDGE}.max_length": "a longer conversation is an error of that row",
    **{
        f"{ROLLOUT}.{name}": reason
        for reason, names in {
            "which engine generates, and its layout": (
                *("name", "tensor_model_parallel_size", "expert_parallel_size", "dtype"),
                *("engine_kwargs.*", "server.*"),
                *("load_format", "lora_as_adapters", "update_weights_bucket_megabytes", "delta_push"),
            ),
            "memory and speed of generation": (
                *("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_model_len"),
                *("enforce_eager", "cudagraph_capture_sizes", "enable_chunked_prefill", "kv_cache"),
                *("enable_prefix_caching", "free_cache_engine", "speculative.*"),
                "recompute_kv_after_update",
            ),
            "whether a pass that gives the same log-probs is left out": ("exact", "exact_check_rows"),
            "conversations of agents, which tests of their own hold": ("multi_turn.*", "agent.*"),
            "what is written of rollouts": ("skip.*", "trace.*"),
        }.items()
        for name in names
    },
    "reward.sandbox*": "what programs of the model may use",
    "reward.num_workers": "processes that score",
    "reward.timeout": "limits of the processes that score",
    "reward.memory_limit_mb": "limits of the processes that score",
    "reward.max_*": "limits of the processes that score",
    "reward.estimated_tokens_per_request": "limits of the processes that score",
    "reward.manager": "whether the function is called with one response or with lists",
    "reward.watch": "what is watched of a run, and not trained",
    "reward.cache_size": "scores that are not computed again",
}
"""Kinds of keys that shape no number, with the reason; what `TRIALS` has is tried all the same."""
