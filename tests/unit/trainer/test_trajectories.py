"""From prompts to the rows that train, on a tiny model: every column stays with its row through rounds,
filters, baselines and answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import actor_module, build, ppo_config

from hybridflow.config import PPOConfig
from hybridflow.data.prompts import PromptRow
from hybridflow.episodes.filters import rows_of, uids_of
from hybridflow.episodes.pipeline import ValidationFailed
from hybridflow.errors import DataError, RewardError, RolloutError
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.report import collect
from hybridflow.protocol import DataProto
from hybridflow.protocol.joining import join_rows
from hybridflow.rollout.base import GenerationOutput, GenerationRequest
from hybridflow.trainer.ppo.build import PPOTrainer
from hybridflow.workers.rollout_group import Finished, Generated

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info, fail_on=None):
    if fail_on is not None and solution_str[:1] in fail_on:
        raise ValueError("a response that cannot be scored")
    even = float(len(solution_str) % 2 == 0)
    score = even + 0.01 * len(solution_str) + 0.001 * int(ground_truth)
    return {"score": score, "acc": even, "text": solution_str}
"""
FILTER = ("algorithm.filter_groups.enable=true", "algorithm.adv_estimator=grpo")
Made = tuple[DataProto, dict[str, float]]


def config(model: Path, run: Path, *overrides: str) -> PPOConfig:
    reward = run.parent / "scores.py"
    reward.write_text(REWARD)
    return ppo_config(model, run, f"reward.custom_reward_function.path='{reward}'", *overrides)


def trajectories(model: Path, run: Path, *overrides: str) -> Made:
    """Rows and metrics of step 1."""
    run.parent.mkdir(parents=True, exist_ok=True)
    with build(config(model, run, *overrides)) as trainer:
        made = trainer.source.next(1)
        check_rows(trainer, made.rows)
        return made.rows, made.metrics.to_floats()


def validated(trainer: PPOTrainer, prompts: Sequence[PromptRow]) -> tuple[DataProto, Metrics]:
    """Rows and metrics of a validation on these prompts."""
    source = trainer.source
    return source.pipeline.for_validation(source.roles.rollout, prompts, 0, source.timer)


def check_rows(trainer: PPOTrainer, batch: DataProto) -> None:
    """What stands in each row agrees: prompt and ground truth, tokens, text and score."""
    rows, columns = batch.batch, batch.non_tensor_batch
    assert len(set(rows["row_id"].tolist())) == len(batch)
    assert torch.equal(rows["input_ids"], torch.cat([rows["prompts"], rows["responses"]], dim=1))
    width = rows["prompts"].shape[1]
    assert (
        rows["attention_mask"][:, :width].any(0).all() and rows["attention_mask"][:, width:].any(0).all()
    ), "no column of padding only"
    demonstrations = (
        rows["is_demonstration"] if "is_demonstration" in batch else torch.zeros(len(batch), dtype=torch.bool)
    )
    for row in range(len(batch)):
        question = trainer.source.pipeline.tokenizer.decode(rows["prompts"][row], skip_special_tokens=True)
        assert eval(question.partition("user\n")[2].partition(" = ?")[0]) == int(columns["ground_truth"][row])
        mask, text = rows["response_mask"][row], columns["solution_str"][row]
        assert (
            text
            == trainer.source.pipeline.tokenizer.decode(
                rows["responses"][row][mask], skip_special_tokens=True
            )
            == columns["text"][row]
        )
        penalty = float(columns["overlong_reward"][row]) if "overlong_reward" in batch else 0.0
        score = (
            float(len(text) % 2 == 0) + 0.01 * len(text) + 0.001 * int(columns["ground_truth"][row]) + penalty
        )
        assert float(rows["token_level_scores"][row].sum()) == pytest.approx(score, abs=1e-6)
        log_probs = rows["rollout_log_probs"][row]
        assert ((log_probs == 0) if demonstrations[row] else (log_probs < 0))[mask].all() and not log_probs[
            ~mask
        ].any()


def tokens_of(batch: DataProto) -> dict[int, tuple[Any, ...]]:
    """By row id: the group, the sampled tokens and the score."""
    rows = batch.batch
    return {
        int(rows["row_id"][row]): (
            batch.non_tensor_batch["uid"][row],
            rows["responses"][row][rows["response_mask"][row]].tolist(),
            rows["token_level_scores"][row].sum().item(),
        )
        for row in range(len(batch))
    }


def assert_same_rows(ours: DataProto, theirs: DataProto) -> None:
    """The same rows in the same order, each with its own tokens, score and log-probs."""
    assert list(tokens_of(ours).items()) == list(tokens_of(theirs).items())
    for left, right in zip(ours.batch["rollout_log_probs"], theirs.batch["rollout_log_probs"], strict=True):
        torch.testing.assert_close(left[left != 0], right[right != 0], atol=1e-5, rtol=0)


def groups_without_a_filter(model: Path, run: Path, count: int) -> DataProto:
    """The rows of the first `count` groups, all of them made with the weights of the start."""
    run.parent.mkdir(parents=True, exist_ok=True)
    with build(config(model, run, "algorithm.adv_estimator=grpo")) as trainer:
        parts = []
        for step in range(1, -(-count // 4) + 1):
            made = trainer.source.next(step)
            assert "training/filtered_groups_ratio" not in made.metrics.to_floats()
            parts.append(made.rows)
    whole = join_rows(parts, int(trainer.source.pipeline.tokenizer.pad_token_id))
    return rows_of(whole, uids_of(whole)[:count])


def test_dynamic_sampling_keeps_the_first_groups_that_vary(model: Path, tmp_path: Path) -> None:
    batch, metrics = trajectories(
        model, tmp_path / "a" / "run", *FILTER, "data.gen_batch_size=3", "data.train_batch_size=4"
    )
    rounds = int(metrics["training/num_gen_batches"])
    assert rounds >= 2
    whole = groups_without_a_filter(model, tmp_path / "b" / "run", 3 * rounds)
    uids, acc = list(whole.non_tensor_batch["uid"]), list(whole.non_tensor_batch["acc"])
    varied = [
        uid
        for uid in dict.fromkeys(uids)
        if len({a for u, a in zip(uids, acc, strict=True) if u == uid}) == 2
    ]
    assert list(dict.fromkeys(batch.non_tensor_batch["uid"])) == varied[:4]
    assert_same_rows(batch, whole.select_idxs([row for row, uid in enumerate(uids) if uid in varied[:4]]))
    assert len(batch) == 8
    assert metrics["training/filtered_groups_ratio"] == pytest.approx(1 - len(varied) / (3 * rounds))
    tokens = int(whole.batch["response_mask"].sum())
    assert metrics["rollout/generated_tokens"] == tokens, "those of dropped groups count"
    assert metrics["training/unfiltered_score/mean"] == pytest.approx(
        float(whole.batch["token_level_scores"].sum()) / len(whole)
    )


def test_dynamic_sampling_says_what_it_found_when_it_gives_up(model: Path, tmp_path: Path) -> None:
    starved = [
        *FILTER,
        "algorithm.filter_groups.min_mean=0.9",
        "algorithm.filter_groups.max_num_gen_batches=2",
        "data.gen_batch_size=3",
    ]
    wanted = (
        r"train_batch_size=4 groups whose acc varies, mean ≥ 0\.9, and kept 0 of the 6 that 2 "
        r"generation batches gave.*=2 allows"
    )
    with pytest.raises(DataError, match=wanted):
        trajectories(model, tmp_path / "run", *starved)


def test_dynamic_sampling_without_a_limit_does_not_go_on_for_ever(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridflow.trainer.schedules.sync.MAX_BARREN_BATCHES", 3)
    endless = [
        *FILTER,
        "algorithm.filter_groups.min_mean=0.9",
        "algorithm.filter_groups.max_num_gen_batches=0",
        "data.gen_batch_size=3",
    ]
    with pytest.raises(
        DataError, match=r"kept 0 of the 9 that 3 generation batches gave: the last 3 of them gave none"
    ):
        trajectories(model, tmp_path / "run", *endless)


def estimator(folder: Path, names: str) -> str:
    """The override for an estimator that names these columns."""
    (folder / "own.py").write_text(
        "from hybridflow.algorithms.advantages import Advantages\n"
        f"def mine(token_level_rewards, response_mask, {names}):\n"
        "    return Advantages(token_level_rewards, token_level_rewards)\n"
    )
    return f"algorithm.adv_estimator='{folder / 'own.py'}:mine'"


def test_a_baseline_is_the_greedy_score_of_its_own_prompt(model: Path, tmp_path: Path) -> None:
    remax = ("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=3")
    batch, metrics = trajectories(model, tmp_path / "a" / "run", *remax)
    plain, without = trajectories(
        model, tmp_path / "b" / "run", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=3"
    )
    assert_same_rows(batch, plain)  # the greedy ones are gone and have changed no draw
    with build(config(model, tmp_path / "a" / "run", *remax)) as trainer:  # validation is greedy
        greedy, _ = validated(trainer, next(iter(trainer.source.loader)))
        tokens = trainer.source.roles.rollout.backend.worker("rollout").engine.stats.generated_tokens  # type: ignore[attr-defined]
    assert not torch.equal(
        greedy.batch["token_level_scores"].sum(-1), greedy.batch["token_level_scores"].sum(-1).flip(0)
    )
    torch.testing.assert_close(
        batch.batch["reward_baselines"], greedy.batch["token_level_scores"].sum(-1).repeat_interleave(3)
    )
    assert metrics["rollout/generated_tokens"] == without["rollout/generated_tokens"] + tokens
    assert metrics["rollout/prefill_tokens"] == without["rollout/prefill_tokens"], (
        "in one call: a prompt is prefilled once"
    )
    assert metrics["training/reward_baseline/mean"] == pytest.approx(
        float(batch.batch["reward_baselines"].mean())
    )


def test_baselines_go_with_their_rows_through_dynamic_sampling(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = estimator(tmp_path, "reward_baselines, is_demonstration")
    settings = [FILTER[0], own, "data.gen_batch_size=3", "data.max_response_length=40"]
    with build(config(model, tmp_path / "run", *settings)) as trainer:
        drawn: list[Any] = []
        monkeypatch.setattr(trainer.source, "admitted", partial(noted, trainer.source.admitted, drawn))
        batch = trainer.source.next(1).rows
        check_rows(trainer, batch)
        greedy = {}
        for _, prompts in drawn:
            scored, _ = validated(trainer, prompts)
            for prompt, score in zip(prompts, scored.batch["token_level_scores"].sum(-1), strict=True):
                greedy[prompt.index] = score
    columns, told = batch.non_tensor_batch, batch.batch["is_demonstration"]
    wanted = torch.stack([greedy[info["index"]] for info in columns["extra_info"]])
    torch.testing.assert_close(batch.batch["reward_baselines"], wanted)
    assert len(drawn) > 1 and told.tolist() == [False, False, True] * 4
    for group in range(4):
        assert (
            len(set(columns["uid"][3 * group : 3 * group + 3])) == 1
            and columns["acc"][3 * group] != columns["acc"][3 * group + 1]
        )


def noted(admitted: Callable[[], Iterator[Any]], drawn: list[Any]) -> Iterator[Any]:
    for batch in admitted():
        drawn.append(batch)
        yield batch


def test_the_answers_of_the_data_are_rows_of_their_groups(model: Path, tmp_path: Path) -> None:
    spin = (estimator(tmp_path, "is_demonstration"), "data.max_response_length=40")
    batch, metrics = trajectories(model, tmp_path / "a" / "run", *spin)
    plain, without = trajectories(
        model, tmp_path / "b" / "run", "algorithm.adv_estimator=grpo", "data.max_response_length=40"
    )
    told = batch.batch["is_demonstration"]
    assert told.tolist() == [False, False, True] * 4 and told.dtype == torch.bool
    assert_same_rows(batch.select_idxs(~told), plain)
    assert metrics["rollout/generated_tokens"] == without["rollout/generated_tokens"], (
        "nothing is generated for them"
    )
    answers, columns = batch.select_idxs(told), batch.non_tensor_batch
    for row in range(len(answers)):
        text = answers.non_tensor_batch["solution_str"][row]
        assert text.endswith(f" . #### {answers.non_tensor_batch['ground_truth'][row]}")
    assert torch.equal(answers.batch["loss_mask"], answers.batch["response_mask"])
    ends = answers.batch["responses"].gather(1, answers.batch["response_mask"].sum(-1, keepdim=True) - 1)
    assert len(set(ends.flatten().tolist())) == 1, "each closed by the end token"
    assert (
        set(answers.non_tensor_batch["finish_reason"]) == {"stop"}
        and (answers.batch["policy_version"] == -1).all()
    )
    assert [columns["uid"][row] for row in range(0, 12, 3)] == [
        columns["uid"][row] for row in range(2, 12, 3)
    ]


def test_keys_of_sampling_reach_the_engine_in_training_and_validation(model: Path, tmp_path: Path) -> None:
    """Responses end at the stop texts and tokens; each key changes what is sampled."""
    rollout = "actor_rollout_ref.rollout."
    val = (f"{rollout}val_kwargs.do_sample=true", f"{rollout}val_kwargs.temperature=1.0")
    with build(
        config(
            model, tmp_path / "run", *val, f"{rollout}stop=['1','a b']", f"{rollout}stop_token_ids=[40,41,42]"
        )
    ) as trainer:
        prompts = next(trainer.source.loader.endless())
        made = [
            trainer.source.next(1).rows,
            validated(trainer, prompts)[0],
        ]
    ended = 0
    for batch in made:
        for text, tokens, mask in zip(
            batch.non_tensor_batch["solution_str"], batch.batch["responses"], batch.batch["response_mask"]
        ):
            response = tokens[mask].tolist()
            assert "1" not in text[:-1] and not {40, 41, 42} & set(response[:-1])
            ended += text.endswith("1") or response[-1] in (40, 41, 42)
    assert ended
    plain = tokens_of(trajectories(model, tmp_path / "plain" / "run")[0])
    for number, change in enumerate(("min_p=0.9", "repetition_penalty=3.0")):
        assert tokens_of(trajectories(model, tmp_path / str(number) / "run", rollout + change)[0]) != plain


def test_overlong_shaping_and_filtering(model: Path, tmp_path: Path) -> None:
    buffer = "reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 4, penalty_factor: 2.0}"
    batch, metrics = trajectories(
        model, tmp_path / "run", "algorithm.adv_estimator=grpo", buffer, "algorithm.overlong_filtering=true"
    )
    rows, penalties = batch.batch, torch.tensor(list(batch.non_tensor_batch["overlong_reward"]))
    lengths = rows["response_mask"].sum(-1)
    torch.testing.assert_close(penalties, -(lengths - 6).clamp(min=0) / 4 * 2.0)
    assert penalties.min() == -2.0 and metrics["training/overlong_reward/mean"] == pytest.approx(
        float(penalties.mean())
    )
    cut = torch.tensor([reason == "length" for reason in batch.non_tensor_batch["finish_reason"]])
    assert cut.any() and torch.equal(rows["loss_mask"], rows["response_mask"] & ~cut[:, None])
    assert metrics["training/overlong_filtered_ratio"] == pytest.approx(float(cut.float().mean()))
    with build(config(model, tmp_path / "run", "algorithm.adv_estimator=grpo", buffer)) as trainer:
        checked, _ = validated(trainer, next(iter(trainer.source.loader)))
        check_rows(trainer, checked)
        assert "overlong_reward" not in checked, "validation shows the reward itself"


def failing(letters: Sequence[str]) -> list[str]:
    return [
        f"reward.custom_reward_function.reward_kwargs={{fail_on: '{''.join(letters)}'}}",
        "algorithm.adv_estimator=grpo",
    ]


def test_rows_whose_reward_failed_leave_the_batch(model: Path, tmp_path: Path) -> None:
    plain, _ = trajectories(model, tmp_path / "a" / "run", "algorithm.adv_estimator=grpo")
    letters = sorted(
        {text[:1] for text in plain.non_tensor_batch["solution_str"] if text and text[0].isalnum()}
    )[:2]
    batch, metrics = trajectories(model, tmp_path / "b" / "run", *failing(letters), "reward.on_error=drop")
    failed = {
        row for row, text in enumerate(plain.non_tensor_batch["solution_str"]) if text[:1] in letters and text
    }
    assert failed and metrics["reward/num_errors"] == len(failed)
    assert_same_rows(batch, plain.select_idxs([row for row in range(len(plain)) if row not in failed]))
    with pytest.raises(RewardError, match="a response that cannot be scored"):
        trajectories(model, tmp_path / "c" / "run", *failing(letters))


def never_scored(model: Path, folder: Path, *overrides: str) -> PPOTrainer:
    """A run whose reward function always raises, with reward.on_error=drop."""
    made = ppo_config(model, folder / "run", "reward.on_error=drop", *overrides)
    (folder / "reward.py").write_text("def compute_score(**row):\n    raise ValueError('never')\n")
    return build(made)


@pytest.mark.parametrize("estimator", ["gae", "grpo", "remax"])
def test_no_failed_trajectory_reaches_an_estimator(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimator: str
) -> None:
    """Where every reward failed, nothing is learned, the next version is published, and the run ends so."""

    def unreachable(*_: Any, **__: Any) -> Any:
        raise AssertionError("an estimator was given rows of failed trajectories")

    monkeypatch.setattr("hybridflow.trainer.ppo.by_source.estimate_advantages", unreachable)
    settings = (f"algorithm.adv_estimator={estimator}", "trainer.total_training_steps=1")
    responses = 12 if estimator == "remax" else 8
    told = rf"(?s)every trajectory of all steps has failed, .*: {responses} by environment.*ValueError"
    with pytest.raises(RolloutError, match=told), never_scored(model, tmp_path, *settings) as trainer:
        before = {name: value.clone() for name, value in actor_module(trainer).state_dict().items()}
        seen: list[dict[str, float]] = []
        trainer.fit(lambda step, metrics: bool(seen.append(metrics)))  # type: ignore[func-returns-value]
        assert trainer.state.step == 1
        after = actor_module(trainer).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert seen[0]["reward/num_errors"] == seen[0]["training/num_failed/environment"] == responses
    assert seen[0]["perf/total_num_tokens"] == 0.0 and seen[0]["training/global_step"] == 1


def test_a_resumed_run_has_learned_before(model: Path, tmp_path: Path) -> None:
    settings = ("algorithm.adv_estimator=grpo", "trainer.test_freq=-1", "trainer.save_freq=1")
    with build(ppo_config(model, tmp_path / "run", *settings, "trainer.total_training_steps=1")) as trainer:
        trainer.fit()
    with never_scored(model, tmp_path, *settings) as trainer:
        trainer.fit()
        assert trainer.state.step == 2


def test_three_steps_in_a_row_without_a_trajectory_end_the_run(model: Path, tmp_path: Path) -> None:
    settings = ("algorithm.adv_estimator=grpo", "trainer.total_training_steps=9")
    told = "every trajectory of the last 3 steps has failed: 24 by environment"
    with pytest.raises(RolloutError, match=told), never_scored(model, tmp_path, *settings) as trainer:
        trainer.fit()
    assert trainer.state.step == 2
    report = collect(tmp_path / "run")
    assert report["failures"] == {"environment": "the reward failed (ValueError)"}
    assert report["counts"]["failed trajectories"] == {"environment": 16.0}, "the steps that were logged"


def test_a_trajectory_is_scored_while_others_are_generated(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ppo_config(model, tmp_path / "run", "algorithm.adv_estimator=grpo", "reward.num_workers=1")
    note = tmp_path / "scored"
    (tmp_path / "reward.py").write_text(
        f"def compute_score(**row):\n    open({str(note)!r}, 'w').close()\n    return 1.0\n"
    )
    with build(made) as trainer:
        rollout = trainer.source.roles.rollout
        generate = rollout.generate

        def waiting(requests: Sequence[GenerationRequest], *, finished: Finished) -> Generated:
            """The second response ends only after the first one has been scored."""
            ended = []

            def wait(output: GenerationOutput) -> None:
                deadline = time.monotonic() + 600
                while len(ended) == 1 and not note.exists():
                    assert time.monotonic() < deadline, "the first response waits for all others"
                    time.sleep(0.02)
                ended.append(output)
                finished(output)

            return generate(requests, finished=wait)

        monkeypatch.setattr(rollout, "generate", waiting)
        batch = trainer.source.next(1).rows
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [1.0] * 8


def test_responses_that_could_not_be_generated_leave_the_batch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build(config(model, tmp_path / "run", "algorithm.adv_estimator=grpo")) as trainer:
        rollout = trainer.source.roles.rollout
        generate = rollout.generate

        def broken(requests: Sequence[GenerationRequest], *, finished: Finished) -> Generated:
            """Two responses of the first group and one of the second fail."""

            def fail(output: GenerationOutput) -> None:
                if output.request_id in (0, 1, 3):
                    output = GenerationOutput(output.request_id, [], [], "error", [], error="no memory left")
                finished(output)

            return generate(requests, finished=fail)

        monkeypatch.setattr(rollout, "generate", broken)
        made = trainer.source.next(1)
        batch = made.rows
        check_rows(trainer, batch)
        with pytest.raises(ValidationFailed, match="of a validation failed; the first, request 0: no memory"):
            validated(trainer, next(iter(trainer.source.loader)))
    assert list(batch.non_tensor_batch["uid"]) == ["1-1", *["1-2"] * 2, *["1-3"] * 2]
    assert made.metrics.to_floats()["training/num_failed/infrastructure"] == 3.0


def test_keys_of_a_reward_that_sound_like_ours_do_no_harm_in_validation(model: Path, tmp_path: Path) -> None:
    made = ppo_config(
        model,
        tmp_path / "run",
        "algorithm.adv_estimator=grpo",
        "trainer.val_only=true",
        "data.val_batch_size=2",
    )
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, **row):\n"
        "    more = {'length_only_here': 1.0} if row['extra_info']['index'] < 2 else {}\n"
        "    return {'score': 0.25, 'reward': 7.0, 'response_length': 3.0, **more}\n"
    )
    with build(made) as trainer:
        found = trainer.fit()
    assert (
        found["val-core/arithmetic_chain/reward/mean@1"] == 0.25
        and found["val-aux/arithmetic_chain/response_length/mean@1"] == 3.0
    )
    assert 0 < found["val-aux/response_length/mean"] <= 10
    assert found["val-aux/arithmetic_chain/length_only_here/mean@1"] == 0.4, (
        "two of five; the others count as 0"
    )
