"""How families of models write conversations, in short templates of our own, and a tokenizer for each."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from hybridflow.data.chat_template import ChatTemplate
from hybridflow.models.tiny import create_tiny_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
ALTERNATE = (
    "{% set turns = TURNS %}{% for m in turns %}{% if (m.role == 'user') != loop.index0 is even %}"
    "{{ raise_exception('user and assistant must alternate') }}{% endif %}{% endfor %}"
)
WITHOUT_TOOLS = (
    "messages | rejectattr('tool_calls', 'defined') | rejectattr('role', 'equalto', 'tool') | list"
)
TOOLS = "{% if tools %}{{ HEAD }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{{ FOOT }}{% endif %}"
HERMES_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson if c.function.arguments is mapping else c.function.arguments }}"
    "{{ '}\n</tool_call>' }}{% endfor %}"
)
GROUPED_RESULTS = (
    "{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>ROLE' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)


def system_of_tools(begin: str, end: str) -> str:
    return TOOLS.replace("HEAD", repr(begin)).replace("FOOT", repr(end))


def chatml(results: str, first: str = "", answer: str = "m.content", opening: str = "") -> str:
    return (
        first
        + system_of_tools("<|im_start|>system\n", "<|im_end|>\n")
        + "{% for m in messages %}{% if m.role == 'tool' %}"
        + results
        + "{% else %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{{ "
        + answer
        + " }}"
        + HERMES_CALLS
        + "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
        + opening
        + "' }}{% endif %}"
    )


QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
) + chatml(
    GROUPED_RESULTS.replace("ROLE", "user"),
    answer="('<think>\n\n</think>\n\n' if loop.index0 > ns.last and '<think>' not in m.content and "
    "(loop.last or m.reasoning_content) else '') + (m.content if loop.index0 > ns.last else "
    "m.content.split('</think>')[-1].lstrip('\n'))",
)
LLAMA31 = (
    "{{ '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December "
    "2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>' }}"
    "{% for m in messages %}{{ '<|start_header_id|>' + {'tool': 'ipython'}.get(m.role, m.role) + "
    "'<|end_header_id|>\n\n' }}"
    "{% if loop.first %}"
    + system_of_tools('Answer as {"name": function name, "parameters": dictionary}:\n', "")
    + "{% endif %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}"
    "{% endif %}{% set c = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' + (c.arguments | tojson) + '}' }}"
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = ALTERNATE.replace("TURNS", "messages") + (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' </s>' }}{% endif %}{% endfor %}"
)
MISTRAL = ALTERNATE.replace("TURNS", WITHOUT_TOOLS) + (
    "<s>{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if m is sameas asked[-1] %}"
    + system_of_tools("[AVAILABLE_TOOLS] ", "[/AVAILABLE_TOOLS]")
    + "{% endif %}{{ '[INST] ' + m.content + '[/INST]' }}{% elif m.tool_calls %}[TOOL_CALLS] ["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}"
    "{% endif %}{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}]</s>"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 or not "
    "(loop.previtem.tool_calls or loop.previtem.role == 'tool') %}"
    "{{ raise_exception('a result of no call') }}"
    '{% endif %}{{ \'[TOOL_RESULTS] {"content": \' + m.content | tojson + \', "call_id": "\' }}'
    "{{ m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>"
    + ALTERNATE.replace("TURNS", "messages")
    + "{% for m in messages %}{{ '<start_of_turn>' + {'assistant': 'model'}.get(m.role, "
    "m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else '<|endoftext|>' }}"
)
DEEPSEEK = (
    "{% set ns = namespace(results=false) %}<｜begin▁of▁sentence｜>"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' and m.content is none %}"
    "{{ ('<｜tool▁outputs▁end｜>' if ns.results else '<｜Assistant｜>') + '<｜tool▁calls▁begin｜>' }}"
    "{% set ns.results = false %}"
    "{% for c in m.tool_calls %}{{ ('' if loop.first else '\n') + '<｜tool▁call▁begin｜>' + c.type + "
    "'<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + "
    "'\n```<｜tool▁call▁end｜>' }}"
    "{% endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
    "{% elif m.role == 'tool' %}{% if not (loop.previtem.tool_calls or loop.previtem.role == 'tool') %}"
    "{{ raise_exception('a result of no call') }}{% endif %}"
    "{{ ('' if ns.results else '<｜tool▁outputs▁begin｜>') + '<｜tool▁output▁begin｜>' + m.content + "
    "'<｜tool▁output▁end｜>' }}{% set ns.results = true %}"
    "{% else %}{{ ('<｜tool▁outputs▁end｜>' if ns.results else '<｜Assistant｜>') + m.content + "
    "'<｜end▁of▁sentence｜>' }}{% set ns.results = false %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜tool▁outputs▁end｜>' if ns.results else '<｜Assistant｜>' }}"
    "{% endif %}"
)
GLM = (
    "[gMASK]<sop>" + system_of_tools("<|system|>\n", "") + "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{{ '\n<think></think>' }}"
    "{% if m.content %}{{ '\n' + m.content | trim }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name + '\n' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' + v + "
    "'</arg_value>\n' }}{% endfor %}</tool_call>{% endfor %}"
    "{% else %}{{ '\n' + m.content }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KIMI = (
    "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}"
    "{% for m in messages %}{{ {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'}.get(m.role, "
    "'<|im_system|>') + (m.name or m.role) + '<|im_middle|>' }}"
    "{% if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' }}{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for c in m.tool_calls %}"
    "{{ '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + c.function.arguments | tojson + "
    "'<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
GPT_OSS = (
    "{% set ns = namespace(name='') %}{{ '<|start|>system<|message|>You answer.<|end|>' }}"
    "{% for m in messages %}{% if m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant<|channel|>commentary to=functions.' + ns.name + "
    "' <|constrain|>json<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + "
    "('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}"
    "{% elif m.role == 'tool' %}{% if not ns.name %}{{ raise_exception('a result of no call') }}{% endif %}"
    "{{ '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + "
    "m.content | tojson + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A family's template; `ends` are the texts behind an answer, the first the usual one."""

    source: str
    ends: tuple[str, ...]
    special: str
    takes_tools: bool = True
    calls_in_template: bool = True
    """Whether the template writes calls; without, results follow a plain answer."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = create_tiny_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": self.special.split()})
        tokenizer.chat_template = self.source
        return tokenizer

    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer())


IM = "<|im_start|> <|im_end|> <|endoftext|>"
IM_END = ("<|im_end|>\n",)
TAGS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
FAMILIES = {
    "qwen2.5": Family(chatml(GROUPED_RESULTS.replace("ROLE", "user")), IM_END, f"{IM} {TAGS}"),
    "qwen3": Family(QWEN3, IM_END, f"{IM} {TAGS}"),
    "hermes": Family(chatml(GROUPED_RESULTS.replace("ROLE", "tool"), first="<s>"), IM_END, f"{IM} <s>"),
    "smollm2": Family(SMOLLM2, IM_END, IM, calls_in_template=False),
    "llama3.1": Family(
        LLAMA31,
        ("<|eot_id|>",),
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> "
        "<|python_tag|>",
    ),
    "llama2": Family(LLAMA2, (" </s>",), "<s> </s>", takes_tools=False),
    "mistral": Family(
        MISTRAL,
        ("</s>",),
        "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] "
        "[/TOOL_RESULTS]",
    ),
    "gemma": Family(
        GEMMA, ("<end_of_turn>\n",), "<bos> <eos> <start_of_turn> <end_of_turn>", takes_tools=False
    ),
    "phi": Family(
        PHI,
        ("<|end|>\n<|endoftext|>",),
        "<|system|> <|user|> <|assistant|> <|tool|> <|end|> <|endoftext|>",
        calls_in_template=False,
    ),
    "deepseek": Family(
        DEEPSEEK,
        ("<｜end▁of▁sentence｜>",),
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> "
        "<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> "
        "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
    ),
    "glm4.5": Family(
        GLM,
        ("",),
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|> <arg_key> </arg_key> "
        f"<arg_value> </arg_value> {TAGS}",
    ),
    "kimi-k2": Family(
        KIMI,
        ("<|im_end|>",),
        "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> <|tool_calls_section_begin|> "
        "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
    ),
    "gpt-oss": Family(
        GPT_OSS,
        ("<|return|>", "<|call|>"),
        "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|return|> <|call|>",
    ),
}
