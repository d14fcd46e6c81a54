"""GLM-4.5 and later: `<tool_call>NAME`, then a pair of `<arg_key>` and `<arg_value>` for each argument, then
`</tool_call>`.
"""

from __future__ import annotations

import re
from typing import Any

from hybridflow.tools.parsers.base import TaggedParser
from hybridflow.tools.parsers.calls import ToolCall, made_call
from hybridflow.tools.parsers.source import SPACE, Pausing, Tags, Unreadable
from hybridflow.tools.parsers.typed import value_of

KEY = "<arg_key>"
VALUE = "<arg_value>"
END_OF_KEY = "</arg_key>"
END_OF_VALUE = "</arg_value>"
NAME = re.compile(r"[\w.:/-]*")
LONGEST_KEY = 256
BEHIND_VALUES = Tags(KEY, "</tool_call>", "<tool_call>")


class GlmParser(TaggedParser):
    """Parser of names and pairs of tags; values are read by the schemas of the tools (`typed`).

    A value ends with the first `</arg_value>` behind which the call goes on or ends; another one is part of
    the value. So are pairs of tags within it.
    """

    starts = ("<tool_call>",)
    inner = (KEY, END_OF_KEY, VALUE, END_OF_VALUE)
    stops = ("</tool_call>",)
    example = f"<tool_call>NAME\n{KEY}KEY{END_OF_KEY}\n{VALUE}VALUE{END_OF_VALUE}\n</tool_call>"

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the first argument where a tool is named."""
        return "<tool_call>" + (f"{name}\n" if name else "")

    def block(self, tag: str) -> Pausing[list[ToolCall]]:
        """Read the call of one pair of tags; the closing one may be missing."""
        source = self._source
        self._left = "call"
        yield from source.run(SPACE)
        name = yield from source.run(NAME)
        if not name:
            raise Unreadable(f"{tag} is not followed by the name of a tool")
        arguments: dict[str, Any] = {}
        twice: str | None = None
        while True:
            yield from source.run(SPACE)
            if not (yield from source.at(Tags(KEY))):
                break
            key = yield from self._key(name)
            value = yield from self._value(name, key)
            source.make_certain()
            if key in arguments:  # reported at the end: what follows belongs to this call
                twice = key
            arguments[key] = value_of(value, key, self._parameters.get(name))
        ends = yield from source.at(Tags(*self.stops))
        if twice is not None:
            raise Unreadable(f"{name} has the argument {twice} twice")
        if ends:
            self._left = ""
            return [made_call(name, arguments)]
        other = yield from source.letter()
        if other and not (yield from source.here(Tags(*self.starts))):
            raise Unreadable(f"{name} has {other!r} where an argument or its end should be")
        is_mention = not arguments and name not in self._parameters  # of the tag, before some word
        if is_mention or (source.is_cut and not other):
            raise Unreadable(f"{name} has no end")
        return [made_call(name, arguments)]

    def _key(self, name: str) -> Pausing[str]:
        source = self._source
        parts: list[str] = []
        end = yield from source.until(Tags(*self.tags), parts.append, LONGEST_KEY)
        yield from source.run(SPACE)
        if end != END_OF_KEY or not (yield from source.at(Tags(VALUE))):
            raise Unreadable(f"an argument of {name} is no pair of {KEY} and {VALUE}")
        return "".join(parts).strip()

    def _value(self, name: str, key: str) -> Pausing[str]:
        """Read the value of an argument, and its closing tag."""
        source = self._source
        parts: list[str] = []
        num_within = 0  # values that were opened in this one
        while tag := (yield from source.until(Tags(VALUE, END_OF_VALUE), parts.append)):
            if tag == VALUE:
                num_within += 1
            elif num_within:
                num_within -= 1
            else:
                space = yield from source.run(SPACE)
                if (yield from source.here(BEHIND_VALUES)) or not (yield from source.letter()):
                    return "".join(parts)
                tag += space
            parts.append(tag)
        raise Unreadable(f"the argument {key} of {name} is not closed")
