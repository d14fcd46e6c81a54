"""The server over the plain wire: its numbers are those of loops without it, runs do not touch each other, a
server that begins anew goes on from what was saved, and no request ends it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from starlette.testclient import TestClient
from torch import Tensor

from hybridflow.errors import ConfigError
from hybridflow.models.adapters.lora import LoraSettings, add_lora, load_with_peft
from hybridflow.models.attention.layouts import PackedLayout
from hybridflow.models.files.build import build_policy, generation_end_tokens
from hybridflow.models.policy import PolicyModel
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.randomness import derive_seed
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.tinker import service as service_module
from hybridflow.tinker import store as store_module
from hybridflow.tinker.app import build_tinker_app
from hybridflow.tinker.model import ALPHA, OPTIMIZER, Sampling, SharedBase
from hybridflow.tinker.service import TinkerService
from hybridflow.tinker.store import Store
from hybridflow.tinker.wire import number_field
from plain_tinker import (
    KEY,
    Failed,
    PlainClient,
    PlainRun,
    Row,
    floats,
    request_message,
    tensor_message,
)

ADAM = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def shared_base(folder: Path, dtype: str) -> SharedBase:
    return SharedBase(
        str(create_tiny_model(folder / "tiny", hidden=64, intermediate=96)),
        device=torch.device("cpu"),
        dtype=dtype,
        pass_tokens=24,  # rows of a request are cut into several passes
        max_rows=8,
        memory_share=0.01,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> SharedBase:
    return shared_base(tmp_path_factory.mktemp("model"), "float32")


@contextmanager
def serving(base: SharedBase, folder: Path, **settings: Any) -> Iterator[TestClient]:
    model = str(base.policy.config.name_or_path)
    service = TinkerService(base, Store(folder), "tiny", model, **settings)
    try:
        yield TestClient(build_tinker_app(service, key=KEY), raise_server_exceptions=False)
    finally:
        service.close(60.0)


@pytest.fixture
def http(base: SharedBase, tmp_path: Path) -> Iterator[TestClient]:
    with serving(base, tmp_path) as client:
        yield client


@pytest.fixture
def client(http: TestClient) -> PlainClient:
    return PlainClient(http)


def rows(seed: int, count: int = 4) -> list[Row]:
    """Rows of different lengths whose first targets weigh nothing."""
    torch.manual_seed(seed)
    made: list[Row] = []
    for place in range(count):
        tokens = torch.randint(5, 90, (7 + 3 * place,)).tolist()
        weights = [0.0, 0.0, *(1.0 for _ in tokens[3:])]
        made.append((tokens[:-1], {"target_tokens": tokens[1:], "weights": weights}))
    return made


def plain_policy(base: SharedBase, rank: int, seed: int) -> PolicyModel:
    policy = build_policy(str(base.policy.config.name_or_path), device="cpu", dtype="float32")
    add_lora(policy, LoraSettings(rank, ALPHA, seed=seed))
    return policy


def plain_log_probs(policy: PolicyModel, tokens: Any, targets: Any) -> Tensor:
    """Log-probs of one row's targets, by a softmax over whole logits."""
    ids = torch.tensor(tokens)[None]
    layout = PackedLayout.build((ids.shape[1],), ids.device)
    states = policy.hidden(ids, torch.arange(ids.shape[1])[None], layout)
    scores = torch.log_softmax(policy.logits(states[0]).double(), -1)
    return scores.gather(-1, torch.tensor(targets)[:, None])[:, 0]


def adam(policy: PolicyModel) -> torch.optim.AdamW:
    trained = [each for each in policy.parameters() if each.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def test_supervised_losses_are_those_of_a_plain_loop(base: SharedBase, client: PlainClient) -> None:
    run = client.train("tiny", rank=4, seed=11)
    policy = plain_policy(base, 4, 11)
    optimizer = adam(policy)
    curve = []
    for step in range(12):
        batch = rows(step % 3)
        plain = torch.zeros((), dtype=torch.float64)
        for tokens, inputs in batch:
            log_probs = plain_log_probs(policy, tokens, inputs["target_tokens"])
            plain = plain - (log_probs * torch.tensor(inputs["weights"])).sum()
        optimizer.zero_grad()
        plain.backward()
        found, loss = run.forward_backward(batch, "cross_entropy")
        num_tokens = sum(len(tokens) for tokens, _ in batch)
        assert abs(loss - float(plain.detach())) / num_tokens < 1e-5, step
        assert [len(each) for each in found] == [len(tokens) for tokens, _ in batch]
        torch.testing.assert_close(found[-1].double(), log_probs.detach(), rtol=0, atol=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(
            [each for each in policy.parameters() if each.requires_grad], 5.0
        )
        assert run.step(**ADAM, grad_clip_norm=5.0) == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        curve.append(loss / num_tokens)
    assert curve[-1] < curve[0] - 0.1


def test_importance_sampling_losses_are_those_of_a_plain_loop(base: SharedBase, client: PlainClient) -> None:
    run = client.train("tiny", rank=4, seed=12)
    policy = plain_policy(base, 4, 12)
    optimizer = adam(policy)
    ends = generation_end_tokens(str(base.policy.config.name_or_path))
    prompt = [20, 30, 40]
    for step in range(10):
        sampler = run.sampler()
        responses = sampler.responses(prompt, 4, max_tokens=8, seed=step)
        engine = NativeEngine(policy, eos_token_ids=ends, max_num_seqs=4, gpu_memory_utilization=0.01)
        engine.set_version(step)
        sampling = SamplingParams(8)
        requests = [
            GenerationRequest(place, Prompt(tuple(prompt)), sampling, derive_seed(step, "tinker", place))
            for place in range(4)
        ]
        outputs = sorted(engine.generate(requests), key=lambda output: output.request_id)
        assert [tokens for tokens, _ in responses] == [output.token_ids for output in outputs], step
        rewards = torch.tensor([float(sum(tokens) % 7) for tokens, _ in responses])
        advantages = rewards - rewards.mean() + 0.1
        batch: list[Row] = []
        plain = torch.zeros((), dtype=torch.float64)
        for (tokens, old), output, advantage in zip(responses, outputs, advantages.tolist(), strict=True):
            before = len(prompt) - 1
            inputs = {
                "target_tokens": [0] * before + tokens,
                "logprobs": [0.0] * before + old.tolist(),
                "advantages": [0.0] * before + [advantage] * len(tokens),
            }
            batch.append((prompt + tokens[:-1], inputs))
            now = plain_log_probs(policy, prompt + tokens[:-1], inputs["target_tokens"])[before:]
            ratio = (now - torch.tensor(output.log_probs)).exp()
            assert abs(float(ratio.detach().log().abs().max())) < 1e-4  # what is sampled is what is trained
            plain = plain - (ratio * advantage).sum()
        optimizer.zero_grad()
        plain.backward()
        _, loss = run.forward_backward(batch, "importance_sampling")
        assert abs(loss - float(plain.detach())) < 1e-5 * max(1.0, abs(float(plain.detach()))), step
        run.step(**ADAM)
        optimizer.step()


def curve(run: PlainRun, seed: int, steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        losses.append(run.forward_backward(rows(seed + step), "cross_entropy")[1])
        run.step(**ADAM)
    return losses


def test_two_runs_at_once_have_the_bits_of_each_alone(http: TestClient) -> None:
    alone = [curve(PlainClient(http).train("tiny", rank, seed), seed) for rank, seed in ((2, 5), (8, 6))]
    first, second = PlainClient(http).train("tiny", 2, 5), PlainClient(http).train("tiny", 8, 6)
    together: list[list[float]] = [[], []]
    for step in range(4):
        for place, (run, seed) in enumerate(((first, 5), (second, 6))):
            together[place].append(run.forward_backward(rows(seed + step), "cross_entropy")[1])
        sampler = first.sampler()
        sampler.responses([20, 30], max_tokens=3, seed=1)
        for run in (second, first):
            run.step(**ADAM)
    assert together == alone


def test_gradients_add_up_until_the_step_and_forward_adds_none(client: PlainClient) -> None:
    whole, cut = client.train("tiny"), client.train("tiny")
    batch = rows(1)
    whole.forward_backward(batch, "cross_entropy")
    for row in batch:
        cut.forward_backward([row], "cross_entropy")
        cut.forward_backward(rows(2), "cross_entropy", forward_only=True)
    assert cut.step(**ADAM) == pytest.approx(whole.step(**ADAM), rel=1e-5)
    with pytest.raises(Failed, match="there are no gradients"):
        cut.step(**ADAM)


def test_several_targets_at_a_place(client: PlainClient) -> None:
    run = client.train("tiny")
    tokens = [20, 30, 40]
    targets = [[30, 7], [40, 8], [50, 9]]
    one = []
    for k in range(2):
        inputs: dict[str, Any] = {"target_tokens": [place[k] for place in targets], "weights": [1.0] * 3}
        one.append(run.forward_backward([(tokens, inputs)], "cross_entropy")[0][0])
    norm = run.step(learning_rate=0.0)
    inputs = {"target_tokens": targets, "weights": [[1.0, 1.0]] * 3}
    (both,), loss = run.forward_backward([(tokens, inputs)], "cross_entropy")
    torch.testing.assert_close(both, torch.stack(one, 1), rtol=0, atol=1e-5)
    assert loss == pytest.approx(-float(both.sum()), rel=1e-5)
    assert run.step(learning_rate=0.0) == pytest.approx(norm, rel=1e-4)


def test_layers_are_chosen(base: SharedBase, client: PlainClient, tmp_path: Path) -> None:
    run = client.train("tiny", train_mlp=False)
    run.forward_backward(rows(0), "cross_entropy")
    run.step(**ADAM)
    path = run.save("attention").removeprefix("tinker://")
    config = json.loads((tmp_path / "runs" / path / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == ALPHA
    kinds = {name.rsplit(".", 1)[-1] for name in config["target_modules"]}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj"}
    policy = build_policy(str(base.policy.config.name_or_path), device="cpu", dtype="float32")
    load_with_peft(policy, tmp_path / "runs" / path)  # other readers of the format read it
    (tokens, inputs), *_ = rows(0)
    (found, *_), _ = run.forward_backward(rows(0), "cross_entropy", forward_only=True)
    wanted = plain_log_probs(policy, tokens, inputs["target_tokens"]).detach()
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


def test_samples_are_of_the_weights_they_were_asked_with(client: PlainClient) -> None:
    run = client.train("tiny", rank=8)
    before = run.sampler()
    asked: dict[str, Any] = {"max_tokens": 6, "seed": 3}
    wanted = before.responses([20, 30, 40], 3, **asked)
    curve(run, 0)
    after = run.sampler()
    assert [each for each, _ in before.responses([20, 30, 40], 3, **asked)] == [each for each, _ in wanted]
    assert [each for each, _ in after.responses([20, 30, 40], 3, **asked)] != [each for each, _ in wanted]
    fresh = client.sampler(base_model="tiny").responses([20, 30, 40], 3, **asked)
    assert [each for each, _ in fresh] == [each for each, _ in wanted]  # a new adapter changes nothing
    assert len({tuple(each) for each, _ in wanted}) > 1


def test_log_probs_of_prompts_and_stops(client: PlainClient) -> None:
    run = client.train("tiny")
    curve(run, 3, 2)
    sampler = run.sampler()
    tokens = [20, 30, 40, 50]
    message = sampler.sample(tokens, max_tokens=1, prompt_logprobs=True, topk_sample_logprobs=2)
    scores = floats(message[2][0])
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 3}
    (trained,), _ = run.forward_backward([(tokens[:-1], inputs)], "cross_entropy", forward_only=True)
    assert scores[0].isnan()
    torch.testing.assert_close(scores[1:], trained, rtol=0, atol=1e-5)
    last = floats(sampler.sample(tokens, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=2)[2][0])
    assert last.isnan().tolist() == [True, True, False, False] and torch.equal(last[2:], scores[2:])
    greedy = {"max_tokens": 8, "temperature": 0.0, "stop": []}
    ((whole, _),) = sampler.responses(tokens, **greedy)
    assert len(whole) == 8
    stop = whole[2]
    ((cut, _),) = sampler.responses(tokens, **{**greedy, "stop": [stop]})
    assert cut == whole[: whole.index(stop) + 1]


def test_requests_are_done_in_the_order_of_their_numbers_and_once(client: PlainClient) -> None:
    run = client.train("tiny")
    step = {"adam_params": ADAM, "model_id": run.model_id, "seq_id": 3}
    late = client.ask("optim_step", **step)
    second = run.send(rows(1), "cross_entropy", 2).json()
    first = run.send(rows(0), "cross_entropy", 1).json()
    again = run.send(rows(0), "cross_entropy", 1).json()
    assert again == first
    norm = client.fetch(late)["metrics"]["grad_norm"]
    assert client.fetch(second)[3] and client.ask("optim_step", **step) == late
    other = client.train("tiny")
    other.forward_backward([*rows(0), *rows(1)], "cross_entropy")
    assert other.step(**ADAM) == pytest.approx(norm, rel=1e-5)


def test_a_number_that_does_not_come_is_not_waited_for_for_ever(
    client: PlainClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "GAP_S", 0.0)
    run = client.train("tiny")
    with pytest.raises(Failed, match="request 5 of the run waits for 1"):
        client.fetch(run.send(rows(0), "cross_entropy", 5).json())


def test_a_server_that_begins_anew_goes_on_from_what_was_saved(base: SharedBase, tmp_path: Path) -> None:
    with serving(base, tmp_path) as http:
        client = PlainClient(http)
        run = client.train("tiny", rank=4, seed=9)
        curve(run, 0, 3)
        path = run.save("three")
        sampler = run.sampler()
        wanted = sampler.responses([20, 30], 2, max_tokens=5, seed=1)
        at = run.seq
        rest = curve(run, 3, 3)
        never_saved = client.train("tiny")
        curve(never_saved, 0, 1)
    with serving(base, tmp_path) as http:
        client.http = http
        again = sampler.responses([20, 30], 2, max_tokens=5, seed=1)
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in wanted]
        assert curve(client.load(path), 3, 3) == rest  # a new run from the checkpoint
        assert curve(client.load(path, optimizer=False), 3, 3)[1:] != rest[1:]
        run.seq = at - 1  # the run itself: the save was its last request that counts
        assert curve(run, 3, 3) == rest
        answer = client.post("get_info", model_id=never_saved.model_id)
        assert answer.status_code == 404 and "nothing of this run was saved" in answer.text
        lost = client.post("retrieve_future", request_id=f"{run.model_id}:2")
        assert lost.status_code == 410
        listed = client.get(f"training_runs/{run.model_id}/checkpoints")["checkpoints"]
        assert [each["tinker_path"] for each in listed] == [path]


def test_masters_of_half_precision_are_in_a_state(tmp_path: Path) -> None:
    small = {**ADAM, "learning_rate": 1e-5}  # less than bfloat16 can tell apart in one step
    with serving(shared_base(tmp_path, "bfloat16"), tmp_path / "runs") as http:
        client = PlainClient(http)
        run = client.train("tiny", rank=4, seed=9)
        losses: list[list[float]] = [[], []]
        for step in range(6):
            run.forward_backward(rows(step), "cross_entropy")
            run.step(**ADAM if step < 2 else small)
        resumed = client.load(run.save("six"))
        for place, each in enumerate((run, resumed)):
            for step in range(6, 9):
                losses[place].append(each.forward_backward(rows(step), "cross_entropy")[1])
                each.step(**small)
        assert losses[0] == losses[1]
        paths = [each.save("end").removeprefix("tinker://") for each in (run, resumed)]
        states = [load_file(tmp_path / "runs" / "runs" / path / OPTIMIZER) for path in paths]
        masters = [name for name in states[0] if name.endswith("/master")]
        assert masters and all(states[0][name].dtype == torch.float32 for name in masters)
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_folder_has_one_server(base: SharedBase, tmp_path: Path) -> None:
    with serving(base, tmp_path), pytest.raises(ConfigError, match="belongs to a server that runs"):
        Store(tmp_path)


def test_checkpoints_are_listed_expire_and_are_removed(client: PlainClient) -> None:
    run = client.train("tiny")
    curve(run, 0, 1)
    path = run.save("a", user_metadata={"k": "v"})
    with pytest.raises(Failed, match="has weights/a already"):
        run.save("a")
    assert run.save("a", overwrite=True) == path
    with pytest.raises(Failed, match="letters, digits, dots"):
        run.save("../b")
    run.sampler()
    (listed,) = client.get("checkpoints")["checkpoints"]  # sampler weights without a name are not listed
    assert (listed["checkpoint_id"], listed["checkpoint_type"]) == ("weights/a", "training")
    info = client.ask("weights_info", tinker_path=path)
    assert (info["lora_rank"], info["train_unembed"], info["train_mlp"]) == (4, False, True)
    run.forward_backward(rows(0), "cross_entropy")
    (told,) = client.get("training_runs")["training_runs"]
    assert told["last_checkpoint"]["tinker_path"] == path
    assert told["last_request_time"] > told["last_checkpoint"]["time"]
    url = f"/api/v1/training_runs/{run.model_id}/checkpoints/weights/a"
    answer = client.http.put(f"{url}/ttl", json={"ttl_seconds": 3600}, headers=client.headers)
    assert answer.status_code == 204 and client.get("checkpoints")["checkpoints"][0]["expires_at"]
    assert client.http.delete(url, headers=client.headers).status_code == 204
    assert client.get("checkpoints")["checkpoints"] == []
    answer = client.post("weights_info", tinker_path=path)
    assert answer.status_code == 400 and "there are no weights at" in answer.text


def test_a_wrong_key_is_401(http: TestClient) -> None:
    for headers in ({}, {"X-API-Key": "tml-another"}):
        answer = http.post("/api/v1/create_session", json={}, headers=headers)
        assert answer.status_code == 401 and "X-API-Key" in answer.text and "TINKER_API_KEY" in answer.text


def bad_requests(run: PlainRun) -> dict[str, tuple[str, dict[str, Any]]]:
    """Bodies by a piece of the reason why each is refused."""
    client = run.client
    number = {"model_id": run.model_id, "seq_id": 1}
    sampled: dict[str, Any] = {
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {},
        "base_model": "tiny",
    }
    model = {
        "session_id": client.session,
        "model_seq_id": 7,
        "base_model": "tiny",
        "lora_config": {"rank": 4},
    }
    return {
        "is not served here, only 'tiny'": ("create_model", {**model, "base_model": "other"}),
        "lora_config.rank": ("create_model", {**model, "lora_config": {"rank": 0}}),
        "optimizer_config.type": ("create_model", {**model, "optimizer_config": {"type": "dimuon"}}),
        "there is no session": ("create_model", {**model, "session_id": "none"}),
        "there is no training run": ("optim_step", {**number, "model_id": "x", "adam_params": {}}),
        "adam_params.momentum": ("optim_step", {**number, "adam_params": {"momentum": 1.0}}),
        "kind": ("save_weights_for_sampler", {**number, "kind": "inflight"}),
        "there are no weights": ("create_sampling_session", {"session_id": client.session,
            "sampling_session_seq_id": 9, "model_path": "tinker://a/weights/../../../etc"}),
        "there is no sampling session": ("asample", {**sampled, "sampling_session_id": "x"}),
        "prompt is empty": ("asample", {**sampled, "prompt": {"chunks": []}}),
        "the model's are 0..": ("asample", {**sampled, "prompt": {"chunks": [{"tokens": [10**6]}]}}),
        "temperature=-1": ("asample", {**sampled, "sampling_params": {"temperature": -1.0, "max_tokens": 1}}),
        "positions": ("asample", {**sampled, "sampling_params": {"max_tokens": 10**6}}),
        "prompt_alt_tokens_k": ("asample", {**sampled, "prompt_alt_tokens_k": 2}),
        "model_seq_id": ("create_model", {**model, "model_seq_id": 10**300}),
        "seq_id": ("optim_step", {"model_id": run.model_id, "seq_id": 2**66, "adam_params": {}}),
        "ttl_seconds": ("save_weights", {**number, "ttl_seconds": 10**12}),
        "prompt.chunks.0.tokens.0": ("asample", {**sampled, "prompt": {"chunks": [{"tokens": [10**30]}]}}),
        "is not served": ("save_weights_external", number),
        "send model_id and seq_id": ("load_weights", {"path": "tinker://a/weights/b", "optimizer": True})
    }  # fmt: skip


def test_a_bad_request_has_a_reason_and_ends_nothing(client: PlainClient) -> None:
    run = client.train("tiny")
    for told, (path, body) in bad_requests(run).items():
        answer = client.post(path, **body)
        assert answer.status_code in (400, 404) and told in answer.text, (told, answer.text)
    numbers = [request_message(run.model_id, seq, [], "ppo", {}, False) for seq in (0, 2**66)]
    for body in (b"", b"\xff\xff", b"{}", *numbers):
        answer = client.http.post("/api/v1/forward_backward", content=body, headers=client.headers)
        assert answer.status_code in (400, 404), answer.text
    run.seq = 1  # which one of them had, and spent
    for query in (f"limit={10**20}", "limit=-1", "offset=-1"):
        answer = client.http.get(f"/api/v1/checkpoints?{query}", headers=client.headers)
        assert answer.status_code == 400 and query.partition("=")[0] in answer.text
    with pytest.raises(Failed, match="token ids from 1000000"):
        run.forward_backward([([10**6], {"target_tokens": [1], "weights": [1.0]})], "cross_entropy")
    with pytest.raises(Failed, match="wanted finite numbers"):
        run.step(learning_rate=-1.0)
    with pytest.raises(Failed, match="choose from cross_entropy"):
        run.forward_backward(rows(0), "stable_reinforce")
    huge = [([20, 30], {"target_tokens": [30, 40], "weights": [3e38, 3e38]})]
    run.forward_backward(huge, "cross_entropy")
    with pytest.raises(Failed, match="norm of the gradients is"):
        run.step(**ADAM)
    other = client.train("tiny")
    assert curve(run, 0) == curve(other, 0)  # nothing of all this is left in the run


def test_a_request_that_is_refused_has_spent_its_number(client: PlainClient) -> None:
    run, other = client.train("tiny"), client.train("tiny")
    for path, body in (
        ("save_weights", {"path": "x", "ttl_seconds": 0}),
        ("optim_step", {"adam_params": {"momentum": 1.0}}),
        ("load_weights", {"path": 1, "optimizer": True}),
        ("save_weights_external", {}),
    ):
        assert client.post(path, **body, **run.next()).status_code in (400, 404)
    bad = tensor_message(1.0) + number_field(4, 3)
    with pytest.raises(Failed, match="the body is no request for forward_backward"):
        run.forward_backward([([1], {"target_tokens": [2], "weights": bad})], "cross_entropy")
    assert curve(run, 0) == curve(other, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_to_what_is_not_finite_changes_nothing(tmp_path: Path, dtype: str) -> None:
    with serving(shared_base(tmp_path, dtype), tmp_path / "runs") as http:
        client = PlainClient(http)
        run, other = client.train("tiny"), client.train("tiny")
        for _ in range(2):  # without moments, and with some
            for odd, told in (
                ({"eps": 0.0}, "eps of at least 1e-30"),
                ({"learning_rate": 1e300}, "a learning rate of at most 1"),
                ({"weight_decay": 1e300}, "the weights would not be finite"),
            ):
                run.forward_backward(rows(5), "cross_entropy")
                with pytest.raises(Failed, match=told):
                    run.step(**{**ADAM, **odd})
            with pytest.raises(Failed, match="there are no gradients"):
                run.step(**ADAM)
            assert curve(run, 0) == curve(other, 0)


def test_a_run_that_loads_another_adapter_says_so(client: PlainClient) -> None:
    run, small = client.train("tiny", rank=4), client.train("tiny", rank=2, train_mlp=False)
    body = {"path": small.save("small"), "optimizer": False}
    client.fetch(client.ask("load_weights", **body, **run.next()))
    assert client.ask("get_info", model_id=run.model_id)["lora_rank"] == 2
    info = client.ask("weights_info", tinker_path=run.save("again"))
    assert (info["lora_rank"], info["train_attn"], info["train_mlp"]) == (2, True, False)


@pytest.mark.parametrize("odd", ["\ud800", float("nan")])
def test_what_no_listing_could_say_again_is_refused(client: PlainClient, odd: Any) -> None:
    headers = {**client.headers, "content-type": "application/json"}
    for field, value in (("user_metadata", {"deep": [odd]}), ("display_name", odd), ("tags", [odd])):
        body = json.dumps({field: value})
        answer = client.http.post("/api/v1/create_session", content=body, headers=headers)
        assert answer.status_code == 400 and field in answer.text, answer.text


def test_listings_pass_over_what_is_saved_or_removed_meanwhile(
    client: PlainClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = client.train("tiny")
    paths = [run.save("a"), run.save("b")]
    folder = tmp_path / "runs" / run.model_id / "weights"
    shutil.copytree(folder / "a", folder / ".tmp_c")
    listed = client.get("checkpoints")["checkpoints"]
    assert sorted(each["tinker_path"] for each in listed) == paths
    read = store_module._facts

    def facts(folder: Path) -> dict[str, Any]:
        if folder.name == "a":
            raise FileNotFoundError(folder)
        return read(folder)

    monkeypatch.setattr(store_module, "_facts", facts)
    assert [each["tinker_path"] for each in client.get("checkpoints")["checkpoints"]] == paths[1:]
    answer = client.post("weights_info", tinker_path=paths[0])
    assert answer.status_code == 400 and "there are no weights" in answer.text


def test_a_prompt_that_cannot_be_scored_fails_alone(
    base: SharedBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[int, str | None] = {}
    asked = [Sampling((20 + place,), SamplingParams(2), 1, 1, place) for place in range(2)]
    for each in asked:
        each.finish = lambda each, problem: told.update({each.num_scored: problem})
    score = base._score

    def broken(each: Sampling) -> Tensor | None:
        if each.num_scored:
            raise RuntimeError("out of memory")
        return score(each)

    monkeypatch.setattr(base, "_score", broken)
    base.sample(None, 0, lambda: [asked.pop() for _ in range(len(asked))])
    assert told == {0: None, 1: "the prompt's log-probs: RuntimeError: out of memory"}


def test_an_error_of_the_model_fails_one_request(
    base: SharedBase, client: PlainClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = client.train("tiny")
    run.forward_backward(rows(0), "cross_entropy")

    def broken(*args: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(base, "_one_pass", broken)
        with pytest.raises(Failed, match="the server failed: RuntimeError: out of memory"):
            run.forward_backward(rows(0), "cross_entropy")
        patch.setattr(base.engine, "open", broken)
        with pytest.raises(Failed, match="out of memory"):
            run.sampler().responses([20], max_tokens=1)
    with pytest.raises(Failed, match="there are no gradients"):  # a half of a batch teaches nothing
        run.step(**ADAM)
    assert len(run.sampler().responses([20], max_tokens=1)) == 1


def test_runs_in_memory_are_limited(
    base: SharedBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(base, tmp_path, max_runs=1) as http:
        client = PlainClient(http)
        run = client.train("tiny")
        model = {
            "session_id": client.session,
            "model_seq_id": 7,
            "base_model": "tiny",
            "lora_config": {"rank": 4},
        }
        answer = client.post("create_model", **model)
        assert answer.status_code == 400 and "--max-runs" in answer.text
        monkeypatch.setattr(service_module, "SILENT_S", 0.0)
        curve(PlainRun(client, client.fetch(client.ask("create_model", **model))["model_id"]), 0, 1)
        answer = run.send(rows(0), "cross_entropy", 1)
        assert answer.status_code == 404 and "its place was needed; begin a new one" in answer.text


def test_a_session_that_has_ended_frees_its_runs(client: PlainClient) -> None:
    run = client.train("tiny")
    curve(run, 0, 1)
    path = run.save("end")
    answer = client.post(f"sessions/{client.session}/finish", reason={"type": "success"})
    assert answer.status_code == 204
    answer = run.send(rows(0), "cross_entropy", run.seq + 1)
    assert answer.status_code == 404 and f"create a training client from one of {path}" in answer.text
    told = client.get(f"sessions/{client.session}")
    assert told["training_run_ids"] == [run.model_id]
    body = request_message("x", 1, [], "ppo", {}, False)
    assert (
        client.http.post("/api/v1/forward_backward", content=body, headers=client.headers).status_code == 404
    )
