"""An evaluation: the validation prompts, engines whose weights stay as they are, the reward function.

prompts ──requests without an answer──► engines or agents ──► Answer ──► answers.jsonl
              kept answers, new ones as they end ──► reward processes ──► ScoredAnswer ──► results
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.agent.single_turn import RequestBatch
from hybridflow.config import PPOConfig
from hybridflow.config.reward import JUDGE_APART, has_judge
from hybridflow.config.show import to_yaml
from hybridflow.config.tree import flatten, to_tree, with_values
from hybridflow.controller import Backend, Factories, RankInfo, WorkerHost
from hybridflow.data.build import build_prompt_data
from hybridflow.data.prompts import PromptRow
from hybridflow.data.row_schema import UNNAMED_SOURCE
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.episodes.agents import Agents
from hybridflow.episodes.planning import validation_requests
from hybridflow.errors import ConfigError
from hybridflow.observability.progress import duration, progress
from hybridflow.protocol.trajectory import Trajectory
from hybridflow.rewards.build import build_reward_manager
from hybridflow.trainer.evaluation.main import ModelEndpoint, Subject
from hybridflow.trainer.evaluation.responses import RESPONSES, write_responses
from hybridflow.trainer.evaluation.results import Answer, AnswerFile, AnswerScores, summarise, write_results
from hybridflow.trainer.ppo.model_rewards import add_reward_model
from hybridflow.trainer.roles.parallel_layout import meshes
from hybridflow.trainer.roles.role_builders import RoleBuilders, RunFacts, facts_of
from hybridflow.trainer.run import PreparedRun, started
from hybridflow.weight_sync.push import StagedPush
from hybridflow.workers import RewardModelGroup, RolloutGroup, RolloutWorker

logger = logging.getLogger(__name__)

SAMPLING_KEYS = (
    "data.max_response_length",
    "data.environment",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.dtype",
    "actor_rollout_ref.rollout.quantization",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.stop",
    "actor_rollout_ref.rollout.ignore_eos",
    "actor_rollout_ref.rollout.val_kwargs.",
    "actor_rollout_ref.rollout.multi_turn.",
    "actor_rollout_ref.rollout.agent.default_agent_loop",
    "actor_rollout_ref.rollout.agent.command",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.model.lora_adapter_path",
    "actor_rollout_ref.model.quantization",
    "trainer.seed",
)
"""Beginnings of the keys on which the answers depend, besides the model and the prompts."""


def answer_and_score(config: PPOConfig, subject: Subject, responses: Path | None) -> dict[str, Any]:
    """Run the evaluation as `evaluation.main.evaluate` describes."""
    if has_judge(config.reward):
        raise ConfigError(
            "reward.reward_model.kind=generative: an evaluation starts no model that is asked for verdicts: "
            f"{JUDGE_APART}"
        )
    learned = responses is None and config.reward.reward_model.enable
    roles = ["reward_model", "rollout"] if learned else ["rollout"]
    with started(config, roles, patience=0.0) as run, ExitStack() as stack:
        with progress.phase("reading tokenizer and data"):
            tokenizer = load_tokenizer(str(config.data.tokenizer), config.data.trust_remote_code)
            data = build_prompt_data(config.data, tokenizer, config.trainer.seed)
            assert data.val_dataset is not None, "the checks ask for data to answer"
            prompts = [data.val_dataset[index] for index in range(len(data.val_dataset))]
        folder = run.folder.path
        kept = stack.enter_context(closing(AnswerFile(folder, _identity(config, subject, prompts))))
        run.folder.write_config(to_yaml(config))
        missing = _Missing(config, subject, prompts, kept)
        rewards = None
        if responses is None:
            rewards = stack.enter_context(closing(build_reward_manager(config.reward, config.trainer.seed)))
        backend = None
        if missing.requests and subject.endpoint is not None:
            from hybridflow.rollout.openai.engine import check_reachable  # its module needs an extra

            check_reachable(subject.endpoint.url)
        if missing.requests or learned:
            backend = _frozen_backend(run, roles, subject, tokenizer)
        if rewards is not None and backend is not None and learned:
            group = RewardModelGroup(backend, "reward_model", also_read={})
            add_reward_model(rewards, group, config.reward, tokenizer)
        session = None
        if rewards is not None:
            session = stack.enter_context(rewards.open())
        found = AnswerScores(session)

        def score(answer: Answer) -> None:
            row = prompts[answer.prompt].row
            truth = (row.get("reward_model") or {}).get("ground_truth")
            source = str(row.get("data_source") or UNNAMED_SOURCE)
            found.add(answer, row.get("raw_prompt"), source, truth, row.get("extra_info") or {})

        for answer in kept.answers.values():
            score(answer)
        if missing.requests and backend is not None:
            with closing(Agents(config, tokenizer, data.agent_names)) as agents:
                rollout = RolloutGroup(backend, "rollout", also_read={})
                rollout.call(RolloutWorker.renew_weights, version=0)
                missing.generate(rollout, agents, tokenizer, score)
        with progress.phase("scoring"):
            rows = found.result()
        n = config.actor_rollout_ref.rollout.val_kwargs.n
        results = summarise(rows, n=n, seed=config.trainer.seed, metrics=responses is None)
        if responses is None:
            write_results(folder, results, rows, subject.step)
        else:
            write_responses(responses, _with_responses(prompts, kept, n))
        return results


def _with_responses(prompts: Sequence[PromptRow], kept: AnswerFile, n: int) -> Iterator[dict[str, Any]]:
    for number, prompt in enumerate(prompts):
        answers = [kept.answers.get((number, sample)) for sample in range(n)]
        row = {name: value for name, value in prompt.row.items() if name != "raw_prompt"}
        yield {**row, RESPONSES: [None if answer is None else answer.response for answer in answers]}


class _Missing:
    """The requests of an evaluation that have no answer yet."""

    def __init__(
        self, config: PPOConfig, subject: Subject, prompts: Sequence[PromptRow], kept: AnswerFile
    ) -> None:
        everything = validation_requests(config, prompts, subject.step)
        n = config.actor_rollout_ref.rollout.val_kwargs.n
        places = [place for place in range(len(everything)) if divmod(place, n) not in kept.answers]
        self.requests = RequestBatch(
            [everything.requests[place] for place in places],
            [everything.rows[place] for place in places],
            [everything.groups[place] for place in places],
            [everything.samples[place] for place in places],
        )
        self._keys = [divmod(place, n) for place in places]
        self._kept = kept
        if len(places) < len(everything):
            logger.info("%d of %d answers are there already", len(everything) - len(places), len(everything))

    def generate(
        self, rollout: RolloutGroup, agents: Agents, tokenizer: Tokenizer, told: Callable[[Answer], None]
    ) -> None:
        """Generate all answers, writing and reporting each as it finishes."""
        tokens = 0
        start = time.monotonic()
        total = len(self.requests)
        with progress.phase("answers", total) as shown, progress.phase("generating"):

            def ended(place: int, trajectory: Trajectory) -> None:
                nonlocal tokens
                answer = self._answer(place, trajectory, tokenizer)
                self._kept.add(answer)
                told(answer)
                tokens += answer.num_tokens
                shown.done += 1
                seconds = time.monotonic() - start
                left = duration(seconds / shown.done * (total - shown.done))
                shown.words = f"{tokens / seconds:,.0f} tokens/s, {left} left, answers"

            agents.answer_list(rollout, self.requests, ended, held_out=True)
        seconds = time.monotonic() - start
        logger.info("%d answers of %d tokens in %s", total, tokens, duration(seconds))

    def _answer(self, place: int, trajectory: Trajectory, tokenizer: Tokenizer) -> Answer:
        """Return the answer to the request at `place` as a line of the file."""
        prompt, sample = self._keys[place]
        read = self.requests.requests[place].prompt_token_ids
        if trajectory.lineages:
            read = trajectory.lineages[0].prompt.token_ids
        question = str(tokenizer.decode(list(read), skip_special_tokens=False))
        outcome = trajectory.outcome
        if outcome.cause is not None:
            return Answer(
                prompt, sample, question, "", "failed", 0, failed=outcome.cause, detail=outcome.detail
            )
        of_data = self.requests.rows[place].row.get("extra_info") or {}
        extra_info = trajectory.extra["extra_info"]
        sampled = trajectory.sampled_ids
        return Answer(
            prompt,
            sample,
            question,
            trajectory.extra["solution_str"],
            "length" if outcome.kind == "truncated" else "stop",
            len(sampled),
            sampled,
            turns=trajectory.turns,
            reward=trajectory.reward,
            extra_info={name: value for name, value in extra_info.items() if value is not of_data.get(name)},
        )


def _frozen_backend(
    run: PreparedRun, roles: Sequence[str], subject: Subject, tokenizer: Tokenizer
) -> Backend:
    """Start engines that generate with the subject's weights, and the reward model if `roles` names it."""
    config = run.config
    assert isinstance(config, PPOConfig), "an evaluation has the keys of a PPO run"
    if subject.weights is not None:
        with progress.phase("merging the checkpoint"):
            folder = subject.weights(config.actor_rollout_ref.model.trust_remote_code)
            config = with_values(config, {"actor_rollout_ref.model.path": folder})
    with progress.phase("starting the engines"):
        facts = facts_of(config, tokenizer, total_steps=1, nonfinite=run.folder.nonfinite)
        return run.start(partial(_factories, facts, subject.endpoint), partial(meshes, config, roles))


def _factories(facts: RunFacts, endpoint: ModelEndpoint | None, process: WorkerHost) -> Factories:
    builders = RoleBuilders(facts, process)
    return {"rollout": partial(_frozen_worker, builders, endpoint), "reward_model": builders.reward_model}


def _frozen_worker(builders: RoleBuilders, endpoint: ModelEndpoint | None, info: RankInfo) -> RolloutWorker:
    """Build an engine whose weights are those of the model's folder, or the endpoint's own."""
    if endpoint is not None:
        from hybridflow.rollout.openai.engine import OpenAIEngine  # its module needs an extra

        engine = OpenAIEngine(
            endpoint.url, model=endpoint.model, api_key=endpoint.api_key, deadline=endpoint.deadline
        )
        return RolloutWorker(engine)
    worker = builders.rollout(info)
    if isinstance(worker.pushed, StagedPush):
        worker.owned = worker.pushed.owned  # no trainer sends weights: the engine has those of the folder
    return worker


def _identity(config: PPOConfig, subject: Subject, prompts: Sequence[PromptRow]) -> dict[str, Any]:
    """Return all that the answers depend on, as flat JSON."""
    digest = hashlib.sha256()
    for prompt in prompts:
        row = {name: value for name, value in sorted(prompt.row.items()) if name != "raw_prompt"}
        digest.update(repr((prompt.prompt_token_ids, row)).encode("utf-8", errors="backslashreplace"))
    identity: dict[str, Any] = {
        "model": subject.name,
        "weights": subject.state,
        "step": subject.step,
        "prompts": f"{len(prompts)} of digest {digest.hexdigest()[:16]}",
    }
    if subject.endpoint is not None:
        identity["endpoint"] = f"{subject.endpoint.model} at {subject.endpoint.url}"
    keys = {name: value for name, value in flatten(to_tree(config)) if name.startswith(SAMPLING_KEYS)}
    return identity | keys
