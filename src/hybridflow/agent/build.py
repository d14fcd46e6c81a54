"""Builds a run's agents by name: the only place where names and keys become agents.

single_turn_agent, tool_agent, environment ──► ChatAgent
command, path/to/file.py:function ───────────► agents that know a base URL
other names, path/to/file.py:Class ──────────► agent loops and the user's agents (load_agent_loop)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hybridflow.agent.agent_loop import REGISTERED, AgentLoopAgent, AgentLoopBase
from hybridflow.agent.chat import ChatAgent, ChatParts
from hybridflow.agent.early_checks import AGENT_KEY, PATH_KEY, agent_entries, check_agent
from hybridflow.agent.episode import Agent, AgentResult, Episode, Policy
from hybridflow.agent.hosted_environment import EnvironmentSpec
from hybridflow.config import PPOConfig
from hybridflow.config.needs import longest_row, reads_text_alone
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.media import MediaReader
from hybridflow.data.plugin import blaming, load_class, load_object
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, install_extra
from hybridflow.processes.hosts import Hosts
from hybridflow.processes.local import HostsLike, LocalHosts
from hybridflow.tools.parsers import TOOL_PARSERS, parser_of_template
from hybridflow.tools.parsers.response import OtherFormats
from hybridflow.tools.toolset import Toolset

logger = logging.getLogger(__name__)

if TYPE_CHECKING:  # it needs the packages of a server
    from hybridflow.agent.black_box import BlackBoxes

SINGLE_TURN = "single_turn_agent"
TOOL = "tool_agent"
ENVIRONMENT = "environment"
COMMAND = "command"
INTERACTIONS = "hybridflow.interactions.environment:InteractionEnvironment"


def name_of(schema: Mapping[str, Any]) -> str:
    """Return the name of a tool by which a model calls it."""
    return str(schema["function"]["name"])


class AgentBuilder:
    """Makes each agent once; close it at the end of the run."""

    def __init__(self, config: PPOConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._rollout = config.actor_rollout_ref.rollout
        self._tokenizer = tokenizer
        self._by_name: dict[str, Agent] = {}
        self._other_formats = OtherFormats()
        workers = self._rollout.agent.num_workers
        self.hosts: HostsLike = Hosts(workers) if workers else LocalHosts()

    @property
    def default_name(self) -> str:
        """Name of the agent for rows without an agent_name."""
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

    def agent(self, name: str) -> Agent:
        """Return the agent of this name; ConfigError or DataError where it cannot be built."""
        if name not in self._by_name:
            self._by_name[name] = self._made(name)
        return self._by_name[name]

    def close(self) -> None:
        """End the processes of tools and environments, and what tools hold in this one."""
        if "_tools" in self.__dict__:
            self._tools.close()
        self.hosts.close()

    def _made(self, name: str) -> Agent:
        if name == SINGLE_TURN:
            return ChatAgent(self._parts(Toolset()))
        if name == TOOL:
            return self._tool_agent()
        if name == ENVIRONMENT:
            if not self._config.data.environment:
                raise ConfigError("a row has agent_name=environment, and there is none: set data.environment")
            methods = list(self._environment.tools.values())
            both = {name_of(schema) for schema in methods} & set(self._tools.specs)
            if both:
                raise ConfigError(
                    f"the environment {self._environment.name} and the run both have tools with the names "
                    f"{sorted(both)}: give one of each two another name"
                )
            self._check_template([*self._schemas, *methods])
            return ChatAgent(self._parts(self._tools), self._environment)
        if name == COMMAND and self._rollout.agent.command:
            return self._black_boxes.command(self._rollout.agent.command)
        if ":" in name and not isinstance(load_object(name, key=AGENT_KEY), type):
            return self._black_boxes.function(name)
        return load_agent_loop(name, self._config, self._tokenizer, self._reader)

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
        reason = reads_text_alone(self._config)
        pictures: dict[str, Any] = {"reader": self._reader}
        if reason is not None:
            pictures = {"pictures_refused": reason}
        return BlackBoxes(
            self._tokenizer,
            self._template,
            **pictures,
            hosts=self.hosts,
            address=(agent.endpoint_host, agent.endpoint_port),
            max_model_len=longest_row(self._config)[0],
            tool_parser=self._parser,
            deadline_s=agent.deadline,
        )

    def _tool_agent(self) -> Agent:
        """Return the agent with the run's tools; rows with interaction_kwargs have a user to talk to."""
        parts = self._parts(self._tools)
        self._check_template(self._schemas)
        plain = ChatAgent(parts)
        file = self._rollout.multi_turn.interaction_config_path
        if file is None:
            return plain
        spec = EnvironmentSpec.of(INTERACTIONS, {"config_path": file})
        return _WithInteractions(plain, ChatAgent(parts, spec, rewarded=False))

    @cached_property
    def _tools(self) -> Toolset:
        return Toolset.load(self._rollout.multi_turn, self._rollout.agent.call_deadline)

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
            hosts=self.hosts,
            multi_turn=self._rollout.multi_turn,
            agent=self._rollout.agent,
            reader=self._reader,
            pictures_refused=reads_text_alone(self._config),
            other_formats=self._other_formats,
        )

    @property
    def _schemas(self) -> list[Mapping[str, Any]]:
        return [spec.schema for spec in self._tools.specs.values()]

    def _check_template(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        """Raise DataError where the chat template cannot go on after an answer; token ids need none."""
        if getattr(self._tokenizer, "chat_template", None):
            self._template.check(list(schemas) or None)
            if schemas and not self._template.shows(schemas):
                logger.warning(
                    "the chat template of %s does not show the model its tools, so that it calls only those "
                    "that it knows from training: use a template that renders `tools` (data.tokenizer)",
                    self._tokenizer.name_or_path or "the tokenizer",
                )

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer, self._config.data.apply_chat_template_kwargs)

    @cached_property
    def _reader(self) -> MediaReader | None:
        return MediaReader.of_model(self._tokenizer, self._config.data)

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

    is_journaled = True

    def __init__(self, plain: ChatAgent, talking: ChatAgent) -> None:
        self._plain = plain
        self._talking = talking

    async def run(self, episode: Episode, policy: Policy) -> AgentResult:
        """Play one conversation."""
        extra_info = episode.row.row.get("extra_info") or {}
        agent = self._talking if extra_info.get("interaction_kwargs") else self._plain
        return await agent.run(episode, policy)


def load_agent_loop(
    name: str, config: PPOConfig, tokenizer: Tokenizer, reader: MediaReader | None = None
) -> Agent:
    """Return an agent: an entry of `agent_loop_config_path`, or a loop that `register` has named.

    path/to/file.py:NAME (or package.module:NAME) is a class of agent loops, constructed with `agent.options`
    for each trajectory, or a class of agents, constructed once as NAME(tokenizer, **options). Agent loops
    read pictures by `reader`. ConfigError where there is no such agent.
    """
    agent = config.actor_rollout_ref.rollout.agent
    entries = agent_entries(agent.agent_loop_config_path)
    if name in entries:
        kwargs = dict(entries[name])
        target = load_class(kwargs.pop("_target_"), key=PATH_KEY)
        return AgentLoopAgent(target, kwargs, config, tokenizer, reader)
    if name in REGISTERED:
        return AgentLoopAgent(REGISTERED[name], agent.options, config, tokenizer, reader)
    if ":" not in name:
        known = ["single_turn_agent", "tool_agent", "environment", *entries, *REGISTERED]
        raise ConfigError(
            f"{AGENT_KEY}: there is no agent {name!r}; wanted {', '.join(known)} or path/to/file.py:NAME"
        )
    found = load_object(name, key=AGENT_KEY)
    check_agent(found, name, agent.options)
    if issubclass(found, AgentLoopBase):
        return AgentLoopAgent(found, agent.options, config, tokenizer, reader)
    with blaming(f"{AGENT_KEY}: {name}"):
        made: Agent = found(tokenizer, **agent.options)
    return made
