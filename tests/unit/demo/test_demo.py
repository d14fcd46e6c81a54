"""What the demo leaves out because it is known already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridflow.demo import demo
from hybridflow.demo.demo import DemoOptions
from hybridflow.errors import ConfigError
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.trackers import build_trackers


def test_the_greedy_accuracies_of_the_demo_are_its_own_validations(tmp_path: Path) -> None:
    with build_trackers("jsonl", tmp_path) as trackers:
        for step, accuracy in ((0, 0.5), (1, None), (20, 0.75), (40, 0.875)):
            trackers.log({"reward": 1.0} if accuracy is None else {demo.VALIDATION: accuracy}, step)
    assert demo._validations(tmp_path) == [0.5, 0.75, 0.875]
    assert demo._validates_the_same(DemoOptions(tmp_path))
    assert not demo._validates_the_same(DemoOptions(tmp_path, reward="random"))
    assert not demo._validates_the_same(DemoOptions(tmp_path, overrides=("data.task.val_size=8",)))


@pytest.mark.parametrize(
    ("algorithm", "experts", "said"),
    [("moe", 0, "give their number too"), ("grpo", 1, "a token has two"), ("grpo", -4, "a token has two")],
)
def test_experts_that_make_no_model_are_refused(
    algorithm: str, experts: int, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        demo.run_demo(DemoOptions(tmp_path, algorithm=algorithm, experts=experts))


def test_the_warm_up_tries_all_questions_only_near_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracy of (256, all) questions at each look; the warm-up ends by that of all."""
    accuracies = iter([0.1, 0.37, 0.39, 0.45, 0.6, 0.4, 0.5, 0.51])
    asked: list[int] = []

    def evaluate(rollout: object, tokenizer: object, questions: Sequence[Any], **_: object) -> Any:
        asked.append(len(questions))
        return SimpleNamespace(accuracy=next(accuracies))

    state = SimpleNamespace(step=0, write_huggingface=lambda target, with_weights: None)

    def fit(after_step: Callable[[int, dict[str, float]], bool]) -> None:
        state.step = next(step for step in range(1, 400) if after_step(step, {}))

    @contextmanager
    def build(config: object) -> Iterator[Any]:
        step = SimpleNamespace(group=SimpleNamespace(backend=None))
        yield SimpleNamespace(fit=fit, state=state, step=step)

    monkeypatch.setattr(demo, "evaluate", evaluate)
    monkeypatch.setattr(demo, "build_sft", build)
    monkeypatch.setattr(demo, "RolloutGroup", lambda backend, role: None)
    monkeypatch.setattr(demo, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(demo, "held_out_questions", lambda tokenizer, seed: range(1024))
    create_tiny_model(tmp_path / "model", hidden=32, intermediate=64, heads=2, kv_heads=1)
    options = demo.WarmUpOptions()
    warm = demo.warm_up(tmp_path / "model", tmp_path / "sft", seed=0, options=options)
    assert asked == [256, 256, 256, 1024, 256, 1024, 256, 1024]
    assert (warm.steps, warm.accuracy) == (60 + 5 * 4, 0.51)
