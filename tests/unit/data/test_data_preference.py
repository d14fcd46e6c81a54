"""Preference data: the forms of pairs, what of them is learned, and kto's answers to other prompts."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from hybridflow.config.preference import PreferenceDataConfig, RewardDataConfig
from hybridflow.data.preference import CHOSEN, MISMATCHED, REJECTED, Comparison, PreferenceDataset
from hybridflow.data.row_schema import steps_of, transcript
from hybridflow.data.tasks.arithmetic_chain import STEP_END, ArithmeticPreferences
from hybridflow.errors import DataError
from hybridflow.models.tiny import create_tiny_tokenizer

TOKENIZER = create_tiny_tokenizer()
ASKED = [{"role": "user", "content": "1 + 1"}]
GOOD = [{"role": "assistant", "content": "2"}]
BAD = [{"role": "assistant", "content": "3 3"}]
TEMPLATED = TOKENIZER.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)


def dataset(*rows: dict[str, Any], single: bool = False, **keys: Any) -> PreferenceDataset:
    return PreferenceDataset(list(rows), TOKENIZER, PreferenceDataConfig(**keys), single=single)


def texts(item: Comparison) -> list[tuple[str, str]]:
    """(prompt, what is learned) of each answer."""
    found = []
    for answer in item.answers:
        start = answer.loss_mask.index(1)
        assert answer.loss_mask == [0] * start + [1] * (len(answer.input_ids) - start)
        found.append((TOKENIZER.decode(answer.input_ids[:start]), TOKENIZER.decode(answer.input_ids[start:])))
    return found


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
        {"prompt": "1 + 1", "chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        {"prompt": "1 + 1", "chosen": GOOD, "rejected": BAD},
        {"prompt": ASKED, "chosen": "2", "rejected": "3 3"},
        {"prompt": TEMPLATED, "chosen": "2", "rejected": "3 3"},
        {
            "chosen": "\n\nHuman: 1 + 1\n\nAssistant: 2",
            "rejected": "\n\nHuman: 1 + 1\n\nAssistant: 3 3",
        },
    ],
)
def test_all_forms_of_a_pair_are_one(row: dict[str, Any]) -> None:
    item = dataset(row)[0]
    assert texts(item) == [(TEMPLATED, "2<|im_end|>"), (TEMPLATED, "3 3<|im_end|>")]
    assert item.kinds == (CHOSEN, REJECTED)


def test_only_the_last_answer_of_a_conversation_is_learned() -> None:
    talk = [*ASKED, *GOOD, {"role": "user", "content": "and 3"}]
    item = dataset({"chosen": [*talk, *GOOD], "rejected": [*talk, *BAD]})[0]
    assert [learned for _, learned in texts(item)] == ["2<|im_end|>", "3 3<|im_end|>"]
    assert "and 3" in texts(item)[0][0]


def test_rows_that_are_no_pairs_are_counted_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    other = [{"role": "user", "content": "2 + 2"}]
    good = {"chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]}
    found = dataset({"chosen": [*ASKED, *GOOD], "rejected": [*other, *BAD]}, good)
    assert len(found) == 1 and "a pair answers one prompt" in caplog.text
    with pytest.raises(DataError, match="neither `Human:` nor `Assistant:`"):
        dataset({"chosen": "2", "rejected": "3"})
    with pytest.raises(DataError, match="no column rejected"):
        dataset({"chosen": "2"})


@pytest.mark.parametrize(("truncation", "kept"), [("drop", 1), ("right", 2), ("left", 2)])
def test_a_pair_that_is_too_long_is_dealt_with_as_one(truncation: str, kept: int) -> None:
    long = [{"role": "assistant", "content": "7 " * 30}]
    rows = [{"prompt": ASKED, "chosen": GOOD, "rejected": answer} for answer in (long, BAD)]
    found = dataset(*rows, max_length=40, truncation=truncation)
    assert len(found) == kept and all(len(a.input_ids) <= 40 for i in range(kept) for a in found[i].answers)
    with pytest.raises(DataError, match=r"1 of 2 conversations .* longer than data.max_length=40"):
        dataset(*rows, max_length=40)


def test_kto_takes_labels_and_gives_answers_to_other_prompts() -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"{n} + 1"}], "completion": f"{n + 1}", "label": n != 2}
        for n in range(3)
    ]
    found = dataset(*rows, single=True)
    assert [found[i].kinds for i in range(3)] == [(CHOSEN, MISMATCHED)] * 2 + [(REJECTED, MISMATCHED)]
    (prompt, own), (same, other) = texts(found[2])
    assert "2 + 1" in prompt and prompt == same and (own, other) == ("3<|im_end|>", "1<|im_end|>")
    pairs = dataset(
        *({"prompt": row["prompt"], "chosen": row["completion"], "rejected": "9"} for row in rows),
        single=True,
    )
    assert len(pairs) == 6 and texts(pairs[0])[1][1] == "2<|im_end|>", "of the next prompt, not of its pair"
    answers = [(row["prompt"], text) for row in rows for text in (row["completion"], "9")]
    apart = dataset(*({"prompt": p, "completion": c, "label": 1} for p, c in answers), single=True)
    assert [apart[i].answers[0].input_ids for i in range(6)] == [
        pairs[i].answers[0].input_ids for i in range(6)
    ]
    assert apart.digest() != pairs.digest(), "the same answers, and others beside them"
    assert pairs.digest() != found.digest() == dataset(*rows, single=True).digest()
    with pytest.raises(DataError, match="no column label"):
        dataset({"prompt": "a", "completion": "b"}, single=True)


def test_kto_walks_on_to_a_row_with_another_prompt() -> None:
    asked = [1, 2, 2, 2, 3, 1]
    rows = [
        {"prompt": [{"role": "user", "content": str(asked[n])}], "completion": str(4 + n), "label": True}
        for n in range(6)
    ]
    found = dataset(*rows, single=True)
    others = [texts(found[n])[1][1].removesuffix("<|im_end|>") for n in range(6)]
    assert others == ["5", "8", "8", "8", "9", "5"]
    with pytest.raises(DataError, match="all usable rows have one prompt"):
        dataset(*rows[1:4], single=True)


@pytest.mark.parametrize("bad", [-1, 2, 0.3, float("nan"), None, "yes", "", [1]])
def test_a_label_is_true_or_false(bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    labels = [True, False, 1, 0, 1.0, 0.0, "+", "-"]
    wanted = [True, False] * 4
    steps = {"completions": ["a"] * 8, "labels": labels}
    assert steps_of(steps, RewardDataConfig())[1] == wanted
    with pytest.raises(ValueError, match=r"labels: got .*, wanted true or false"):
        steps_of(steps | {"labels": [*labels[1:], bad]}, RewardDataConfig())
    rows = [
        {"prompt": [{"role": "user", "content": str(n)}], "completion": "2", "label": label}
        for n, label in enumerate([*labels, bad])
    ]
    found = dataset(*rows, single=True)
    assert [bool(found[i].kinds[0]) for i in range(len(found))] == wanted
    assert "1 of 9 rows" in caplog.text and "label: got" in caplog.text


@pytest.mark.parametrize("bad", [{}, {"margin": None}, {"margin": float("nan")}, {"margin": "much"}])
def test_a_pair_without_a_finite_margin_is_left_out(
    bad: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    pair = {"prompt": ASKED, "chosen": "2", "rejected": "3"}
    rows = [pair | {"margin": 1}, pair | bad, pair | {"margin": 0.5}]
    found = PreferenceDataset(rows, TOKENIZER, RewardDataConfig(), margin_key="margin")
    assert [found[i].margin for i in range(len(found))] == [1.0, 0.5] and "row 1: " in caplog.text


def test_a_transcript_keeps_what_looks_like_one_inside_a_line() -> None:
    assert transcript("Human: say Human: twice\n\nAssistant: Human: Human:\n\nHuman: ok\n\nAssistant:") == [
        {"role": "user", "content": "say Human: twice"},
        {"role": "assistant", "content": "Human: Human:"},
        {"role": "user", "content": "ok"},
        {"role": "assistant", "content": ""},
    ]


def test_the_task_has_one_wrong_step_in_the_rejected_answer() -> None:
    options = {"hops": 3, "max_total": 9}
    rows = ArithmeticPreferences(**options).rows("train", 40)
    for row in rows:
        right, wrong = (row[key][0]["content"].split(" . ") for key in ("chosen", "rejected"))
        assert right[-1] == f"#### {row['reward_model']['ground_truth']}" != wrong[-1]
        bad = [step for step in wrong[:-1] if eval(step.split("=")[0]) != int(step.split("=")[1])]
        assert len(bad) == 1 and all(0 <= int(step.split("=")[1]) <= 9 for step in wrong[:-1])
        assert row["labels"] == [True] * 4 or (
            row["completions"] == wrong and row["labels"].index(False) == wrong.index(bad[0])
        )
    content = hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()
    assert content == "2351e59f366edf44", "the rows of a seed stay"
    (row,) = ArithmeticPreferences(wrong_steps=3, **options).rows("train", 1)
    steps = row["rejected"][0]["content"].split(" . ")[:-1]
    assert all(eval(step.split("=")[0]) != int(step.split("=")[1]) for step in steps)
    (judged,) = ArithmeticPreferences(wrong_steps=3, conversation="verdict", **options).rows("train", 1)
    asked, said = (message["content"] for message in judged["messages"])
    assert asked == f"{row['prompt'][0]['content']} {STEP_END.join(row['completions'])}"
    assert said == ("10" if all(row["labels"]) else "0")
    (either,) = ArithmeticPreferences(wrong_steps=3, conversation="either", **options).rows("train", 1)
    assert either["messages"][1]["content"] == STEP_END.join(row["completions"])
    half = ArithmeticPreferences(swapped=0.5, **options).rows("train", 40)
    changed = [one["chosen"] != other["chosen"] for one, other in zip(rows, half, strict=True)]
    assert 8 < sum(changed) < 32


def test_the_task_of_one_step_is_wrong_by_as_little() -> None:
    rows = ArithmeticPreferences(hops=1, max_number=5, max_total=5).rows("train", 60)
    results = [
        [int(row[key][0]["content"].split("#### ")[1]) for key in ("chosen", "rejected")] for row in rows
    ]
    assert 5 in [right for right, _ in results], "the largest total is among them"
    assert {abs(right - wrong) for right, wrong in results} == {1, 2}
