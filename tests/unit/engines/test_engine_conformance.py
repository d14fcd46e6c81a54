"""What every training engine owes the workers; one joins by a line in `engine_zoo.ENGINES`."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import (
    ENGINES,
    VOCABULARY,
    Counting,
    EngineMaker,
    Gradients,
    folders,
    row_tokens,
    same_weights,
    tiny_policy,
    training_rows,
    weights,
)
from torch import Tensor
from transformers import LlamaForCausalLM

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.config.model import OptimConfig
from hybridflow.distributed.shards import Box
from hybridflow.engines import BatchLimits, LossFn, OutputSpec, TrainEngine
from hybridflow.errors import CheckpointError, ConfigError, TrainingError
from hybridflow.models.adapters.lora import LoraSettings, add_lora
from hybridflow.models.policy import PolicyModel
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.workers.losses import sft_loss

WHOLE = BatchLimits(max_tokens=1000)
LOG_PROBS = OutputSpec(log_probs=True)
OPTIM = OptimConfig(lr=1e-3)


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest) -> EngineMaker:
    return ENGINES[request.param]


def likelihood(batch: DataProto) -> LossFn:
    return sft_loss(LossScale.count(batch.batch["loss_mask"]))


def not_a_number(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
    return outputs["log_probs"].sum() * float("nan"), Metrics()


def infinite_gradient(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
    """A finite loss: sqrt at 0 has an infinite slope."""
    return (outputs["log_probs"] * 0.0).abs().sum().sqrt(), Metrics()


def infinite_loss(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
    """A finite gradient."""
    return outputs["log_probs"].sum() + float("inf"), Metrics()


def reinforce(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
    """Importance ratio times advantage over the tokens that are learned from."""
    ratio = (outputs["log_probs"] - micro.batch["old_log_probs"]).exp()
    return torch.where(micro.batch["loss_mask"], ratio * micro.batch["advantages"], 0.0).sum(), Metrics()


def step(
    engine: TrainEngine, rows: DataProto, loss: LossFn | None = None, limits: BatchLimits = WHOLE
) -> dict[str, float]:
    return engine.train_mini_batch(rows, LOG_PROBS, loss or likelihood(rows), limits).to_floats()


@pytest.mark.parametrize(
    "limits",
    [BatchLimits(14), BatchLimits(20), BatchLimits(33, max_rows=2), BatchLimits(1000, max_rows=1), WHOLE],
)
def test_no_forward_gets_more_than_the_limits(make: EngineMaker, limits: BatchLimits) -> None:
    rows = training_rows(extra_prompt=9, extra_response=9)
    for train in (True, False):
        module = tiny_policy()
        engine, counting = make(module, OPTIM), Counting(module)
        if train:
            engine.train_mini_batch(rows, LOG_PROBS, likelihood(rows), limits)
        else:
            engine.forward(rows, LOG_PROBS, limits)
        assert sum(count for count, _ in counting.seen) == len(rows)
        assert sum(tokens for _, tokens in counting.seen) == sum(row_tokens()), "padding is not computed"
        assert max(tokens for _, tokens in counting.seen) <= limits.max_tokens
        assert max(count for count, _ in counting.seen) <= (limits.max_rows or len(rows))


def test_a_row_over_the_cap_is_refused(make: EngineMaker) -> None:
    engine = make(tiny_policy(), OPTIM)
    with pytest.raises(ConfigError, match="row 3 has 14 tokens but a micro-batch may hold 13"):
        engine.forward(training_rows(), LOG_PROBS, BatchLimits(13))


SCATTERED = [0, 1, 0, 2, 1, 2, 0]
"""Tokens of the groups: 21, 20, 22."""


@pytest.mark.parametrize(
    ("limits", "forwards"),
    [
        (BatchLimits(22, keep_groups=True), 3),
        (BatchLimits(45, keep_groups=True), 2),
        (BatchLimits(45, 3, True), 3),
    ],
)
def test_groups_are_kept_in_one_forward(make: EngineMaker, limits: BatchLimits, forwards: int) -> None:
    batch, seen = training_rows(), list[list[int]]()
    batch.batch["group_ids"] = torch.tensor(SCATTERED)
    loss = likelihood(batch)

    def noting(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
        seen.append(micro.batch["group_ids"].tolist())
        assert int(micro.batch["attention_mask"].sum()) <= limits.max_tokens
        assert len(micro) <= (limits.max_rows or 7)
        return loss(outputs, micro)

    make(tiny_policy(), OPTIM).train_mini_batch(batch, LOG_PROBS, noting, limits)
    assert len(seen) == forwards and sorted(group for groups in seen for group in set(groups)) == [0, 1, 2]
    assert sorted(group for groups in seen for group in groups) == sorted(SCATTERED)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (
            BatchLimits(21, keep_groups=True),
            r"the 2 responses of the prompt in row 3 .*22 tokens.* hold 21: set \*_max_token_len.* least 22",
        ),
        (
            BatchLimits(45, 2, True),
            r"the 3 responses of the prompt in row 0 .* hold 2 rows: set \*_micro_batch_size_per_gpu to at "
            r"least 3",
        ),
    ],
)
def test_a_group_over_the_limits_is_refused(make: EngineMaker, limits: BatchLimits, says: str) -> None:
    batch = training_rows()
    batch.batch["group_ids"] = torch.tensor(SCATTERED)
    with pytest.raises(ConfigError, match=says):
        make(tiny_policy(), OPTIM).train_mini_batch(batch, LOG_PROBS, likelihood(batch), limits)


def test_memory_that_runs_out_names_the_keys(make: EngineMaker) -> None:
    def too_much(module: torch.nn.Module, args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    module = tiny_policy()
    module.register_forward_pre_hook(too_much)
    engine, rows = make(module, OPTIM), training_rows()
    for run in (
        lambda: engine.forward(rows, LOG_PROBS, WHOLE),
        lambda: engine.train_mini_batch(rows, LOG_PROBS, likelihood(rows), WHOLE),
    ):
        with pytest.raises(TrainingError, match=r"at most 1000 tokens: lower its \*_max_token_len_per_gpu"):
            run()


def test_forward_leaves_no_gradient_and_no_trace(make: EngineMaker) -> None:
    module = tiny_policy()
    engine, before = make(module, OPTIM), weights(module)
    engine.forward(training_rows(), LOG_PROBS, WHOLE)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert same_weights(weights(module), before)


def test_rows_without_a_response_are_carried_along(make: EngineMaker) -> None:
    rows = training_rows(dtype=torch.float32)
    for column in ("attention_mask", "response_mask", "loss_mask"):
        width = rows.batch["responses"].shape[1]
        rows.batch[column][0, -width:] = False
    engine = make(tiny_policy(), OPTIM)
    assert not engine.forward(rows, LOG_PROBS, BatchLimits(1000, max_rows=1))["log_probs"][0].any()
    assert step(engine, rows, limits=BatchLimits(1000, max_rows=1))["actor/num_skipped_steps"] == 0.0


def test_learning_lowers_the_loss(make: EngineMaker) -> None:
    rows, engine = (
        training_rows(dtype=torch.float32),
        make(tiny_policy(), OptimConfig(lr=1e-2), grad_clip=1.0),
    )
    losses = [step(engine, rows)["train/loss"] for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]


def test_gradients_are_clipped_to_the_limit_and_reported_before_it(make: EngineMaker) -> None:
    """AdamW's first step forgets the size of a gradient, so the clip is seen in the second: it weighs like
    one of that size.
    """

    def second_step(
        scale: float, grad_clip: float | None
    ) -> tuple[dict[str, Tensor], dict[str, float], float]:
        module, rows = tiny_policy(torch.float64), training_rows()
        engine = make(module, OPTIM, grad_clip=grad_clip)
        base = likelihood(rows)

        def scaled(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
            share, metrics = base(outputs, micro)
            return share * scale, metrics

        step(engine, rows)
        gradients = Gradients(module)
        metrics = step(engine, rows, scaled, BatchLimits(20))
        return weights(module), metrics, gradients.norm()

    limit = 1e6  # leaves the first step alone
    _, metrics, norm = second_step(1.0, limit)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-10)
    clipped, metrics, big = second_step(1e7 / norm, limit)
    assert metrics["actor/grad_norm"] == pytest.approx(big, rel=1e-10) and big == pytest.approx(1e7)
    by_hand, _, exact = second_step(1e6 / norm, None)
    assert exact == pytest.approx(limit, rel=1e-5)
    assert max(float((clipped[name] - by_hand[name]).abs().max()) for name in clipped) < 1e-9
    unclipped, _, _ = second_step(1e7 / norm, None)
    assert not same_weights(unclipped, clipped)


@pytest.mark.parametrize("bad", [not_a_number, infinite_gradient, infinite_loss])
def test_a_step_that_is_not_finite_changes_nothing_and_leaves_its_rows(
    make: EngineMaker, bad: LossFn, tmp_path: Path
) -> None:
    module, rows = tiny_policy(), training_rows(dtype=torch.float32)
    engine = make(module, OPTIM, dump_dir=tmp_path / "nonfinite")
    step(engine, rows)
    before, state = weights(module), deepcopy(engine.state_dict()["optimizer"])
    metrics = step(engine, rows, bad, BatchLimits(20))
    assert same_weights(weights(module), before)
    assert all(
        torch.equal(value, state[name][key])
        for name, entry in engine.state_dict()["optimizer"].items()
        for key, value in entry.items()
    )
    assert (metrics["actor/num_updates"], metrics["actor/num_skipped_steps"]) == (
        0.0,
        1.0,
    )
    assert "actor/grad_norm" not in metrics
    (folder,) = folders(tmp_path / "nonfinite")
    kept = DataProto.load_from_disk(folder)
    assert torch.equal(kept.batch["input_ids"], rows.batch["input_ids"])
    assert list(kept.non_tensor_batch["uid"]) == list(rows.non_tensor_batch["uid"])
    step(engine, rows)
    again = make(tiny_policy(), OPTIM)
    step(again, rows)
    step(again, rows)
    assert same_weights(weights(module), weights(again.module)), "as if the bad step had never been"


def detached(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
    return outputs["log_probs"].detach().sum(), Metrics()


def unrelated(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
    """A loss with a gradient that leads to no parameter."""
    return torch.ones((), requires_grad=True) * 3.0, Metrics()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (detached, r"actor: the loss of a micro-batch of \d rows is -\d.* and has no gradient"),
        (
            unrelated,
            r"actor: optimizer step 2 has a loss of \d+, and none of the \d+ parameters that are trained",
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_without_a_gradient_is_no_step(
    make: EngineMaker, bad: LossFn, says: str, dtype: torch.dtype
) -> None:
    module, rows = tiny_policy(dtype), training_rows(dtype=torch.float32)
    engine = make(module, OPTIM)
    step(engine, rows)
    before = weights(module)
    with pytest.raises(TrainingError, match=f"{says}.*it does not depend on the model. Look for detach"):
        step(engine, rows, bad, BatchLimits(20))
    assert same_weights(weights(module), before)
    assert engine.state_dict()["scheduler"]["num_steps"] == 1


def test_a_gradient_of_zeros_is_a_gradient(make: EngineMaker) -> None:
    rows = training_rows(dtype=torch.float32)
    rows.batch["loss_mask"] = torch.zeros_like(rows.batch["loss_mask"])
    engine = make(tiny_policy(), OPTIM)
    found = step(engine, rows, limits=BatchLimits(20))
    assert (found["actor/num_updates"], found["actor/grad_norm"], found["train/loss"]) == (1.0, 0.0, 0.0)


def test_too_many_bad_steps_in_a_row_end_the_run(make: EngineMaker, tmp_path: Path) -> None:
    rows, engine = (
        training_rows(dtype=torch.float32),
        make(tiny_policy(), OPTIM, max_nonfinite_steps=3, dump_dir=tmp_path),
    )
    for _ in range(2):
        step(engine, rows, not_a_number)
    step(engine, rows)
    for _ in range(2):
        step(engine, rows, not_a_number)
    with pytest.raises(TrainingError, match=r"3 in a row of at most 3.*trainer\.max_nonfinite_steps"):
        step(engine, rows, not_a_number)
    assert len(folders(tmp_path)) == 5


def test_a_skipped_step_says_why(make: EngineMaker, caplog: pytest.LogCaptureFixture) -> None:
    """The warning names the column and the place, or the model's own output, and says where to look."""
    said: list[str] = []

    def reason(rows: DataProto, loss: LossFn = not_a_number, module: PolicyModel | None = None) -> str:
        caplog.clear()
        step(make(module or tiny_policy(), OPTIM), rows, loss)
        (record,) = [each for each in caplog.records if each.name.endswith("micro_batch_engine")]
        said.append(record.getMessage())
        return said[-1]

    rows = training_rows(dtype=torch.float32)
    rows.batch["old_log_probs"][6, 2] = float("-inf")
    rows.batch["advantages"][4] = float("nan")  # the whole row is left out of the loss
    text = reason(rows, reinforce)
    assert "old_log_probs is -inf at row 6, response token 2" in text and "has probability 0" in text
    rows = training_rows(dtype=torch.float32)
    rows.batch["advantages"][0, 1] = float("nan")
    text = reason(rows)
    assert "advantages is nan at row 0, response token 1" in text and "scores of the reward function" in text
    assert "so the loss or its gradient overflows" in reason(training_rows(dtype=torch.float32))
    impossible = tiny_policy(tied=False)
    token = int(training_rows().batch["responses"][0, 0])
    impossible.head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    with torch.no_grad():
        impossible.head.bias[token] = float("-inf")
    rows = training_rows(dtype=torch.float32)
    text = reason(rows, likelihood(rows), impossible)
    assert re.search(r"\d+ of the model's log_probs for these rows are not finite", text), text
    assert all("(loss " in text and "1 in a row of at most 3)" in text for text in said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_to_the_bit(make: EngineMaker, dtype: torch.dtype) -> None:
    optim = OptimConfig(lr=1e-3, lr_scheduler_type="cosine", lr_warmup_steps=2, total_training_steps=6)
    rows = training_rows(dtype=torch.float32)
    first = make(tiny_policy(dtype), optim, grad_clip=1.0)
    for _ in range(3):
        step(first, rows)
    state = deepcopy(first.state_dict())
    second = make(tiny_policy(dtype, seed=7), optim, grad_clip=1.0)
    step(second, rows)
    before = [parameter.data_ptr() for parameter in second.module.parameters()]
    second.load_state_dict(state)
    assert same_weights(weights(second.module), weights(first.module))
    for _ in range(2):
        assert step(first, rows) == step(second, rows)
    assert same_weights(weights(second.module), weights(first.module))
    assert [parameter.data_ptr() for parameter in second.module.parameters()] == before, (
        "whoever shares the module sees the new weights"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_state_can_be_loaded(make: EngineMaker, dtype: torch.dtype) -> None:
    """`load_contents` chooses; masters left from before must not undo a model that is taken alone."""
    rows = training_rows(dtype=torch.float32)
    first = make(tiny_policy(dtype, seed=7), OPTIM)
    step(first, rows)
    state = deepcopy(first.state_dict())
    second = make(tiny_policy(dtype), OptimConfig(lr=0.0))
    second.load_state_dict({"model": state["model"]})
    step(second, rows)  # at lr 0 nothing moves
    assert same_weights(weights(second.module), weights(first.module))
    third = make(tiny_policy(), OptimConfig(lr=1e-3, lr_scheduler_type="linear", total_training_steps=4))
    third.load_state_dict({"scheduler": {"num_steps": 2, "nonfinite_in_a_row": 0}})
    assert step(third, rows)["actor/lr"] == pytest.approx(5e-4)


def test_a_fresh_state_forgets_the_moments(make: EngineMaker) -> None:
    rows, fresh = training_rows(dtype=torch.float32), make(tiny_policy(), OPTIM)
    state = deepcopy(fresh.state_dict())
    used = make(tiny_policy(), OPTIM)
    step(used, rows)
    used.load_state_dict(state)
    step(used, rows)
    step(fresh, rows)
    assert same_weights(weights(used.module), weights(fresh.module))


def change(state: dict[str, Any], part: str, name: str, value: Any) -> dict[str, Any]:
    return {**state, part: {**state[part], name: value}}


def test_a_state_that_does_not_fit_is_refused_whole(make: EngineMaker) -> None:
    engine = make(tiny_policy(), OPTIM)
    before, state = weights(engine.module), deepcopy(engine.state_dict())
    moved = {**state, "model": {name: value + 1 for name, value in state["model"].items()}}
    with pytest.raises(CheckpointError, match=r"other parameters.*'odd'"):
        engine.load_state_dict(change(moved, "model", "odd", torch.zeros(1)))
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight is \(2, 2\) in the checkpoint and \(64, 32\) here"
    ):
        engine.load_state_dict(change(moved, "model", "hf.lm_head.weight", torch.zeros(2, 2)))
    assert same_weights(weights(engine.module), before)
    with pytest.raises(CheckpointError, match=r"optimizer is for other parameters.*'odd'"):
        engine.load_state_dict(change(state, "optimizer", "odd", {}))


def test_an_engine_without_an_optimizer_only_reads(make: EngineMaker) -> None:
    engine = make(tiny_policy().requires_grad_(False), None)
    assert engine.forward(training_rows(), LOG_PROBS, WHOLE)["log_probs"].shape == (7, 9)
    with pytest.raises(AssertionError, match="without an optimizer"):
        step(engine, training_rows())


def test_held_weights_are_the_parameters_in_place(make: EngineMaker) -> None:
    module = tiny_policy(torch.bfloat16)
    held = {each.name: each for each in make(module, OPTIM).held_weights()}
    parameters = dict(module.named_parameters())
    assert list(held) == list(parameters), "tied parameters once"
    for name, each in held.items():
        assert each.shape == parameters[name].shape and each.box == Box.whole(each.shape)
        assert each.tensor.data_ptr() == parameters[name].data_ptr() and not each.tensor.requires_grad
        assert each.trained and each.compute_dtype == each.tensor.dtype == torch.bfloat16
    frozen = make(tiny_policy().requires_grad_(False), None)
    assert frozen.vocabulary == VOCABULARY and not any(each.trained for each in frozen.held_weights())


def test_a_policy_becomes_a_hugging_face_folder(make: EngineMaker, tmp_path: Path) -> None:
    engine = make(tiny_policy(), OPTIM)
    step(engine, training_rows(dtype=torch.float32))
    engine.export_hf(tmp_path / "config", with_weights=False)
    assert not list((tmp_path / "config").glob("*.safetensors"))
    engine.export_hf(tmp_path / "whole")
    again = PolicyModel(LlamaForCausalLM.from_pretrained(tmp_path / "whole"))
    assert same_weights(weights(again), {each.name: each.tensor for each in engine.held_weights()})


def test_without_adapters_the_base_answers(make: EngineMaker) -> None:
    rows = training_rows()
    base = make(tiny_policy(), None).forward(rows, LOG_PROBS, WHOLE)["log_probs"]
    adapted = tiny_policy()
    add_lora(adapted, LoraSettings(rank=2))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    engine = make(adapted, OPTIM)
    with engine.without_adapters():
        assert torch.equal(engine.forward(rows, LOG_PROBS, WHOLE)["log_probs"], base)
    assert not torch.equal(engine.forward(rows, LOG_PROBS, WHOLE)["log_probs"], base)
    with pytest.raises(AssertionError, match="no adapters to leave out"):
        make(tiny_policy(), OPTIM).without_adapters()
