"""`python -m hybridflow.trainer.main_generation key=value …`: answers a file of prompts, by keys of verl.

The defaults of sampling are those of verl's generation.yaml. `hybridflow generate` is the same with the keys
of a run, and takes checkpoints and endpoints too.
"""

from __future__ import annotations

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


def generate(words: list[str]) -> None:
    """Answer the prompts; ConfigError where a key is missing or wrong."""
    overrides, given = translate(words, RENAMED, [OUTPUT])
    if OUTPUT not in given:
        raise ConfigError(f"{OUTPUT} is not set: give the file to write, which ends in .parquet or .jsonl")
    target = Path(given[OUTPUT]).expanduser()
    folder = target.with_suffix("")  # the answers so far, for a command that is started again
    config, notes = prepare_evaluation([*DEFAULTS, *overrides, f"trainer.default_local_dir='{folder}'"])
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    evaluate(config, Subject.of(str(config.actor_rollout_ref.model.path)), responses=target)


main = door(HELP, generate)

if __name__ == "__main__":
    raise SystemExit(main(None))
