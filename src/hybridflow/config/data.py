"""`data.*`: where prompts come from and how they become batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.schema import group, key


@dataclass(frozen=True)
class CustomClassConfig:
    path: str | None = key(None, "file or module that holds the class")
    name: str | None = key(None, "name of the class; `path:name` in `path` works too")


@dataclass(frozen=True)
class SamplerConfig:
    class_path: str | None = key(
        None, "file or module that holds a sampler; a curriculum sampler also has update(batch)"
    )
    class_name: str | None = key(None, "name of the sampler class; `path:name` in `class_path` works too")


@dataclass(frozen=True)
class TaskConfig:
    name: str | None = key(
        None, "procedural task in place of files: arithmetic_chain, reasoning_gym:NAME, or path.py:factory"
    )
    size: int = key(10_000, "number of training questions", minimum=1)
    val_size: int = key(256, "number of held-out questions; never among the training questions", minimum=0)
    seed: int = key(0, "seed of the questions, apart from the seed of the run")
    options: dict[str, Any] = key({}, "keyword arguments of the task, for example {hops: 3}")


@dataclass(frozen=True)
class DataConfig:
    train_files: str | list[str] = key(
        [], "parquet, json or jsonl file(s): local, hdfs://, s3://, or any fsspec address"
    )
    val_files: str | list[str] = key([], "validation file(s), same kinds")
    task: TaskConfig = group(TaskConfig)
    tokenizer: str | None = key(None, "tokenizer folder or hub name; null: the actor model's")
    train_max_samples: int = key(-1, "use at most this many training rows; -1: all", minimum=-1)
    val_max_samples: int = key(-1, "use at most this many validation rows; -1: all", minimum=-1)
    prompt_key: str = key(
        "prompt", "column with the prompt: a list of messages, or a string that is already templated"
    )
    wrap_prompts: bool = key(
        False, "make a prompt that is a string a user's message, rendered by the chat template"
    )
    reward_fn_key: str = key("data_source", "column that names the source and so chooses the built-in reward")
    max_prompt_length: int = key(512, "longest prompt, in tokens", minimum=1)
    max_response_length: int = key(512, "longest response, in tokens", minimum=1)
    train_batch_size: int = key(1024, "prompts per training step", minimum=1)
    gen_batch_size: int | None = key(
        None, "prompts per generation batch of dynamic sampling; null: train_batch_size", minimum=1
    )
    demonstration_key: str = key(
        "messages", "column with the data's own answer, read by spin: text, or messages that end in an answer"
    )
    val_batch_size: int | None = key(None, "prompts per validation batch; null: all at once", minimum=1)
    shuffle: bool = key(True, "shuffle the training rows anew each epoch, seeded")
    seed: int | None = key(None, "seed of the shuffling; null: trainer.seed")
    validation_shuffle: bool = key(False, "shuffle the validation rows")
    filter_overlong_prompts: bool = key(False, "leave out prompts over max_prompt_length (counted and shown)")
    truncation: Literal["error", "left", "right", "middle"] = key(
        "error", "what happens to a prompt over max_prompt_length that was not filtered"
    )
    trust_remote_code: bool = key(False, "let the tokenizer's own code run")
    custom_cls: CustomClassConfig = group(CustomClassConfig)
    sampler: SamplerConfig = group(SamplerConfig)
    dataloader_num_workers: int = key(0, "processes that read rows ahead; 0: in process", minimum=0)
    apply_chat_template_kwargs: dict[str, Any] = key({}, "extra arguments of the chat template")
    cache_dir: str | None = key(None, "where remote files are kept; null: ~/.cache/hybridflow")


@dataclass(frozen=True)
class SFTDataConfig:
    train_files: str | list[str] = key([], "parquet, json or jsonl file(s)")
    val_files: str | list[str] = key([], "validation file(s)")
    task: TaskConfig = group(TaskConfig)
    tokenizer: str | None = key(None, "tokenizer folder or hub name; null: the model's")
    train_batch_size: int = key(256, "conversations per optimizer step", minimum=1)
    micro_batch_size_per_gpu: int | None = key(
        None, "at most this many conversations in one forward; null: only the token limit", minimum=1
    )
    max_token_len_per_gpu: int = key(8192, "at most this many tokens in one forward (hard)", minimum=1)
    max_length: int = key(1024, "longest conversation, in tokens", minimum=2)
    truncation: Literal["error", "left", "right", "drop"] = key(
        "error", "what happens to a conversation over max_length"
    )
    messages_key: str = key("messages", "column with the list of messages")
    prompt_key: str = key("prompt", "column with the prompt where there is no messages column")
    response_key: str = key("response", "column with the response where there is no messages column")
    wrap_prompts: bool = key(
        False, "make a prompt that is a string a user's message, rendered by the chat template"
    )
    train_max_samples: int = key(-1, "use at most this many training rows; -1: all", minimum=-1)
    val_max_samples: int = key(-1, "use at most this many validation rows; -1: all", minimum=-1)
    shuffle: bool = key(True, "shuffle the rows anew each epoch, seeded")
    trust_remote_code: bool = key(False, "let the tokenizer's own code run")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "extra arguments of the chat template")
    dataloader_num_workers: int = key(0, "processes that read rows ahead; 0: in process", minimum=0)
    cache_dir: str | None = key(None, "where remote files are kept; null: ~/.cache/hybridflow")
