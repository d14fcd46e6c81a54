"""The vLLM side of `generation.py`, run by vLLM's own Python.

python benchmarks/generation_vllm.py MODEL ROWS
"""

from __future__ import annotations

import os
import sys
import time

import side_by_side as kit

os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# else it takes a thread for each core, whatever OMP_NUM_THREADS says
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm import LLM, SamplingParams, TokensPrompt, __version__


def main() -> None:
    """Serve until standard input ends."""
    folder = sys.argv[1]
    rows = int(sys.argv[2])
    engine = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=rows,
        skip_tokenizer_init=True,
        seed=0,
    )
    kit.say({"version": __version__})
    while True:
        asked = kit.next_question()
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in asked["prompts"]]
        sampling = [
            SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
            for length in asked["lengths"]
        ]
        before = time.process_time()
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert [len(output.outputs[0].token_ids) for output in outputs] == asked["lengths"]
        kit.say({"wall": seconds, "cpu": time.process_time() - before})


if __name__ == "__main__":
    main()
