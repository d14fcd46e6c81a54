"""Questions of NQ and HotpotQA as parquet, for a model that may search, as in Search-R1.

python examples/data_preprocess/search_r1.py --local_save_dir ~/data/search_r1
python examples/data_preprocess/search_r1.py --local_dataset_path ~/raw/nq_hotpotqa
"""

from __future__ import annotations

from typing import Any

from rows import arguments, write_splits

DATASET = "PeterJinGo/nq_hotpotqa_train"
SYSTEM = "You are a helpful assistant."
INSTRUCTION = (
    "Answer the question below. Think inside <think> and </think> whenever you have learned something new. "
    "Where you lack knowledge, call the search tool; you may do so several times. When you know enough, give "
    "the answer inside <answer> and </answer>, without explanations, for example <answer>Beijing</answer>."
)


def convert(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return one raw row (question, golden_answers or reward_model, data_source)."""
    question = str(raw["question"]).strip()
    given = raw.get("reward_model") or {}
    truth = given.get("ground_truth") or {"target": list(raw["golden_answers"])}
    source = f"searchR1_{raw.get('data_source', 'nq')}"
    create_kwargs = {"ground_truth": truth, "question": question, "data_source": source}
    return {
        "data_source": source,
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{INSTRUCTION}\n\nQuestion: {question}"},
        ],
        "ability": raw.get("ability") or "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "need_tools_kwargs": True,
            "tools_kwargs": {"search": {"create_kwargs": create_kwargs}},
        },
    }


if __name__ == "__main__":
    write_splits(convert, arguments(__doc__.splitlines()[0], "~/data/search_r1"), DATASET)
