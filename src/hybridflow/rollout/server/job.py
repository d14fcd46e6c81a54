"""Jobs: requests as they are generated, with prompts as token ids, sampling parameters, and how the answer is
read. Every refusal names its field.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hybridflow.data.tokenizer import Tokenizer, render_chat
from hybridflow.errors import RolloutError
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import SamplingParams
from hybridflow.rollout.server.errors import ApiError, refuse
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.prompts import (
    Check,
    SentPictures,
    check_count,
    check_ids,
    completion_prompts,
    encode_text,
    picture_prompt,
    template_errors_refused,
    template_message,
)
from hybridflow.rollout.server.schema import ChatBody, CompletionBody, Function, NamedTool, SamplingBody
from hybridflow.tools.parsers import TOOL_PARSERS

COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where none is given, as OpenAI has it."""
GIVEN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters whose defaults are those of `SamplingParams`."""
LONGEST_ID = 10
"""Digits of a token id: no vocabulary needs more."""
LONGEST_SHOWN = 40
"""Characters of a wrong name that a message repeats."""
OWN_OPTIONS = frozenset(inspect.signature(Tokenizer.apply_chat_template).parameters) | {"messages"}
"""Options of the chat template that a request may not set: its own template, for one, would be a program."""


@dataclass(frozen=True)
class ToolUse:
    """Tool calls that a response may have, or has to have."""

    parser: str | None = None
    """Parser of tool calls, where there may be any."""
    opening: str = ""
    """Beginning of a call that has to be made; it is in the prompt and belongs to the response."""
    callable: frozenset[str] | None = None
    """Tools of which one has to be called; None: no call is needed."""
    one_call: bool = False
    """Whether the response ends with its first call."""


@dataclass(frozen=True)
class Job:
    """One validated HTTP request."""

    body: SamplingBody
    """The request, which also says how it is to be answered."""
    prompts: list[Prompt]
    sampling: list[SamplingParams]
    """Sampling parameters of each prompt."""
    log_probs: bool = False
    """Whether the answer lists log-probs."""
    echo: list[str] = field(default_factory=list)
    """Texts that the responses begin with, one for each prompt; empty where prompts are not repeated."""
    tools: ToolUse = ToolUse()
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages of a chat as its template takes them."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template; `tools` are among them."""
    pictures: list[str] = field(default_factory=list)
    """Digests of the pictures of a chat, in the order of their places."""

    @property
    def media_bytes(self) -> int:
        """Bytes of what the model reads of its pictures."""
        media = (medium for prompt in self.prompts for medium in prompt.media)
        return sum(value.nbytes for medium in media for value in medium.values.values())


def completion_job(body: CompletionBody, model: ServedModel, check: Check) -> Job:
    """Return the job of a /v1/completions request; ApiError where it cannot be served."""
    if body.best_of is not None and body.best_of != body.n:
        raise refuse(
            "best_of", f"{body.best_of} is not supported: every response is returned, so ask for n of them"
        )
    if body.suffix:
        raise refuse("suffix", "text after the gap is not supported: the models served here only continue")
    if body.echo and body.logprobs is not None:
        raise refuse(
            "echo",
            "with logprobs it asks for log-probs of the prompt, which are not computed: leave one of them "
            "out",
        )
    texts, prompts = completion_prompts(body, model, check)
    limit = body.max_tokens or COMPLETION_TOKENS
    top = body.logprobs or 0
    sampling = [
        sampling_of(body, model, len(prompt), max_tokens=limit, top_log_probs=top) for prompt in prompts
    ]
    return Job(body, prompts, sampling, log_probs=body.logprobs is not None, echo=texts)


PromptOf = Callable[[list[dict[str, Any]], dict[str, Any], str, SentPictures], Prompt]
"""Makes a prompt of messages, options of the template, a text behind what that writes, and pictures."""


def chat_job(body: ChatBody, model: ServedModel, check: Check, prompt_of: PromptOf | None = None) -> Job:
    """Return the job of a /v1/chat/completions request; ApiError where it cannot be served.

    Without a `prompt_of`, the chat template writes the whole conversation.
    """
    check_count(1, body.n)
    _check_chat(body)
    use = _tool_use(body, model)
    options = _template_options(body, model)
    pictures = SentPictures(model, check)
    messages = [template_message(message, place, pictures) for place, message in enumerate(body.messages)]
    check()
    if prompt_of is None:
        begins = body.add_generation_prompt and not body.continue_final_message
        with template_errors_refused():
            text = render_chat(model.tokenizer, messages, options, add_generation_prompt=begins)
        ids = encode_text("messages", text + use.opening, model, check)
        prompt = picture_prompt("messages", ids, pictures.files, model, check)
    else:
        prompt = prompt_of(messages, options, use.opening, pictures)
    limit = body.max_completion_tokens or body.max_tokens
    top = body.top_logprobs or 0
    sampling = sampling_of(body, model, len(prompt), max_tokens=limit, top_log_probs=top)
    return Job(
        body,
        [prompt],
        [sampling],
        log_probs=body.logprobs,
        tools=use,
        messages=messages,
        template_options=options,
        pictures=pictures.digests,
    )


def _template_options(body: ChatBody, model: ServedModel) -> dict[str, Any]:
    """Return the arguments of the chat template; ApiError where there is no template."""
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if taken := sorted(options.keys() & OWN_OPTIONS):
        raise refuse(
            "chat_template_kwargs",
            f"{taken[0]!r} is the server's to set: only variables of the model's own template can be given",
        )
    if body.tools and body.tool_choice != "none":
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    if body.continue_final_message:
        options["continue_final_message"] = True
    if model.chat_template is not None:
        options.setdefault("chat_template", model.chat_template)
    if not (options.get("chat_template") or getattr(model.tokenizer, "chat_template", None)):
        raise ApiError(
            400,
            "the model's tokenizer has no chat template: use /v1/completions, or start the server with "
            "--chat-template",
        )
    return options


def sampling_of(
    body: SamplingBody, model: ServedModel, prompt_tokens: int, *, max_tokens: int | None, top_log_probs: int
) -> SamplingParams:
    """Return the sampling parameters for one prompt; without `max_tokens` a response may fill the context."""
    room = model.max_model_len - prompt_tokens
    if prompt_tokens < 1:
        raise refuse("prompt", "is empty; at least one token is needed to predict the next")
    if room < (max_tokens or 1):
        wanted = max_tokens or 1
        raise ApiError(
            400,
            f"the model's context has {model.max_model_len} tokens, and the request asks for "
            f"{prompt_tokens + wanted}: {prompt_tokens} of the prompt and {wanted} of the response. Shorten "
            "the prompt or set a smaller max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options", "is only allowed with stream=true")
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(body, name):
            raise refuse(name, "is not supported, only 0 is: use repetition_penalty")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    check_ids("stop_token_ids", body.stop_token_ids or [], model)
    given = {name: getattr(body, name) for name in GIVEN if getattr(body, name) is not None}
    try:
        return SamplingParams(
            max_tokens=max_tokens or room,
            **given,
            min_tokens=body.min_tokens,
            stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
            stop=stop,
            ignore_eos=body.ignore_eos,
            logit_bias=_logit_bias(body.logit_bias or {}, model),
            top_log_probs=top_log_probs,
        )
    except RolloutError as error:
        param, equals, _ = str(error).partition("=")
        raise ApiError(400, str(error), param=param if equals else None) from error


def _logit_bias(given: dict[str, float], model: ServedModel) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for name, value in given.items():
        if not (name.isascii() and name.isdecimal() and len(name) <= LONGEST_ID):
            shown = repr(name)
            if len(name) > LONGEST_SHOWN:
                shown = f"a name of {len(name)} characters"
            raise refuse("logit_bias", f"{shown} is no token id")
        if not -100 <= value <= 100:
            raise refuse("logit_bias", "values are numbers from -100 to 100")
        if int(name) in biases:
            raise refuse("logit_bias", f"token id {int(name)} is given twice, once as {name!r}")
        biases[int(name)] = value
    check_ids("logit_bias", list(biases), model)
    return tuple(biases.items())


def _check_chat(body: ChatBody) -> None:
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise refuse(
            "response_format",
            f"{kind!r} is not supported, only 'text' is: nothing here forces the shape of a response",
        )
    if body.modalities not in (None, ["text"]):
        raise refuse("modalities", f"{body.modalities} are not supported, only ['text'] is")
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", "is only allowed with logprobs=true")
    if body.continue_final_message and body.messages[-1].role != "assistant":
        raise refuse(
            "continue_final_message",
            f"the last message is of {body.messages[-1].role!r}, and only an assistant's can be continued",
        )


def _tool_use(body: ChatBody, model: ServedModel) -> ToolUse:
    choice = body.tool_choice
    names = [tool.function.name for tool in body.tools or ()]
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise refuse("tool_choice", "asks for a call, and there are no tools")
        return ToolUse()
    for place, tool in enumerate(body.tools):
        _check_function(f"tools[{place}].function", tool.function, names)
    if choice == "none":
        return ToolUse()
    if model.tool_parser is None:
        raise refuse(
            "tools",
            "how this model writes calls is not known: start the server with --tool-call-parser "
            f"({', '.join(TOOL_PARSERS)})",
        )
    one_call = body.parallel_tool_calls is False
    if choice in (None, "auto"):
        return ToolUse(model.tool_parser, one_call=one_call)
    parser = TOOL_PARSERS[model.tool_parser]()
    if not isinstance(choice, NamedTool):
        return ToolUse(model.tool_parser, parser.opening(None), frozenset(names), one_call)
    name = choice.function.name
    if name not in names:
        raise refuse("tool_choice", f"there is no tool {name!r} among tools")
    return ToolUse(model.tool_parser, parser.opening(name), frozenset([name]), one_call=True)


def _check_function(place: str, function: Function, names: list[str]) -> None:
    """Raise ApiError for a function that cannot be called, or not in the way that it asks for."""
    if names.count(function.name) > 1:
        raise refuse(f"{place}.name", f"{function.name!r} names two tools")
    if function.strict:
        raise refuse(
            f"{place}.strict", "true is not supported: nothing here forces the arguments into their schema"
        )
    schema = function.parameters or {}
    if schema.get("type", "object") != "object":
        raise refuse(f"{place}.parameters.type", f"{schema['type']!r}: arguments are an object")
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, dict) or not all(
        isinstance(each, (dict, bool)) for each in properties.values()
    ):
        raise refuse(
            f"{place}.parameters.properties", "wanted an object that gives each argument its JSON schema"
        )
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise refuse(f"{place}.parameters.required", "wanted a list of names of arguments")
