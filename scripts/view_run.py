"""A made-up run of any length, written by the library's own writers, for looking at its page."""

from __future__ import annotations

import math
import random
import zlib
from pathlib import Path
from typing import Any

import yaml

from hybridflow.observability.samples import SampleWriter
from hybridflow.observability.timing import timeline
from hybridflow.observability.trackers import build_trackers
from hybridflow.observability.trackers.jsonl import StepLines

GROUPS = 10
SAMPLES = 8
ROWS = GROUPS * SAMPLES
"""Rollouts of a step."""
EPOCH = 1_700_000_000.0
WORDS = [
    "so",
    "we",
    "add",
    "two",
    "numbers",
    "carry",
    "one",
    "over",
    "then",
    "check",
    "that",
    "it",
    "is",
    "right",
]


class MadeUpRun:
    """Writes step after step of a run into a folder, the same for the same seed and skill."""

    def __init__(self, folder: Path, name: str, skill: float, seed: int = 0) -> None:
        """`skill` is added to the share of right answers."""
        self.folder = folder
        self.skill = skill
        self.random = random.Random(seed)
        self.now = EPOCH
        folder.mkdir(parents=True)
        config = {
            "trainer": {
                "project_name": "sums",
                "experiment_name": name,
                "rollout_data_dir": str(folder / "rollout_data"),
                "resource_pools": {"train": [4], "gen": [4]},
                "placement": {"rollout": "gen"},
            },
            "actor_rollout_ref": {"rollout": {"n": SAMPLES}, "actor": {"optim": {"lr": 1e-6}}},
            "algorithm": {"filter_groups": {"enable": False}},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        self.trackers = build_trackers("jsonl", folder, config_dict=config)
        self.samples = SampleWriter(folder / "samples")
        self.texts = SampleWriter(folder / "rollout_data")
        self.numbers = StepLines(folder / "rollouts.jsonl", -1)

    def write(self, first: int, last: int) -> None:
        """Write the steps from `first` to `last`."""
        for step in range(first, last + 1):
            self._step(step)

    def close(self) -> None:
        """End the run."""
        self.trackers.close()

    def _step(self, step: int) -> None:
        rows = [self._row(step, group, sample) for group in range(GROUPS) for sample in range(SAMPLES)]
        self.texts.write([{**row, "tokens": {}} for row in rows], step)
        self.samples.write([self._with_tokens(row, step) for row in rows[:16]], step)
        keys = [f"{zlib.crc32(row['prompt'].encode()):08x}" for row in rows]
        names = ("uid", "row_id", "trajectory_id", "score", "num_tokens", "finish_reason")
        self.numbers.write(step, {name: [row[name] for row in rows] for name in names} | {"key": keys})
        metrics = self._metrics(step, rows)
        self._spans(step, rows, metrics)
        self.trackers.log(metrics, step)

    def _row(self, step: int, group: int, sample: int) -> dict[str, Any]:
        number = (step * GROUPS + group) % 211
        hard = number % 7 == 0
        right = 0.0 if hard else min(0.97, 0.3 + 0.005 * step + self.skill)
        asked = f"What is {number} + {number * 3 % 97}?"
        length = max(6, int(self.random.gauss(34 + 0.28 * step, 9)))
        cut = length > 70
        answer = " ".join(self.random.choice(WORDS) for _ in range(length // 2))
        return {
            "uid": f"{step}-{group}",
            "row_id": str(((step << 20) + group * 4096 + sample) * 1024),
            "trajectory_id": (step << 20) + group * 4096 + sample,
            "lineage": 0,
            "prompt": f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n",
            "response": answer,
            "score": float(not cut and self.random.random() < right),
            "num_tokens": min(length, 70),
            "finish_reason": "length" if cut else "stop",
            "data_source": "sums",
            "extra_info": {"num_turns": 2, "question": asked},
        }

    def _with_tokens(self, row: dict[str, Any], step: int) -> dict[str, Any]:
        count = row["num_tokens"]
        draw = self.random
        text = [f" {word}" for word in (row["response"].split() * 3)[:count]]
        text += ["."] * (count - len(text))
        log_probs = [-abs(draw.gauss(0.0, 0.9)) for _ in range(count)]
        given = range(count // 2, count // 2 + 5)
        call = {"function": {"name": "add", "arguments": {"a": 3, "b": 9}}}
        messages = [
            {"role": "user", "content": row["extra_info"]["question"]},
            {"role": "assistant", "content": "I ask the calculator.", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": "12"},
            {"role": "assistant", "content": row["response"]},
        ]
        tokens = {
            "text": text,
            "rollout_log_probs": log_probs,
            "old_log_probs": [value + draw.gauss(0.0, 0.004) for value in log_probs],
            "advantages": [row["score"] - 0.5 + 0.1 * math.sin(place / 5) for place in range(count)],
            "entropys": [abs(value) * 0.8 for value in log_probs],
            "policy_version": [-1 if place in given else step - 1 - (place < 8) for place in range(count)],
            "response_mask": [int(place not in given) for place in range(count)],
            "loss_mask": [int(place not in given and place < count - 2) for place in range(count)],
        }
        return {**row, "messages": messages, "tokens": tokens}

    def _metrics(self, step: int, rows: list[dict[str, Any]]) -> dict[str, float]:
        scores = [row["score"] for row in rows]
        lengths = [row["num_tokens"] for row in rows]
        groups = [scores[start : start + SAMPLES] for start in range(0, ROWS, SAMPLES)]
        metrics = {
            "critic/score/mean": sum(scores) / ROWS,
            "critic/score/min": min(scores),
            "critic/score/max": max(scores),
            "critic/rewards/mean": sum(scores) / ROWS,
            "response_length/mean": sum(lengths) / ROWS,
            "response_length/max": float(max(lengths)),
            "response_length/min": float(min(lengths)),
            "response_length/clip_ratio": sum(row["finish_reason"] == "length" for row in rows) / ROWS,
            "training/zero_variance_groups": sum(min(group) == max(group) for group in groups) / GROUPS,
            "training/rollout_log_probs_diff_max": abs(self.random.gauss(0.0, 0.002)),
            "actor/entropy": 0.9 * math.exp(-step / 90),
            "actor/ppo_kl": abs(self.random.gauss(0.0, 0.001)),
            "actor/kl_loss": 0.0005 * step,
            "actor/grad_norm": 0.4 + abs(self.random.gauss(0.0, 0.1)),
            "actor/lr": 1e-6,
            "agent/num_turns/mean": 2.0,
            "perf/throughput": 9000 + self.random.gauss(0.0, 300),
        }
        if step % 10 == 0:
            metrics["val-core/sums/acc/mean@1"] = min(0.95, 0.3 + 0.0045 * step + self.skill)
        return metrics

    def _spans(self, step: int, rows: list[dict[str, Any]], metrics: dict[str, float]) -> None:
        begun = self.now
        parts = (("gen", 9.0, "rollout"), ("reward", 0.8, "driver"), ("old_log_prob", 2.1, "actor"))
        parts += (("adv", 0.1, "driver"), ("update_actor", 6.0, "actor"), ("update_weights", 0.7, "actor"))
        for name, seconds, role in parts:
            seconds *= self.random.uniform(0.9, 1.2)
            if name == "gen":
                for row in rows[:24]:
                    self._trajectory(row, seconds)
            timeline.add(role, name, self.now, self.now + seconds)
            metrics[f"timing_s/{name}"] = seconds
            self.now += seconds
        timeline.add("driver", "step", begun, self.now)
        metrics["timing_s/step"] = self.now - begun

    def _trajectory(self, row: dict[str, Any], seconds: float) -> None:
        lane = f"trajectory {row['trajectory_id']}"
        at = self.now + self.random.uniform(0.0, 0.2) * seconds
        for name, share in (("generate", 0.3), ("tool", 0.1), ("generate", 0.3)):
            end = at + self.random.uniform(0.5, 1.0) * share * seconds
            timeline.add(lane, name, at, end)
            at = end
