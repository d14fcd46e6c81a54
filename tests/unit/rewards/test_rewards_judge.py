"""A judge behind an endpoint: its verdicts, and what becomes of those that it does not give."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.reward import RewardConfig
from hybridflow.errors import ConfigError
from hybridflow.rewards.build import build_reward_manager
from hybridflow.rewards.dry_run import dry_run
from hybridflow.rewards.manager import ScoredBatch
from hybridflow.rewards.result import ScoreRequest

ANSWERS = {
    "good": "It is fine.\nScore: 10",
    "fair": "Score: 3\nno: Score: 2.5",
    "odd": "hm",
    "far": "Score: 99",
}


class Judge(ThreadingHTTPServer):
    """Answers by a word of the question; to `refused` with an error, to `slow` when it is released."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Judge

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        self.server.asked.append(text)
        if "slow" in text:
            self.server.released.wait(60)
        answer = next((answer for word, answer in ANSWERS.items() if word in text), "")
        data = json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
        self.send_response(400 if "refused" in text else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def judge() -> Iterator[Judge]:
    server = Judge()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


def scored(
    judge: Judge, *texts: str, terms: Any = None, timeout: float = 60.0, **options: Any
) -> ScoredBatch:
    asked = {"name": "judge", "model": "m", "base_url": judge.url, **options}
    config = RewardConfig(terms=[*(terms or []), asked], num_workers=0, timeout=timeout, on_error="drop")
    rows = [
        ScoreRequest(
            "sums", text, "4", {}, messages=[{"role": "user", "content": "Sum?"}, {"role": "assistant"}]
        )
        for text in texts
    ]
    with build_reward_manager(config, 0) as manager, manager.open() as session:
        for place, row in enumerate(rows):
            session.add(place, row)
        return session.result()


def test_verdicts_are_scores_and_their_lack_is_counted(judge: Judge) -> None:
    batch = scored(judge, "good", "fair", "odd", "far", "refused", template="{question} {response} {{x}}")
    assert batch.scores == [1.0, 0.25, 0.0, 0.0, 0.0]
    assert batch.dropped == ["", "", "MalformedVerdict", "MalformedVerdict", "HTTPStatusError"]
    assert batch.metrics["reward/num_errors/MalformedVerdict"] == 2.0
    assert batch.extras["judge_answer"][0].endswith("Score: 10")
    assert sorted(judge.asked)[1] == "Sum? far {x}"


def test_a_trial_shows_the_judge_the_question(judge: Judge) -> None:
    options = {"model": "m", "base_url": judge.url, "template": "{question} {response}"}
    config = RewardConfig(terms=[{"name": "judge", **options}], num_workers=0)
    truth = {"data_source": "sums", "reward_model": {"ground_truth": "4"}}
    prompts = ("Sum?", [{"role": "user", "content": "Sum?"}])
    with build_reward_manager(config, 0) as manager:
        dry_run(manager, [{**truth, "raw_prompt": prompt} for prompt in prompts], config, response="good")
    assert judge.asked == ["Sum? good"] * 2


def test_a_judge_that_does_not_answer_is_a_timeout(judge: Judge) -> None:
    assert scored(judge, "slow", timeout=0.5).dropped == ["timeout"]


def test_a_function_may_read_the_verdict_and_a_condition_save_the_question(
    judge: Judge, tmp_path: Path
) -> None:
    (tmp_path / "read.py").write_text("def last(answer):\n    return float(answer.split()[-1])\n")
    parser = f"{tmp_path}/read.py:last"
    first = [{"name": "format", "pattern": "goo", "weight": 1}]
    batch = scored(judge, "good", "fair", terms=first, parser=parser, highest=20, when="format", weight=2)
    assert batch.scores == [2.0, 0.0] and len(judge.asked) == 1
    assert scored(judge, "odd", parser=parser, template="{response}").dropped == ["MalformedVerdict"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"template": "no file"}, "is no file"),
        ({"template": "{answer}"}, "is no placeholder"),
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": "Score"}, "0 groups"),
        ({"lowest": 10}, "is not below"),
    ],
)
def test_mistakes_are_refused(judge: Judge, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        scored(judge, "good", **options)
