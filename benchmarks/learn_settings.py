"""The cells of the learn table: one recipe, one seed, one budget. Light: imports no torch.

Cell(name, seed) + Settings ──digest──► is the result on disk still the result of this?
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hybridflow.config.recipes import COMPARISONS, FOLDER, read_recipe

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CONTROL = "grpo_random"
"""GRPO with a reward that knows nothing: it must not learn."""
TEACHER = "on_policy_distillation"
JUDGED_BY_PASS = "grpo_passk"
PASS_MEASURED = ("grpo", JUDGED_BY_PASS)
NUM_PASS_QUESTIONS = 1024
PASS_K = 8
BAR = 0.10
CONTROL_BAR = 0.02
"""How much held-out accuracy must rise, on average over the seeds, and how much the control's may."""
TEACHER_ACCURACY = 0.9
TEACHER_MAX_STEPS = 1500
NOTES = {
    "spin": "the task's worked answer to each prompt",
    "prime": "its reward model starts from the warm start and trains on the outcomes of the same responses",
}
"""What a recipe is given besides the budget of generated tokens, where the cell itself does not say."""


@dataclass(frozen=True)
class Settings:
    """Keys that all cells share."""

    budget: int = 437_000
    """Tokens that a run may generate: 40 steps of 64 x 8 responses of 21.3 tokens, the mean length of the
    three warm starts (437,000).
    """
    max_steps: int = 60
    """Steps after which a run ends in any case."""
    warm_accuracy: float = 0.5
    """Greedy accuracy at which the warm start is taken."""


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    name: str
    seed: int

    @property
    def recipe(self) -> str:
        """The recipe that runs."""
        return "tiny/grpo" if self.name == CONTROL else f"tiny/{self.name}"

    @property
    def label(self) -> str:
        """Stem of its files."""
        return f"{self.name}_{self.seed}"

    def own_overrides(self) -> list[str]:
        """Return the keys that the cell sets besides the shared ones."""
        return ["reward.function=random"] if self.name == CONTROL else []

    def digest(self, settings: Settings) -> str:
        """Changes where the recipe, the warm start's recipe or the settings do."""
        content = [read_recipe(self.recipe), read_recipe("tiny/sft"), self.own_overrides(), asdict(settings)]
        return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def all_names() -> list[str]:
    """Every tiny recipe with a twin for models of any size, and the control."""
    names = {path.stem for path in (FOLDER / "tiny").glob("*.yaml") if (FOLDER / path.name).is_file()}
    return [*sorted(names - {*COMPARISONS}), CONTROL]


def result_path(out: Path, cell: Cell) -> Path:
    """Where a cell's result stands."""
    return out / "learn" / f"{cell.label}.json"


def finished(out: Path, cell: Cell, settings: Settings) -> bool:
    """Whether the result on disk is whole and still the result of this cell."""
    found = read_result(out, cell)
    return found is not None and "failed" not in found and found["digest"] == cell.digest(settings)


def read_result(out: Path, cell: Cell) -> dict[str, Any] | None:
    """A cell's result, or that it failed; None where it never ran."""
    path = result_path(out, cell)
    return json.loads(path.read_text()) if path.is_file() else None


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)


def warm_folder(work: Path, seed: int, settings: Settings) -> Path:
    """Where the warm start of a seed is kept, with `warm.json` written last; a changed recipe has another
    folder.
    """
    content = json.dumps([read_recipe("tiny/sft"), settings.warm_accuracy], sort_keys=True)
    return work / f"warm_{seed}_{blake2b(content.encode(), digest_size=3).hexdigest()}"


def teacher_folder(work: Path, seed: int, settings: Settings) -> Path:
    """Where the teacher of a seed is kept, with `teacher.json` written last."""
    warm = warm_folder(work, seed, settings)
    return warm.with_name(warm.name.replace("warm", "teacher"))
