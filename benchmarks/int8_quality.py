"""What rounded weights do to the log-probs of a real model. Read by int8_rollout.py.

a folder ──transformers──► samples of the model ──each way in place of every linear layer──► log-probs, beside
float32's
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import side_by_side as kit

if TYPE_CHECKING:
    from int8_rollout import Way
    from torch import Tensor

QUESTIONS = (
    "What is 7 + 15? Answer with a number.",
    "Write a short story about a fox.",
    "Explain why the sky is blue.",
    "Name three uses of copper.",
)
WAYS = (
    "float16 weights",
    "bfloat16",
    "int8 weights, bfloat16 inputs",
    "int8 weights and inputs, a scale a row",
    "int8 weights and inputs",
)
HEAD = ("way", "mean difference of log-probs", "99th percentile", "KL, a token", "greedy token differs")


def samples_of(model: Any, tokenizer: Any) -> list[tuple[Tensor, int]]:
    """Answers that the model samples, with their prompts [1, T], and where each answer begins."""
    samples = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        made = model.generate(ids, do_sample=True, max_new_tokens=96, top_k=0, top_p=1.0, temperature=1.0)
        samples.append((made, ids.shape[1]))
    return samples


def measure(folder: str, ways: Mapping[str, Way]) -> list[dict[str, Any]]:
    """How far log-probs of the model's own samples are off, by way; nats. The head is rounded too."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    samples = samples_of(model, AutoTokenizer.from_pretrained(folder))
    layers = [module for module in model.modules() if type(module) is nn.Linear]

    def distributions() -> Tensor:
        return torch.cat([model(ids).logits[0, start - 1 : -1].log_softmax(-1) for ids, start in samples])

    true = distributions()
    tokens = torch.cat([ids[0, start:] for ids, start in samples])[:, None]
    lines = []
    for name in WAYS:
        way = ways[name]
        for layer in layers:
            own = way.prepare(layer.weight)
            layer.forward = lambda states, own=own, way=way: way.product(states[0], own)[None]
        got = distributions()
        for layer in layers:
            vars(layer).pop("forward")
        off = (got - true).gather(1, tokens).abs()
        kl = (true.exp() * (true - got)).sum(1).mean().item()
        differs = (got.argmax(1) != true.argmax(1)).float().mean().item()
        line = {"way": name, "mean": off.mean().item(), "p99": off.quantile(0.99).item(), "kl": kl}
        lines.append({**line, "argmax": differs, "tokens": len(tokens)})
    return lines


def told(lines: list[dict[str, Any]], model: str) -> str:
    """The section of the page."""
    if not lines:
        return "Not measured: give --quality a folder with a real model."
    cells = [
        [one["way"], *(f"{one[key]:.4f}" for key in ("mean", "p99", "kl")), f"{one['argmax']:.0%}"]
        for one in lines
    ]
    return (
        f"A real model ({model}), {lines[0]['tokens']} tokens that it sampled, layers and head "
        f"rounded, in nats. Each\nanswer is one batch.\n\n{kit.table(HEAD, cells)}"
    )
