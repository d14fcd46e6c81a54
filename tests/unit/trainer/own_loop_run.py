"""One run of the example's loop, or of the trainer on the same keys: metrics of each step, digest of weights.

As a script it does so in a process of its own: `own_loop_run.py loop|trainer OUT MODEL KEY…`, where OUT is
the JSON file that it writes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tiny_trainer import build, ppo_config

from hybridflow.trainer.run import huggingface_writer

EXAMPLES = Path(__file__).parents[3] / "examples" / "own_loop"
STEPS = 3


def example(name: str) -> Any:
    """Import an example by its file."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def digest(folder: Path) -> str:
    """Return a digest of all weights in a Hugging Face folder, by name."""
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights.update(load_file(file))
    assert weights, f"no weights in {folder}"
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def run(kind: str, model: Path, folder: Path, *keys: str) -> dict[str, Any]:
    """Train for STEPS steps by the `loop` or by the `trainer`."""
    loop = example("grpo_loop")
    config = ppo_config(
        model,
        folder,
        f"reward.custom_reward_function.path='{EXAMPLES / 'grpo_loop.py'}'",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.n=4",
        "data.task.val_size=0",
        f"trainer.total_training_steps={STEPS}",
        loop.FAST,
        *keys,
    )
    if kind == "loop":
        steps = list(loop.train(config, STEPS))
    else:
        steps = []
        with build(config) as trainer:
            trainer.fit(lambda step, logged: bool(steps.append(logged)))
            tokenizer = trainer.source.pipeline.tokenizer
            huggingface_writer(trainer.step.roles.actor, tokenizer)(folder / "model", True)
    return {"controller": config.trainer.controller, "steps": steps, "weights": digest(folder / "model")}


if __name__ == "__main__":
    kind, out, model, *words = sys.argv[1:]
    Path(out).write_text(json.dumps(run(kind, Path(model), Path(out).with_suffix(""), *words)))
