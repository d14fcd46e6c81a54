"""verl's types of a tool: its schema in OpenAI's form, and what it answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class OpenAIFunctionPropertySchema(BaseModel):
    """One argument; further keys of JSON schema (`items`, `default`, …) are kept."""

    model_config = ConfigDict(extra="allow")

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """All arguments of a tool."""

    model_config = ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """The name and the arguments of a tool, and what it is for."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """Description of a tool, as the model reads it."""

    type: str = "function"
    function: OpenAIFunctionSchema


def schema_with(name: str, description: str, **arguments: dict[str, Any]) -> OpenAIFunctionToolSchema:
    """Return the schema of a tool whose arguments, each given by its JSON schema, are all required."""
    parameters = {"type": "object", "properties": arguments, "required": list(arguments)}
    function = {"name": name, "description": description, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


class ToolResponse(BaseModel):
    """Answer of a tool: the model reads the pictures, in any form that data have, and then the text."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
    """Not read: an answer with a video is an error."""
