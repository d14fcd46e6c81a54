"""The paths of Tinker's interface under /api/v1, as version 0.38 of its client asks them.

request ──Gate (key, size)──► body ──TinkerService──► id of the request      retrieve_future ──► answer

What is refused has a status of 400 or above, or is the answer of its future, with the reason as a sentence.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from contextlib import suppress
from typing import Annotated, Any, Literal

import torch
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, Field, ValidationError
from starlette.exceptions import HTTPException

from hybridflow import __version__
from hybridflow.errors import HybridFlowError
from hybridflow.rollout.base import SamplingParams
from hybridflow.rollout.server.app import Gate, answer_error
from hybridflow.rollout.server.errors import ApiError
from hybridflow.rollout.server.schema import FailFast, StrictBody
from hybridflow.rollout.server.service import ServerCounts
from hybridflow.tinker.model import AdamStep, LoraSpec, Sampling, Trained
from hybridflow.tinker.service import ADAPTER_FACTS, AdapterRun, Answer, TinkerService, Unknown
from hybridflow.tinker.store import SAMPLER, WEIGHTS, Facts
from hybridflow.tinker.wire import (
    MAX_SEQ,
    Refusal,
    WireError,
    read_forward_backward,
    read_numbers,
    write_outputs,
)

POLL_S = 20.0
"""Seconds that a client waits for an answer before it asks again."""
MAX_BODY = 64 * 2**20
"""Bytes of a body; the client cuts rows into bodies of 5 MB."""
PREFIX = "/api/v1"
UNEMBED = (
    "hybridflow tinker: adapters are on the linear layers of attention and MLP; train_unembed has no effect, "
    "the output head gets none"
)
"""Sentence that the client logs when a session begins."""
Count = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[int, Field(ge=0, le=MAX_SEQ)]
Seconds = Annotated[int, Field(ge=1, le=10**9)]
Ids = Annotated[list[Count], FailFast(), Field(max_length=2**20)]


def _check_text(value: Any) -> Any:
    """Refuse what JSON cannot say again: listings would fail on it for ever."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it cannot be told again as JSON ({error})") from error
    return value


Text = Annotated[str, AfterValidator(_check_text)]
Metadata = Annotated[dict[str, Any], AfterValidator(_check_text)]


class Body(StrictBody):
    """A body that may say its own name."""

    type: str = ""


class SessionBody(Body):
    """POST /create_session."""

    tags: list[Text] = Field([])
    user_metadata: Metadata | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: Text | None = None


class LoraBody(StrictBody):
    """An adapter; `train_unembed` has no effect."""

    rank: int = Field(ge=1, le=4096)
    seed: Number | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(StrictBody):
    """The optimizer of a run."""

    type: Literal["adamw"] = "adamw"


class ModelBody(Body):
    """POST /create_model."""

    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: LoraBody
    optimizer_config: OptimizerBody = OptimizerBody()


class AdamBody(StrictBody):
    """The fields of `AdamStep`, which has their defaults and checks their values in their turn."""

    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    grad_clip_norm: float | None = None


class NumberedBody(Body):
    """A request of a run, with its number."""

    model_id: str
    seq_id: int = Field(ge=1, le=MAX_SEQ)


class StepBody(NumberedBody):
    """POST /optim_step."""

    adam_params: AdamBody


class SaveBody(NumberedBody):
    """POST /save_weights."""

    path: str | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: Annotated[dict[str, str], AfterValidator(_check_text)] | None = None


class SaveForSamplerBody(SaveBody):
    """POST /save_weights_for_sampler."""

    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"


class LoadBody(Body):
    """POST /load_weights: into a run, or as the first request of a new one."""

    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1, le=MAX_SEQ)
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerBody = OptimizerBody()


class SamplerBody(Body):
    """POST /create_sampling_session."""

    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class ChunkBody(StrictBody):
    """A part of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: Ids


class PromptBody(StrictBody):
    """A prompt."""

    chunks: list[ChunkBody]


class ParamsBody(StrictBody):
    """How tokens are chosen, and when a response ends."""

    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    seed: Number | None = None
    stop: str | list[str] | Ids | None = None
    temperature: float = 1.0
    top_k: int = Field(-1, lt=2**31)
    top_p: float = 1.0


class SampleBody(Body):
    """POST /asample."""

    num_samples: int = Field(1, ge=1, le=4096)
    prompt: PromptBody
    sampling_params: ParamsBody
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Number | None = None
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = Field(None, ge=1, lt=2**31)
    topk_sample_logprobs: int = Field(0, ge=0, le=100)
    topk_prompt_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] = False


class ExpiryBody(StrictBody):
    """PUT …/ttl."""

    ttl_seconds: Seconds | None = None


class FutureBody(StrictBody):
    """POST /retrieve_future."""

    request_id: str
    allow_metadata_only: bool = False


def build_tinker_app(service: TinkerService, *, key: str | None) -> FastAPI:
    """Return the application; with a `key` it answers 401 to requests that do not send it."""
    app = FastAPI(
        title="hybridflow tinker", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    _add_sessions(app, service)
    _add_training(app, service)
    _add_sampling(app, service)
    _add_listings(app, service)

    @app.api_route(PREFIX + "/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def other(path: str, request: Request) -> Response:
        with suppress(ValueError, RecursionError):
            _spend_number(service, await request.json())
        raise ApiError(404, f"{PREFIX}/{path} is not served: docs/tinker.md lists what is")

    async def bad_body(request: Request, error: Any) -> Response:
        _spend_number(service, error.body)
        return await answer_error(request, error)

    for kind in (ApiError, ValidationError, HTTPException, HybridFlowError, Refusal):
        app.add_exception_handler(kind, _told)
    app.add_exception_handler(RequestValidationError, bad_body)
    app.add_exception_handler(Exception, answer_error)
    app.add_middleware(
        Gate,
        token=key,
        max_body_bytes=MAX_BODY,
        metrics=ServerCounts(service.name),
        paths=(),
        credential="'X-API-Key: tml-KEY', as Tinker's client does with its api_key or TINKER_API_KEY",
        size_option=": send fewer or shorter rows in one request",
    )
    return app


async def _told(request: Request, error: Exception) -> Response:
    if isinstance(error, (Refusal, HybridFlowError)):
        error = ApiError(getattr(error, "status", 400), str(error))
    return await answer_error(request, error)


def _spend_number(service: TinkerService, body: object) -> None:
    """Let the number of a run's request that was refused count as done: the client goes on with the next."""
    if isinstance(body, dict):
        with suppress(ValidationError, Unknown):
            numbers = NumberedBody.model_validate({key: body.get(key) for key in ("model_id", "seq_id")})
            service.refuse(numbers.model_id, numbers.seq_id, "the request was refused when it came")


def _future(request_id: str, model_id: str | None = None) -> Facts:
    return {"request_id": request_id, "model_id": model_id}


def _add_sessions(app: FastAPI, service: TinkerService) -> None:
    @app.post(PREFIX + "/client/config")
    async def config() -> Facts:
        return {"use_pyqwest_transport": False, "fwdbwd_max_chunk_len": 1024}

    @app.post(PREFIX + "/client/dynamic_config")
    async def dynamic_config() -> Facts:
        return {}

    @app.post(PREFIX + "/telemetry")
    async def telemetry() -> Facts:
        return {"status": "accepted"}

    @app.get(PREFIX + "/healthz")
    async def health() -> Facts:
        return {"status": "ok"}

    @app.get(PREFIX + "/get_server_capabilities")
    async def capabilities() -> Facts:
        served = {
            "model_name": service.name,
            "max_context_length": service.base.positions,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [served]}

    @app.post(PREFIX + "/create_session")
    async def create_session(body: SessionBody) -> Facts:
        facts = {key: getattr(body, key) for key in ("tags", "user_metadata", "display_name")}
        session = service.create_session(facts)
        return {"type": "create_session", "session_id": session, "warning_message": UNEMBED}

    @app.post(PREFIX + "/session_heartbeat")
    async def heartbeat(body: dict[str, Any]) -> Facts:
        service.hear(str(body.get("session_id")))
        return {"type": "session_heartbeat"}

    @app.post(PREFIX + "/sessions/{session}/finish")
    async def finish(session: str) -> Response:
        service.finish_session(session)
        return Response(status_code=204)

    @app.post(PREFIX + "/retrieve_future")
    async def retrieve(body: FutureBody) -> Response:
        job = service.job(body.request_id)
        if job is None:
            raise ApiError(
                410, f"there is no request {body.request_id!r} here, or its answer is no longer kept"
            )
        waited = asyncio.wrap_future(job.answer)
        await asyncio.wait({waited}, timeout=POLL_S)
        if not waited.done():
            pending = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(pending, 408)
        answer = waited.result()
        if isinstance(answer, bytes):
            return Response(answer, media_type="application/x-protobuf")
        return JSONResponse(answer)


def _add_training(app: FastAPI, service: TinkerService) -> None:
    @app.post(PREFIX + "/create_model")
    async def create_model(body: ModelBody) -> Facts:
        service.check_name(body.base_model)
        lora = body.lora_config
        seed = secrets.randbits(31) if lora.seed is None else lora.seed
        spec = LoraSpec(lora.rank, seed, lora.train_attn, lora.train_mlp)
        return _future(service.create_run(body.session_id, body.model_seq_id, spec, body.user_metadata))

    @app.post(PREFIX + "/load_weights")
    async def load_weights(body: LoadBody) -> Facts:
        source = (body.path, body.optimizer)
        if body.session_id is not None and body.model_seq_id is not None:
            if body.base_model is not None:
                service.check_name(body.base_model)
            return _future(
                service.create_run(body.session_id, body.model_seq_id, None, body.user_metadata, source)
            )
        if body.model_id is None or body.seq_id is None:
            raise ApiError(400, "load_weights: send model_id and seq_id, or session_id and model_seq_id")

        def work(run: AdapterRun, trained: Trained) -> Answer:
            facts = service.store.facts(body.path)
            run.trained = service.read(*source)
            run.facts |= {key: facts[key] for key in ADAPTER_FACTS}
            return {"type": "load_weights", "path": body.path, "model_id": body.model_id}

        return _future(service.submit(body.model_id, body.seq_id, work))

    @app.post(PREFIX + "/get_info")
    async def get_info(body: dict[str, Any]) -> Facts:
        facts = service.run_of(str(body.get("model_id"))).facts
        model = {
            "arch": service.base.policy.config.model_type,
            "model_name": service.name,
            "tokenizer_id": service.folder,
        }
        return {
            "type": "get_info",
            "model_data": model,
            "model_id": facts["model_id"],
            "is_lora": True,
            "lora_rank": facts["rank"],
            "model_name": service.name,
        }

    @app.post(PREFIX + "/forward_backward")
    async def forward_backward(request: Request) -> Facts:
        body = await request.body()
        model_id, seq = read_numbers(body)
        try:
            asked = await asyncio.to_thread(read_forward_backward, body)
        except WireError as error:
            return _future(service.refuse(model_id, seq, str(error)))

        def work(run: AdapterRun, trained: Trained) -> Answer:
            log_probs, loss = service.base.forward(trained, asked)
            return write_outputs(log_probs, {"loss:sum": loss})

        return _future(service.submit(model_id, seq, work))

    @app.post(PREFIX + "/optim_step")
    async def optim_step(body: StepBody) -> Facts:
        def work(run: AdapterRun, trained: Trained) -> Answer:
            norm = service.base.step(trained, AdamStep(**body.adam_params.model_dump(exclude_unset=True)))
            return {"metrics": {"grad_norm": norm}}

        return _future(service.submit(body.model_id, body.seq_id, work))

    @app.post(PREFIX + "/save_weights")
    async def save_weights(body: SaveBody) -> Facts:
        def work(run: AdapterRun, trained: Trained) -> Answer:
            name = body.path or f"state-{body.seq_id}"
            path = service.save(run, trained, body.seq_id, WEIGHTS, name, body)
            return {"type": "save_weights", "path": path}

        return _future(service.submit(body.model_id, body.seq_id, work))

    @app.post(PREFIX + "/save_weights_for_sampler")
    async def save_for_sampler(body: SaveForSamplerBody) -> Facts:
        def work(run: AdapterRun, trained: Trained) -> Answer:
            path = service.save(run, trained, body.seq_id, SAMPLER, body.path, body)
            answer: Facts = {"type": "save_weights_for_sampler", "path": path}
            if body.sampling_session_seq_id is not None:
                session = run.facts["session_id"]
                answer["sampling_session_id"] = service.create_sampler(
                    session, body.sampling_session_seq_id, path
                )
            return answer

        return _future(service.submit(body.model_id, body.seq_id, work))


def _add_sampling(app: FastAPI, service: TinkerService) -> None:
    @app.post(PREFIX + "/create_sampling_session")
    async def create_sampler(body: SamplerBody) -> Facts:
        sampler = service.create_sampler(
            body.session_id, body.sampling_session_seq_id, body.model_path, base=body.base_model
        )
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    @app.get(PREFIX + "/samplers/{sampler}")
    async def get_sampler(sampler: str) -> Facts:
        return {"sampler_id": sampler, "base_model": service.name, **service.sampler(sampler)}

    @app.post(PREFIX + "/asample")
    async def asample(body: SampleBody) -> Facts:
        if body.sampling_session_id is not None:
            address = service.sampler(body.sampling_session_id)["model_path"]
        else:
            address = body.model_path
            if address is None:
                service.check_name(body.base_model)
        prompt = tuple(token for chunk in body.prompt.chunks for token in chunk.tokens)
        sampling = _sampling(service, body, prompt)
        name = secrets.token_hex(8)
        if body.sampling_session_id is not None and body.seq_id is not None:
            name = f"{body.sampling_session_id}:{body.seq_id}"
        service.sample(name, address, sampling, body.topk_sample_logprobs)
        return {
            **_future(name),
            "sample_sequence_ids": [f"{name}:{place}" for place in range(body.num_samples)],
        }


def _sampling(service: TinkerService, body: SampleBody, prompt: tuple[int, ...]) -> Sampling:
    """Return what is to be generated; Refusal or RolloutError for values that cannot be."""
    params = body.sampling_params
    most = params.max_tokens
    if most is None:
        if service.base.positions is None:
            raise Refusal("sampling_params: give max_tokens, because the model has no number of positions")
        most = max(1, service.base.positions - len(prompt))
    service.base.check_tokens("prompt", torch.tensor(prompt, dtype=torch.int64), most)
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    sampling = SamplingParams(
        max_tokens=most,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        ignore_eos=stop == [],
        stop_token_ids=tuple(each for each in stop or () if isinstance(each, int)),
        stop=tuple(each for each in stop or () if isinstance(each, str)),
        top_log_probs=body.topk_sample_logprobs,
    )
    num_scored = 0
    if body.prompt_logprobs:
        num_scored = body.prompt_logprobs_last_n or len(prompt)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return Sampling(prompt, sampling, seed, body.num_samples, num_scored)


def _add_listings(app: FastAPI, service: TinkerService) -> None:
    runs = PREFIX + "/training_runs"

    def page(items: list[Any], limit: int, offset: int) -> tuple[list[Any], Facts]:
        return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}

    @app.get(runs)
    async def list_runs(limit: Count = 20, offset: Count = 0) -> Facts:
        found, cursor = page(list(reversed(service.runs)), limit, offset)
        return {"training_runs": [service.told_run(model_id) for model_id in found], "cursor": cursor}

    @app.get(runs + "/{model_id}")
    async def get_run(model_id: str) -> Facts:
        return service.told_run(model_id)

    @app.get(runs + "/{model_id}/checkpoints")
    async def run_checkpoints(model_id: str) -> Facts:
        service.told_run(model_id)
        return {"checkpoints": service.store.checkpoints(model_id)}

    @app.get(PREFIX + "/checkpoints")
    async def checkpoints(limit: Count = 100, offset: Count = 0) -> Facts:
        found, cursor = page(service.store.checkpoints(), limit, offset)
        return {"checkpoints": found, "cursor": cursor}

    @app.put(runs + "/{model_id}/checkpoints/{kind}/{name}/ttl")
    async def set_ttl(model_id: str, kind: str, name: str, body: ExpiryBody) -> Response:
        service.store.set_expiry(f"tinker://{model_id}/{kind}/{name}", body.ttl_seconds)
        return Response(status_code=204)

    @app.delete(runs + "/{model_id}/checkpoints/{kind}/{name}")
    async def delete(model_id: str, kind: str, name: str) -> Response:
        service.store.delete(f"tinker://{model_id}/{kind}/{name}")
        return Response(status_code=204)

    @app.post(PREFIX + "/weights_info")
    async def weights_info(body: dict[str, Any]) -> Facts:
        facts = service.store.facts(str(body.get("tinker_path")))
        trained = {key: facts[key] for key in ("train_mlp", "train_attn")}
        return {
            "base_model": service.name,
            "is_lora": True,
            "lora_rank": facts["rank"],
            "train_unembed": False,
            **trained,
        }

    @app.get(PREFIX + "/sessions")
    async def sessions(limit: Count = 20, offset: Count = 0) -> Facts:
        return {"sessions": page(list(reversed(service.sessions)), limit, offset)[0]}

    @app.get(PREFIX + "/sessions/{session}")
    async def session(session: str) -> Facts:
        return service.told_session(session)
