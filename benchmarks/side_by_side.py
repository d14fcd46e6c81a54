"""Shared code of the benchmarks: the model, the lengths, sides in processes of their own that are asked in
turn, and how a result is written.

parent ──asks side A, side B, side A, …──► a process each, idle between two questions ──answers (seconds,
…)──► medians, table, page
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROMPT = 15
GROUP = 8
MAX_TOKENS = 64
SIZES = {
    "vocab_size": 262,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
LENGTHS = {"uniform": (MAX_TOKENS, 0.0), "life": (0.4 * MAX_TOKENS, 0.7)}
RESULTS = Path(__file__).parent / "results"
MARK = "@@ "
PAD = 0
END = 1


def lengths_of(rows: int, pattern: str) -> list[int]:
    """Response lengths of a pattern, always the same ones: `uniform` all at the maximum, `life` log-normal
    with mean 0.4 of it.
    """
    mean, sigma = LENGTHS[pattern]
    draw = random.Random(rows)
    return [
        min(MAX_TOKENS, max(1, round(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))
        for _ in range(rows)
    ]


def make_model(folder: Path, *, end: int | None = None, **sizes: int) -> int:
    """Write a Qwen 2 model with random weights, 4.3 M parameters unless `sizes` say otherwise; gives their
    number.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    wanted = {**SIZES, **sizes}
    wanted.setdefault("num_key_value_heads", wanted["num_attention_heads"])
    config = Qwen2Config(
        **wanted, max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=PAD, eos_token_id=end
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=PAD, eos_token_id=end)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def characters() -> list[str]:
    """260 letters, one token each."""
    return [chr(code) for code in range(0x4E00, 0x4E00 + SIZES["vocab_size"] - 2)]


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 262 tokens, one a letter. Beside the model, not in its folder: transformers
    overrules it in one of Qwen 2.
    """
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(("<pad>", "<end>", *characters()))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    made.save_pretrained(folder)


def make_prompts(count: int) -> list[str]:
    """Texts of PROMPT tokens."""
    draw = random.Random(0)
    return ["".join(draw.choices(characters(), k=PROMPT)) for _ in range(count)]


def write_prompts(file: Path, count: int) -> None:
    """Write `count` prompts as rows of data that our trainer reads."""
    rows = [
        {"data_source": "letters", "prompt": text, "reward_model": {"ground_truth": ""}}
        for text in make_prompts(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a process that is measured: spinning threads take many times as long where
    cores are shared.
    """
    own = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**os.environ, **own}


class Side:
    """A process that answers a line of JSON with another, and does nothing between two questions."""

    first: Mapping[str, Any]
    """What it said when it was ready."""

    def __init__(self, command: Sequence[str], threads: int) -> None:
        self.process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(threads)
        )

    def answer(self) -> dict[str, Any]:
        """The next answer; RuntimeError if the process ends instead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line[len(MARK) :])
                return found
        raise RuntimeError(f"{' '.join(map(str, self.process.args))} ended with status {self.process.wait()}")

    def ask(self, question: Any = None) -> dict[str, Any]:
        """One question, one answer."""
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        """End the process by ending its input."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        for _ in self.process.stdout:  # whatever it still says, so that it is not stopped by a full pipe
            pass
        self.process.wait(timeout=120)


@contextmanager
def open_sides(commands: Mapping[str, Sequence[str]], threads: int) -> Iterator[dict[str, Side]]:
    """A side for each command, one after the other ready to be asked."""
    sides: dict[str, Side] = {}
    try:
        for name, command in commands.items():
            sides[name] = Side(command, threads)
            sides[name].first = sides[name].answer()
        yield sides
    finally:
        for side in sides.values():
            side.close()


def own_command(file: str, *arguments: object) -> list[str]:
    """A side that is a part of the script `file`."""
    return [sys.executable, file, *map(str, arguments)]


def say(answer: Mapping[str, Any]) -> None:
    """In a side: an answer."""
    print(MARK + json.dumps(answer), flush=True)


def next_question() -> Any:
    """In a side: the next question; ends the process where there is none."""
    line = sys.stdin.readline()
    if not line:
        sys.stdout.flush()
        os._exit(0)
    return json.loads(line)


def in_turn(ways: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int) -> dict[str, list[Any]]:
    """Run each way in `rounds` rounds after `warm_up` ones, in an order that turns; return what each
    gives.
    """
    names = list(ways)
    found = {name: list[Any]() for name in ways}
    for turn in range(warm_up + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            given = ways[name]()
            if turn >= warm_up:
                found[name].append(given)
    return found


def memory() -> dict[str, float]:
    """MiB of this process: resident now, and at its peak since the start or since `forget_peak`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"now": int(lines["VmRSS"].split()[0]) / 1024, "peak": int(lines["VmHWM"].split()[0]) / 1024}


def forget_peak() -> None:
    """Let the peak of this process begin anew, so that what importing took is not in it."""
    Path("/proc/self/clear_refs").write_text("5")


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """median (smallest–largest)."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    return "\n".join(map(line, [head, ["---"] * len(head), *rows]))


def line(cells: Sequence[object]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def verdict(met: bool) -> str:
    """Whether a goal was met, for a page."""
    return "met" if met else "**missed**"


def ratio(one: Sequence[float], other: Sequence[float], meaning: str = "") -> str:
    """Median of `one` over the median of `other`, then `meaning`, and a note where their ranges overlap."""
    text = f"{statistics.median(one) / statistics.median(other):.2f} × {meaning}".rstrip()
    if min(one) <= max(other) and min(other) <= max(one):
        text += " (within the noise)"
    return text


NOISE = (
    "Within the noise: the ranges of both sides, from the fastest round to the slowest, overlap, so that\n"
    "another run may turn the order round."
)


def facts(
    packages: Sequence[str], command: str | None = None, threads: object = "as shown"
) -> dict[str, str]:
    """Command, date, machine, threads and versions of this run."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return {
        "command": command
        or " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_anywhere, sys.argv[1:])]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{machine()}, Python {platform.python_version()}, {versions}",
        "threads": str(threads),
    }


def _anywhere(argument: str) -> str:
    """An argument of the command; a place on this machine means nothing on another."""
    return "PATH" if Path(argument).is_absolute() else argument


def machine() -> str:
    """The processor and how many cores this process sees.

    The name alone may be that of a whole series, so family, model and stepping are told too, and the vector
    instructions, by which kernels are chosen: figures and even rounding differ between them.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        known.setdefault(name.strip(), value.strip())
    flags = known.get("flags", known.get("Features", "")).split()
    vectors = [flag for flag in flags if flag.startswith(("avx", "amx", "sve", "asimd"))]
    numbers = [f"{name} {known[name]}" for name in ("cpu family", "model", "stepping") if name in known]
    details = ", ".join([*numbers, " ".join(vectors)]).strip(", ")
    name = known.get("model name", platform.machine())
    return f"{name} ({details}), {os.cpu_count()} cores" if details else f"{name}, {os.cpu_count()} cores"


def write(
    name: str,
    result: Mapping[str, Any],
    title: str,
    text: str,
    *,
    dry: object = False,
    folder: Path | None = None,
) -> None:
    """`results/{name}.json` and `.md`, or in another folder; `result` holds the facts, which head the page.

    Prints the page; a dry run does no more.
    """
    told = f"{result['date']} · `{result['command']}` · {result['machine']}"
    script = result["command"].removeprefix("python ").split()[0]
    page = f"# {title}\n\n{told}\n\nWritten by {script}; do not edit.\n\n{text}\n"
    if not dry:
        folder = folder or RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (folder / f"{name}.md").write_text(page)
    print(f"\n{page}", flush=True)


def committed(name: str) -> dict[str, Any]:
    """The result that is there, of which `--page` writes the page again."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def numbers(text: str) -> list[int]:
    """`1,2` as a list, for a parser."""
    return [int(part) for part in text.split(",")]


def arguments(document: str | None, *, rounds: int, quick_rounds: int = 1) -> argparse.ArgumentParser:
    """A parser with what every benchmark has: threads, rounds, a quick mode that only shows that it runs."""
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--quick",
        action="store_const",
        const=quick_rounds,
        default=0,
        help="a dry run: one round, nothing is written",
    )
    parser.add_argument(
        "--page", action="store_true", help="only write the page again, from the result that is there"
    )
    return parser
