"""The exchange and the gathered weights on two ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sync_models import policy, requests, spread, state
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.distributed.shards import Box, local, own_box
from hybridflow.engines.fsdp.sharding import held_weights
from hybridflow.errors import RolloutError
from hybridflow.models.adapters.lora import LoraSettings, add_lora
from hybridflow.models.copies.twin import Twin
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import WeightSource
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.weight_sync.reshard import GatheredTwin, OffloadedSource, Reshard
from ranks import Ranks

CPU = torch.device("cpu")


def twin_of(model: PolicyModel, **settings: Any) -> Twin:
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    return Twin(model, dtypes=dtypes, device=CPU, **settings)


def gather(rank: int, how: str, bucket: int) -> dict[str, Any]:
    model = policy()
    wanted = state(model)
    held = dict(spread(model, how).named_parameters())
    boxes = {name: Box.whole(tensor.shape) for name, tensor in held.items()}
    own = sum(own_box(tensor).numel for tensor in held.values())
    for name, tensor in held.items():
        assert torch.equal(local(tensor), wanted[name][own_box(tensor).within(boxes[name])])
    reshard = Reshard(partial(held_weights, model, {}), boxes, bucket_bytes=bucket)
    out = {name: torch.full(box.shape, torch.nan) for name, box in boxes.items()}
    reshard.run(out)
    assert all(torch.equal(out[name], wanted[name]) for name in wanted)
    lacking = sum(tensor.numel() for tensor in wanted.values()) - own
    return {
        "received": reshard.bytes_received,
        "lacking": 4 * lacking,
        "sent": reshard.bytes_sent,
        "sums": reshard.checksums().tolist(),
    }


@pytest.mark.parametrize("how", ["fsdp", "hsdp", "tensor", "whole"])
def test_shards_of_every_kind_become_whole(two_ranks: Ranks, how: str) -> None:
    first, second = two_ranks.run(gather, how, 1 << 20)
    assert first["received"] == first["lacking"] == second["sent"]
    assert second["received"] == second["lacking"] == first["sent"]
    assert (first["received"] > 0) == (how in ("fsdp", "tensor")), "who holds all of it receives nothing"
    assert first["sums"] == second["sums"] == two_ranks.run(gather, "whole", 1 << 20)[0]["sums"]
    assert two_ranks.run(gather, how, 300) == [first, second], "however small the buckets"


def cast(rank: int) -> None:
    model = spread(policy(), "fsdp")
    held = dict(model.named_parameters())
    for to in (torch.bfloat16, torch.float64):
        boxes = {name: Box.whole(tensor.shape) for name, tensor in held.items()}
        reshard = Reshard(partial(held_weights, model, dict.fromkeys(held, to)), boxes)
        out = {name: torch.empty(box.shape, dtype=to) for name, box in boxes.items()}
        reshard.run(out)
        whole = {
            name: tensor.full_tensor().detach()
            for name, tensor in held.items()
            if isinstance(tensor, DTensor)
        }
        assert all(torch.equal(out[name], tensor.to(to)) for name, tensor in whole.items())
        assert len(whole) == len(out)
        assert reshard.bytes_sent == to.itemsize * sum(local(tensor).numel() for tensor in held.values()), (
            "cast before it travels"
        )


def test_the_sender_casts(two_ranks: Ranks) -> None:
    two_ranks.run(cast)


def sleep_and_wake(rank: int, lora: bool) -> dict[str, Any]:
    settings = LoraSettings(rank=2) if lora else None
    model = policy("qwen2")
    if settings:
        add_lora(model, settings)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.1)
    asked = requests()
    alone = [
        output.token_ids
        for output in sorted(
            NativeEngine(model, eos_token_ids=[2]).generate(asked), key=lambda o: o.request_id
        )
    ]
    spread(model, "fsdp")
    twin = twin_of(model, lora=settings)
    engine = NativeEngine(
        twin.policy, eos_token_ids=[2], source=GatheredTwin(partial(held_weights, model, {}), twin)
    )
    with pytest.raises(RolloutError, match="wake_up"):
        engine.generate(asked)
    engine.wake_up()
    outputs = sorted(engine.generate(asked), key=lambda output: output.request_id)
    storages = [StorageWeakRef(parameter.untyped_storage()) for parameter in twin.policy.parameters()]
    assert not any(each.expired() for each in storages)
    full = sum(parameter.untyped_storage().nbytes() for parameter in twin.policy.parameters())
    engine.sleep()
    rest = sum(parameter.untyped_storage().nbytes() for parameter in twin.policy.parameters())
    assert all(each.expired() for each in storages), "the memory itself is gone"
    hooks = [module for module in twin.policy.modules() if module._forward_pre_hooks or module._forward_hooks]
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).mul_(1.2)
    engine.wake_up()
    moved = sorted(engine.generate(asked), key=lambda output: output.request_id)
    engine.sleep()
    return {
        "same": [output.token_ids for output in outputs] == alone,
        "moved": [output.log_probs for output in moved] != [output.log_probs for output in outputs],
        "full": full,
        "rest": rest,
        "hooks": len(hooks),
        "whole": 4 * sum(parameter.numel() for parameter in model.parameters()),
    }


@pytest.mark.parametrize("lora", [False, True])
def test_a_sharded_policy_generates_on_gathered_weights_that_sleep_frees(
    two_ranks: Ranks, lora: bool
) -> None:
    for found in two_ranks.run(sleep_and_wake, lora):
        assert found == {
            "same": True,
            "moved": True,
            "full": found["whole"],
            "rest": 0,
            "hooks": 0,
            "whole": found["whole"],
        }


def release_again(rank: int, rests: bool) -> list[int]:
    model = spread(policy(), "fsdp")
    twin = twin_of(model)
    source: WeightSource = GatheredTwin(partial(held_weights, model, {}), twin)
    if rests:
        source = OffloadedSource(Resting(), source)  # type: ignore[arg-type]
    held = []
    source.release()
    for version in (1, 2):
        source.acquire(version)
        held.append(sum(parameter.numel() for parameter in twin.policy.parameters()))
        for _ in range(2):
            source.release()
            held.append(sum(parameter.numel() for parameter in twin.policy.parameters()))
    return held


class Resting:
    """An engine whose parameters may always be read."""

    def onload(self) -> None: ...

    def offload(self) -> None: ...


@pytest.mark.parametrize("rests", [False, True])
def test_weights_may_be_released_before_they_came_and_again_and_come_back(
    two_ranks: Ranks, rests: bool
) -> None:
    whole = sum(parameter.numel() for parameter in policy().parameters())
    assert two_ranks.run(release_again, rests) == [[whole, 0, 0, whole, 0, 0]] * 2


def broken(rank: int, how: str) -> str:
    model = spread(policy(), "fsdp")
    twin = twin_of(model)
    weights = GatheredTwin(partial(held_weights, model, {}), twin)
    run = weights.reshard.run

    def damage(out: dict[str, torch.Tensor]) -> None:
        if how == "dropped":
            for tensor in out.values():
                tensor.zero_()
            return
        run(out)
        if rank == 1:  # one rank, one bit
            out["hf.model.layers.1.mlp.up_proj.weight"].view(torch.int32)[3, 4] ^= 1

    weights.reshard.run = damage  # type: ignore[method-assign, assignment]
    with pytest.raises(RolloutError) as caught:
        weights.acquire(7)
    return str(caught.value)


def test_a_flipped_bit_and_a_dropped_exchange_are_found_on_all_ranks(two_ranks: Ranks) -> None:
    elsewhere, here = two_ranks.run(broken, "bit")
    for text in (elsewhere, here):
        assert "version 7" in text and "hf.model.layers.1.mlp.up_proj.weight" in text
    assert "another rank" in elsewhere and "another rank" not in here
    assert all("embed_tokens" in text for text in two_ranks.run(broken, "dropped"))


def lockstep(rank: int, kind: str, how: str, lora: bool) -> dict[str, Any]:
    settings = LoraSettings(rank=2, target_modules=("q_proj", "o_proj", "down_proj")) if lora else None
    model = policy(kind, torch.float64)
    if settings:
        add_lora(model, settings)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    asked = requests(n=3, temperature=0.9)
    alone = sorted(
        NativeEngine(model, eos_token_ids=[2]).generate(asked), key=lambda output: output.request_id
    )
    replica = ReplicaRanks.of_this_rank(2)
    held = {name: own_box(tensor).numel for name, tensor in spread(model, how).named_parameters()}
    twin = twin_of(model, lora=settings, replica=replica)
    source = GatheredTwin(partial(held_weights, model, {}), twin)
    engine = NativeEngine(twin.policy, eos_token_ids=[2], source=source, replica=replica, max_num_seqs=5)
    engine.wake_up()
    received = source.reshard.bytes_received
    outputs = sorted(engine.generate(asked), key=lambda output: output.request_id)
    engine.sleep()
    differences = [abs(a - b) for x, y in zip(outputs, alone) for a, b in zip(x.log_probs, y.log_probs)]
    return {
        "same": [output.token_ids for output in outputs] == [output.token_ids for output in alone],
        "worst": max(differences),
        "received": received,
        "slices": 8 * sum(box.numel for box in source.holding.boxes.values()),
        "whole": 8 * sum(parameter.numel() for parameter in model.parameters()),
        "held": 8 * sum(held.values()),
        "cut": len(twin.slices),
    }


@pytest.mark.parametrize(
    ("kind", "how", "lora"),
    [
        ("llama", "fsdp", False),
        ("qwen2", "fsdp", False),
        ("phi3", "fsdp", False),
        ("llama", "tensor", False),
        ("qwen2", "fsdp", True),
    ],
)
def test_a_replica_of_two_ranks_generates_what_one_does(
    two_ranks: Ranks, kind: str, how: str, lora: bool
) -> None:
    for found in two_ranks.run(lockstep, kind, how, lora):
        assert found["same"] and found["worst"] < 1e-9 and found["cut"] > 0
        assert found["slices"] < 0.75 * found["whole"], "dense layers are cut in half"
        if how == "tensor":  # trained with the slices that it generates with: they stay
            assert found["received"] == 0
        else:
            assert 0 < found["received"] <= found["slices"] - found["held"] / 3


def disagree(rank: int) -> str:
    replica = ReplicaRanks.of_this_rank(2)
    assert replica.smallest(10 + rank) == 10 and replica.sum_(torch.ones(2)).tolist() == [2.0, 2.0]
    replica.check_same(-12345)
    with pytest.raises(RolloutError) as caught:
        replica.check_same(12345 + rank)
    assert dist.get_world_size(replica.group) == 2
    return str(caught.value)


def test_ranks_that_sampled_different_tokens_are_told(two_ranks: Ranks) -> None:
    assert all("different tokens" in text for text in two_ranks.run(disagree))
