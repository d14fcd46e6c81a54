"""`python -m hybridflow.trainer.main_eval key=value …`: the scores of a file of responses, by verl's keys.

`hybridflow eval --responses COLUMN` is the same with the keys of a run.
"""

from __future__ import annotations

import json
import sys

from hybridflow.config.evaluation import prepare_evaluation
from hybridflow.trainer.evaluation.responses import RESPONSES, REWARD_MODEL, score_file
from hybridflow.trainer.evaluation.verl_door import door, translate

RENAMED = {
    "data.path": "data.val_files",
    "data.data_source_key": "data.reward_fn_key",
    "data.output_path": "trainer.default_local_dir",
}
RESPONSE = "data.response_key"
TRUTH = "data.reward_model_key"
HELP = """\
usage: python -m hybridflow.trainer.main_eval data.path=FILE custom_reward_function.path=FILE ...

Scores each response in data.path and prints their mean by data source. Keys: data.path, data.prompt_key,
data.response_key (responses), data.data_source_key, data.reward_model_key, custom_reward_function.path and
name, the keys of reward, and data.output_path, the folder of the results (eval).
`hybridflow eval --help` shows the same with the keys of a run.
"""


def score(words: list[str]) -> int:
    """Score the responses and print the means; errors are those of `score_file`."""
    overrides, given = translate(words, RENAMED, [RESPONSE, TRUTH])
    config, notes = prepare_evaluation(["trainer.default_local_dir=eval", *overrides], needs_model=False)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    results = score_file(
        config, response_key=given.get(RESPONSE, RESPONSES), truth_key=given.get(TRUTH, REWARD_MODEL)
    )
    for source, found in results.items():
        for name, estimate in found["metrics"].items():
            if name.startswith("mean@"):
                sys.stdout.write(json.dumps({f"test_score/{source}": estimate["value"]}) + "\n")
        for cause, count in found["failed"].items():
            sys.stderr.write(f"{source}: {count} responses have no score ({cause})\n")
    return 0


main = door(HELP, score)

if __name__ == "__main__":
    raise SystemExit(main(None))
