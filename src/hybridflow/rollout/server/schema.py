"""Bodies of requests. A field that is not listed is refused, one that is listed and cannot be served is
refused where it is set.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Strict):
    """How a stream is to be."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted, without effect: nothing is padded."""
    continuous_usage_stats: bool = False
    """Accepted, without effect: usage comes at the end."""


class SamplingBody(_Strict):
    """What chat and completions have in common."""

    model: str | None = None
    n: int = Field(1, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Lists of log-probs name tokens `token_id:NUMBER`: no two tokens have one name."""
    skip_special_tokens: bool = True
    prompt_cache_key: str | None = None
    """Requests of one key go to one replica."""
    user: str | None = None
    """As `prompt_cache_key`, where that is not given."""
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    metadata: dict[str, Any] | None = None
    """Accepted, without effect."""
    store: bool | None = None
    service_tier: str | None = None
    """Accepted, without effect."""
    safety_identifier: str | None = None
    """Accepted, without effect."""


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: str | None = None
    add_special_tokens: bool = True
    """The first token that the tokenizer wants, before text prompts."""


class FunctionCall(_Strict):
    """A call in an earlier message."""

    name: str
    arguments: str = "{}"


class MessageToolCall(_Strict):
    """A call in an earlier message, with the id that its result names."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(_Strict):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class Function(_Strict):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Strict):
    """The function that is to be called."""

    name: str


class NamedTool(_Strict):
    """The tool that is to be used."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The last message is to be continued, not answered."""
