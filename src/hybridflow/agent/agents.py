"""The agents of a run, by the names that rows give: made once, and run for each batch of episodes.

row's agent_name, else the keys ──► ChatAgent (tools, environment) | an agent of one's own
episodes ──run──► trajectories, told one by one; metrics; counts of the engines
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hybridflow.agent.chat import ChatAgent, ChatParts
from hybridflow.agent.episode import Agent, AgentResult, Episode
from hybridflow.agent.hosted_environment import EnvironmentSpec
from hybridflow.agent.load_agent import AGENT_KEY, load_agent_loop
from hybridflow.agent.policy import Policy, PolicyLimits
from hybridflow.agent.runner import Ended, Runner
from hybridflow.config import PPOConfig
from hybridflow.config.checks.rollout import longest_row
from hybridflow.config.needs import uses_agents
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.plugin import load_object
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, install_extra
from hybridflow.observability.metrics import Metrics
from hybridflow.processes import Hosts, HostsLike, LocalHosts
from hybridflow.protocol.trajectory import Trajectory
from hybridflow.rollout.base import RolloutStats
from hybridflow.rollout.client import LLMClient
from hybridflow.tools.parsers import TOOL_PARSERS, parser_of_template
from hybridflow.tools.toolset import ToolLimits, Toolset

if TYPE_CHECKING:  # it needs the packages of a server
    from hybridflow.agent.black_box import BlackBoxes

T = TypeVar("T")

SINGLE_TURN = "single_turn_agent"
TOOL = "tool_agent"
ENVIRONMENT = "environment"
COMMAND = "command"
INTERACTIONS = "hybridflow.interactions.environment:InteractionEnvironment"


class Serving(Protocol):
    """Engines that serve asynchronous work: `RolloutGroup`."""

    def run(self, work: Callable[[LLMClient], Coroutine[Any, Any, T]]) -> tuple[T, RolloutStats]:
        """Serve `work` until it has ended; return its result and the counts of the engines."""


class Agents:
    """The agents of a run; close them at its end."""

    def __init__(self, config: PPOConfig, tokenizer: Tokenizer) -> None:
        """Make what the keys ask for; ConfigError where that cannot be had."""
        self.are_used = uses_agents(config)
        """Whether the keys ask for agents; the name in a row may, too."""
        self._config = config
        self._rollout = config.actor_rollout_ref.rollout
        self._tokenizer = tokenizer
        self._by_name: dict[str, Agent] = {}
        self._default = self._default_name()
        workers = self._rollout.agent.num_workers
        self._hosts: HostsLike = Hosts(workers) if workers else LocalHosts()
        self._limits = PolicyLimits(
            max_model_len=longest_row(config)[0],
            max_prompt_length=config.data.max_prompt_length,
            request_deadline=self._rollout.agent.request_deadline,
            lost_replicas=self._rollout.agent.retries.infrastructure,
        )
        if self.are_used:
            self._agent(self._default)

    def play(self, rows: Sequence[PromptRow]) -> bool:
        """Return whether these rows are played by agents, and are not single requests."""
        return self.are_used or any(row.row.get("agent_name") not in (None, SINGLE_TURN) for row in rows)

    def run(
        self, rollout: Serving, episodes: Sequence[Episode], ended: Ended
    ) -> tuple[Metrics, RolloutStats]:
        """Play all episodes; `ended` hears of each trajectory, in the event loop's thread, when it has ended.

        ConfigError where a row names an agent that there is not.
        """
        for episode in episodes:
            self._agent(self._name_of(episode))
        told: list[Trajectory] = []

        def hear(place: int, trajectory: Trajectory) -> None:
            told.append(trajectory)
            ended(place, trajectory)

        runner = Runner(
            lambda episode: self._agent(self._name_of(episode)),
            self._tokenizer,
            self._limits,
            self._rollout.agent,
        )
        _, stats = rollout.run(lambda client: runner.run(client, episodes, hear))
        return _metrics(told, runner), stats

    def close(self) -> None:
        """End the processes of tools and environments."""
        self._hosts.close()

    def _default_name(self) -> str:
        agent = self._rollout.agent
        if agent.command:
            return COMMAND
        if agent.default_agent_loop != SINGLE_TURN:
            return agent.default_agent_loop
        if self._config.data.environment:
            return ENVIRONMENT
        if self._rollout.multi_turn.enable:
            return TOOL
        return SINGLE_TURN

    def _name_of(self, episode: Episode) -> str:
        return episode.row.row.get("agent_name") or self._default

    def _agent(self, name: str) -> Agent:
        if name not in self._by_name:
            self._by_name[name] = self._made(name)
        return self._by_name[name]

    def _made(self, name: str) -> Agent:
        if name == SINGLE_TURN:
            return ChatAgent(self._parts(Toolset()))
        if name == TOOL:
            return self._tool_agent()
        if name == ENVIRONMENT:
            if not self._config.data.environment:
                raise ConfigError("a row has agent_name=environment, and there is none: set data.environment")
            return ChatAgent(self._parts(self._tools), self._environment)
        if name == COMMAND:
            return self._black_boxes.command(self._rollout.agent.command)
        if ":" in name and not isinstance(load_object(name, key=AGENT_KEY), type):
            return self._black_boxes.function(name)
        return load_agent_loop(name, self._config, self._tokenizer)

    @cached_property
    def _black_boxes(self) -> BlackBoxes:
        """Makes agents that know a base URL only; ConfigError where a package for that is missing."""
        missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"an agent that is a function or a command needs {' and '.join(missing)}, which is not "
                f"installed: {install_extra('serve')}"
            )
        from hybridflow.agent.black_box import BlackBoxes

        agent = self._rollout.agent
        return BlackBoxes(
            self._tokenizer,
            self._template,
            hosts=self._hosts,
            address=(agent.endpoint_host, agent.endpoint_port),
            max_model_len=self._limits.max_model_len,
            tool_parser=self._parser,
            deadline_s=agent.deadline,
        )

    def _tool_agent(self) -> Agent:
        """Return the agent with the run's tools; rows with interaction_kwargs have a user to talk to."""
        parts = self._parts(self._tools)
        plain = ChatAgent(parts)
        file = self._rollout.multi_turn.interaction_config_path
        if file is None:
            return plain
        spec = EnvironmentSpec.of(INTERACTIONS, {"config_path": file})
        return _WithInteractions(plain, ChatAgent(parts, spec, rewarded=False))

    @cached_property
    def _tools(self) -> Toolset:
        keys = self._rollout.multi_turn
        limits = ToolLimits(
            keys.max_parallel_calls,
            keys.max_tool_response_length,
            keys.tool_response_truncate_side,
            self._rollout.agent.call_deadline,
        )
        return Toolset.load(
            tool_config_path=keys.tool_config_path, function_tool_path=keys.function_tool_path, limits=limits
        )

    @cached_property
    def _environment(self) -> EnvironmentSpec:
        assert self._config.data.environment is not None, "asked for only where there is one"
        return EnvironmentSpec.of(self._config.data.environment, self._config.data.environment_options)

    def _parts(self, tools: Toolset) -> ChatParts:
        return ChatParts(
            tokenizer=self._tokenizer,
            template=self._template,
            parser=self._parser,
            tools=tools,
            hosts=self._hosts,
            multi_turn=self._rollout.multi_turn,
            agent=self._rollout.agent,
        )

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer, self._config.data.apply_chat_template_kwargs)

    @cached_property
    def _parser(self) -> str:
        """Name of the format of tool calls: the key's, or the one that the chat template shows."""
        name = self._rollout.multi_turn.format
        if name == "auto":
            template = getattr(self._tokenizer, "chat_template", None) or ""
            return parser_of_template(template) or "hermes"
        if name not in TOOL_PARSERS:
            raise ConfigError(
                f"actor_rollout_ref.rollout.multi_turn.format={name}: wanted auto or one of "
                f"{', '.join(TOOL_PARSERS)}"
            )
        return name


class _WithInteractions:
    """Two agents, one for rows that name an interaction, and one for the others."""

    def __init__(self, plain: Agent, talking: Agent) -> None:
        self._plain = plain
        self._talking = talking

    async def run(self, episode: Episode, policy: Policy) -> AgentResult:
        """Play one conversation."""
        extra_info = episode.row.row.get("extra_info") or {}
        agent = self._talking if extra_info.get("interaction_kwargs") else self._plain
        return await agent.run(episode, policy)


def _metrics(trajectories: Sequence[Trajectory], runner: Runner) -> Metrics:
    """Return the numbers of trajectories that have not failed, and how the others were dealt with."""
    metrics = Metrics()
    whole = [trajectory for trajectory in trajectories if not trajectory.failed]
    for trajectory in whole:
        metrics.add_mean("agent/num_turns/mean", trajectory.turns, 1.0)
        metrics.add_max("agent/num_turns/max", trajectory.turns)
        metrics.add_mean("agent/num_rows/mean", len(trajectory.lineages), 1.0)
        for name, value in trajectory.metrics.items():
            metrics.add_mean(f"agent/{name}", value, 1.0)
    for cause, count in runner.retried.items():
        metrics.add_sum(f"agent/num_retried/{cause}", float(count))
    metrics.add_max("agent/max_concurrent", float(runner.peak))
    return metrics
