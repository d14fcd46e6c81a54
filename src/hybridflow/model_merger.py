"""`python -m hybridflow.model_merger merge|test`: `hybridflow.merger` under the command of verl's
documentation.

    merge --backend fsdp --local_dir RUN/global_step_N/actor --target_dir FOLDER     write a Hugging Face
    folder
    test  --backend fsdp --local_dir RUN/global_step_N/actor --test_hf_dir FOLDER    compare it with the
    checkpoint
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from hybridflow.data.remote import HubUpload
from hybridflow.errors import ConfigError
from hybridflow.merger import compare, merge
from hybridflow.observability.logging_setup import setup_logging
from hybridflow.trainer.command import ends_in_status

logger = logging.getLogger(__name__)


@ends_in_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, 0 or the one of an error."""
    options = _parser().parse_args(arguments)
    setup_logging()
    _check(options)
    where = {"base_model": options.base_model, "trust_remote_code": options.trust_remote_code}
    if options.operation == "merge":
        upload = None
        if options.hf_upload_path:
            upload = HubUpload(options.hf_upload_path, options.private)
            upload.check()
        target = merge(options.local_dir, options.target_dir, lora=options.lora, dtype=options.dtype, **where)
        if upload is not None:
            upload.send(target)
    else:
        sys.stdout.write(compare(options.local_dir, options.test_hf_dir, **where) + "\n")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse options that are not supported, and log those without effect."""
    if options.private and not options.hf_upload_path:
        raise ConfigError(
            "--private says how to upload: give --hf_upload_path OWNER/NAME too, or leave it out"
        )
    if options.hf_upload_path and options.operation == "test":
        raise ConfigError("--hf_upload_path: `test` compares only; give it to `merge`")
    for given, what in (
        (
            options.tie_word_embedding,
            "--tie-word-embedding: the model's configuration says whether its embeddings are tied",
        ),
        (options.use_cpu_initialization, "--use_cpu_initialization: merging always happens on the CPU"),
        (options.is_value_model, "--is-value-model: the checkpoint says itself whether it is a critic's"),
    ):
        if given:
            logger.info("without effect: %s", what)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hybridflow.model_merger", description="Turn a checkpoint into a Hugging Face folder."
    )
    operations = parser.add_subparsers(dest="operation", required=True)
    merging = operations.add_parser("merge", help="write a Hugging Face folder")
    merging.add_argument("--target_dir", required=True, help="folder to write; must be new or empty")
    merging.add_argument(
        "--lora",
        choices=["fold", "keep"],
        help="adapters: fold them into their base (default), or write an adapter folder of peft",
    )
    merging.add_argument(
        "--dtype",
        choices=["source", "trained", "float32", "bfloat16", "float16"],
        default="source",
        help="dtype of the weights: of the model the run started from (default), of training, or this one",
    )
    testing = operations.add_parser("test", help="compare a Hugging Face folder with the checkpoint")
    testing.add_argument("--test_hf_dir", required=True, help="folder to compare")
    for each in (merging, testing):
        each.add_argument(
            "--backend",
            choices=["fsdp", "megatron"],
            required=True,
            help="engine that wrote the checkpoint; it has one form, whichever did",
        )
        each.add_argument("--local_dir", required=True, help="global_step_N, or its folder actor or critic")
        each.add_argument(
            "--base_model",
            help="folder or hub name of the adapters' base model, if it is not where the run had it",
        )
        each.add_argument(
            "--trust-remote-code",
            action="store_true",
            help="run the model code that the checkpoint brings along",
        )
        each.add_argument(
            "--tie-word-embedding",
            action="store_true",
            help="without effect: the model's configuration has it",
        )
        each.add_argument(
            "--use_cpu_initialization",
            action="store_true",
            help=("without effect: merging always happens on the CPU"),
        )
        each.add_argument(
            "--is-value-model",
            action="store_true",
            help="without effect: the checkpoint says whether it is a critic's",
        )
        each.add_argument(
            "--hf_upload_path", help="merge: then upload the folder to this repository of the hub (HF_TOKEN)"
        )
        each.add_argument(
            "--private", action="store_true", help="with --hf_upload_path: a new repository is private"
        )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
