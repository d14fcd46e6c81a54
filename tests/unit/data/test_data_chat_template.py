"""Conversations of several turns, token by token, over families of chat templates."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from chat_families import FAMILIES, TOOL, Family
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config.data import DataConfig
from hybridflow.data.chat_template import ChatTemplate, check_conversation
from hybridflow.data.prompts import PromptDataset
from hybridflow.data.tokenizer import encode_rendered, text_of
from hybridflow.errors import DataError
from hybridflow.tools.parsers import TOOL_PARSERS, ToolCall, parser_of_template

WORDS = st.text('abc 01+=.#\n"{}', min_size=1, max_size=12).map(lambda text: f"x{text}y")
"""Texts without white space at their ends, which some templates take off."""
TURNS = st.lists(
    st.tuples(WORDS, st.sampled_from(["user", "tool", "tools"]), WORDS, st.booleans()), max_size=3
)
USER = [{"role": "user", "content": "2"}]
RESULT = [{"role": "tool", "content": "7", "name": "add"}]


@functools.cache
def template_of(name: str) -> ChatTemplate:
    return FAMILIES[name].template()


def call(family: Family, name: str, content: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer before results of tools, as the family's template wants it."""
    if not family.calls_in_template:
        return {"role": "assistant", "content": content}
    arguments: Any = {"a": content}
    if name == "deepseek":
        arguments = '{"a": 1}'
    calls = [
        {"id": each["tool_call_id"], "type": "function", "function": {"name": "add", "arguments": arguments}}
        for each in results
    ]
    return {"role": "assistant", "content": None if name == "deepseek" else "", "tool_calls": calls}


def written(family: Family, template: ChatTemplate, before: list[Any], answer: Any, tools: Any) -> str:
    """What the model writes, end of the turn left out, so that the template would render it as `answer`."""
    begun = template.render(before, tools, add_generation_prompt=True)
    text = template.render([*before, answer], tools, add_generation_prompt=False)
    assert text.startswith(begun)
    end = next(end for end in family.ends if text.endswith(end))
    return text[len(begun) : len(text) - len(end)]


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=25)
@given(turns=TURNS, question=WORDS)
def test_turns_give_the_ids_of_the_whole_conversation(name: str, turns: list[Any], question: str) -> None:
    family = FAMILIES[name]
    template = template_of(name)
    tokenizer = template.tokenizer
    tools = [TOOL] if family.takes_tools and name != "mistral" else None
    messages: list[Any] = [{"role": "user", "content": question}]
    row = template.begin(messages, tools)
    merged = False
    for content, kind, reply, stopped in turns:
        new: list[Any] = [{"role": "user", "content": reply}]
        answer: dict[str, Any] = {"role": "assistant", "content": content}
        if kind != "user" and family.takes_tools:
            num_results = 2 if kind == "tools" and name not in ("llama3.1", "gpt-oss") else 1
            new = [
                {"role": "tool", "content": reply, "name": "add", "tool_call_id": f"{place:09d}"}
                for place in range(num_results)
            ]
            answer = call(family, name, content, new)
        ids = encode_rendered(tokenizer, written(family, template, messages, answer, tools))
        following = template.after_answer(None, new, tools)
        end = following[0]
        # gpt-oss ends an answer with one token, and an earlier answer with another
        if stopped and name not in ("gpt-oss", "llama2"):
            ids = [*ids, end]
            following = template.after_answer(end, new, tools)
        merged = merged or template.boundary_merges(ids, following) or template.boundary_merges(row, ids)
        row = [*row, *ids, *following]
        messages = [*messages, answer, *new]
    whole = template.render(messages, tools, add_generation_prompt=True)
    if name != "qwen3":  # it takes thoughts away from earlier turns
        assert text_of(tokenizer, row) == whole
        assert merged or row == encode_rendered(tokenizer, whole)


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_in_what_users_and_tools_say_stay_text(name: str) -> None:
    family = FAMILIES[name]
    template = template_of(name)
    special = family.special.split()
    ids = {template.tokenizer.convert_tokens_to_ids(token) for token in special}
    hostile = f"x{' '.join(special)}y"
    plain = [{"role": "user", "content": "xy"}]
    said = [{"role": "user", "content": hostile}]
    asked = [(template.begin(plain), template.begin(said))]
    asked.append((template.after_answer(None, plain), template.after_answer(None, said)))
    if family.takes_tools:
        results = [[{**RESULT[0], "content": text}] for text in ("xy", hostile)]
        asked.append(tuple(template.after_answer(None, each, [TOOL]) for each in results))  # type: ignore[arg-type]
    for safe, attacked in asked:
        assert [token for token in attacked if token in ids] == [token for token in safe if token in ids]
        if hostile.isascii():  # the tiny tokenizer has no other letters
            assert hostile in text_of(template.tokenizer, attacked)
    row = [*template.begin(said), *encode_rendered(template.tokenizer, "z")]
    conversation = [*said, {"role": "assistant", "content": "z"}]
    if name == "qwen2.5":  # others write something before or after such an answer
        assert check_conversation(template, row, conversation) is None


@pytest.mark.parametrize(
    "name", ["qwen2.5", "qwen3", "llama3.1", "mistral", "deepseek", "glm4.5", "kimi-k2", "gpt-oss"]
)
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
    family = FAMILIES[name]
    template = template_of(name)
    answer = call(family, name, "1", [{"tool_call_id": "000000000"}])
    if name == "kimi-k2":
        answer["tool_calls"][0]["id"] = "functions.add:0"
    parser = TOOL_PARSERS[parser_of_template(family.source) or ""]()
    text = written(family, template, USER, answer, [TOOL])
    (found,) = [part for part in [*parser.feed(text), *parser.end()] if isinstance(part, ToolCall)]
    assert found.name == "add" and json.loads(found.arguments) in ({"a": "1"}, {"a": 1})
    assert found.id == {"kimi-k2": "functions.add:0", "mistral": "000000000"}.get(name, "")
    assert parser.malformed == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_prompt_is_that_of_the_data(name: str) -> None:
    template = template_of(name)
    (row,) = list(PromptDataset([{"prompt": USER}], template.tokenizer, DataConfig()))
    assert template.begin(USER) == row.prompt_token_ids


def after(name: str, stop: str | None, messages: list[dict[str, Any]], *, final: bool = False) -> str:
    template = template_of(name)
    last = None if stop is None else int(template.tokenizer.convert_tokens_to_ids(stop))
    return text_of(template.tokenizer, template.after_answer(last, messages, final=final))


@pytest.mark.parametrize(
    ("name", "stop", "messages", "wanted"),
    [
        # the template's own end of the turn was sampled
        ("qwen2.5", "<|im_end|>", USER, "\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"),
        ("gpt-oss", "<|call|>", RESULT, '<|start|>functions.add to=assistant<|channel|>commentary'
         '<|message|>"7"<|end|><|start|>assistant'),
        ("llama2", "</s>", USER, "<s>[INST] 2 [/INST]"),
        ("phi", "<|end|>", USER, "\n<|user|>\n2<|end|>\n<|assistant|>\n"),
        ("glm4.5", "<|observation|>", RESULT, "\n<tool_response>\n7\n</tool_response><|assistant|>"),
        # another stop token was sampled: it stays, and the template's end of the turn is left out
        ("qwen2.5", "<|endoftext|>", USER, "\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"),
        ("gpt-oss", "<|return|>", USER, "<|start|>user<|message|>2<|end|><|start|>assistant"),
        ("llama3.1", "<|eom_id|>", RESULT, '<|start_header_id|>ipython<|end_header_id|>\n\n"7"<|eot_id|>'
         "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("glm4.5", "<|endoftext|>", USER, "<|user|>\n2<|assistant|>"),
        # the answer was cut
        ("mistral", None, USER, "</s>[INST] 2[/INST]"),
        ("gpt-oss", None, USER, "<|end|><|start|>user<|message|>2<|end|><|start|>assistant"),
    ],
)  # fmt: skip
def test_ends_of_turns(name: str, stop: str | None, messages: list[dict[str, Any]], wanted: str) -> None:
    assert after(name, stop, messages) == wanted


def test_the_end_of_a_conversation_has_no_generation_prompt() -> None:
    assert after("qwen2.5", None, [], final=True) == "<|im_end|>\n"
    assert after("phi", "<|end|>", USER, final=True) == "\n<|user|>\n2<|end|>\n<|endoftext|>"


def test_ids_of_calls_are_those_of_the_results_where_the_template_takes_them() -> None:
    named = [{**RESULT[0], "tool_call_id": "functions.add:3"}]
    assert "## Return of functions.add:3\n7" in after("kimi-k2", "<|im_end|>", named)
    assert '"call_id": "000000000"' in after("mistral", "</s>", named), "wanted 9 characters"
    assert '"call_id": "abcdefghi"' in after("mistral", "</s>", [{**RESULT[0], "tool_call_id": "abcdefghi"}])


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_template_cannot_do_is_said_at_the_start(name: str) -> None:
    template = template_of(name)
    template.check()
    if FAMILIES[name].takes_tools:
        template.check([TOOL])
        return
    with pytest.raises(DataError, match=r"cannot go on after an answer with messages of tool .*alternate"):
        template.check([TOOL])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "does not write the answer",
        ),
        ("{% for m in messages %}{{ m.content + m.content[:2] }}{% endfor %}", "depends on the answer"),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }};{% endfor %}",
            "leaves out messages of tool",
        ),
    ],
)
def test_templates_without_a_fixed_end_are_refused(source: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        ChatTemplate(template_of("qwen2.5").tokenizer, template=source).check([TOOL])


def test_an_end_of_several_tokens_is_written_by_the_model() -> None:
    source = "{% for m in messages %}{{ m.content }}<think><|endoftext|>{% endfor %}"
    template = ChatTemplate(template_of("qwen2.5").tokenizer, template=source)
    first, second = encode_rendered(template.tokenizer, "<think><|endoftext|>")
    assert text_of(template.tokenizer, template.after_answer(second, USER)) == "2<think><|endoftext|>"
    assert template.after_answer(first, USER) == [second, *template.after_answer(second, USER)]


def test_options_and_tools_reach_the_template() -> None:
    source = (
        "{{ name }}{% for m in messages %}{{ m.content }};{% endfor %}{% for t in tools or [] %}T{% endfor %}"
    )
    template = ChatTemplate(template_of("qwen2.5").tokenizer, {"name": "N"}, source)
    assert text_of(template.tokenizer, template.begin(USER, [TOOL])) == "N2;T"
    assert text_of(template.tokenizer, template.after_answer(None, USER)) == ";2;"


def test_merges_across_a_boundary_are_seen() -> None:
    template = template_of("qwen2.5")
    before, after_it = (encode_rendered(template.tokenizer, text) for text in ("1 +", " 2"))
    assert template.boundary_merges(before, after_it)
    assert not template.boundary_merges(before, after_it[1:])
    assert not template.boundary_merges(before, template.after_answer(None, USER)), "a special token"
    assert not template.boundary_merges([], after_it)


@pytest.mark.parametrize("stop", ["<|im_end|>", None])
def test_rows_are_compared_with_the_whole_conversation(stop: str | None) -> None:
    template = template_of("qwen2.5")
    tokenizer = template.tokenizer
    end = [] if stop is None else [int(tokenizer.convert_tokens_to_ids(stop))]
    answers = [encode_rendered(tokenizer, text) + end for text in ("a b", "c")]
    row = (
        template.begin(USER) + answers[0] + template.after_answer(end[0] if end else None, USER) + answers[1]
    )
    messages = [*USER, {"role": "assistant", "content": "a b"}, *USER, {"role": "assistant", "content": "c"}]
    assert check_conversation(template, row, messages) is None
    messages[1] = {"role": "assistant", "content": "a  b"}
    assert check_conversation(template, row, messages, mode="ignore_strippable") is None
    difference = check_conversation(template, row, messages)
    assert difference is not None and difference.position == len(template.begin(USER)) + 2
    assert "a b<|im_end|>" in difference.row and "a  b<|im_end|>" in str(difference)
    messages[1] = {"role": "assistant", "content": "a d"}
    assert check_conversation(template, row, messages, mode="ignore_strippable") is not None
    assert check_conversation(template, row, messages, mode="disable") is None
    assert check_conversation(template, row[:-2], messages[:3]) is not None
