"""`python -m hybridflow.model_merger merge|test`: the command of verl's documentation over `hybridflow.merger`.

merge --backend fsdp --local_dir RUN/global_step_N/actor --target_dir FOLDER        write a Hugging Face folder
test  --backend fsdp --local_dir RUN/global_step_N/actor --test_hf_dir FOLDER       compare one with the checkpoint
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hybridflow.errors import ConfigError
from hybridflow.merger import compare, merge
from hybridflow.observability.logging_setup import setup_logging
from hybridflow.trainer.command import ends_in_status


@ends_in_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or what `ends_in_status` makes of an error."""
    options = _parser().parse_args(arguments)
    setup_logging()
    if options.backend == "megatron":
        raise ConfigError(
            "--backend megatron is not supported: checkpoints of this version are written by the fsdp engine only, use --backend fsdp"
        )
    if options.operation == "merge":
        merge(options.local_dir, options.target_dir, trust_remote_code=options.trust_remote_code)
    else:
        count = compare(options.local_dir, options.test_hf_dir, trust_remote_code=options.trust_remote_code)
        sys.stdout.write(f"{count} tensors, all equal bit for bit\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hybridflow.model_merger", description="Turn a checkpoint into a Hugging Face folder.")
    operations = parser.add_subparsers(dest="operation", required=True)
    merging = operations.add_parser("merge", help="write a Hugging Face folder")
    merging.add_argument("--target_dir", required=True, help="folder to write; must be new or empty")
    testing = operations.add_parser("test", help="compare a Hugging Face folder with the checkpoint, bit for bit")
    testing.add_argument("--test_hf_dir", required=True, help="folder to compare")
    for each in (merging, testing):
        each.add_argument("--backend", choices=["fsdp", "megatron"], required=True, help="engine that wrote the checkpoint")
        each.add_argument("--local_dir", required=True, help="global_step_N, or its actor folder")
        each.add_argument("--trust-remote-code", action="store_true", help="run the model code that the checkpoint brings along")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
