"""A generative reward model that the run serves: its address, the loss of replicas, what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from judge_scene import TEXTS, judged_config, judging
from tiny_trainer import build, tiny_model

from hybridflow.config import PPOConfig
from hybridflow.controller.local import LocalBackend
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError, HybridFlowError, ModelError
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.rewards.early_checks import refuse_model
from hybridflow.rollout.base import GenerationOutput
from hybridflow.trainer.roles import judges
from hybridflow.trainer.roles.judges import JudgeServer, ReplicaKeeper
from hybridflow.trainer.roles.role_builders import facts_of
from hybridflow.trainer.roles.roles import factories
from hybridflow.workers import RolloutGroup, RolloutWorker

PATIENCE = 300.0


def test_a_function_that_was_written_for_verl_asks_the_runs_own_judge(tmp_path: Path) -> None:
    config = judged_config(tmp_path)
    assert config.reward.reward_model.kind == "generative"
    with build(config) as trainer:
        trainer.fit()
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl").values()
    assert [step["reward/num_errors"] for step in steps] == [0.0, 0.0]
    assert any(step["critic/score/max"] > step["critic/score/min"] for step in steps)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("keeper of")]


def test_the_built_in_judge_and_a_term_ask_it_too(tmp_path: Path) -> None:
    reads = f"{tmp_path / 'asks.py'}:read"
    config = judged_config(
        tmp_path,
        "reward.custom_reward_function.path=null",
        "reward.num_workers=1",
        f"reward.terms=[{{name: judge, parser: '{reads}', sampling: {{max_tokens: 6}}}}, "
        f"{{name: '{tmp_path / 'asks.py'}', weight: 0.5, factor: 2.0}}]",
        "reward.reward_model.kind=generative",
    )
    with judging(config, tmp_path) as scores:
        batch = scores()
        again = scores()
    judged = batch.extras["judge"]
    assert batch.metrics["reward/num_errors"] == 0.0 and len(judged) == len(TEXTS)
    assert batch.scores == [a + 0.5 * b for a, b in zip(judged, batch.extras["asks"], strict=True)]
    assert len({*batch.scores}) > 1 and again.scores == batch.scores
    assert all(0 < tokens <= 7 for tokens in batch.extras["tokens"])


# ---- replicas that are lost


def ask(server: JudgeServer, text: str, seconds: float = PATIENCE) -> dict[str, Any]:
    body = {"model": "any", "max_tokens": 4, "messages": [{"role": "user", "content": text}], "seed": 5}
    request = urllib.request.Request(
        f"{server.access.url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def refusal(server: JudgeServer, text: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(server, text)
    return caught.value.code, caught.value.read().decode()


def group_of(config: PPOConfig, folder: Path) -> RolloutGroup:
    facts = facts_of(config, load_tokenizer(str(config.data.tokenizer), False), 1, folder)
    return RolloutGroup(LocalBackend(partial(factories, facts)), "judge")


def spoil(group: RolloutGroup) -> None:
    """From now on each step of the group's engine fails."""
    worker = group.backend.worker("judge")  # type: ignore[attr-defined]
    assert isinstance(worker, RolloutWorker)

    def fail(**_: bool) -> None:
        raise RuntimeError("the card is on fire")

    worker.engine.open = fail  # type: ignore[assignment, method-assign]


def test_a_request_goes_to_another_replica_and_the_lost_one_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = judged_config(tmp_path)
    started: list[str] = []
    again = threading.Event()

    def start(name: str) -> RolloutGroup:
        started.append(name)
        again.set()
        return group_of(config, tmp_path)

    groups = {name: group_of(config, tmp_path) for name in ("judge-0", "judge-1")}
    groups["judge-1"].backend.worker("judge")  # type: ignore[attr-defined]
    spoil(groups["judge-0"])
    with JudgeServer(config).listening() as server:
        server.begin(groups, start)
        found = [ask(server, text)["choices"][0]["message"]["content"] for text in TEXTS]
        assert again.wait(PATIENCE) and {*started} == {"judge-0"}
        assert found == [ask(server, text)["choices"][0]["message"]["content"] for text in TEXTS]
    assert "judge-0 of the judge was lost: RolloutError" in caplog.text and "is on fire" in caplog.text
    assert "judge-1 of the judge was lost" not in caplog.text


def test_a_judge_that_is_lost_for_good_says_what_it_died_of(tmp_path: Path) -> None:
    config = judged_config(tmp_path, "reward.reward_model.rollout.max_restarts=0")
    group = group_of(config, tmp_path)
    spoil(group)
    with JudgeServer(config).listening() as server:
        server.begin({"judge": group}, None)
        for _ in range(2):  # the request under which it died, and one that comes later
            status, said = refusal(server, "good?")
            assert status == 503 and "the card is on fire" in said


class SilentGroup:
    """What a keeper needs of a group, over such a client."""

    def __init__(self) -> None:
        self.replicas = (SilentReplica(),)
        self.woken = threading.Event()
        self.backend = self
        self.has_ended = False
        self.is_lost = False

    @contextmanager
    def opened(self) -> Iterator[Any]:
        yield self

    def serve(self, over: Any) -> None:
        if self.is_lost:
            raise RuntimeError("the card is on fire")
        while not over():
            self.woken.wait(0.01)

    def wake(self) -> None:
        self.woken.set()

    def shutdown(self) -> None:
        self.has_ended = True


class SilentReplica:
    """It takes requests and never answers; its clock shows another second each time that it is read."""

    name = "judge-0"
    waiting = load = 0
    failure = version = None

    def __init__(self) -> None:
        self.seconds = 0.0
        self.aborted: list[int] = []

    @property
    def clock(self) -> float:
        self.seconds += 1.0
        return self.seconds

    def submit(self, request: Any, tap: object = None) -> Future[GenerationOutput]:
        return Future()

    def abort(self, request_ids: Any) -> None:
        self.aborted += request_ids


def test_a_judge_that_never_answers_meets_its_deadline_by_name(tmp_path: Path) -> None:
    config = judged_config(tmp_path, "reward.timeout=2")
    group: Any = SilentGroup()
    with JudgeServer(config).listening() as server:
        server.begin({"judge-0": group}, None)
        status, said = refusal(server, "good?")
    assert status == 504 and "had no answer of replica judge-0 within 2 s (deadline_s)" in said
    assert group.replicas[0].aborted == [0]


def test_requests_wait_for_a_replica_only_until_their_deadline(tmp_path: Path) -> None:
    config = judged_config(tmp_path, "reward.timeout=0.2")
    blocked = threading.Event()

    def start(name: str) -> RolloutGroup:
        blocked.wait(PATIENCE)
        raise RuntimeError("no devices")

    group = group_of(config, tmp_path)
    spoil(group)
    with JudgeServer(config).listening() as server:
        server.begin({"judge-0": group}, start)
        try:
            said = [refusal(server, "good?") for _ in range(2)][-1]
        finally:
            blocked.set()
    assert said[0] == 504 and "found no replica of the judge alive within 0.2 s (deadline_s)" in said[1]


def lost_group() -> Any:
    group: Any = SilentGroup()
    group.is_lost = True
    return group


def no_devices() -> RolloutGroup:
    raise RuntimeError("no devices")


def test_starts_that_fail_are_ever_further_apart(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judges, "FIRST_PAUSE", 0.01)
    keeper = ReplicaKeeper("judge-0", lost_group(), no_devices, 5, 0.03)
    assert keeper.join(PATIENCE)
    assert keeper.failure == "judge-0 was lost: RuntimeError: no devices"
    pauses = [message for message in caplog.messages if "is started again in" in message]
    assert [message.split()[-2] for message in pauses] == ["0.01", "0.02", "0.03", "0.03"]


def test_the_end_of_a_run_does_not_wait_for_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "FIRST_PAUSE", 1e6)
    failed = threading.Event()

    def start() -> RolloutGroup:
        failed.set()
        return no_devices()

    keeper = ReplicaKeeper("judge-0", lost_group(), start, 5, 1e6)
    assert failed.wait(PATIENCE)
    keeper.close()
    assert keeper.join(PATIENCE) and keeper.failure is None


def test_a_replica_that_starts_when_the_run_has_ended_is_shut_down() -> None:
    begun = threading.Event()
    ended = threading.Event()
    late: Any = SilentGroup()

    def start() -> RolloutGroup:
        begun.set()
        ended.wait(PATIENCE)
        found: RolloutGroup = late
        return found

    keeper = ReplicaKeeper("judge-0", lost_group(), start, 1, 0.0)
    assert begun.wait(PATIENCE)
    keeper.close()
    ended.set()
    assert keeper.join(PATIENCE) and late.has_ended


def test_all_replicas_have_one_deadline_to_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def join(keeper: ReplicaKeeper, seconds: float) -> bool:
        given.append(seconds)
        time.sleep(0.06)
        return False

    monkeypatch.setattr(ReplicaKeeper, "join", join)
    silent: dict[str, Any] = {f"judge-{index}": SilentGroup() for index in range(3)}
    with JudgeServer(judged_config(tmp_path, "trainer.startup_timeout=0.1")).listening() as server:
        server.begin(silent, None)
    assert 0.1 >= given[0] > given[1] and given[2] == 0.0
    assert "judge-0, judge-1, judge-2 of the judge did not stop within 0.1 s" in caplog.text


def test_a_judge_that_cannot_listen_says_where_and_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(server: JudgeServer) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(JudgeServer, "_serve", never)
    monkeypatch.setattr(judges, "LISTEN_SECONDS", 0.1)
    wanted = r"does not listen on 127\.0\.0\.1 after 0\.1 s"
    with (
        pytest.raises(HybridFlowError, match=wanted),
        JudgeServer(judged_config(tmp_path)).listening(),
    ):
        pass


# ---- what is refused before anything is allocated


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("reward.reward_model.model.path=/no/where",), "reward.reward_model.model.path: there is no folder"),
        (("reward.reward_model.rollout.tensor_model_parallel_size=2",), "a pool of its own"),
        (
            (
                "trainer.resource_pools={main: [1], judges: [3]}",
                "trainer.placement={judge: judges}",
                "reward.reward_model.rollout.tensor_model_parallel_size=2",
            ),
            "does not divide the 3 processes of its pool",
        ),
        (
            ("reward.custom_reward_function.path=null", "reward.function=gsm8k"),
            r"never asks the model: set reward\.function=auto and reward\.terms=\[\{name: judge",
        ),
        (
            ("reward.custom_reward_function.path=null", "reward.terms=[{name: reward_model}]"),
            "has no score of its own: name judge",
        ),
        (("reward.reward_model.kind=score",), "set reward.reward_model.kind=generative"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, overrides: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        judged_config(tmp_path, "reward.reward_model.kind=generative", *overrides)


def test_a_classifier_and_a_model_without_a_template_are_no_judges(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "odd")
    described = json.loads((folder / "config.json").read_text())
    described["architectures"] = ["LlamaForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError) as caught:
        judged_config(tmp_path, f"reward.reward_model.model.path='{folder}'")
    assert "is a classifier (LlamaForSequenceClassification), which writes no verdict" in str(caught.value)
    assert "has no chat template, so the judge cannot be asked" in str(caught.value)


def test_more_tokens_than_the_model_has_positions_are_refused(tmp_path: Path) -> None:
    config = judged_config(tmp_path, "reward.reward_model.rollout.max_model_len=5000")
    with pytest.raises(ConfigError, match=r"max_model_len=5000: .* has 4096 positions"):
        JudgeServer(config)


def test_without_a_judge_its_arguments_are_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reward_router_address"):
        judged_config(tmp_path, "reward.reward_model.enable=false")


def test_where_no_judge_is_started_it_is_served_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the term judge its base_url") as caught:
        refuse_model(judged_config(tmp_path).reward)
    assert "reward_model out of" not in str(caught.value) and "hybridflow eval" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("reward.reward_model.model.path", ("reward.reward_model.kind=generative",)),
        ("reward.reward_model.model.tokenizer_path", ("reward.reward_model.kind=generative",)),
        ("critic.model.path", ("reward.reward_model.enable=false", "algorithm.adv_estimator=gae")),
    ],
)
def test_a_model_that_is_not_there_is_named_with_its_key(
    tmp_path: Path, key: str, overrides: tuple[str, ...]
) -> None:
    config = judged_config(
        tmp_path,
        "reward.custom_reward_function.path=null",
        "reward.function=auto",
        *overrides,
        f"{key}=nowhere",
    )
    with pytest.raises(ModelError, match=f"^{key}=nowhere: "), build(config):
        pass
