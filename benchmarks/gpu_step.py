"""A PPO step on one CUDA device, of the shape of verl's quickstart: 0.5 B parameters, 256 prompts, 512 + 512
tokens, critic and reference.

    python benchmarks/gpu_step.py [--sizes 0.5B] [--rounds 3] [--response 512] [--key key=value …]
    python benchmarks/gpu_step.py --tiny --device cpu          (a dry run)

This project's trainer as `hybridflow train --recipe ppo` runs it, local controller, random weights; prompts
of 512 tokens, every response 512 tokens, mini-batches of 64. A step is the time from the end of one to the
end of the next: loader, generation, reward, reference, values, both updates, logging; the first one, which
warms up, does not count.

The roofline of a part: passes and updates have their FLOPs (those of `hybridflow.models.files.size`) over the
rate of a large matrix product; generation has those of its prefill, and the bytes that decoding reads over
the bandwidth of a copy. Both ceilings are measured here, before the run. Writes
`benchmarks/results/gpu_step.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu_kit as gpu
import side_by_side as kit
import torch
from transformers import PreTrainedModel

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.models.files.size import matmul_parameters, workload_of
from hybridflow.models.policy import PolicyModel
from hybridflow.trainer.ppo.build import build

GOAL = 10.0
"""Seconds of a step."""


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """A reward that costs nothing."""
    return float(len(solution_str) % 2)


def floors_of(hf: PreTrainedModel, shape: dict[str, int], rate: float, bandwidth: float) -> dict[str, float]:
    """Return the least seconds of each part of a step on a device of this FLOP/s and these bytes/s."""
    rows = shape["prompts"]
    parameters = matmul_parameters(hf)
    head = hf.get_output_embeddings().weight
    length = shape["length"] + shape["response"]
    actor = workload_of(hf.config, parameters)
    critic = workload_of(hf.config, parameters - head.numel() + head.shape[1])  # one value for each token
    passed = rows * actor.cost(length) / rate
    valued = rows * critic.cost(length) / rate
    decoded = gpu.decode_floor(PolicyModel(hf), rows, shape["length"], shape["response"], bandwidth)
    return {
        "gen": rows * actor.cost(shape["length"]) / rate + decoded,
        "old_log_prob": passed,
        "ref": passed,
        "values": valued,
        "update_actor": 3 * passed,  # a backward pass costs twice the forward
        "update_critic": 3 * valued,
    }


def make_work(folder: Path, hf: PreTrainedModel, prompts: int, length: int) -> None:
    """Model, tokenizer and prompts of exactly `length` tokens."""
    hf.save_pretrained(folder / "model")
    kit.make_tokenizer(folder / "tokenizer")
    draw = random.Random(0)
    texts = ["".join(draw.choices(kit.characters(), k=length)) for _ in range(prompts)]
    rows = [
        {"data_source": "letters", "prompt": text, "reward_model": {"ground_truth": ""}} for text in texts
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def keys_of(options: argparse.Namespace, work: Path, shape: dict[str, int]) -> list[str]:
    """The run, as a user would write it."""
    model = work / "model"
    tokens = shape["tokens"]
    return [
        f"actor_rollout_ref.model.path='{model}'",
        f"critic.model.path='{model}'",
        f"data.tokenizer='{work / 'tokenizer'}'",
        f"data.train_files='{work / 'prompts.jsonl'}'",
        f"data.train_batch_size={shape['prompts']}",
        f"data.max_prompt_length={shape['length']}",
        f"data.max_response_length={shape['response']}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={shape['mini']}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}",
        f"critic.ppo_max_token_len_per_gpu={tokens}",
        f"actor_rollout_ref.rollout.max_num_seqs={shape['prompts']}",
        f"actor_rollout_ref.rollout.max_num_batched_tokens={tokens}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "critic.model.enable_gradient_checkpointing=false",
        f"reward.custom_reward_function.path='{__file__}'",
        "reward.num_workers=0",
        f"trainer.default_local_dir='{work / 'run'}'",
        f"trainer.device={options.device}",
        "trainer.controller=local",
        "trainer.logger=[]",
        "trainer.resume_mode=disable",
        "trainer.total_epochs=1000",
        *options.key,
    ]


def measure(
    options: argparse.Namespace,
    size: str,
    device: torch.device,
    shape: dict[str, int],
    ceilings: tuple[float, float],
) -> dict[str, Any]:
    """The steps of one run, beside their floors under the ceilings (FLOP/s, bytes/s) of the device."""
    seconds: list[float] = []
    logged: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        hf = gpu.make_hf(size, device)
        floors = floors_of(hf, shape, *ceilings)
        make_work(Path(name), hf, shape["prompts"], shape["length"])
        del hf
        gpu.free(device)
        config = prepare_config(PPOConfig, keys_of(options, Path(name), shape), recipe="ppo").config
        with build(config) as trainer:
            began = time.perf_counter()

            def stepped(step: int, metrics: dict[str, float]) -> bool:
                nonlocal began
                gpu.wait(device)
                now = time.perf_counter()
                seconds.append(now - began)
                logged.append({key: value for key, value in metrics.items() if key.startswith("timing_s/")})
                began = now
                tokens = int(metrics["rollout/generated_tokens"])
                assert tokens == shape["prompts"] * shape["response"], f"{tokens} tokens were generated"
                return step > options.rounds

            trainer.fit(after_step=stepped)
    memory = torch.cuda.max_memory_allocated(device) / gpu.GIB if device.type == "cuda" else 0.0
    parts = {key: gpu.median([step.get(key, 0.0) for step in logged[1:]]) for key in sorted(logged[-1])}
    return {
        "size": size,
        **shape,
        "first_s": seconds[0],
        "seconds": seconds[1:],
        "parts": parts,
        "floors": floors,
        "memory_gib": memory,
    }


def lines_of(case: dict[str, Any]) -> list[list[str]]:
    """Rows of the table of parts."""
    lines = []
    for key, seconds in case["parts"].items():
        name = key.removeprefix("timing_s/")
        floor = case["floors"].get(name)
        told = ["–", "–"]
        if floor is not None and seconds > 0:
            told = [f"{floor:.2f}", f"{floor / seconds:.2f}"]
        lines.append([case["size"], name, f"{seconds:.2f}", *told])
    return lines


def main() -> None:
    """Measure, print, write."""
    parser = gpu.parser_of(__doc__, rounds=3, sizes=("0.5B",))
    parser.add_argument("--response", type=int, default=512, help="tokens of each response")
    parser.add_argument("--key", action="append", default=[], help="a further key=value of the run")
    options = parser.parse_args()
    device = gpu.device_of(options)
    shape = {"prompts": 256, "length": 512, "response": options.response, "mini": 64, "tokens": 16_384}
    if options.tiny:
        options.sizes = ["tiny"]
        options.rounds = 1
        shape = {"prompts": 4, "length": 6, "response": 5, "mini": 2, "tokens": 64}
    ceilings = (gpu.matrix_rate(device), gpu.copy_bandwidth(device))
    reached = (
        f"{ceilings[0] / 1e12:,.2f} TFLOP/s in a matrix product, {ceilings[1] / 1e9:,.0f} GB/s in a copy"
    )
    print(f"this device reaches {reached}", flush=True)
    cases = [measure(options, size, device, shape, ceilings) for size in options.sizes]
    parts = [line for case in cases for line in lines_of(case)]
    steps = [
        [case["size"], kit.spread(case["seconds"]), f"{case['first_s']:.1f}", f"{case['memory_gib']:.1f}"]
        for case in cases
    ]
    goals = "\n".join(
        f"Goal, {case['size']}: a step in at most {GOAL:.0f} s: "
        f"{kit.verdict(gpu.median(case['seconds']) <= GOAL)}."
        for case in cases
    )
    text = f"""{shape["prompts"]} prompts of {shape["length"]} tokens, responses of {shape["response"]},
mini-batches of {shape["mini"]}, critic and reference; median (fastest–slowest) of {options.rounds} steps
after the first.
The floor of a part is what it would take at {reached},
both measured here.

{kit.table(("model", "s a step", "first step, s", "memory, GiB"), steps)}

{kit.table(("model", "part", "s", "floor, s", "of the roofline"), parts)}

{goals}"""
    result = gpu.facts(device) | {
        "matrix_flops": ceilings[0],
        "copy_bytes_per_s": ceilings[1],
        "cases": cases,
    }
    gpu.write(options, "gpu_step", result, "A PPO step on one CUDA device", text)


if __name__ == "__main__":
    sys.exit(main())
