"""Prompts with the data's own answers, from which SPIN learns next to the responses that it samples.

    PromptRow + its column data.demonstration_key ──as in sft.py──► PromptRow with demonstration_token_ids

The answers are tokenised while the dataset is built, so what cannot be used is counted and shown then.
"""

from __future__ import annotations

from dataclasses import replace

from hybridflow.config.data import DataConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.files import RaggedInts
from hybridflow.data.loader import MapDataset
from hybridflow.data.messages import SHAREGPT, check_messages
from hybridflow.data.prompts import PromptRow
from hybridflow.data.row_report import RowReport
from hybridflow.data.sft import encode_conversation, encode_pair, last_answer
from hybridflow.data.tokenizer import Tokenizer


class DemonstratedPrompts:
    """The prompts of `dataset` with an answer; item i is its PromptRow with `demonstration_token_ids`.

    Rows without a usable answer, and answers over `data.max_response_length`, are left out, counted and
    shown. Raises DataError where that leaves none.
    """

    def __init__(self, dataset: MapDataset[PromptRow], tokenizer: Tokenizer, config: DataConfig) -> None:
        self.dataset = dataset
        self._kept: list[int] = []
        self._answers = RaggedInts()
        key = config.demonstration_key
        limit = config.max_response_length
        self.report = RowReport(f"the training data's answers (data.demonstration_key={key})", len(dataset))

        def encode(index: int, _: int) -> list[int]:
            return encode_demonstration(tokenizer, dataset[index], config)

        for index, answer in self.report.encoded(range(len(dataset)), encode):
            if len(answer) > limit:
                self.report.failed(
                    index, f"the answer has {len(answer)} tokens, more than data.max_response_length={limit}"
                )
                continue
            self._kept.append(index)
            self._answers.append(answer)
        self.report.close()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, position: int) -> PromptRow:
        return replace(
            self.dataset[self._kept[position]], demonstration_token_ids=self._answers[position % len(self)]
        )


def encode_demonstration(tokenizer: Tokenizer, prompt: PromptRow, config: DataConfig) -> list[int]:
    """Return the token ids of the answer that SFT would learn, end token included.

    The column holds the answer's text, or messages that end in it and begin with the prompt's. Raises
    TypeError or ValueError where it holds neither, or other messages than the prompt's.
    """
    value = prompt.row.get(config.demonstration_key)
    if value is None:
        value = prompt.row.get(SHAREGPT)
    asked = prompt.row.get("raw_prompt")
    if value is None:
        raise ValueError(f"no answer in the column {config.demonstration_key}: set data.demonstration_key")
    if isinstance(value, str) and not isinstance(asked, (list, tuple)):
        ids, mask = encode_pair(tokenizer, str(asked or ""), value)
    else:
        if isinstance(value, str):
            messages = [*check_messages(asked), {"role": "assistant", "content": value}]
        else:
            messages = check_messages(value)
            if messages[-1]["role"] != "assistant":
                raise ValueError(
                    f"the last message has role {messages[-1]['role']}, wanted an answer of the assistant"
                )
            if isinstance(asked, (list, tuple)) and messages[:-1] != check_messages(asked):
                raise ValueError("the messages before the answer are not the prompt of the row")
        template = ChatTemplate(tokenizer, config.apply_chat_template_kwargs)
        ids, mask = encode_conversation(template, messages)
    start, end = last_answer(mask)
    return ids[start:end]
