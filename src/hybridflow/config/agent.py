"""`actor_rollout_ref.rollout.multi_turn.*` and `.agent.*`: several turns, tools, and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.schema import at_most, group, key, needs


@dataclass(frozen=True)
class MultiTurnConfig:
    """Tools and several turns."""

    enable: bool = key(
        False,
        "Rows without an agent_name are played by tool_agent, with the tools and interactions below; false: "
        "by agent.default_agent_loop.",
    )
    max_assistant_turns: int | None = key(
        None, "Turns of the model in one trajectory; null: as many as fit.", minimum=1
    )
    max_user_turns: int | None = key(
        None,
        "Answers of tools, environments or users in one trajectory; null: as many as fit.",
        minimum=1,
    )
    max_parallel_calls: int = key(
        1,
        "Tool calls of one turn that are made, side by side; those beyond it are answered with a refusal.",
        minimum=1,
    )
    max_tool_response_length: int = key(
        256, "Characters of a tool's answer that the model reads; the rest is cut.", minimum=1
    )
    tool_response_truncate_side: Literal["left", "middle", "right"] = key(
        "middle",
        "Part that is kept of a tool's answer that is too long: its beginning (left), its end (right), or "
        "half of each (middle).",
    )
    tool_config_path: str | None = key(None, "YAML file with classes of tools; null: none.")
    function_tool_path: str | None = key(
        None, "Python file or module whose functions marked with @tool are tools; null: none."
    )
    interaction_config_path: str | None = key(
        None, "YAML file with interactions, which answer as a user would; null: none."
    )
    format: str = key(
        "auto", "Format in which the model writes tool calls, such as hermes; auto: by its chat template."
    )
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable"] = key(
        "disable",
        "Compare the tokens of a conversation with those of its chat template as a whole, and count "
        "differences: strict: all; ignore_strippable: all but whitespace; disable: no comparison.",
    )
    journal: bool = key(
        False,
        "Keep what training episodes have done in the run's folder, turn by turn, until a checkpoint has "
        "their rows: a run that goes on after a loss continues them, and calls no tool twice.",
        needs("trainer.save_freq>0", "without checkpoints no run goes on"),
    )


@dataclass(frozen=True)
class RetriesConfig:
    """Further tries of a trajectory that has failed, by cause; each draws anew."""

    infrastructure: int = key(3, "An engine or a process broke under it.", minimum=0)
    environment: int = key(1, "A tool, an environment or an agent raised an error.", minimum=0)
    deadline: int = key(0, "A call, a response or the whole of it took too long.", minimum=0)


@dataclass(frozen=True)
class AgentConfig:
    """How agents run, and their limits."""

    default_agent_loop: str = key(
        "single_turn_agent",
        "Agent of rows without a column agent_name: single_turn_agent, tool_agent, a name of "
        "agent_loop_config_path, or path/to/file.py:NAME of an agent loop or an agent.",
    )
    agent_loop_config_path: str | None = key(
        None, "YAML file that gives agent loops of your own their names; null: none."
    )
    options: dict[str, Any] = key({}, "Keyword arguments of an agent of your own.")
    command: list[str] = key(
        [],
        "Words of a command that is an agent, and finds its model under OPENAI_BASE_URL; empty: none.",
    )
    num_workers: int = key(
        4,
        "Processes that run the code of tools, environments and agents, and that are ended at a deadline; 0: "
        "in the trainer's process, where code that blocks cannot be ended.",
        minimum=0,
    )
    max_concurrent: int = key(
        1024,
        "Trajectories that run at once, at most; fewer do where the engine's cache is full.",
        minimum=1,
    )
    deadline: float = key(1800.0, "Seconds that one trajectory may take.", above=0)
    request_deadline: float = key(
        900.0,
        "Seconds that one response of the model may take. Those in which the engines stand, for new weights "
        "or a validation, count with trainer.num_collectors only.",
        above=0,
    )
    call_deadline: float = key(60.0, "Seconds that a call of a tool or an environment may take.", above=0)
    retries: RetriesConfig = group(RetriesConfig)
    min_group_size: int = key(
        1,
        "Samples that a group needs; a group of which so many failed that fewer are left is left out.",
        at_most("actor_rollout_ref.rollout.n", "so no group would ever be trained"),
        minimum=1,
    )
    strip_thinking: bool = key(
        False,
        "Render the whole conversation in each turn, so that the chat template may leave out the thinking of "
        "earlier turns; each turn then trains as a row of its own.",
    )
    endpoint_host: str = key("127.0.0.1", "Address at which agents of your own find the model.")
    endpoint_port: int = key(0, "Port at which they find it; 0: a free one.", minimum=0, maximum=65535)
