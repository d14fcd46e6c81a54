"""The one place that wires a PPO run: a prepared configuration in, a trainer ready to `fit` out.

config ─► devices ─► tokenizer, data ─► worker processes (worker_groups.py) ─► Roles
       ─► SyncSource, PPOStep, Validator ─► Trainer
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from hybridflow.agent.journal import Journal, settings_of
from hybridflow.algorithms.catalog import OF_A_WHOLE_RUN
from hybridflow.checkpoint.layout import REFERENCE
from hybridflow.checkpoint.state import encode_tree
from hybridflow.config import PPOConfig
from hybridflow.config.convert import raise_all
from hybridflow.config.layout import ROLE_KEYS, VALIDATION
from hybridflow.config.model import CheckpointContentsConfig
from hybridflow.config.needs import reads_text_alone, replayed_steps
from hybridflow.config.own_code import own_algorithm_problems
from hybridflow.config.reward import has_judge
from hybridflow.config.source_code import definition_of, shown
from hybridflow.config.trainer import EXACT_SCHEDULES
from hybridflow.config.tree import get_value
from hybridflow.controller import WorkerGroup
from hybridflow.controller.resource_pool import COLLECTOR
from hybridflow.data.build import PromptData, build_prompt_data
from hybridflow.data.growing import GrowingPrompts
from hybridflow.data.loader import CurriculumSampler, Sampler, StatefulLoader, StatefulSampler
from hybridflow.data.plugin import load_object
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.episodes.agents import Agents
from hybridflow.episodes.failures import Failures
from hybridflow.episodes.pipeline import RolloutPipeline
from hybridflow.episodes.planning import shows_data
from hybridflow.episodes.rollout_traces import rollout_traces
from hybridflow.errors import ConfigError, install_extra
from hybridflow.observability.progress import progress
from hybridflow.observability.timing import Timer
from hybridflow.observability.trackers.jsonl import has_validation_of
from hybridflow.protocol import DataProto
from hybridflow.rewards.build import build_reward_manager
from hybridflow.rewards.manager import RewardManager
from hybridflow.trainer.models import check_reference_tokens
from hybridflow.trainer.ppo.background_validation import BackgroundValidation
from hybridflow.trainer.ppo.columns import KLController, find_estimator, find_estimators, kl_controller
from hybridflow.trainer.ppo.exact import ExactState, settle_exact
from hybridflow.trainer.ppo.model_rewards import add_reward_model
from hybridflow.trainer.ppo.replay_buffer import ReplayBuffer
from hybridflow.trainer.ppo.run_plan import Predictor, make_predictor
from hybridflow.trainer.ppo.sample_log import SampleLog
from hybridflow.trainer.ppo.step import PPOStep
from hybridflow.trainer.ppo.validation import Validator
from hybridflow.trainer.profiling import StepProfiler
from hybridflow.trainer.replay.kept_rows import KeptRows, not_kept
from hybridflow.trainer.resume import model_facts
from hybridflow.trainer.roles.roles import Roles, needed_roles
from hybridflow.trainer.roles.worker_groups import start_judge, start_roles, validation_starter
from hybridflow.trainer.run import PreparedRun, huggingface_writer, started, steps_of
from hybridflow.trainer.schedules.collector import Collector, Collectors, collector_factories
from hybridflow.trainer.schedules.continuous import ContinuousSource
from hybridflow.trainer.schedules.ledger import LEDGER_FILE, Ledger
from hybridflow.trainer.schedules.pinned import PinnedSource
from hybridflow.trainer.schedules.schedule import Schedule
from hybridflow.trainer.schedules.skip import DumpedSource
from hybridflow.trainer.schedules.sync import SourceParts, SyncSource
from hybridflow.trainer.source import Resumable
from hybridflow.trainer.state import RunState, SavedEngine
from hybridflow.trainer.stopping import expiry_of
from hybridflow.trainer.trainer import Trainer
from hybridflow.trainer.why.findings import waits_written
from hybridflow.workers.losses import find_policy_loss

if TYPE_CHECKING:
    from hybridflow.trainer.roles.judges import JudgeServer


def make_source(
    config: PPOConfig,
    parts: SourceParts,
    total_steps: int,
    folder: Path,
) -> SyncSource:
    """Return the source of `trainer.schedule`, or that of dumped rollouts (`rollout.skip`).

    `folder` is the run's, which has the ledger.
    """
    name = config.trainer.schedule
    keys = config.trainer.async_
    if config.actor_rollout_ref.rollout.skip.enable:
        return DumpedSource(parts)
    if name == "sync":
        return SyncSource(parts)
    ledger = Ledger(folder / LEDGER_FILE)
    if ledger.position:
        ledger.rewind(0)  # a run that goes on rewinds to its checkpoint's position, which stays possible
    if name in EXACT_SCHEDULES:
        return PinnedSource(
            parts,
            run_ahead=int(keys.run_ahead),
            total_steps=total_steps,
            ledger=ledger,
        )
    assert keys.max_staleness is not None, "filled by resolve"
    return ContinuousSource(
        parts,
        schedule=Schedule(config.data.train_batch_size, keys.run_ahead, keys.max_staleness, total_steps),
        ledger=ledger,
        partial=keys.partial_rollout,
        max_concurrent=keys.max_concurrent_groups,
    )


PPOTrainer: TypeAlias = Trainer[SyncSource, PPOStep]

WEIGHTS_ONLY = CheckpointContentsConfig(save_contents=["model"], load_contents=["model"])
"""Contents of the checkpoint of a reference that moves: it has no optimizer, but its weights are needed to go
on to the bit.
"""


@contextmanager
def build(config: PPOConfig, *, patience: float = 0.0) -> Iterator[PPOTrainer]:
    """Build everything a run needs; processes, files and the run folder are released when the context ends,
    also after an error.

    `patience` is that of `run.started`.
    """
    step_class = _step_class(config)
    _check_own_algorithms(config)
    names = needed_roles(config)
    if config.trainer.num_collectors:
        names.append(COLLECTOR)
    with started(config, names, patience=patience) as run:
        with progress.phase("reading tokenizer and data"):
            tokenizer = load_tokenizer(str(config.data.tokenizer), config.data.trust_remote_code)
            check_reference_tokens(config, tokenizer)
            data = build_prompt_data(
                config.data,
                tokenizer,
                config.trainer.seed,
                dynamic_sampling=config.algorithm.filter_groups.enable,
                demonstrations=shows_data(config, find_estimator(config.algorithm).needs),
            )
        if data.train_loader is not None and isinstance(data.train_loader.dataset, GrowingPrompts):
            data.train_loader.dataset.stored_by(encode_tree)
        _refuse_idle_sources(config, data)
        journal = Journal.of_run(config)
        if journal is not None:
            # a restart of the same command has patience: its episodes go on also where it has no checkpoint
            anew = config.trainer.resume_mode == "disable" and not patience
            journal.settle({**model_facts(config), "settings": settings_of(config)}, anew=anew)
        with (
            judge_server(config) as judge,
            closing(
                build_reward_manager(config.reward, config.trainer.seed, judge.access if judge else None)
            ) as rewards,
            closing(Agents(config, tokenizer, data.agent_names, journal)) as agents,
        ):
            _refuse_pictures(config, data, agents)
            yield from _trainer(config, run, tokenizer, data, rewards, agents, step_class, judge)


def judge_server(config: PPOConfig) -> AbstractContextManager[JudgeServer | None]:
    """Return the context in which the run's generative reward model has an address; None where it has none.

    Raises ConfigError where the model does not suit its keys, or the server's libraries are missing.
    """
    if not has_judge(config.reward):
        return nullcontext()
    try:
        from hybridflow.trainer.roles.judges import JudgeServer  # needs an extra
    except ImportError as error:
        raise ConfigError(
            "reward.reward_model.kind=generative is served over HTTP, and FastAPI, uvicorn or "
            f"prometheus-client is not installed: {install_extra('serve')}"
        ) from error
    return JudgeServer(config).listening()


def _check_own_algorithms(config: PPOConfig) -> None:
    """Raise ConfigError for a user's own estimator or loss with arguments that no run has; its source may not
    have shown them before it was loaded.
    """
    estimator = find_estimator(config.algorithm).function
    loss = find_policy_loss(config.actor_rollout_ref.actor).function
    raise_all(list(own_algorithm_problems(config, definition_of(estimator), definition_of(loss))))
    if not config.algorithm.by_source:
        return
    for source, each in find_estimators(config.algorithm).items():
        if alone := [name for name in each.needs if name in OF_A_WHOLE_RUN]:
            raise ConfigError(
                f"algorithm.by_source, {source or 'all other rows'}: estimator {each.name} needs "
                f"{', '.join(alone)}, which only a whole run has: set another one"
            )


def _refuse_pictures(config: PPOConfig, data: PromptData, agents: Agents) -> None:
    """Raise ConfigError where rows have pictures, and the engines or an agent of the run read text only."""
    if data.has_media and (reason := reads_text_alone(config) or agents.read_text_alone):
        raise ConfigError(f"the data has pictures, and {reason}")


def _refuse_idle_sources(config: PPOConfig, data: PromptData) -> None:
    """Raise ConfigError for a teacher or an algorithm of a data source that no row has."""
    sources = data.data_sources
    if sources is None:
        return
    named = {
        "distillation.teachers": [*config.distillation.teachers],
        "algorithm.by_source": [*config.algorithm.by_source],
    }
    for key, names in named.items():
        for name in names:
            if name not in sources:
                raise ConfigError(
                    f"{key}: no row has the data source {shown(name)}; the data has "
                    f"{', '.join(map(shown, sorted(sources)))}: name one of these"
                )


def _trainer(
    config: PPOConfig,
    run: PreparedRun,
    tokenizer: Tokenizer,
    data: PromptData,
    rewards: RewardManager,
    agents: Agents,
    step_class: type[PPOStep],
    judge: JudgeServer | None,
) -> Iterator[PPOTrainer]:
    if data.train_loader is None:
        raise ConfigError("there is nothing to train on: set data.train_files or data.task.name")
    total_steps = _num_steps(config, data.train_loader)
    _fixed_order(config, data.train_loader.sampler)
    needs = find_estimator(config.algorithm).needs
    more = collector_factories(config, data.agent_names, needs)
    roles = start_roles(config, tokenizer, run.start, total_steps, run.folder.nonfinite, more)
    if judge is not None:
        start_judge(config, tokenizer, run.start, roles, run.folder.nonfinite, judge)
    if roles.reward_model is not None:
        alone = partial(roles.alone, roles.reward_model.role)
        add_reward_model(rewards, roles.reward_model, config.reward, tokenizer, alone)
    failures = Failures(run.folder.failures)
    traces = rollout_traces(config, tokenizer)
    pipeline = RolloutPipeline(rewards, tokenizer, config, agents, needs, traces)
    collectors = None
    if config.trainer.num_collectors:
        group = WorkerGroup[Collector](roles.actor.backend, COLLECTOR)
        collectors = Collectors(group, roles.rollout, config, pipeline.pad_token_id)
        collectors.gives_whole_rows |= data.reads_batches
    parts = SourceParts(data.train_loader, pipeline, roles, failures, collectors)
    source = make_source(config, parts, total_steps, run.folder.path)
    controller = kl_controller(config.algorithm)
    exact = ExactState()
    buffer = _replay_buffer(config, tokenizer, source)
    state = _state(config, roles, source, controller, exact, buffer, tokenizer, total_steps)
    if agents.journal is not None:
        state.committed = agents.journal.committed
    store = run.resume(state)
    with progress.phase("comparing log-probs of generation and training"):
        mode = settle_exact(config, roles, exact)
    predictor = make_predictor(config, roles)
    failures.begin(state.step)
    with (
        run.recorded(state, store, source) as trackers,
        waits_written(config, run.folder.path),
        closing(traces) if traces else nullcontext(),
        ExitStack() as stack,
    ):
        samples = SampleLog(run.folder.path, config, tokenizer, total_steps, trackers, state.step)
        kept = KeptRows(run.folder.path)
        kept.drop_after(state.step)
        validator = None
        if data.val_dataset:
            validator = Validator(data.val_dataset, pipeline, roles.rollout, samples, run.timer)
            state.validation_due &= not has_validation_of(run.folder.path, state.step)
        beside = None
        in_background = config.trainer.val_in_background
        plays_on = isinstance(source, ContinuousSource) and collectors is None
        if validator is not None and (in_background or plays_on):
            # this process plays episodes of training meanwhile, and one event loop at a time may use agents
            own = stack.enter_context(closing(Agents(config, tokenizer, data.agent_names)))
            validator.pipeline = RolloutPipeline(rewards, tokenizer, config, own, needs, traces)
        if validator is not None and in_background:
            validator.timer = Timer(role=VALIDATION)
            starter = validation_starter(config, tokenizer, run.start, run.folder.nonfinite)
            started_beside = BackgroundValidation(
                validator, roles.actor, starter, mode, patience=config.trainer.worker_timeout
            )
            beside = stack.enter_context(closing(started_beside))
        step = step_class(
            roles,
            config,
            controller,
            run.timer,
            exact=exact,
            shows=lambda step: config.trainer.keep_rows or data.reads_batches or samples.shows(step),
            buffer=buffer,
        )
        yield Trainer(
            source=source,
            step=step,
            validator=validator,
            state=state,
            store=store,
            trackers=trackers,
            timer=run.timer,
            total_steps=total_steps,
            test_freq=_test_freq(config, total_steps),
            save_freq=config.trainer.save_freq,
            expiry=expiry_of(config.trainer.esi_redundant_time),
            validates_first=config.trainer.val_before_train,
            only_validates=config.trainer.val_only,
            keeping=kept.keeping if config.trainer.keep_rows else not_kept,
            after_update=partial(_finish_batch, source, data),
            log_samples=partial(_further_metrics, samples, predictor, data.train_loader.dataset),
            profiling=StepProfiler(config.global_profiler, roles.all, run.folder.path),
            beside=beside,
        )
        # have the traces of collectors sent, and log the failures of the run, unless it only made batches
        if collectors is not None:
            collectors.end_traces()
        if state.step:
            failures.end_run()


def _further_metrics(
    samples: SampleLog,
    predictor: Predictor | None,
    dataset: object,
    batch: DataProto,
    values: Mapping[str, float],
    step: int,
) -> dict[str, float]:
    """Keep the samples of a step; return their metrics, the size of data that grow, and the predicted times
    of the step.
    """
    found = samples.training(batch, values, step)
    if isinstance(dataset, GrowingPrompts):
        found |= dataset.growth()
    if predictor is not None:
        found |= predictor(batch, values)
    return found


def _num_steps(config: PPOConfig, loader: StatefulLoader[PromptRow]) -> int:
    """Return the number of training steps; ConfigError where the actor takes part in none of them."""
    total_steps = steps_of(config, loader)
    if total_steps <= config.trainer.critic_warmup:
        raise ConfigError(
            f"trainer.critic_warmup={config.trainer.critic_warmup} leaves none of the run's {total_steps} "
            "steps for the actor: set it lower, or raise trainer.total_epochs"
        )
    return total_steps


def _replay_buffer(config: PPOConfig, tokenizer: Tokenizer, source: SyncSource) -> ReplayBuffer | None:
    """Return the buffer of a run whose steps draw rows of earlier ones."""
    if not replayed_steps(config):
        return None
    return ReplayBuffer(config.algorithm.pf_ppo.max_age, tokenizer.pad_token_id, source.note_replayed)


def _finish_batch(source: SyncSource, data: PromptData, batch: DataProto) -> None:
    """Update the sampler, and data that grow, by a trained batch."""
    with source.reading, progress.phase("data.sampler and data.datagen"):  # a user's code, without a deadline
        data.finish_batch(batch)


def _fixed_order(config: PPOConfig, sampler: Sampler) -> None:
    """Raise ConfigError where an exact schedule would ask a sampler that learns before it has learned."""
    trainer = config.trainer
    if trainer.schedule not in EXACT_SCHEDULES or not trainer.async_.run_ahead:
        return
    for protocol, does in ((CurriculumSampler, "learns from batches"), (StatefulSampler, "keeps a state")):
        if isinstance(sampler, protocol):
            raise ConfigError(
                f"trainer.schedule={trainer.schedule} asks for prompts {trainer.async_.run_ahead:g} steps "
                f"ahead, and data.sampler ({type(sampler).__name__}) {does}, so the prompts would depend on "
                "the schedule: set trainer.async.run_ahead=0, trainer.schedule=sync or fully_async, or "
                "leave data.sampler out"
            )


def _step_class(config: PPOConfig) -> type[PPOStep]:
    """Return the subclass of PPOStep that `trainer.step_class` names, or PPOStep; ConfigError for others."""
    name = config.trainer.step_class
    if name is None:
        return PPOStep
    found = load_object(name, key="trainer.step_class")
    if not (isinstance(found, type) and issubclass(found, PPOStep)):
        raise ConfigError(
            f"trainer.step_class: {name} is a {type(found).__name__}, wanted a subclass of "
            "hybridflow.trainer.ppo.step.PPOStep"
        )
    return found


def _test_freq(config: PPOConfig, total_steps: int) -> int:
    if config.trainer.test_freq <= 0 and config.trainer.val_before_train:
        return total_steps  # at the end, to compare with the start
    return config.trainer.test_freq


def _state(
    config: PPOConfig,
    roles: Roles,
    source: SyncSource,
    controller: KLController,
    exact: ExactState,
    buffer: ReplayBuffer | None,
    tokenizer: Tokenizer,
    total_steps: int,
) -> RunState:
    engines = {
        name: SavedEngine(getattr(roles, name), get_value(config, f"{keys.updates}.checkpoint"))
        for name, keys in ROLE_KEYS.items()
        if keys.updates and getattr(roles, name) is not None
    }
    reference = {}
    if roles.reference is not None:
        reference = {REFERENCE: SavedEngine(roles.reference, WEIGHTS_ONLY)}
    if config.algorithm.ref_update_freq > 0:
        engines |= reference
    parts: dict[str, Resumable] = {"kl_controller": controller, "exact": exact}
    if buffer is not None:
        parts["replay_buffer"] = buffer
    return RunState(
        kind="ppo",
        seed=config.trainer.seed,
        total_steps=total_steps,
        source=source,
        models=model_facts(config),
        may_change_model=config.trainer.resume_other_model,
        engines=engines,
        write_huggingface=huggingface_writer(roles.actor, tokenizer),
        parts=parts,
        begin_empty=("replay_buffer",),  # of a run that had none until now
        # a reference that had moved must not fall back to the start weights, even where it moves no more
        joining=reference,
    )
