"""The engines under test, each on the same tiny model, and what a test may do to it from outside."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from shown_by import SHOWN_BY, shown_by
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from hybridflow.config.engine_features import TABLE
from hybridflow.models.policy import PolicyModel
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutEngine, SamplingParams
from hybridflow.rollout.engine_replica import EngineReplica
from hybridflow.rollout.hf.engine import HFEngine
from hybridflow.weight_sync.holding import Holding
from hybridflow.weight_sync.push import RemotePush, WeightShare

END = 3
MAX_ROWS = 64
POSITIONS = 4096
DEVICE = torch.device(os.environ.get("HYBRIDFLOW_CONFORMANCE_DEVICE", "cpu"))
"""Where the engine computes; what it is compared with stays on the CPU."""
Outputs = dict[int, GenerationOutput]


@dataclass
class Subject:
    """An engine, and what the tests do to it that is not in the protocol."""

    name: str
    engine: RolloutEngine
    model: PreTrainedModel
    """A copy of what it generates with, under transformers' own attention."""
    decode: Callable[[Sequence[int]], str]
    push: Callable[[dict[str, Tensor], int, str | None], None] | None = None
    """Weights by Hugging Face name, their version, and the name of one that gets lost on the way."""
    held: Callable[[], int] | None = None
    """Bytes that sleeping frees."""
    failing: Callable[[], AbstractContextManager[None]] | None = None
    """Inside the block the engine dies after some tokens."""
    close: Callable[[], None] = lambda: None
    lacks: dict[str, str] = field(default_factory=dict)
    """Features that the table gives the engine and this way of running it does not have, each with the
    reason.
    """
    version: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = {name: weight.clone() for name, weight in self.model.state_dict().items()}

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.vocab_size)

    def needs(self, feature: str) -> None:
        """Skip the test where the table says that the engine lacks the feature or another test shows it."""
        if feature in self.lacks:
            pytest.skip(f"{self.name}: {self.lacks[feature]}")
        note = TABLE[self.name][feature].note
        test = shown_by(self.name, feature)
        if test != SHOWN_BY[feature]:
            pytest.skip(f"{self.name}: {'; '.join(filter(None, [note, test and f'shown by {test}']))}")

    @contextmanager
    def replica(self) -> Iterator[EngineReplica]:
        """The engine as all callers see it, for as long as the block lasts."""
        replica = EngineReplica(self.engine, name=f"{self.name}-0")
        try:
            yield replica
        finally:
            replica.close(timeout_s=3600)

    def run(self, requests: Sequence[GenerationRequest]) -> Outputs:
        """All outputs by request id, from a replica whose requests join together."""
        with self.replica() as replica:
            answers = replica.submit_many(requests)
            outputs = [answer.result() for answer in answers]
            assert replica.load == 0 and (not requests or replica.version is not None)
        assert [output.request_id for output in outputs] == [request.request_id for request in requests]
        for output in outputs:
            assert len(output.token_ids) == len(output.log_probs) == len(output.policy_versions)
        return {output.request_id: output for output in outputs}

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
        """[len(response), V]: a plain forward pass over the whole sequence, before each response token."""
        logits: Tensor = self.model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0]
        return logits[len(prompt) - 1 : -1].float()

    def greedy(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[list[int]]:
        """What transformers' `generate` makes of each prompt; equal lengths together, without padding."""
        config = GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens, eos_token_id=END, pad_token_id=1
        )
        model, responses = cast(Any, self.model), {}
        for length in {len(prompt) for prompt in prompts}:
            equal = [prompt for prompt in prompts if len(prompt) == length]
            for prompt, row in zip(
                equal, model.generate(torch.tensor(equal), generation_config=config)[:, length:].tolist()
            ):
                responses[prompt] = row[: row.index(END) + 1] if END in row else row
        return [responses[prompt] for prompt in prompts]

    def give(self, weights: dict[str, Tensor], lost: str | None = None) -> int:
        """Push weights as the next version, to the copy too unless one gets lost; return the version."""
        assert self.push is not None
        self.version += 1
        self.push(weights, self.version, lost)
        self.model.load_state_dict(weights)
        return self.version


def create_folder(folder: Path) -> Path:
    """A tiny model whose attention matters and whose tokens vary."""
    create_tiny_model(folder, hidden=64, heads=2, kv_heads=1, intermediate=96)
    model = load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 10
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    """The model of the folder under transformers' own attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model


def prompts(count: int, seed: int = 0, longest: int = 12) -> list[tuple[int, ...]]:
    """Random prompts of 1 to `longest` tokens, none of them special."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=draw).tolist()
    return [tuple(torch.randint(4, 100, (length,), generator=draw).tolist()) for length in lengths]


def requests_for(
    token_ids: Sequence[tuple[int, ...]], *, n: int = 1, **params: Any
) -> list[GenerationRequest]:
    """`n` requests for each prompt; ids count up from 0."""
    sampling = SamplingParams(**{"max_tokens": 16, **params})
    return [
        GenerationRequest(place * n + copy, Prompt(prompt), sampling, seed=7919 * (place * n + copy) + 5)
        for place, prompt in enumerate(token_ids)
        for copy in range(n)
    ]


def build(name: str, folder: Path) -> Subject:
    """The engine of that name; skips the test with the reason where it cannot be had."""
    return BUILDERS[name](folder)


def _native(folder: Path) -> Subject:
    from hybridflow.rollout.native.engine import NativeEngine

    decode = decoder(folder)
    policy = PolicyModel(load(folder).to(DEVICE))
    engine = NativeEngine(policy, eos_token_ids=(END,), max_num_seqs=MAX_ROWS, decode=decode)
    return Subject(
        "native",
        engine,
        load(folder),
        decode,
        in_process_push(engine, policy, folder),
        lambda: engine.cache_bytes,
        lambda: failing(policy),
    )


def _hf(folder: Path) -> Subject:
    decode = decoder(folder)
    policy = PolicyModel(load(folder).to(DEVICE))  # shared with a trainer, whose attention it has
    engine = HFEngine(policy.hf, eos_token_ids=(END,), max_num_seqs=MAX_ROWS, decode=decode)
    between = "a replica is told between two batches; within one, test_hf_engine.py shows it"
    return Subject(
        "hf",
        engine,
        load(folder),
        decode,
        in_process_push(engine, policy, folder),
        None,
        lambda: failing(policy),
        lacks={"abort": between, "abort_partials": between},
    )


def _openai(folder: Path) -> Subject:
    """Against our own server, with the native engine in it."""
    for package in ("httpx", "fastapi", "uvicorn"):
        without(package)
    from hybridflow.rollout.openai.engine import OpenAIEngine
    from hybridflow.rollout.server.build import ServeSettings, build_service
    from hybridflow.rollout.server.run import DrainingServer, listen

    service = build_service(ServeSettings(str(folder), "tiny", dtype="float32", max_num_seqs=MAX_ROWS))
    bound = listen("127.0.0.1", 0)
    server = DrainingServer(service, token="a-token", grace_s=600)
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()

    def close() -> None:
        server.should_exit = True
        thread.join(600)
        bound.close()
        for replica in service.client.replicas:
            replica.close()

    url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
    engine = OpenAIEngine(url, model="tiny", api_key="a-token", deadline=600)
    return Subject("openai", engine, load(folder), decoder(folder), close=close)


def _openai_vllm(folder: Path) -> Subject:
    """Against vLLM's own server, which knows nothing of us."""
    for package in ("httpx", "vllm"):
        without(package)
    from hybridflow.rollout.openai.engine import OpenAIEngine
    from hybridflow.rollout.vllm.settings import MODEL, start_server

    arguments = {
        "model": str(folder),
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": MAX_ROWS,
        "max_model_len": POSITIONS,
        "max_num_batched_tokens": 2 * POSITIONS,
        "enable_chunked_prefill": False,
        "kv_cache_memory_bytes": 2**28,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
    }
    address, process = start_server(arguments, python=None, timeout=900)
    engine = OpenAIEngine(f"{address.url}/v1", model=MODEL, api_key="unread", deadline=120)
    left = "vLLM's log-probs are of what top-k, top-p and biases leave of the distribution"
    lacks = {"log_probs_limited": left, "logit_bias": left}
    return Subject("openai", engine, load(folder), decoder(folder), close=process.stop, lacks=lacks)


def _vllm(folder: Path, *, server: bool = False) -> Subject:
    """In this process, or as a server; its weights are pushed before anything is generated."""
    without("vllm")
    from hybridflow.config.actor_rollout_ref import RolloutConfig, RolloutServerConfig
    from hybridflow.rollout.remote.model import ModelFacts
    from hybridflow.rollout.vllm.build import build_vllm_engine

    own = RolloutServerConfig(enable=server)
    config = RolloutConfig(
        name="vllm", max_num_seqs=MAX_ROWS, max_model_len=POSITIONS, gpu_memory_utilization=0.2, server=own
    )
    engine = build_vllm_engine(config, ModelFacts(str(folder), DEVICE, "float32"), (END,))

    def push(weights: dict[str, Tensor], version: int, lost: str | None) -> None:
        sent = [(name, tensor.to(DEVICE)) for name, tensor in weights.items() if name != lost]
        engine.update_weights(sent, version)

    subject = Subject("vllm", engine, load(folder), decoder(folder), push, close=engine.close)
    subject.give(subject.weights)
    return subject


def _sglang(folder: Path) -> Subject:
    """Its server, started here; its weights are pushed before anything is generated."""
    without("sglang")
    from hybridflow.config.actor_rollout_ref import RolloutConfig
    from hybridflow.rollout.remote.model import ModelFacts
    from hybridflow.rollout.sglang.engine import build_sglang_engine

    config = RolloutConfig(
        name="sglang", max_num_seqs=MAX_ROWS, max_model_len=POSITIONS, gpu_memory_utilization=0.2
    )
    engine = build_sglang_engine(config, ModelFacts(str(folder), DEVICE, "float32"), (END,))

    def push(weights: dict[str, Tensor], version: int, lost: str | None) -> None:
        sent = [(name, tensor.to(DEVICE)) for name, tensor in weights.items() if name != lost]
        engine.update_weights(sent, version)

    subject = Subject("sglang", engine, load(folder), decoder(folder), push, close=engine.close)
    subject.give(subject.weights)
    return subject


def decoder(folder: Path) -> Callable[[Sequence[int]], str]:
    """Token ids to text, special tokens included."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def in_process_push(
    engine: RolloutEngine, policy: PolicyModel, folder: Path
) -> Callable[[dict[str, Tensor], int, str | None], None]:
    """As the ranks that train push to a replica of its own."""
    pushed, trainer = RemotePush(policy, Holding.whole(policy)), PolicyModel(load(folder).to(DEVICE))
    holding = Holding.whole(trainer)

    def push(weights: dict[str, Tensor], version: int, lost: str | None) -> None:
        trainer.hf.load_state_dict(weights)
        parameters = {name: parameter.detach().clone() for name, parameter in trainer.named_parameters()}
        sums = dict(zip(holding.boxes, holding.checksums(parameters).tolist(), strict=True))
        sent = {name: tensor for name, tensor in parameters.items() if name != f"hf.{lost}"}
        pushed.update(engine, [WeightShare(version, sent, sums)], version)

    return push


@contextmanager
def failing(policy: PolicyModel) -> Iterator[None]:
    """The model's forward raises from its tenth call on."""
    calls = iter(range(1000))

    def fail(module: nn.Module, args: object) -> None:
        if next(calls) >= 10:
            raise RuntimeError("a planted failure")

    handle = policy.hf.get_input_embeddings().register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def without(package: str) -> None:
    """Skip where a package is missing."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed in this environment")


BUILDERS: dict[str, Callable[[Path], Subject]] = {
    "native": _native,
    "hf": _hf,
    "vllm": _vllm,
    "sglang": _sglang,
    "openai": _openai,
    "vllm-server": partial(_vllm, server=True),
    "openai-vllm": _openai_vllm,
}
