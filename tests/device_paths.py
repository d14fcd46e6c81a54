"""Every path of a run that touches a device has the CPU's numbers there.

Tests on a device import these and say by the fixture `device` which one it is: on the simulated one the
kernels are the CPU's, but attention and samplings have a device's form; a real one has kernels of its own.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
sys.path += [str(TESTS), str(TESTS / "unit" / "trainer")]

from tiny_trainer import TIMINGS, build, ppo_config, sft_config, tiny_model  # noqa: E402

from hybridflow.config import PPOConfig  # noqa: E402
from hybridflow.config.load import prepare_config  # noqa: E402
from hybridflow.errors import ConfigError  # noqa: E402
from hybridflow.observability.trackers.jsonl import read_metrics  # noqa: E402
from picture_models import picture_model  # noqa: E402

FLOAT32 = ("actor_rollout_ref.model.dtype=float32", "critic.model.dtype=float32")
"""The CPU's dtype, where a device would compute in bfloat16."""


@dataclass(frozen=True)
class Device:
    """The device of a test."""

    name: str
    rounding: float
    """Most of the difference of a metric, relative to it where it is above 1."""
    repeats: bool
    """Whether its kernels give the same bits each time."""


OF_THE_ORDER = (
    "perf/",
    "rollout/cache",
    "rollout/decode_steps",
    "rollout/max_rows",
    "rollout/prefill_tokens",
    "rollout/prefix_hit_ratio",
)
"""Metrics of who was generated beside whom, which looking ahead and several turns change."""
EAGER = "actor_rollout_ref.rollout.exact=false"
GRPO = (EAGER, "algorithm.adv_estimator=grpo")
ACTOR = "actor_rollout_ref.actor"
ASYNC = (
    *GRPO,
    "algorithm.rollout_correction.rollout_is=token",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
)

PATHS: dict[str, tuple[str, ...]] = {
    "grpo": (*GRPO,),
    "ppo with critic": (EAGER, "algorithm.adv_estimator=gae"),
    "reference": (*GRPO, f"{ACTOR}.use_kl_loss=true"),
    "lora": (*GRPO, "actor_rollout_ref.model.lora_rank=4"),
    "offload": (
        *GRPO,
        f"{ACTOR}.fsdp_config.param_offload=true",
        f"{ACTOR}.fsdp_config.optimizer_offload=true",
        "actor_rollout_ref.model.enable_activation_offload=true",
    ),
    "shared prompts": (*GRPO, f"{ACTOR}.use_prefix_grouper=true"),
    "checkpointed layers": (*GRPO, "actor_rollout_ref.model.enable_gradient_checkpointing=true"),
    "top-p and top-k": (
        *GRPO,
        "actor_rollout_ref.rollout.top_p=0.9",
        "actor_rollout_ref.rollout.top_k=200",
    ),
    "blocks of a cache": (*GRPO, "actor_rollout_ref.rollout.engine_kwargs.native.kv_cache=paged"),
    "colocated_async": (*ASYNC, "trainer.schedule=colocated_async"),
    "one_step_off": (*ASYNC, "trainer.schedule=one_step_off"),
    "entropy and clip_cov": (*GRPO, f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.entropy_coeff=0.01"),
}
QUICK = ("ppo with critic", "offload", "blocks of a cache", "one_step_off")
"""Paths that are not slow tests. The others are parts of these, or are counted, drawn or resumed in another
test.
"""


def numbers(folder: Path, device: str, model: Path, *overrides: str) -> list[dict[str, float]]:
    """Run two steps; return what each logged, without times."""
    folder.mkdir(exist_ok=True)
    config = ppo_config(model, folder / device, f"trainer.device={device}", *FLOAT32, *overrides)
    with build(config) as trainer:
        trainer.fit()
    return of_run(folder / device)


def of_run(run: Path) -> list[dict[str, float]]:
    """Return the metrics of a run's steps that do not depend on the clock."""
    return [
        {name: value for name, value in row.items() if not name.startswith(TIMINGS)}
        for _, row in sorted(read_metrics(run / "metrics.jsonl").items())
    ]


def compare(cpu: list[dict[str, float]], there: list[dict[str, float]], tolerance: float) -> None:
    """Hold the metrics of two runs together, each relative to the larger of itself and 1."""
    assert len(cpu) == len(there) and cpu
    apart = []
    for step, (wanted, got) in enumerate(zip(cpu, there, strict=True)):
        for name, value in wanted.items():
            if name.startswith(OF_THE_ORDER):
                continue
            assert name in got, f"step {step} does not log {name} on the device"
            difference = abs(value - got[name]) / max(1.0, abs(value))
            if not (difference <= tolerance or (math.isnan(value) and math.isnan(got[name]))):
                apart.append(f"step {step} {name}: {value} on the CPU, {got[name]} on the device")
    assert not apart, "\n".join(apart)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.slow] * (path not in QUICK)) for path in PATHS]
)
def test_a_run_has_the_cpus_numbers(path: str, model: Path, tmp_path: Path, device: Device) -> None:
    runs = [numbers(tmp_path, each, model, *PATHS[path]) for each in ("cpu", device.name)]
    compare(*runs, device.rounding)


def test_exact_mode_is_refused_where_it_is_asked_for_and_left_out_by_auto(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, device: Device
) -> None:
    exact = "actor_rollout_ref.rollout.exact"
    there = f"trainer.device={device.name}"
    config = ppo_config(model, tmp_path / "true", there, *GRPO, f"{exact}=true")
    refused = (
        f"{exact}=true cannot hold: the model is on {device.name}.*mode is for the CPU. Set {exact}=auto"
    )
    with pytest.raises(ConfigError, match=refused), build(config):
        pass
    keys = (*GRPO, "trainer.total_training_steps=1")
    with caplog.at_level("INFO", "hybridflow"):
        auto = numbers(tmp_path / "auto", device.name, model, *keys, f"{exact}=auto")
    assert [each for each in caplog.messages if each.startswith(f"fast mode: the model is on {device.name}")]
    without = numbers(tmp_path / "false", device.name, model, *keys)
    compare(without, auto, 0.0 if device.repeats else device.rounding)


def test_a_mixture_of_experts_with_routes_of_generation(tmp_path: Path, device: Device) -> None:
    model = tiny_model(tmp_path / "moe", experts=4)
    keys = (
        *GRPO,
        f"{ACTOR}.router_replay.mode=R3",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
        f"{ACTOR}.use_prefix_grouper=false",  # the CPU would share prompts, and count their tokens once
    )
    compare(*(numbers(tmp_path, each, model, *keys) for each in ("cpu", device.name)), device.rounding)


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("smolvlm", marks=pytest.mark.slow)])
def test_a_model_that_reads_pictures(family: str, tmp_path: Path, device: Device) -> None:
    runs = []
    for each in ("cpu", device.name):
        keys = [
            f"actor_rollout_ref.model.path='{picture_model(family)}'",
            f"trainer.device={each}",
            f"trainer.default_local_dir='{tmp_path / each}'",
            *FLOAT32,
            EAGER,
            "data.task.size=16",
            "data.task.val_size=4",
            "data.train_batch_size=2",
            f"{ACTOR}.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=2",
            "reward.num_workers=0",
            "trainer.total_training_steps=2",
            "trainer.logger=[]",
            "trainer.num_threads=1",
            "data.max_prompt_length=200",
        ]
        with build(prepare_config(PPOConfig, keys, "tiny/vlm").config) as trainer:
            trainer.fit()
        runs.append(of_run(tmp_path / each))
    compare(*runs, device.rounding)


WORLD = """
from hybridflow.environments import Environment, Step


class Echo(Environment):
    def reset(self, row):
        self.left = 3
        return f"{self.seed % 10} + 1"

    def step(self, text):
        self.left -= 1
        return Step(text[:4] + "?", reward=sum(c.isdigit() for c in text) / 10, done=not self.left)
"""


def test_conversations_with_an_environment(model: Path, tmp_path: Path, device: Device) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    ends = ",".join(map(str, range(112)))  # any token ends a turn, so that conversations go on
    keys = (
        *GRPO,
        f"data.environment='{tmp_path / 'world.py'}:Echo'",
        "data.task.name=null",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.max_model_len=120",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4",
        "actor_rollout_ref.rollout.agent.num_workers=0",
        f"actor_rollout_ref.rollout.stop_token_ids=[{ends}]",
    )
    runs = [numbers(tmp_path, each, model, *keys) for each in ("cpu", device.name)]
    assert runs[0][0]["agent/num_turns/mean"] == 3.0
    compare(*runs, device.rounding)


def test_supervised_fine_tuning(model: Path, tmp_path: Path, device: Device) -> None:
    from hybridflow.trainer.sft.build import build as build_sft

    runs = []
    for each in ("cpu", device.name):
        keys = (f"trainer.device={each}", "model.dtype=float32")
        with build_sft(sft_config(model, tmp_path / each, *keys)) as trainer:
            trainer.fit()
        runs.append(of_run(tmp_path / each))
    compare(*runs, device.rounding)


def test_a_run_that_is_stopped_goes_on_with_the_same_numbers(
    model: Path, tmp_path: Path, device: Device
) -> None:
    keys = (*GRPO, "trainer.save_freq=1", "trainer.total_training_steps=2", "trainer.test_freq=1")
    whole = numbers(tmp_path / "whole", device.name, model, *keys)
    run = tmp_path / "halves" / device.name
    run.parent.mkdir()
    config = ppo_config(model, run, f"trainer.device={device.name}", *FLOAT32, *keys)
    for last in (1, 2):
        with build(config) as trainer:
            trainer.fit(lambda step, logged, last=last: step == last)
    compare(whole, of_run(run), 0.0 if device.repeats else device.rounding)
    compare(numbers(tmp_path / "whole", "cpu", model, *keys), whole, device.rounding)
