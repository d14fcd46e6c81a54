"""Do two commits resolve the same configurations and refuse the same runs?

    python benchmarks/same_config.py FILE.json            # writes what this checkout says
    python benchmarks/same_config.py FILE.json --compare  # names what differs from the file

Written are every key of the resolved configuration of each recipe, of each command in the documents and of
verl's commands in the tests, and for each row of `tests/unit/config/refusals.yaml` what it is refused with
and what it is noted with. Keys have to be equal: a difference in them gives exit status 1. Messages may
become better, so differences in them are only shown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "unit" / "config")]

from possible_run import table, write_model_folder, written_out  # noqa: E402
from test_refusals import SHORT  # noqa: E402

import verl_commands  # noqa: E402
from hybridflow import config as schema  # noqa: E402
from hybridflow.config import recipes  # noqa: E402
from hybridflow.config.load import expand_sweeps, load_config, prepare_config  # noqa: E402
from hybridflow.config.resolve import resolve  # noqa: E402
from hybridflow.config.tree import to_tree  # noqa: E402
from hybridflow.errors import ConfigError  # noqa: E402

BASE = ("data.train_files=train.parquet", "data.val_files=test.parquet", "actor_rollout_ref.model.path=model")
PAGES = ("README.md", "ARCHITECTURE.md", "docs/**/*.md", "examples/**/*.md")


def main() -> int:
    """Write or compare; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", action="store_true")
    arguments = parser.parse_args()
    target = arguments.file.absolute()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in ("train.parquet", "test.parquet"):
            Path(name).touch()
        write_model_folder(Path("model"))
        found = json.loads(json.dumps({"configurations": dict(configurations()), "rows": dict(rows())}))
    if not arguments.compare:
        target.write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")
        print(f"{len(found['configurations'])} configurations and {len(found['rows'])} rows: {target}")
        return 0
    return compared(json.loads(target.read_text(encoding="utf-8")), found)


def compared(before: dict[str, Any], now: dict[str, Any]) -> int:
    """Print each difference; return 1 if a key differs, a row is refused no more, or one is refused anew."""
    status = 0
    for name, keys in before["configurations"].items():
        others = now["configurations"].get(name)
        if others != keys:
            status = 1
            print(f"configuration {name}: {difference(keys, others)}")
    for name, said in before["rows"].items():
        others = now["rows"].get(name)
        if others is None:
            print(f"row {name}: is not in the table any more")
        elif others != said:
            status = status or int((said[0] == "refused") != (others[0] == "refused"))
            print(f"row {name}:\n  before {said}\n  now    {others}")
    print("the keys are equal" if not status else "keys or refusals differ")
    return status


def difference(keys: Any, others: Any) -> str:
    """Return the keys that differ, with both values."""
    if not isinstance(keys, dict) or not isinstance(others, dict):
        return f"before {str(keys)[:400]}, now {str(others)[:400]}"
    names = [name for name in {**keys, **others} if keys.get(name, "absent") != others.get(name, "absent")]
    return ", ".join(f"{name}: {keys.get(name, 'absent')} → {others.get(name, 'absent')}" for name in names)


def configurations() -> Iterator[tuple[str, Any]]:
    """Yield the name and the resolved keys of each recipe and each command."""
    for name in recipes.recipe_names():
        text = recipes.find_recipe(name).read_text(encoding="utf-8")
        command = re.search(r"^# hybridflow (\S+) --recipe", text, re.MULTILINE)
        yield f"recipe {name}", resolved(recipes.ROOTS[command[1]] if command else "PPOConfig", [], name)
    for name, words in vars(verl_commands).items():
        if name.isupper() and isinstance(words, str):
            yield f"verl {name}", resolved("PPOConfig", [*verl_commands.FLAGS, *words.split()], None)
    yield "verl documents", resolved("PPOConfig", table("verl_documents.yaml")["commands"].split(), None)
    for page in sorted(page for pattern in PAGES for page in ROOT.glob(pattern)):
        for place, (root, words, recipe) in enumerate(commands(page.read_text(encoding="utf-8"))):
            yield f"{page.relative_to(ROOT)} {place}", resolved(root, words, recipe)


def commands(text: str) -> Iterator[tuple[str, list[str], str | None]]:
    """Yield the class of keys, the overrides and the recipe of each command of a page."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.search(r"hybridflow (train|sft|dpo|reward-model|config|plan) (.*)|main_ppo (.*)", line)
            if match is None:
                continue
            try:
                words = shlex.split(match[2] or match[3] or "", comments=True)
            except ValueError:
                continue
            recipe = words[words.index("--recipe") + 1] if "--recipe" in words[:-1] else None
            keys = [word for word in words if re.match(r"[+~]*[a-z_]+[.\w]*=", word)]
            yield recipes.ROOTS.get(match[1] or "train", "PPOConfig"), keys, recipe


def resolved(root: str, words: list[str], recipe: str | None) -> Any:
    """Return every key of the resolved configurations, one for each run of a sweep, or the refusal."""
    try:
        runs = expand_sweeps(words)
        loads = [load_config(getattr(schema, root), run, recipe) for run in runs]
    except ConfigError as error:
        return str(error)
    trees = [(to_tree(resolve(load.config, load.given)[0]), load.notes) for load in loads]
    if len(trees) > 1:
        return [[str(tree), notes] for tree, notes in trees]
    tree, notes = trees[0]
    return {"notes": notes, **dict(flat(tree))}


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key with its value as text."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", repr(value)


def rows() -> Iterator[tuple[str, Any]]:
    """Yield what each row of the table of refusals is told: ["refused", message] or ["noted", notes]."""
    sections = table("refusals.yaml")
    for name, section in sections.items():
        section = section.split() if isinstance(section, str) else section
        root = schema.SFTConfig if name == "refused_supervised" else schema.PPOConfig
        for row in section:
            words = row if isinstance(row, str) else row[0]
            words = words.split(" ") if isinstance(words, str) else words
            words = [written_out(word, SHORT) for word in words]
            base = ["model.path=org/name"] if root is schema.SFTConfig else list(BASE)
            try:
                said = ["noted", prepare_config(root, [*base, *words]).notes]
            except ConfigError as error:
                said = ["refused", str(error)]
            yield f"{name}: {' '.join(words)}", said


if __name__ == "__main__":
    raise SystemExit(main())
