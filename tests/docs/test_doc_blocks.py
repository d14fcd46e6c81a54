"""The blocks of the documents work: bash is run or checked, python compiles, data parse."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest
import yaml
from doc_blocks import ROOT, Block, commands_outside, inline_commands, pages, read_blocks
from doc_words import DOTS, WITH_KEYS, check_command
from doc_workplace import recorded, run_bash, write_file, write_workplace

from hybridflow.config import PPOConfig
from hybridflow.config.load import load_config
from hybridflow.config.tree import to_tree

PAGES = pages()
PLACEHOLDERS = {"NAME": "grpo", "tiny/NAME": "tiny/grpo", "key=1,2": "trainer.seed=1,2"}
"""What sentences write for a value of the reader's choice, and one such value."""
RUN = [page for page in PAGES if any(block.mode == "run" for block in read_blocks(page))]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=_name)
def test_blocks_of_a_page_run_in_their_order(page: Path, stock: Path, zygote: str, tmp_path: Path) -> None:
    folder = write_workplace(stock, tmp_path / "work", zygote)
    problems = []
    for block in read_blocks(page):
        if block.file:
            write_file(block, folder)
        if block.before:
            before = run_bash(block.before, folder)
            assert before.returncode == 0, f"{block.place}: {block.before}: {before.stdout}"
        if block.mode == "run":
            done = _run(block, folder)
            if done.returncode:
                problems.append(f"{block.place} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    if problems:
        pytest.fail("\n\n".join(problems), pytrace=False)


def _run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    if block.language == "bash":
        return run_bash(block.text, folder)
    (folder / "block.py").write_text(block.text)
    return run_bash("python block.py", folder)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_are_spelled_as_the_command_wants_them(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in read_blocks(page):
        if block.file:
            write_file(block, tmp_path)
        if block.language != "bash" or block.mode == "skip":
            continue
        calls = recorded(block.text, tmp_path)
        lines = re.sub(r"\\\n", " ", block.text)
        written = re.findall(r"^(?:[A-Z_]+=\S+ +)*(?:\S+/bin/)?(?:hybridflow|python) ", lines, re.MULTILINE)
        assert len(calls) >= len(written), f"{block.place}: {len(written)} commands, {len(calls)} found"
        for call in calls:
            check_command(call)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_quoted_commands_are_spelled_as_the_command_wants_them(page: Path) -> None:
    for text in inline_commands(page):
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(text)]
        whole = words[1] in WITH_KEYS or not {*DOTS} & {*words}
        if len(words) > 2 and whole:  # with two words it is the name of a command
            check_command(words)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_command_is_in_a_bash_block(page: Path) -> None:
    assert not commands_outside(page)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_python_compiles_and_data_parse(page: Path, tmp_path: Path) -> None:
    for block in read_blocks(page):
        if block.mode == "skip":
            continue
        if block.language == "python":
            _compile(block)
        elif block.language == "json":
            for line in block.text.strip().split("\n") if block.text.count("\n{") else [block.text]:
                json.loads(line)
        elif block.language == "yaml":
            _check_yaml(block, tmp_path)


def _compile(block: Block) -> None:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        compile(block.text, block.place, "exec", flags=flags, dont_inherit=True)
    except SyntaxError as error:
        if "outside function" not in str(error):
            raise
        body = textwrap.indent(block.text, "    ")  # a part of a function, with its yield or return
        compile(f"async def part():\n{body}", block.place, "exec", dont_inherit=True)


def _check_yaml(block: Block, folder: Path) -> None:
    tree = yaml.safe_load(block.text)
    assert tree is not None, block.place
    if isinstance(tree, dict) and set(tree) <= {*to_tree(PPOConfig()), "defaults"}:
        tree.pop("defaults", None)
        recipe = folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(tree))
        load_config(PPOConfig, recipe=recipe)


def test_a_wrong_key_or_word_is_found(tmp_path: Path) -> None:
    (call,) = recorded("hybridflow train --recipe grpo \\\n  … trainer.total_epoch=3 # comment\n", tmp_path)
    assert call == ["hybridflow", "train", "--recipe", "grpo", "…", "trainer.total_epoch=3"]
    with pytest.raises(AssertionError, match="total_epochs"):
        check_command(call)
    with pytest.raises(AssertionError, match="--recipes"):
        check_command(["hybridflow", "train", "--recipes", "grpo"])
    with pytest.raises(AssertionError, match="lr"):
        check_command(["python", "-m", "hybridflow.trainer.main_sft", "…", "optim.lrr=1"])
