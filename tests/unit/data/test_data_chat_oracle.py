"""What follows an answer, against the package `renderers`, which writes several families by hand."""

from __future__ import annotations

from typing import Any

import pytest
from chat_families import FAMILIES

from hybridflow.data.tokenizer import encode_rendered

renderers = pytest.importorskip("renderers")

RESULTS = [
    {"role": "tool", "content": f"{7 + place}", "name": "add", "tool_call_id": f"functions.add:{place}"}
    for place in range(2)
]
NEW: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "2 + 3"}],
    "result": RESULTS[:1],
    "results": RESULTS,
}


@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize(
    ("name", "renderer", "stop"),
    [
        ("qwen3", "Qwen3Renderer", "<|im_end|>"),
        ("llama3.1", "Llama3Renderer", "<|eot_id|>"),
        ("kimi-k2", "KimiK2Renderer", "<|im_end|>"),
        ("deepseek", "DeepSeekV3Renderer", "<｜end▁of▁sentence｜>"),
        ("glm4.5", "GLM45Renderer", "<|observation|>"),
    ],
)
def test_an_outside_oracle_agrees(name: str, renderer: str, stop: str, stopped: bool, new: str) -> None:
    if name == "glm4.5" and not stopped:
        pytest.skip("the oracle closes an answer that was cut with a token which the template does not write")
    template = FAMILIES[name].template()
    config = getattr(renderers, f"{renderer}Config")(thinking_retention="all")
    oracle = getattr(renderers, renderer)(template.tokenizer, config)
    if name == "glm4.5" and new == "user":
        stop = "<|user|>"
    prompt = template.begin([{"role": "user", "content": "hi"}])
    answer = encode_rendered(template.tokenizer, "<think>a</think>bc")
    last = None
    if stopped:
        (last,) = encode_rendered(template.tokenizer, stop)
        answer.append(last)
    bridged = oracle.bridge_to_next_turn(prompt, answer, NEW[new])
    assert [*prompt, *answer, *template.after_answer(last, NEW[new])] == list(bridged.token_ids)
