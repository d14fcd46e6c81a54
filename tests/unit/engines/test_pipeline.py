"""A model in stages trains as one in one piece: losses, gradients, weights and states, in every mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import training_rows
from sharded_runs import Run, build, loss_of, save_tiny, spec, train, train_on_nothing, weights_of, whole
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.config.model import FSDPConfig
from hybridflow.distributed.shards import is_absent
from hybridflow.engines import BatchLimits, OutputSpec
from hybridflow.engines.pipeline import Pass, one_forward_one_backward
from hybridflow.errors import ModelError
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.models.parallel.stages import Stage, check_stages, cut_layers
from hybridflow.models.policy import PolicyModel
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import ROUTES
from ranks import Ranks

ALL = (tuple(range(7)),)
CLOSE = 2e-6
"""Float32 on both sides; what is left is the order of sums."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model folders by (tied, layers)."""
    return {
        name: save_tiny(tmp_path_factory.mktemp(name), tied=name.startswith("tied"), layers=layers)
        for name, layers in {"tied": 2, "untied": 2, "tied4": 4}.items()
    }


def alone(run: Run) -> dict[str, Any]:
    """The run on one rank, in one piece."""
    return train(0, replace(run, fsdp=FSDPConfig(), sizes={}, activation_offload=False), 1)


def merged(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Entries by name from all stages; what two of them hold is the same to the bit."""
    whole: dict[str, Any] = {}
    for entries in found:
        for name, value in entries.items():
            for key, tensor in value.items() if isinstance(value, dict) else (("", value),):
                other = whole.setdefault(name, value)
                assert torch.equal(tensor, other[key] if key else other), (name, key)
    return whole


def compare(run: Run, ranks: list[dict[str, Any]], one: dict[str, Any], *, bound: float = CLOSE) -> None:
    last = ranks[-len(ranks) // run.sizes["pipeline"] :]
    leaders = last[:: len(last) // len(run.deal)]
    for step, expected in enumerate(one["losses"]):
        assert abs(sum(rank["losses"][step] for rank in leaders) - expected) < bound
        told = leaders[0]["metrics"][step]
        assert told["actor/num_updates"] == 1.0 and "actor/lr" in told
        assert told["actor/grad_norm"] == pytest.approx(
            one["metrics"][step]["actor/grad_norm"], rel=10 * bound
        )
    assert not any("actor/num_updates" in step for rank in ranks[:1] for step in rank["metrics"])
    for rank in leaders:
        rows = [sorted(one["rows"]).index(row) for row in rank["rows"]]
        for key, values in one["before"].items():
            assert (rank["before"][key] - values[rows]).abs().max() < bound, key
    weights = merged([rank["weights"] for rank in ranks])
    state = merged([rank["state"] for rank in ranks])
    assert weights.keys() == one["weights"].keys() and state.keys() == one["state"].keys()
    for name, tensor in one["weights"].items():
        assert (weights[name] - tensor).abs().max() < bound, name
    for name, entry in one["state"].items():
        assert {key: value.dtype for key, value in entry.items()} == {
            key: value.dtype for key, value in state[name].items()
        }
        assert all((state[name][key] - value).abs().max() < bound for key, value in entry.items()), name


CASES: dict[str, dict[str, Any]] = {
    "tied, probed": {"folder": "tied", "model": {"probe": True}},
    "two parts a stage": {"folder": "tied4", "fsdp": FSDPConfig(virtual_pipeline_parallel_size=2)},
    "value model": {"kind": "value"},
    "process reward model": {"kind": "token_score", "limits": BatchLimits(1000)},
    "recomputed, kept gathered": {
        "model": {"gradient_checkpointing": True},
        "fsdp": FSDPConfig(reshard_after_forward=False),
    },
    "all offloaded": {
        "folder": "tied",
        "fsdp": FSDPConfig(param_offload=True, optimizer_offload=True),
        "activation_offload": True,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_two_stages_train_as_one_piece(name: str, two_ranks: Ranks, folders: dict[str, str]) -> None:
    settings = dict(CASES[name])
    run = Run(folders[settings.pop("folder", "untied")], sizes={"pipeline": 2}, deal=ALL, **settings)
    ranks = two_ranks.run(train, run)
    compare(run, ranks, alone(run))
    layers = [{key.split("layers.")[1][0] for key in rank["weights"] if "layers." in key} for rank in ranks]
    assert not layers[0] & layers[1] and all(layers), "each layer is on one stage"


@pytest.mark.parametrize("sizes", [{"pipeline": 2}, {}])
def test_a_loss_of_nothing_is_refused_on_all_ranks(
    sizes: dict[str, int], two_ranks: Ranks, folders: dict[str, str]
) -> None:
    run = Run(folders["untied"], sizes=sizes, **({"deal": ALL} if sizes else {}))
    for said in two_ranks.run(train_on_nothing, run):
        assert "optimizer step 1 has a loss of" in said and "got a gradient from it" in said, said


MIXTURES: dict[str, dict[str, Any]] = {
    "stages x shards": {"sizes": {"pipeline": 2}, "deal": ((0, 1, 3, 4, 5, 6), (2,))},
    "stages x copies, kept gathered, two parts": {
        "folder": "tied4",
        "sizes": {"pipeline": 2, "fsdp_size": 1},
        "deal": ((0, 2, 4, 6), (1, 3, 5)),
        "fsdp": FSDPConfig(reshard_after_forward=False, virtual_pipeline_parallel_size=2),
    },
    "stages x slices": {"sizes": {"pipeline": 2, "tensor": 2}, "deal": ALL},
    "stages x tokens of a row": {"folder": "untied", "sizes": {"pipeline": 2, "sequence": 2}, "deal": ALL},
    "stages x tokens in a ring": {
        "sizes": {"pipeline": 2, "sequence": 2},
        "deal": ALL,
        "fsdp": FSDPConfig(context_parallel="ring"),
    },
    "four stages": {"folder": "tied4", "sizes": {"pipeline": 4}, "deal": ALL},
    "adapters, on the CPU": {
        "folder": "untied",
        "sizes": {"pipeline": 2},
        "deal": ((0, 2, 4, 6), (1, 3, 5)),
        "lora": LoraSettings(rank=4),
        "fsdp": FSDPConfig(offload_policy=True),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_four_ranks_train_as_one(name: str, four_ranks: Ranks, folders: dict[str, str]) -> None:
    settings = dict(MIXTURES[name])
    run = Run(folders[settings.pop("folder", "tied")], **settings)
    sums_otherwise = "tensor" in run.sizes or run.fsdp.context_parallel == "ring"
    bound = 1e-5 if sums_otherwise else CLOSE
    compare(run, four_ranks.run(train, run, 4), alone(run), bound=bound)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"pipeline": 2}, {"pipeline": 2, "tensor": 2}])
def test_float64_weights_after_a_step(
    sizes: dict[str, int], four_ranks: Ranks, folders: dict[str, str]
) -> None:
    deal = ALL if "tensor" in sizes else ((0, 2, 4, 6), (1, 3, 5))
    run = Run(
        folders["tied"], sizes=sizes, deal=deal, model={"dtype": "float64"}, dtype=torch.float64, steps=1
    )
    compare(run, four_ranks.run(train, run, 4), alone(run), bound=1e-10)


def replays(rank: int, run: Run, world_size: int, routes: Tensor) -> dict[str, Any]:
    """A step that replays routes, as `train` reports it, with the auxiliary loss; before it, live routes."""
    engine = build(run, world_size)
    engine.policy.follow_routes().balance_coef = 0.5
    part = range(7) if world_size == 1 else run.deal[engine.layout.data_rank(rank)]
    rows = training_rows(dtype=torch.float32)
    routed = rows | DataProto.from_dict({ROUTES: routes})
    batch = routed.select_idxs(list(part))
    before = engine.forward(rows.select_idxs(list(part)), replace(spec(run), routes=True), run.limits)
    metrics = engine.train_mini_batch(batch, spec(run), loss_of(run, rows), run.limits).to_floats()
    state = engine.state_dict()["optimizer"]
    return {
        "rows": list(part),
        "before": before,
        "losses": [],
        "metrics": [metrics],
        "weights": weights_of(engine),
        "state": {
            name: {key: whole(value) for key, value in entry.items()}
            for name, entry in state.items()
            if not is_absent(entry["exp_avg"])
        },
    }


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48}
    return str(create_tiny_model(tmp_path_factory.mktemp("experts"), experts=4, **sizes))


def compare_replays(ranks: Ranks, run: Run, processes: int) -> None:
    """Routes that differ from the live ones, and the auxiliary loss, in stages and in one piece.

    Each pass has one row, because the auxiliary loss depends on how a mini-batch is cut.
    """
    run = replace(run, limits=BatchLimits(24, 1), model={"dtype": "float64"}, dtype=torch.float64)
    alone = replace(run, sizes={}, fsdp=FSDPConfig(), deal=ALL)
    live = build(alone, 1).forward(training_rows(), OutputSpec(log_probs=True, routes=True), run.limits)[
        "routes"
    ]
    routes = torch.where(live >= 0, 3 - live, live)
    one = replays(0, alone, 1, routes)
    found = ranks.run(replays, run, processes, routes)
    compare(run, found, one, bound=1e-10)
    told = [rank["metrics"][0] for rank in found if "actor/moe/flips" in rank["metrics"][0]]
    assert len(told) == 1 and told[0]["actor/moe/flips"] > 0
    for name, value in one["metrics"][0].items():
        if "/moe/" in name:
            assert told[0][name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("parts", [1, 2])
def test_stages_record_and_replay_routes(parts: int, two_ranks: Ranks, experts: str, tmp_path: Path) -> None:
    if parts == 2:
        sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48}
        experts = str(create_tiny_model(tmp_path, experts=4, layers=4, **sizes))
    fsdp = FSDPConfig(virtual_pipeline_parallel_size=parts)
    compare_replays(two_ranks, Run(experts, sizes={"pipeline": 2}, deal=ALL, steps=1, fsdp=fsdp), 2)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}])
def test_stages_of_a_mixture_of_experts_share_them(
    four_ranks: Ranks, experts: str, sizes: dict[str, int]
) -> None:
    deal: Any = ((0, 1, 3, 4, 5, 6), (2,))  # the second has passes that weigh nothing
    if sizes:
        deal = ALL
    run = Run(experts, sizes={"pipeline": 2, "experts": 2, **sizes}, deal=deal, steps=1)
    compare_replays(four_ranks, run, 4)


def test_adapters_train_in_stages(two_ranks: Ranks, folders: dict[str, str]) -> None:
    run = Run(folders["untied"], sizes={"pipeline": 2}, deal=ALL, lora=LoraSettings(rank=4))
    compare(run, two_ranks.run(train, run), alone(run))


@pytest.mark.parametrize(
    ("stages", "parts", "micros"), [(2, 2, 1), (3, 3, 5), (4, 4, 2), (2, 4, 5), (3, 9, 7), (4, 8, 3)]
)
def test_each_pass_comes_once_and_after_what_it_needs(stages: int, parts: int, micros: int) -> None:
    orders = one_forward_one_backward(stages, parts, micros)
    done: set[Pass] = set()
    places = [0] * stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = len(done)
        for stage, order in enumerate(orders):
            if places[stage] == len(order):
                continue
            each = order[places[stage]]
            needs = {Pass(True, each.part - 1, each.micro)} if each.forward and each.part else set()
            if not each.forward:
                needs = {Pass(True, each.part, each.micro)}
                if each.part < parts - 1:
                    needs.add(Pass(False, each.part + 1, each.micro))
            if needs <= done:
                assert each not in done and each.part % stages == stage
                done.add(each)
                places[stage] += 1
        assert len(done) > before, "every stage waits"
    assert len(done) == 2 * parts * micros
    for stage, order in enumerate(orders):  # two stages must agree on the order of their messages
        following = orders[(stage + 1) % stages]
        sent = [(p + 1, m) for forward, p, m in order if forward and p + 1 < parts]
        assert sent == [(p, m) for forward, p, m in following if forward and p]
        back = [(p - 1, m) for forward, p, m in following if not forward and p]
        assert back == [(p, m) for forward, p, m in order if not forward and p + 1 < parts]


def test_a_stage_holds_no_more_activations_than_stages() -> None:
    for stage, order in enumerate(one_forward_one_backward(4, 4, 12)):
        held = [sum(1 if each.forward else -1 for each in order[:end]) for end in range(len(order) + 1)]
        assert max(held) == 4 - stage


def test_layers_are_cut_by_what_they_cost() -> None:
    assert cut_layers([1.0] * 8, 0.0, 0.0, 2) == [range(4), range(4, 8)]
    assert cut_layers([1.0] * 8, 0.0, 3.0, 2) == [range(5), range(5, 8)], "the head is worth three layers"
    assert cut_layers([1.0, 1.0, 4.0, 1.0, 1.0], 0.0, 0.0, 3) == [range(2), range(2, 3), range(3, 5)]
    with pytest.raises(ModelError, match="pipeline_parallel_size"):
        cut_layers([1.0] * 3, 0.0, 0.0, 4)


def _tiny(kind: str, **changes: Any) -> PolicyModel:
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        **changes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PolicyModel(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "olmoe"])
def test_families_compute_in_stages_as_in_one_piece(kind: str) -> None:
    check_stages(_tiny(kind))


def test_a_family_that_does_more_with_its_embeddings_is_refused() -> None:
    with pytest.raises(ModelError, match=r"GraniteForCausalLM .*pipeline_parallel_size=1"):
        check_stages(_tiny("granite", embedding_multiplier=3.0))


def test_a_family_without_a_plan_is_refused() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=32, n_layer=2, n_head=4)
    policy = PolicyModel(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    with pytest.raises(ModelError, match=r"GPT2Model .*no plan of stages"):
        Stage(policy, stage=0, stages=2, parts=2)


def test_stages_that_hold_a_tie_agree_on_it() -> None:
    tied: Tensor = _tiny("llama", tie_word_embeddings=True).head.weight
    policy = _tiny("llama", tie_word_embeddings=True)
    stages = [Stage(policy, stage=number, stages=2, parts=2) for number in range(2)]
    assert all(policy.head.weight not in stage.absent for stage in stages) and tied.shape == (64, 32)
    assert all(stage.tied for stage in stages)


def test_a_stage_with_nothing_to_train_is_refused() -> None:
    policy = _tiny("llama", tie_word_embeddings=False)
    policy.requires_grad_(False)
    policy.hf.base_model.layers[0].requires_grad_(True)
    Stage(policy, stage=0, stages=2, parts=2).check_trained()
    with pytest.raises(ModelError, match=r"stage of the layers 1: set model.target_modules"):
        Stage(policy, stage=1, stages=2, parts=2).check_trained()
