"""The responses of `hybridflow reward-test --response generate`: the run's model answers the first prompts.

rows ──tokenizer, chat template──► prompts ──the engine of this process──► responses

The native engine generates, in this process and on one device, whatever engine the run itself would use; the
sampling keys are those of the run. This part imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hybridflow.agent.single_turn import build_requests
from hybridflow.config import PPOConfig
from hybridflow.data.build import build_prompt_data
from hybridflow.data.files import Row
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer, text_of
from hybridflow.distributed.device import resolve_device
from hybridflow.episodes.planning import sampling_of
from hybridflow.errors import RolloutError
from hybridflow.models.files.build import build_policy, generation_end_tokens
from hybridflow.rollout.build import build_rollout_engine


def usable_prompts(config: PPOConfig, count: int) -> tuple[Tokenizer, list[PromptRow]]:
    """The tokenizer of the run and the first training prompts that it can use."""
    path = config.data.tokenizer or str(config.actor_rollout_ref.model.path)
    tokenizer = load_tokenizer(path, config.data.trust_remote_code)
    few_rows_will_do = replace(config.data, train_batch_size=1, val_files=[])
    data = build_prompt_data(few_rows_will_do, tokenizer, config.trainer.seed)
    assert data.train_loader is not None, "the checks ask for training data"
    dataset = data.train_loader.dataset
    return tokenizer, [dataset[index] for index in range(min(count, len(dataset)))]


def generate_responses(config: PPOConfig, count: int) -> tuple[list[Row], list[str]]:
    """The first rows and one sampled response to each.

    Raises ModelError for a model that cannot be loaded, RolloutError for a prompt that cannot be served.
    """
    tokenizer, prompts = usable_prompts(config, count)
    model = config.actor_rollout_ref.model
    rollout = config.actor_rollout_ref.rollout
    if rollout.name not in ("native", "hf"):
        rollout = replace(rollout, name="native", quantization=None)
    policy = build_policy(
        str(model.path),
        device=resolve_device(config.trainer.device),
        trust_remote_code=model.trust_remote_code,
        override_config=model.override_config,
    ).requires_grad_(False)
    ends = generation_end_tokens(str(model.path), trust_remote_code=model.trust_remote_code)
    engine = build_rollout_engine(rollout, policy, ends, decode=partial(text_of, tokenizer))
    sampling = replace(sampling_of(config, rollout), greedy=not rollout.do_sample)
    batch = build_requests(prompts, sampling, n=1, seed=config.trainer.seed, purpose="rollout", step=1)
    outputs = {output.request_id: output for output in engine.generate(batch.requests)}
    answers = [outputs[request.request_id] for request in batch.requests]
    for output in answers:
        if output.finish_reason == "error":
            raise RolloutError(f"the prompt of row {output.request_id} cannot be answered: {output.error}")
    texts = tokenizer.batch_decode([output.token_ids for output in answers], skip_special_tokens=True)
    return [prompt.row for prompt in prompts], list(texts)
