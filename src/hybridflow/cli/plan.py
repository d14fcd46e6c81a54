"""The command `hybridflow plan`: the fastest placement and layout of a run, and what it needs.

recipe, overrides, --devices ─► Job ─► Search ─► the best plans as a table, and the overrides of each
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hybridflow.cli.recipe_flags import add_recipe

if TYPE_CHECKING:
    from hybridflow.planner.costs import Costs
    from hybridflow.planner.hardware import Cluster
    from hybridflow.planner.pools import StepWork
    from hybridflow.planner.run_plan import RunPlan
    from hybridflow.planner.search import PlacementSearch

MODEL = "model="
GIB = 2**30
WIDTH = 80
"""Characters of a line, as the narrowest terminals and pipes have them."""
INDENT = "   "
STEPS = 100
"""Steps for which hours are shown where trainer.total_training_steps is not set."""
EPILOG = """example:
  hybridflow plan --recipe grpo model=Qwen/Qwen3-8B --devices 16xH100 \\
      data.train_batch_size=256 data.max_response_length=4096 \\
      --response-tokens 1200 --device-price 2.5

model=PATH is short for actor_rollout_ref.model.path=PATH: a folder, a
config.json, or the name of a known model. No weights are read."""


def add_plan(words: Any, recipe: str, overrides: str) -> None:
    """Add the command to the grammar."""
    plan = words.add_parser(
        "plan",
        help="which placement of a run on given devices takes the least time, how long, and its memory",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(plan, recipe)
    plan.add_argument("--devices", help="number and kind of the devices, as in 16xH100; 1xCPU: this one")
    plan.add_argument("--device-price", type=float, help="price of a device for an hour, in any currency")
    plan.add_argument(
        "--prompt-tokens", type=float, help="mean tokens of a prompt (default: half of the longest)"
    )
    plan.add_argument(
        "--response-tokens", type=float, help="mean tokens of a response (default: half of the longest)"
    )
    plan.add_argument(
        "--reward-seconds", type=float, default=0.0, help="seconds of the reward for a response (default: 0)"
    )
    plan.add_argument(
        "--schedule",
        action="append",
        help="only this schedule (sync, one_step_off, fully_async, colocated_async); may be repeated",
    )
    plan.add_argument("--best", type=int, default=5, help="plans to show (default: %(default)s)")
    plan.add_argument("overrides", nargs="*", help=overrides)
    plan.set_defaults(body=plan_run)


def plan_run(options: argparse.Namespace) -> int:
    """Search, and print the best plans."""
    import time

    from hybridflow.config import PPOConfig
    from hybridflow.config.convert import raise_all
    from hybridflow.config.layout import pool_sizes
    from hybridflow.config.load import load_config, prepare_config
    from hybridflow.config.megatron import STRATEGIES, family_refusal, megatron_problems
    from hybridflow.config.tree import get_value, with_values
    from hybridflow.errors import ConfigError
    from hybridflow.planner.model_shape import shape_by_keys
    from hybridflow.planner.pools import job_of
    from hybridflow.planner.search import PlacementSearch, first_different

    if not options.devices:
        raise ConfigError("plan: say for which devices, as in --devices 16xH100")
    _check_options(options, PlacementSearch.schedules)
    path = "actor_rollout_ref.model.path="
    given = [
        path + word.removeprefix(MODEL) if word.startswith(MODEL) else word for word in options.overrides
    ]

    costs = _costs(options.devices)

    def prepared(*words: str) -> PPOConfig:
        every = [*given, *words]
        config = prepare_config(
            PPOConfig, every, recipe=options.recipe, runs=False, needs_model=False, needs_files=False
        ).config
        # megatron-core need not be on the machine that plans
        asked = load_config(PPOConfig, every, recipe=options.recipe).config
        several = [
            role
            for role in ("actor", "critic")
            if (sum(pool_sizes(config.trainer, role)) if words else costs.cluster.devices) > 1
        ]
        config = with_values(
            config, {STRATEGIES[role]: get_value(asked, STRATEGIES[role]) for role in several}
        )
        if words:
            raise_all(list(megatron_problems(config)))
        return config

    config = prepared()
    prompt = _mean_tokens("prompt", options.prompt_tokens, config.data.max_prompt_length)
    response = _mean_tokens("response", options.response_tokens, config.data.max_response_length)
    if config.actor_rollout_ref.model.path is None:
        raise ConfigError("plan: say for which model, as in model=Qwen/Qwen3-8B")
    job = job_of(config, shape_by_keys, prompt, response, options.reward_seconds)
    for role, shape in job.shapes.items():
        is_megatrons = role in STRATEGIES and get_value(config, STRATEGIES[role]) == "megatron"
        if is_megatrons and (refusal := family_refusal(shape.kind)):
            raise ConfigError(f"plan: {refusal}")
    began = time.perf_counter()
    search = PlacementSearch(job, costs)
    if options.schedule:
        search.schedules = options.schedule
    found = search.run()
    seconds = time.perf_counter() - began
    best, refused = _that_pass(first_different(found.plans), costs.cluster, options.best, prepared)
    if not best:
        raise ConfigError(f"plan: {refused or _why_none(search, options)}")
    lines = [
        f"{found.placements} placements, {found.tried:,} ways to deal the devices out, {len(found.plans):,} "
        f"plans that fit, in {seconds:.2f} s",
        *_report(best, job, costs.cluster, options.device_price),
        f"\na checkpoint of the actor takes about {costs.checkpoint(job.shapes['actor']):.0f} s to write",
    ]
    if config.actor_rollout_ref.model.quantization is not None:
        lines.append("these seconds leave out that weights in 4 bits are dequantized (docs/lora.md)")
    print("\n".join(lines))
    return 0


def _costs(devices: str) -> Costs:
    """Return the cost model of these devices; a CPU is measured. Raises ConfigError for unknown ones."""
    from hybridflow.planner.costs import FITTED, Costs, cpu_costs
    from hybridflow.planner.hardware import CPU, read_devices

    if devices.strip().upper() != f"1X{CPU}":
        return Costs(read_devices(devices), FITTED)
    from hybridflow.distributed.device import measured_cpu

    return cpu_costs(1, *measured_cpu())


def _why_none(search: PlacementSearch, options: argparse.Namespace) -> str:
    """Return why no plan was found, and what to change."""
    from hybridflow.planner.pools import PARTS
    from hybridflow.planner.search import enough_devices

    job = search.job
    roles = ", ".join(job.roles)
    name = search.costs.cluster.hardware.name
    if search.pools.plan(tuple(job.roles), search.costs.cluster.devices) is not None:
        return (
            f"{roles} fit on {options.devices}, but not under --schedule {', '.join(options.schedule)}: "
            "one_step_off and fully_async need devices for the rollout alone. Use more devices, or leave "
            "--schedule out"
        )
    if search.pools.fewest(("rollout",)) is None:
        shape = job.shapes["actor"]
        pools = search.pools
        many = max(parts for parts in PARTS if parts <= pools.node and pools.generates_by(parts))
        return (
            f"a replica that generates has at most {many} × {name} here, which cannot hold the "
            f"{shape.parameters * search.costs.itemsize / GIB:.0f} GiB of {shape.name} and generate: take "
            "devices with more memory, actor_rollout_ref.rollout.name=vllm (whose replicas cut experts too), "
            "or start larger servers yourself and give their addresses "
            "(actor_rollout_ref.rollout.server.address), which is not planned for"
        )
    enough = enough_devices(job, search.costs)
    more = "devices with more memory"
    if enough is not None:
        more = f"{enough}x{name}, on which they fit"
    return (
        f"{roles} do not fit into the memory of {options.devices}. Use {more}, LoRA "
        "(actor_rollout_ref.model.lora_rank), shorter rows, or a smaller "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    )


def _check_options(options: argparse.Namespace, schedules: Sequence[str]) -> None:
    """Raise ConfigError for schedules that are not compared, and for numbers that mean nothing."""
    from hybridflow.errors import ConfigError

    odd = [name for name in options.schedule or () if name not in schedules]
    if odd:
        raise ConfigError(f"--schedule {odd[0]}: plans compare {', '.join(schedules)}")
    if options.best < 1:
        raise ConfigError(f"--best {options.best}: wanted the number of plans to show, at least 1")
    for name, value in (("device-price", options.device_price), ("reward-seconds", options.reward_seconds)):
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"--{name} {value:g}: wanted a number from 0 on")


def _mean_tokens(of: str, given: float | None, longest: int) -> float:
    """Return the mean tokens of prompts or responses; ConfigError for none, or too many."""
    from hybridflow.errors import ConfigError

    if given is not None and not 0 < given <= longest:
        raise ConfigError(
            f"--{of}-tokens {given:g}: wanted a mean above 0 and of at most data.max_{of}_length={longest}"
        )
    return longest / 2 if given is None else given


def _that_pass(
    plans: Sequence[RunPlan], cluster: Cluster, most: int, prepared: Callable[..., Any]
) -> tuple[list[tuple[RunPlan, list[str]]], str]:
    """Return the first plans whose overrides pass all checks of the configuration, with the overrides.

    The second value says why the fastest plan did not pass, and is empty if it did.
    """
    from hybridflow.errors import ConfigError

    passed: list[tuple[RunPlan, list[str]]] = []
    refused = ""
    for plan in plans:
        words = plan.overrides(cluster)
        try:
            prepared(*(word.strip("'") for word in words))
        except ConfigError as error:  # the recipe or a key of the user's excludes it
            refused = refused or f"keys of this run exclude all plans that fit; of the fastest, {error}"
            continue
        passed.append((plan, words))
        if len(passed) == most:
            break
    return passed, refused


def _report(
    best: Sequence[tuple[RunPlan, list[str]]], job: StepWork, cluster: Cluster, price: float | None
) -> Iterator[str]:
    """Yield the plans as a table, then the devices, seconds and overrides of each."""
    import textwrap

    steps = job.config.trainer.total_training_steps or STEPS
    headings = ["", "step s", "tokens/s", "GiB", "hours", "placement", "schedule"]
    rows = []
    for number, (plan, _) in enumerate(best, 1):
        hours = plan.seconds * steps * plan.devices / 3600
        most = max(size for pool in plan.pools for size in pool.memory.values())
        cells = [str(number), _number(plan.seconds), f"{job.trained.tokens / plan.seconds:,.0f}"]
        cells += [f"{most / GIB:.0f}", _number(hours), plan.placement, plan.schedule]
        if price is not None:
            cells.insert(5, f"{hours * price:,.0f}")
        rows.append(cells)
    if price is not None:
        headings.insert(5, "price")
    devices = f"{cluster.devices} × {cluster.hardware.name}"
    yield f"\n{devices}. GiB: the fullest device. Hours: of all devices, for {steps:,} steps.\n"
    yield from _table([headings, *rows], texts=2)
    for number, (plan, words) in enumerate(best, 1):
        yield f"\n{number}  {plan.placement}, {plan.schedule}"
        facts = []
        for pool in plan.pools:
            many = "devices" if pool.devices > 1 else "device"
            memory = ", ".join(f"{phase} {size / GIB:.1f} GiB" for phase, size in pool.memory.items())
            facts.append(f"{pool.devices} {many}: {', '.join(pool.roles)}; each {memory}")
        facts.append("seconds: " + ", ".join(f"{name} {each:.1f}" for name, each in plan.phases.items()))
        for fact in facts:
            yield textwrap.fill(fact, WIDTH, initial_indent=INDENT, subsequent_indent=2 * INDENT)
        yield _command_lines(words)


def _number(value: float) -> str:
    """Return a number with as many digits as one reads."""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _table(rows: Sequence[Sequence[str]], *, texts: int) -> Iterator[str]:
    """Yield the lines of a table whose last `texts` columns are text, and all others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        words = [cell.ljust(width) for cell, width in zip(row[-texts:], widths[-texts:], strict=True)]
        yield "  ".join([" ".join(cells[:-texts]), *words]).rstrip()


def _command_lines(words: Sequence[str]) -> str:
    """Return words of a command on lines that a shell reads as one."""
    lines = [INDENT + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > WIDTH:
            lines[-1] += " \\"
            lines.append(INDENT + word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)
