"""Bodies of requests. Fields that are not listed here are refused; a field that is listed and cannot be
served is refused where it is set.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_CHOICES = 1024
"""Responses of one HTTP request, over all of its prompts."""
MAX_ENTRIES = 1024
"""Entries of `stop_token_ids`, `logit_bias` and `tools`."""
MAX_STOP_TEXTS = 32
MAX_STOP_LENGTH = 512
"""Characters of a stop text."""
MAX_MESSAGES = 8192
MAX_NUMBER = 2**31 - 1
"""Largest number of tokens or responses that is read; what the model can serve is far less."""


class FailFast(pydantic.FailFast):
    """Stop at the first wrong entry of a list; can be part of a union, which pydantic's own cannot."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


Ids = Annotated[list[int], FailFast()]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
StopText = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
StopTexts = Annotated[list[StopText], FailFast(), Field(max_length=MAX_STOP_TEXTS)]
Parts = Annotated[list[dict[str, Any]], FailFast(), Field(max_length=MAX_MESSAGES)]
"""Parts of one message, or items of a conversation."""


def _check_number_of_prompts(value: Any) -> Any:
    """Refuse too many prompts before each of them is validated."""
    if isinstance(value, list) and len(value) > MAX_CHOICES and not isinstance(value[0], int):
        raise ValueError(f"{len(value)} prompts are more than {MAX_CHOICES} in one request")
    return value


Prompts = Annotated[
    str | Ids | Annotated[list[str], FailFast()] | Annotated[list[Ids], FailFast()],
    BeforeValidator(_check_number_of_prompts),
]


class StrictBody(BaseModel):
    """Fields that are not known are refused. A null counts as not sent, since clients send nulls."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Leave out nulls, but for those of fields that must be there."""
        if not isinstance(body, dict):
            return body
        fields = cls.model_fields
        return {
            name: value
            for name, value in body.items()
            if value is not None or (name in fields and fields[name].is_required())
        }


class StreamOptions(StrictBody):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted, without effect: nothing is padded."""
    continuous_usage_stats: bool = False
    """Accepted, without effect: usage comes at the end."""


class RequestBody(StrictBody):
    """Fields that all interfaces have in common."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = None
    stream: bool = False
    metadata: dict[str, Any] | None = None
    """Accepted by OpenAI's interfaces, without effect."""
    service_tier: str | None = None
    """Accepted, without effect."""


class OpenAIBody(RequestBody):
    """Fields that OpenAI's interfaces have in common."""

    stream_options: StreamOptions | None = None
    prompt_cache_key: str | None = None
    """Requests of one key go to one replica."""
    user: str | None = None
    """Used as `prompt_cache_key` where that is not given."""
    store: bool | None = None
    """Accepted, without effect: nothing is stored."""
    safety_identifier: str | None = None
    """Accepted, without effect."""


class SamplingBody(OpenAIBody):
    """Fields that chat and completions have in common."""

    n: int = Field(1, ge=1, le=MAX_NUMBER)
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=MAX_ENTRIES)] | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=MAX_NUMBER)
    max_tokens: int | None = Field(None, ge=1, le=MAX_NUMBER)
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_ENTRIES)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Lists of log-probs name tokens `token_id:NUMBER`: no two tokens have one name."""
    skip_special_tokens: bool = True
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompts
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: str | None = None
    add_special_tokens: bool = True
    """Whether text prompts begin with the first token that the tokenizer wants."""


class FunctionCall(StrictBody):
    """A call in an earlier message."""

    name: str
    arguments: str = "{}"


class MessageToolCall(StrictBody):
    """A call in an earlier message, with the id that its result names."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(StrictBody):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = Field(None, max_length=MAX_ENTRIES)
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: list[dict[str, Any]] | None = Field(None, max_length=0)
    """Empty in the answers that come back as history."""


class Function(StrictBody):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(StrictBody):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(StrictBody):
    """The function that is to be called."""

    name: str


class NamedTool(StrictBody):
    """The tool that is to be used."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_NUMBER)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[ToolBody], FailFast()] | None = Field(None, max_length=MAX_ENTRIES)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the last message is continued instead of answered."""
