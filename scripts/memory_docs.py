"""Write the tables of docs/models_and_memory.md, between its markers, from the estimator of
`config --explain`; with --check only say whether the page is fresh.

    models × kinds of run × devices × settings ──explain.run──► bytes of a process ──► the first that fits

    python scripts/memory_docs.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.config import RUNS
from hybridflow.config.load import prepare_config
from hybridflow.config.tree import with_values
from hybridflow.explain.run import peak_bytes, placed, size_of_role
from hybridflow.planner.model_size import ModelSize
from hybridflow.planner.run_plan import RunPlan

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models_and_memory.md"
GIB = 2**30


class Shape(NamedTuple):
    """What config.json says of a model."""

    name: str
    kind: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool = False
    head_dim: int = 128


SHAPES = [
    Shape("Qwen2.5-0.5B", "qwen2", 896, 24, 14, 2, 4864, 151936, tied=True, head_dim=64),
    Shape("Qwen2.5-1.5B", "qwen2", 1536, 28, 12, 2, 8960, 151936, tied=True),
    Shape("Qwen2.5-3B", "qwen2", 2048, 36, 16, 2, 11008, 151936, tied=True),
    Shape("Qwen2.5-7B", "qwen2", 3584, 28, 28, 4, 18944, 152064),
    Shape("Llama-3.1-8B", "llama", 4096, 32, 32, 8, 14336, 128256),
    Shape("Qwen3-8B", "qwen3", 4096, 36, 32, 8, 12288, 151936),
    Shape("Qwen2.5-14B", "qwen2", 5120, 48, 40, 8, 13824, 152064),
    Shape("Qwen2.5-32B", "qwen2", 5120, 64, 40, 8, 27648, 152064),
    Shape("Qwen2.5-72B", "qwen2", 8192, 80, 64, 8, 29568, 152064),
]
DEVICES = [1, 2, 4, 8, 16, 64]
MEMORY = {24: 23.5, 40: 39.4, 80: 79.1, 141: 139.7}
"""GiB that a device of each size has, by its name."""
RESERVED = 1.5
"""GiB of a process that the estimate leaves out: the CUDA context, the libraries, communication."""
USABLE = 0.9
"""Share of the rest that is planned with, because memory is fragmented."""
PROMPT, RESPONSE, GROUP, BATCH, MINI, AT_ONCE = 512, 1536, 8, 128, 32, 32
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
OTHERS = ("actor_rollout_ref.ref", "critic")
"""Roles that take the actor's model where no other is named."""
RL = [
    "data.train_files=train.jsonl",
    f"data.max_prompt_length={PROMPT}",
    f"data.max_response_length={RESPONSE}",
    f"data.train_batch_size={BATCH}",
    f"{ROLLOUT}.max_num_seqs={AT_ONCE}",
    f"{ACTOR}.ppo_mini_batch_size={MINI}",
    f"{ACTOR}.ppo_max_token_len_per_gpu={4 * (PROMPT + RESPONSE)}",
]
LENGTH = PROMPT + RESPONSE
SUPERVISED = ["data.train_files=chats.jsonl", f"data.max_length={LENGTH}", f"data.train_batch_size={BATCH}"]
SUPERVISED.append(f"data.max_token_len_per_gpu={4 * LENGTH}")


class Work(NamedTuple):
    """A kind of run: its command, its keys, and the blocks of its engines."""

    title: str
    command: str
    recipe: str | None
    keys: list[str]
    trained: list[str]
    frozen: list[str]
    model: str


_GROUPS = [*RL, f"{ROLLOUT}.n={GROUP}"]
_CRITIC = ["actor_rollout_ref.actor.fsdp_config", "critic.fsdp_config"]
_LORA = [f"{MODEL}.lora_rank=32", f"{MODEL}.lora_alpha=32"]
WORKS = [
    Work(
        "GRPO, all weights",
        "train",
        "grpo",
        _GROUPS,
        _CRITIC[:1],
        ["actor_rollout_ref.ref.fsdp_config"],
        MODEL,
    ),
    Work("GRPO, LoRA of rank 32", "train", "grpo", [*_GROUPS, *_LORA], _CRITIC[:1], [], MODEL),
    Work("PPO, all weights, a critic of the same size", "train", "ppo", RL, _CRITIC, [], MODEL),
    Work("Supervised fine-tuning, all weights", "sft", None, SUPERVISED, ["engine"], [], "model"),
    Work("DPO, all weights", "dpo", "dpo", SUPERVISED, ["engine"], [], "model"),
]


class Setting(NamedTuple):
    """Keys that save memory, and their name in the tables."""

    name: str
    keys: dict[str, Any]


def settings(work: Work, shape: Shape, devices: int) -> Iterator[Setting]:
    """Give the settings of a run in the order in which they should be tried: the cheapest in time first."""
    yield Setting("A", {})
    keys: dict[str, Any] = {f"{block}.param_offload": True for block in work.frozen}
    keys |= {f"{block}.optimizer_offload": True for block in work.trained}
    yield Setting("B", dict(keys))
    keys |= {f"{block}.param_offload": True for block in work.trained}
    yield Setting("C", dict(keys))
    tensor = 1
    if work.command == "train":
        for tensor in (2, 4, 8):
            if tensor <= devices and shape.kv_heads % tensor == 0:
                keys[f"{ROLLOUT}.tensor_model_parallel_size"] = tensor
                yield Setting(f"D{tensor}", dict(keys))
    if devices > 1:
        keys |= {f"{block}.offload_policy": True for block in [*work.trained, *work.frozen]}
        yield Setting("E", dict(keys))


def render() -> str:
    """Return the page as it should be."""
    text, number = re.subn(
        r"(<!-- tables -->\n).*?(<!-- end of tables -->)",
        lambda found: f"{found[1]}\n{tables()}\n{found[2]}",
        PAGE.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    if number != 1:
        raise ValueError(f"{PAGE}: wanted one <!-- tables --> … <!-- end of tables -->, found {number}")
    return text


def tables() -> str:
    """Return a table for each kind of run: models and memories down, numbers of devices across."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {shape.name: _write_shape(shape, Path(folder) / shape.name) for shape in SHAPES}
        count = _counter()
        parts = []
        for work in WORKS:
            plans = {devices: _prepared(work, devices, paths[SHAPES[0].name]) for devices in DEVICES}
            lines = [f"### {work.title}\n", "| model | device | " + " | ".join(map(str, DEVICES)) + " |"]
            lines.append("|---" * (len(DEVICES) + 2) + "|")
            for shape in SHAPES:
                columns = [
                    _column(work, shape, plans[devices], paths[shape.name], devices, count)
                    for devices in DEVICES
                ]
                lines += _rows(shape.name, columns)
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _rows(name: str, columns: list[dict[int, str]]) -> Iterator[str]:
    """Give the lines of a model: one for each memory, or for several whose cells are the same."""
    first = 0
    memories = list(MEMORY)
    for index, memory in enumerate(memories):
        cells = [column[memory] for column in columns]
        if index + 1 < len(memories) and cells == [column[memories[index + 1]] for column in columns]:
            continue
        sizes = f"{memory} GB"
        if first < index:
            sizes = f"{memories[first]} to {memory} GB"
        yield f"| {name if first == 0 else ''} | {sizes} | " + " | ".join(cells) + " |"
        first = index + 1


def _column(
    work: Work, shape: Shape, config: Any, path: Path, devices: int, count: Callable[..., ModelSize]
) -> dict[int, str]:
    """Return the cell for each memory: the first setting that fits, with the GiB of a process."""
    cells: dict[int, str] = {}
    config = with_values(config, {f"{work.model}.path": str(path)})
    if work.command == "train":
        config = with_values(config, {f"{role}.model.path": str(path) for role in OTHERS})
    for setting in settings(work, shape, devices):
        plan = placed(with_values(config, setting.keys))
        found = {role: count(plan, role) for role in plan.engines}
        needed = peak_bytes(plan, found) / GIB
        for memory, has in MEMORY.items():
            if needed <= USABLE * (has - RESERVED):
                cells.setdefault(memory, f"{setting.name} {needed:.1f}")
        if len(cells) == len(MEMORY):
            break
    return {memory: cells.get(memory, "–") for memory in MEMORY}


def _prepared(work: Work, devices: int, path: Path) -> Any:
    """Return the configuration of a run on `devices` devices, checked."""
    nodes = max(1, devices // 8)
    keys = [*work.keys, f"{work.model}.path='{path}'", "trainer.device=cuda"]
    keys += [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={devices // nodes}"]
    return prepare_config(RUNS[work.command], keys, work.recipe, runs=False, needs_files=False).config


def _counter() -> Callable[..., ModelSize]:
    """Return a function that counts a role's model, and remembers what it has counted."""
    known: dict[tuple[Any, ...], ModelSize] = {}

    def count(plan: RunPlan, role: str) -> ModelSize:
        engine = plan.engines[role]
        tensor = 1
        if hasattr(plan.config, "actor_rollout_ref") and role == "actor":
            tensor = plan.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        key = (
            engine.model.path,
            engine.model.lora_rank,
            role == "critic",
            engine.trained,
            tensor,
            plan.devices > 1,
        )
        if key not in known:
            known[key] = size_of_role(plan, role, engine)
        return known[key]

    return count


def _write_shape(shape: Shape, folder: Path) -> Path:
    folder.mkdir()
    told = {
        "model_type": shape.kind,
        "architectures": [{"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[shape.kind] + "ForCausalLM"],
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def main(arguments: list[str]) -> int:
    """Return exit status 0, or 1 where --check finds the page stale."""
    fresh = render()
    if "--check" in arguments:
        stale = PAGE.read_text(encoding="utf-8") != fresh
        if stale:
            sys.stderr.write("docs/models_and_memory.md is not fresh: run python scripts/memory_docs.py\n")
        return int(stale)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
