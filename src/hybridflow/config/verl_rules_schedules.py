"""Keys of verl's asynchronous trainers, as data: values without effect here, and others refused.

The keys that have another name here are in `aliases.py`.
"""

from __future__ import annotations

from hybridflow.config.verl_rule import OFF, Rule, ignored, off

ROLLOUT = r"actor_rollout_ref\.rollout\."
OWN_DEVICES = (
    "set trainer.resource_pools={train: [devices of each node], gen: [devices of each node]} and "
    "trainer.placement={rollout: gen}, with trainer.schedule=one_step_off, exact_async or fully_async"
)
PUBLISHED = (
    "weights are published after each step, whose prompts are data.train_batch_size: set that to "
    "trigger_parameter_sync_step × require_batches × actor_rollout_ref.actor.ppo_mini_batch_size, and leave "
    "this out"
)

SCHEDULES: tuple[Rule, ...] = (
    Rule(
        r"trainer\.v1\.(colocate|separate)_async\.num_warmup_batches",
        (None, 1),
        "an asynchronous schedule runs one step ahead unless trainer.async.run_ahead says otherwise",
        "set trainer.async.run_ahead to as many steps, with trainer.schedule=colocated_async or fully_async",
    ),
    ignored(
        r"trainer\.v1\.separate_async\.parameter_sync_step",
        "weights are published after each step, which makes data.train_batch_size / "
        "actor_rollout_ref.actor.ppo_mini_batch_size optimizer steps, and verl wants that to be this number",
    ),
    off(
        r"trainer\.v1\.separate_async\.(hybrid_rollout\.)?enable_switch",
        "devices do not change between training and generation: leave it out, or set "
        "trainer.schedule=colocated_async, which has one set of devices for both",
    ),
    ignored(
        r"trainer\.v1\.separate_async\.hybrid_rollout\..+",
        "it is read only with enable_switch, which is off",
    ),
    Rule(
        r"trainer\.v1\.sampler\.max_off_policy_threshold",
        (None, 8),
        "trainer.async.max_staleness bounds the age of every token, and follows trainer.async.run_ahead "
        "unless it is set",
        "set trainer.async.max_staleness",
    ),
    ignored(
        r"trainer\.v1\.sampler\.max_off_policy_strategy",
        "nothing is dropped for its age: a step waits for groups that would pass trainer.async.max_staleness",
    ),
    off(
        r"trainer\.v1\.sampler\.sync_refill_failed_groups",
        "trainer.schedule=fully_async and colocated_async replace failed groups: leave it out",
    ),
    off(
        r"trainer\.v1\.sampler\.(custom_sampler(\..+)?|sampler_kwargs(\..+)?)",
        "trainer.async.run_ahead and max_staleness choose the groups of a step; data.sampler.class_path "
        "chooses the order of prompts",
    ),
    Rule(
        r"async_training\.(trigger_parameter_sync_step|require_batches)", (None,), "it is left out", PUBLISHED
    ),
    off(
        r"async_training\.use_trainer_do_validate",
        "validation is always the run's own, on the rollout's devices (trainer.test_freq): leave it out",
    ),
    off(
        r"async_training\.use_dynamic_resource_scheduling",
        "devices do not change between training and generation: leave it out",
    ),
    ignored(
        r"async_training\.dynamic_schedule_\w+",
        "it is read only with use_dynamic_resource_scheduling, which is off",
    ),
    Rule(
        r"async_training\.concurrent_samples_per_replica",
        (None, 16),
        "as many groups are generated at once as trainer.async.run_ahead admits",
        "set trainer.async.max_concurrent_groups, which counts the groups of all replicas together",
    ),
    Rule(
        r"async_training(\..+)?",
        (),
        "",
        "set trainer.schedule=fully_async, with trainer.async.run_ahead, max_staleness and partial_rollout",
    ),
    Rule(ROLLOUT + r"nnodes", OFF, "generation shares the devices of training", OWN_DEVICES),
    ignored(
        ROLLOUT + r"n_gpus_per_node",
        "verl reads it with rollout.nnodes; trainer.resource_pools and trainer.placement.rollout give "
        "generation devices of its own",
    ),
    off(
        ROLLOUT + r"total_rollout_steps",
        "it counts prompts: set trainer.total_training_steps to this number / data.train_batch_size",
    ),
    off(ROLLOUT + r"test_freq", "set trainer.test_freq, which counts steps"),
    off(
        ROLLOUT + r"standalone_gpu_memory_utilization",
        "set actor_rollout_ref.rollout.gpu_memory_utilization",
    ),
    Rule(r"actor_rollout_ref\.actor\.use_rollout_log_probs", (None, False), "it is off", "set true or false"),
)
