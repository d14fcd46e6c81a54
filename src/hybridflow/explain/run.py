"""Consequences of a configuration, before anything is built: `hybridflow config --explain`.

keys ─► roles and placement, by the functions that the run itself calls ─► processes, rows and memory of each
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.explain import Line, explain, format_bytes, generation_batch
from hybridflow.config.needs import replayed_steps, responses_per_prompt, rows_per_prompt
from hybridflow.config.preference import rows_per_item
from hybridflow.config.trainer import EXACT_SCHEDULES
from hybridflow.controller import Placement
from hybridflow.distributed.accelerators import features, is_accelerator
from hybridflow.distributed.device import resolve_device
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.models.files.build import describe_model, resolve_dtype, shape_of
from hybridflow.models.files.size import size_of
from hybridflow.models.parallel.stages import layers_of_parts
from hybridflow.planner.memory import Needs, RoleEngine, phases_of_pool
from hybridflow.planner.model_size import ModelSize
from hybridflow.planner.run_plan import PoolPlan, RunPlan
from hybridflow.trainer.ppo.run_plan import plan_of
from hybridflow.trainer.schedules.schedule import Schedule
from hybridflow.trainer.sft.build import roles_of
from hybridflow.trainer.sft.build import sizes as sft_sizes

MOST_RANKS = 16
"""Ranks that are drawn; the others go on in the same way."""
PROMPT_BYTES = 17
"""Bytes of a prompt token in a row: `prompts`, `input_ids` and `attention_mask`."""
RESPONSE_BYTES = 35
"""Bytes of a response token in a row: these, two masks, log-prob, version, call and score."""


def layout_lines(engine: RoleEngine, role: str) -> Iterator[Line]:
    """Yield a line for each rank of a model that is divided otherwise than into shards alone."""
    layout = engine.layout
    if layout.world_size == layout.dp_shard and layout.cp == layout.ep == 1:
        return
    held = _layers(engine, role)
    for rank in range(min(layout.world_size, MOST_RANKS)):
        how = f"rows of part {layout.data_rank(rank) + 1} of {layout.data}"
        if layout.cp > 1:
            how += f", every {layout.cp} ranks share their tokens"
        if layout.pp > 1:
            how += f"; {held[rank // layout.stage_size]}"
        yield Line(f"{engine.role} rank {rank}", _of_engine(engine, layout.place(rank)), how)
    if layout.world_size > MOST_RANKS:
        rest = f"{engine.role} ranks {MOST_RANKS} to {layout.world_size - 1}"
        yield Line(rest, "go on in the same way", "")


def _of_engine(engine: RoleEngine, words: str) -> str:
    """Return words on a layout as its engine has it: megatron-core keeps copies where FSDP2 has shards."""
    if engine.strategy != "megatron":
        return words
    return words.replace("shards", "copies").replace("shard", "copy")


def _layers(engine: RoleEngine, role: str) -> list[str]:
    """Return the layers of each stage, in words."""
    layout = engine.layout
    if layout.pp == 1:
        return []
    if not Path(str(engine.model.path)).expanduser().is_dir():
        return ["its layers are cut when the model is there"] * layout.pp
    parts = layout.pp * engine.fsdp.virtual_pipeline_parallel_size
    is_value = role in ("critic", "reward_model")
    ranges = layers_of_parts(engine.model, parts, is_value=is_value)
    if engine.strategy == "megatron":  # which gives each part as many
        each = sum(map(len, ranges)) // parts
        ranges = [range(part * each, (part + 1) * each) for part in range(parts)]
    words = []
    for stage in range(layout.pp):
        some = [
            f"layer {each[0]}" if len(each) == 1 else f"layers {each[0]} to {each[-1]}"
            for each in ranges[stage :: layout.pp]
        ]
        if stage == 0:
            some.insert(0, "embeddings")
        if stage == layout.pp - 1:
            some.append("last norm and head")
        words.append(", ".join(some))
    return words


def explain_run(
    config: PPOConfig | SFTConfig, num_train_rows: int | None = None, columns: Collection[str] | None = None
) -> list[Line]:
    """Return the sizes of a step, its schedule, the processes, their rows and memory for models on this
    machine.

    Raises ConfigError and ModelError as the run would, for a placement or a layout that cannot be.
    """
    plan = placed(config)
    return [
        _device_line(plan),
        *explain(config, num_train_rows, columns),
        *(schedule_lines(config) if isinstance(config, PPOConfig) else ()),
        *_processes(plan),
        *_rows(plan),
        *_memory(plan),
    ]


def placed(config: PPOConfig | SFTConfig) -> RunPlan:
    """Return the plan of a run, as `build` of its trainer would build it."""
    if isinstance(config, PPOConfig):
        return plan_of(config)
    role, *_ = names = roles_of(config)
    (pool,) = Placement.from_config(config.trainer, names).pools
    data = config.data
    engine = RoleEngine(
        "model",
        sft_sizes(config, pool.world_size),
        config.engine,
        config.model,
        rows=data.train_batch_size * rows_per_item(config),
        longest=data.max_length,
        max_tokens=data.max_token_len_per_gpu,
        max_rows=data.micro_batch_size_per_gpu,
        optimizer=config.optim.optimizer,
        keys="data.",
        strategy=config.engine.strategy,
    )
    return RunPlan(config, (PoolPlan(pool.name, tuple(names), pool.devices_per_node, {role: engine}),))


def device_of(plan: RunPlan) -> torch.device:
    """Return the device that a run computes on; one that torch itself names may be planned for where it is
    not.
    """
    named = plan.config.trainer.device
    if is_accelerator(named) and features(named).package is None:
        with suppress(RuntimeError):  # torch does not know the name
            return torch.device(named)
    return resolve_device(named)


def compute_dtype(engine: RoleEngine) -> str:
    """Return the dtype in which an engine computes, as its keys name it."""
    if engine.fsdp.mixed_precision.param_dtype == "auto":
        return engine.model.dtype
    return engine.fsdp.mixed_precision.param_dtype


def _device_line(plan: RunPlan) -> Line:
    """Give the line on the device and the dtype that the estimate of memory is for."""
    dtypes = {
        engine.role: str(resolve_dtype(compute_dtype(engine), device_of(plan)))
        for engine in plan.engines.values()
    }
    shown = ", ".join(f"{role} {dtype}" for role, dtype in dtypes.items())
    if len(set(dtypes.values())) == 1:
        shown = next(iter(dtypes.values()))
    how = f"trainer.device={plan.config.trainer.device}: memory is estimated for it"
    if device_of(plan).type == "cpu":
        how += "; set trainer.device=cuda to plan for a GPU, which need not be in this machine"
    return Line("device and dtype", f"{device_of(plan).type}, {shown.replace('torch.', '')}", how)


def _processes(plan: RunPlan) -> Iterator[Line]:
    """Give the lines on where each role is and how its model is spread over the processes there."""
    trainer = plan.config.trainer
    if trainer.controller == "local":
        yield Line("processes", "1", "trainer.controller=local: all roles in the process that you start")
        return
    how = f"trainer.nnodes={trainer.nnodes} × trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
    if getattr(trainer, "resource_pools", {}):
        how = "trainer.resource_pools"
    yield Line("worker processes", f"{plan.devices:,}", f"{how}, started by Ray; the driver is one more")
    for pool in plan.pools:
        nodes = ", ".join(map(str, pool.nodes))
        how = f"{', '.join(pool.roles)}; on its nodes: {nodes}"
        yield Line(f"pool {pool.name}", f"{pool.devices:,} processes", how)
    for role, engine in plan.engines.items():
        spread = engine.layout
        keys = f"fsdp_size={engine.fsdp.fsdp_size}"
        if engine.strategy == "megatron":
            keys = "megatron-core, whose copies divide the optimizer's state"
        keys += f", ulysses={spread.cp}, tensor_parallel_size={spread.tp}"
        if spread.pp > 1:
            keys += f", pipeline_parallel_size={spread.pp}"
        yield Line(f"{engine.role} is spread over", _of_engine(engine, str(spread)), keys)
        yield from layout_lines(engine, role)
    if "reference" not in plan.engines and plan.pools_of("reference"):
        how = "LoRA: the actor with its adapters off, in the same processes"
        yield Line("reference is", "the actor's module", how)
    for pool in plan.pools:
        if pool.replica is not None:
            ranks = pool.replica.ranks
            how = f"groups that generate apart × rollout.tensor_model_parallel_size={ranks}"
            value = f"{pool.devices // ranks:,} × {ranks} processes"
            yield Line(f"generation on pool {pool.name}", value, how)


def _rows(plan: RunPlan) -> Iterator[Line]:
    """Give the lines on the rows and micro-batches that one process gets."""
    many = plan.devices > 1
    if many and isinstance(plan.config, PPOConfig):
        rows = generation_batch(plan.config) * responses_per_prompt(plan.config)
        parts = plan.generating // plan.ranks_of_replica
        yield Line(
            "responses generated per process, about",
            f"{math.ceil(rows / parts):,}",
            f"{rows:,} at once / {parts} that generate apart",
        )
    for role, engine in plan.engines.items():
        if not engine.trained:
            continue
        shown = engine.role
        if isinstance(plan.config, SFTConfig):
            shown = role.replace("_", " ").upper()
        if many:
            by = "by their tokens" if plan.config.trainer.balance_batch else "by their number"
            how = (
                f"{engine.rows:,} rows of a mini-batch / {engine.layout.data} parts, dealt {by} "
                "(trainer.balance_batch)"
            )
            yield Line(f"{shown} rows per process and mini-batch, about", f"{engine.rows_here:,}", how)
        count = math.ceil(engine.rows_here / engine.rows_at_once)
        limit = f"{engine.keys}max_token_len_per_gpu={engine.max_tokens:,} // {engine.longest:,} tokens"
        if engine.max_rows is not None and engine.rows_at_once == engine.max_rows:
            limit = f"{engine.keys}micro_batch_size_per_gpu={engine.max_rows}"
        how = f"{engine.rows_here:,} rows / {engine.rows_at_once} rows ({limit})"
        yield Line(f"{shown} micro-batches per mini-batch, at most", f"{count:,}", how)


def _memory(plan: RunPlan) -> Iterator[Line]:
    """Give the lines on how much memory a process of each pool needs."""
    models = {str(engine.model.path): engine.model for engine in plan.engines.values()}
    missing = [path for path in models if not Path(path).expanduser().is_dir()]
    if missing:
        yield Line("memory", "not estimated", f"{missing[0]} is no folder on this machine")
        return
    for engine in plan.engines.values():
        dtype = resolve_dtype(compute_dtype(engine), device_of(plan))
        described = describe_model(shape_of(engine.model), dtype)
        yield Line(f"{engine.role} model", described, str(engine.model.path))
    found = {role: size_of_role(plan, role, engine) for role, engine in plan.engines.items()}
    for role, size in found.items():
        engine = plan.engines[role]
        if engine.trained and size.whole.trained < size.whole.all:
            how = "model.freeze_vision_tower=true"
            if engine.model.lora_adapter_path:
                how = "model.lora_adapter_path"
            if engine.model.lora_rank:
                how = f"model.lora_rank={engine.model.lora_rank}"
            yield Line(
                f"{engine.role} parameters in training", f"{size.whole.trained:,} of {size.whole.all:,}", how
            )
        if size.tower.all:
            state = "in training" if size.tower.trained else "frozen"
            weights = format_bytes(size.tower.all * size.itemsize)
            yield Line(
                f"{engine.role} vision tower",
                f"{size.tower.all:,} of {size.whole.all:,} parameters, {state}",
                f"{weights} of weights for each copy, among those below (model.freeze_vision_tower)",
            )
        if size.experts:
            yield Line(
                f"{engine.role} parameters for each token",
                f"{size.active:,} of {size.whole.all:,}",
                f"{size.experts_per_token} of {size.experts} experts in each sparse layer",
            )
    totals = []
    device = device_of(plan).type
    for pool in plan.pools:
        needs = pool.needs(found, device)
        totals.append(max(phases_of_pool(needs, pool.devices).values()) * pool.devices)
        yield from _pool_lines(plan, pool, needs)
    if device == "cpu" and plan.devices > 1:
        yield Line(
            f"memory of all {plan.devices} processes, at most",
            format_bytes(sum(totals)),
            "on one machine they share it; the libraries take some 0.4 GiB each besides",
        )


def peak_bytes(plan: RunPlan, found: Mapping[str, ModelSize]) -> int:
    """Return the bytes of the heaviest phase of a process, of all pools; `found` has each role's size."""
    device = device_of(plan).type
    phases = [phases_of_pool(pool.needs(found, device), pool.devices) for pool in plan.pools]
    return max(size for pool in phases for size in pool.values())


def size_of_role(plan: RunPlan, role: str, engine: RoleEngine) -> ModelSize:
    """Count the model of a role as its engine will build it; no weights are read."""
    lora = None
    if engine.trained:
        lora = LoraSettings.from_config(engine.model, seed=plan.config.trainer.seed)
    tensor = engine.layout.tp
    blocks = engine.layout.world_size > 1
    if role == "actor" and isinstance(plan.config, PPOConfig):
        rollout = plan.config.actor_rollout_ref.rollout
        if rollout.name == "native":  # which cuts the actor's own module
            tensor = max(tensor, rollout.tensor_model_parallel_size)
            blocks = blocks or rollout.quantization is not None
    return size_of(
        "value" if role in ("critic", "reward_model") else "policy",
        engine.model,
        dtype=compute_dtype(engine),
        device=device_of(plan),
        lora=lora,
        trained=engine.trained,
        tensor=tensor,
        experts_apart=engine.layout.ep > 1 or engine.strategy == "megatron",
        blocks=blocks,
    )


def _pool_lines(plan: RunPlan, pool: PoolPlan, needs: Mapping[str, Needs]) -> Iterator[Line]:
    """Yield the lines on a process of a pool."""
    of = ""
    if plan.devices > 1:
        of += " of each process"
    if len(plan.pools) > 1:
        of += f" of {pool.name}"
    named = {role: plan.engines[role].role if role in plan.engines else role for role in needs}
    for role, need in needs.items():
        for part in need.parts:
            if part.size:
                shown = part.label
                if not (role == "generation" and part.label.startswith("KV")):
                    shown = f"{named[role]}: {part.label}"
                how = part.how + (" (in CPU memory)" if part.on_host else "")
                yield Line(f"memory{of}, {shown}", format_bytes(part.size), how)
    working = {role: need.update for role, need in needs.items() if role != "generation" and need.update}
    for phase, size in phases_of_pool(needs, pool.devices).items():
        how = "estimate, without the libraries"
        if phase == "updating" and len(working) > 1:
            heaviest = named[max(working, key=lambda role: working[role])]
            how = f"estimate, of the {heaviest}, without the libraries"
        yield Line(f"memory{of} while {phase}", format_bytes(size), how)
    host = sum(part.size for need in needs.values() for part in need.parts if part.on_host)
    if host:
        how = "estimate: what all roles have there"
        yield Line(f"CPU memory{of}", format_bytes(host), how)


def schedule_lines(config: PPOConfig) -> Iterator[Line]:
    """Give the lines on `trainer.schedule`, on collectors, and on rows that are trained again."""
    name = config.trainer.schedule
    keys = config.trainer.async_
    batch = config.data.train_batch_size
    generated = {
        "sync": "a batch is generated between two updates, by the newest weights",
        "one_step_off": "the next batch is generated whole beside training, by the weights before the update",
        "exact_async": f"batches are generated whole beside training, each by the weights of "
        f"{keys.run_ahead:g} training steps before, whatever the timing",
        "fully_async": "groups are generated without a pause beside training, and change to new weights "
        "when they come",
        "colocated_async": "one set of devices takes turns: groups of the next steps are generated while "
        "rewards and environments are waited for",
    }
    yield Line("schedule", name, generated[name])
    if collectors := config.trainer.num_collectors:
        how = "trainer.num_collectors: processes whose tokens go to the workers past the trainer's process"
        yield Line("groups are played by", f"{collectors:,} collectors", how)
    if age := replayed_steps(config):  # rows that later steps may draw again (PF-PPO)
        held = age * batch * rows_per_prompt(config)
        how = (
            f"algorithm.pf_ppo.max_age={age} batches: every pass reads {age + 1} batches, an update one; "
            "more rows where a trajectory has several"
        )
        yield Line("rows of earlier steps that a step may draw, at most", f"{held:,}", how)
        data = config.data
        size = held * (PROMPT_BYTES * data.max_prompt_length + RESPONSE_BYTES * data.max_response_length)
        how = (
            f"estimate: rows × ({PROMPT_BYTES} B a prompt token + {RESPONSE_BYTES} B a response token); "
            "a checkpoint has it too"
        )
        yield Line("replay buffer in the driver's memory, at most", format_bytes(size), how)
        yield Line("the loss corrects rows of earlier steps by", *_correction(config))
    if name == "sync":
        return
    bound = keys.max_staleness or 0
    how = "every token was sampled by the weights that it trains"
    if bound:
        how = "training steps between the weights that sampled a token and those that it trains"
    yield Line("staleness of a token, at most", f"{bound:,}", f"trainer.async.max_staleness: {how}")
    ahead = Schedule(batch, keys.run_ahead, bound, total_steps=1).groups_ahead
    how = f"data.train_batch_size={batch} × (1 + trainer.async.run_ahead={keys.run_ahead:g})"
    yield Line("groups generated and not yet trained, at most", f"{batch + ahead:,}", how)
    if keys.max_concurrent_groups is not None:
        key = "trainer.async.max_concurrent_groups"
        yield Line("groups generated at once, at most", f"{keys.max_concurrent_groups:,}", key)
    waits = f"{batch:,} scored groups, and for any group that would be too stale in a later step"
    ended = "all responses that were begun"
    how = f"trainer.async.partial_rollout={str(keys.partial_rollout).lower()}"
    if name in EXACT_SCHEDULES:
        waits = f"the {batch:,} groups of its own batch"
        ended = "the groups of their batch"
        how = "a response is generated whole under one version"
    elif keys.partial_rollout:
        ended = "the next token"
        how += ": responses go on, and each token carries its version"
    yield Line("a training step waits for", waits, "nothing is dropped for its age")
    yield Line("generation waits for", "a published step", "once as many groups as above are not yet trained")
    yield Line("new weights wait for", ended, how)
    if bound:
        yield Line("the loss corrects stale tokens by", *_correction(config))


def _correction(config: PPOConfig) -> tuple[str, str]:
    """Return the correction of the loss for stale tokens, and the keys that ask for it."""
    correction = config.algorithm.rollout_correction
    keys = []
    found = []
    if correction.bypass_mode:
        keys.append("bypass_mode=true")
        found.append("the ratio of the policy to the one that sampled")
    elif correction.rollout_is:
        found.append("weights: the policy at the start of the step over the one that sampled")
    if correction.rollout_is:
        keys.append(f"rollout_is={correction.rollout_is}")
    if correction.rollout_rs:
        keys.append(f"rollout_rs={correction.rollout_rs}")
        found.append("rejection of tokens or rows whose ratio is off")
    return "; ".join(found), f"algorithm.rollout_correction.{', '.join(keys)}"
