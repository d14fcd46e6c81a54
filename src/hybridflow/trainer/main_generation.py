"""`python -m hybridflow.trainer.main_generation key=value …`: answers a file of prompts, by keys of verl.

The defaults of sampling are those of verl's generation.yaml. `hybridflow generate` is the same with the keys
of a run, and takes checkpoints and endpoints too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hybridflow.config.evaluation import prepare_evaluation
from hybridflow.errors import ConfigError
from hybridflow.trainer.evaluation.main import Subject, evaluate
from hybridflow.trainer.evaluation.verl_door import ROLE, door, translate

VAL = f"{ROLE}rollout.val_kwargs."
SAMPLING = ("n", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
RENAMED = {
    "data.path": "data.val_files",
    "data.train_files": "data.val_files",
    "data.n_samples": f"{VAL}n",
    "data.batch_size": "data.val_batch_size",
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.response_length": "data.max_response_length",
    **{f"rollout.{name}": f"{VAL}{name}" for name in SAMPLING},
    **{f"{block}.": ROLE for block in ("model", "rollout", "actor")},
}
DEFAULTS = [
    f"{VAL}n=5",
    f"{VAL}do_sample=true",
    f"{VAL}temperature=1.0",
    f"{VAL}top_k=50",
    f"{VAL}top_p=0.7",
    "data.max_prompt_length=1536",
]
OUTPUT = "data.output_path"
HELP = """\
usage: python -m hybridflow.trainer.main_generation model.path=MODEL data.path=FILE data.output_path=FILE ...

Answers each prompt of data.path data.n_samples times, and writes the rows with a column `responses`. Keys:
data.path, data.prompt_key, data.n_samples, data.output_path, model.path, rollout.temperature, top_k, top_p,
do_sample, prompt_length, response_length and the other keys of rollout, trainer.n_gpus_per_node, nnodes.
Started again it goes on. `hybridflow generate --help` shows the same with the keys of a run.
"""


def generate(words: list[str]) -> int:
    """Answer the prompts and return 1 where an answer failed; ConfigError where a key is missing or wrong."""
    overrides, given = translate(words, RENAMED, [OUTPUT])
    target = Path(given.get(OUTPUT, "")).expanduser()
    if not target.suffix or target.is_dir():
        raise ConfigError(
            f"{OUTPUT}={given.get(OUTPUT)}: give the file to write, which ends in .parquet or .jsonl"
        )
    folder = target.with_suffix("")  # the answers so far, for a command that is started again
    keys = [*DEFAULTS, *overrides, f"trainer.default_local_dir='{folder}'"]
    if any(re.fullmatch(rf"{re.escape(VAL)}temperature=0(\.0*)?", word) for word in overrides):
        keys.insert(len(DEFAULTS), f"{VAL}do_sample=false")
    config, notes = prepare_evaluation(keys)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    results = evaluate(config, Subject.of(str(config.actor_rollout_ref.model.path)), responses=target)
    for source, found in results.items():
        for cause, count in found["failed"].items():
            sys.stderr.write(f"{source}: {count} answers failed ({cause}); the same command tries again\n")
    return int(any(found["failed"] for found in results.values()))


main = door(HELP, generate)

if __name__ == "__main__":
    raise SystemExit(main(None))
