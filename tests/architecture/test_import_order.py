"""A room imports only from lines above its own; heavy libraries have one door each; there are no cycles."""

from __future__ import annotations

import ast
import graphlib
import re

import pytest
from sources import imports, sources

pytestmark = pytest.mark.xdist_group("sources")  # parsed once

LINES = [
    ["errors"],
    ["algorithms.catalog"],
    ["distributed.accelerators"],
    ["distributed.facilities"],
    ["config", "protocol", "algorithms"],
    ["data", "distributed", "observability", "sandbox"],
    ["controller", "kernels", "planner", "processes", "stop_token"],
    ["models", "tools", "weight_sync.wire"],
    ["engines", "rollout"],
    ["weight_sync", "checkpoint", "rewards"],
    ["environments", "tinker"],
    ["interactions"],
    ["agent"],
    ["workers"],
    ["episodes"],
    ["trainer", "merger"],
    ["explain", "demo", "invariants"],
    ["api"],
    ["cli", "model_merger"],
    ["__main__"],
]
LINE_OF = {room: number for number, rooms in enumerate(LINES) for room in rooms}
"""The line of each room, and of a module that is on a line above its own room's."""

DOORS = {
    "ray": ("controller.ray",),
    "vllm": ("rollout.vllm",),
    "sglang": ("rollout.sglang",),
    "megatron": ("engines.megatron",),
    "peft": ("models.adapters.lora",),
    "transformers": ("models", "data.tokenizer", "data.processor", "rollout.hf", "invariants.adapters.trl"),
    "trl": ("invariants.adapters.trl",),
    "verl": ("invariants.adapters.verl",),
    "wandb": ("observability.trackers.adapters",),
    "mlflow": ("observability.trackers.adapters",),
    "swanlab": ("observability.trackers.adapters",),
    "trackio": ("observability.trackers.adapters",),
    "clearml": ("observability.trackers.adapters",),
    "weave": ("observability.trackers.adapters",),
    "tensorboard": ("observability.trackers.adapters",),
    "prometheus_client": ("observability.trackers.prometheus", "rollout.server"),
    "reasoning_gym": ("data.tasks.reasoning_gym", "rewards.functions.reasoning_gym"),
    "mpmath": ("data.answers.values", "rewards.functions.math"),
    "math_verify": ("rewards.functions.math",),
    "fastapi": ("rollout.server", "tinker"),
    "uvicorn": ("rollout.server", "tinker"),
    "mcp": ("tools.mcp_servers",),
    "IPython": ("observability.notebook",),
    "hydra": ("config.load", "config.overrides"),
}


def own(target: str) -> str | None:
    return target.removeprefix("hybridflow.") if target.startswith("hybridflow.") else None


def place_of(module: str) -> str:
    """The name by which a module has its line: its own, that of the room within a room, else its room's."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in LINE_OF), parts[0])


def test_every_room_has_its_line() -> None:
    rooms = {source.room for source in sources() if source.module and source.module != "__init__"}
    assert rooms <= set(LINE_OF), f"rooms without a place in the import order: {sorted(rooms - set(LINE_OF))}"


def test_a_room_imports_only_from_lines_above() -> None:
    wrong = []
    for found in imports():
        room = place_of(found.module)
        target = own(found.target)
        if target is None or room == "__init__" or found.module == "":
            continue
        other = place_of(target)
        if other != room and LINE_OF[other] >= LINE_OF[room]:
            wrong.append(f"{found.module}:{found.line} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_nothing_of_a_line_below_is_reached_by_its_name() -> None:
    wrong = []
    for source in sources():
        for node in ast.walk(source.tree):
            named = isinstance(node, ast.Constant) and re.fullmatch(
                r"hybridflow\.(\w+)[\w.]*:\w+", str(node.value)
            )
            if named and LINE_OF[named[1]] > LINE_OF[source.room]:
                wrong.append(f"{source.module} names {named[0]}")
    assert not wrong, "\n".join(wrong)


def test_heavy_libraries_come_through_their_door() -> None:
    wrong = []
    for found in imports():
        doors = DOORS.get(found.target.split(".")[0])
        if doors and not any(found.module == door or found.module.startswith(door + ".") for door in doors):
            wrong.append(
                f"{found.module}:{found.line} imports {found.target}; its door is {' or '.join(doors)}"
            )
    assert not wrong, "\n".join(wrong)


def test_light_rooms_stay_light() -> None:
    heavy = {
        "config": {"torch", "ray", "transformers"},
        "algorithms": {"tensordict", "transformers", "ray", "numpy"},
        "planner": {"torch", "transformers", "ray", "numpy"},
    }
    wrong = [
        f"{f.module}:{f.line} imports {f.target}"
        for f in imports()
        if f.target.split(".")[0] in heavy.get(f.module.split(".")[0], set())
    ]
    assert not wrong, "\n".join(wrong)


def test_own_imports_inside_functions_only_in_builders_and_entries() -> None:
    wrong = []
    for found in imports():
        room = found.module.split(".")[0]
        name = found.module.split(".")[-1]
        # entries: they check before they load
        allowed = room == "cli" or name in ("build", "main")
        if found.in_function and own(found.target) and not allowed:
            wrong.append(f"{found.module}:{found.line} imports {found.target} inside a function")
    assert not wrong, "\n".join(wrong)


def test_processes_have_one_supervisor() -> None:
    """The sandbox starts its own, and the command of an agent is a keeper that an event loop awaits."""
    starts = {"Popen", "create_subprocess_exec", "create_subprocess_shell"}
    found = {
        source.module
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in starts
    }
    assert found == {"processes.supervisor", "sandbox.sandbox", "agent.black_box"}


def test_modules_form_no_cycle() -> None:
    modules = {source.module for source in sources()}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for found in imports():
        target = own(found.target)
        if target in modules and target != found.module and not found.in_function and not found.type_checking:
            graph[found.module].add(target)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_only_engines_and_what_is_below_them_know_how_tensors_are_sharded() -> None:
    """Above an engine there are boxes, layouts and local tensors, so that an engine of another kind fits."""
    may = ("distributed", "models", "engines")
    wrong = [
        f"{found.module}:{found.line} imports {found.target}"
        for found in imports()
        if found.target.startswith(("torch.distributed.tensor", "torch.distributed.fsdp"))
        and found.module.split(".")[0] not in may
    ]
    assert not wrong, "\n".join(wrong)


def test_nobody_above_an_engine_takes_its_module() -> None:
    """`engine.policy` is there for generation; everything else is asked of the engine."""
    wrong = [
        f"{source.module}:{node.lineno}"
        for source in sources()
        if source.room not in ("engines", "models")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "module"
        and ast.unparse(node.value).endswith("engine")
    ]
    assert not wrong, "\n".join(wrong)
