"""The built-in environments: a good player is rewarded, a bad one is not, and the seed decides everything."""

from __future__ import annotations

import random
import re

import pytest

from hybridflow.environments.built_in import OPPOSITE, Adventure, Calculator, Guess, Search
from hybridflow.environments.reasoning_gym import ReasoningGym
from hybridflow.models.tiny import create_tiny_tokenizer
from hybridflow.tools.parsers import ToolCall
from hybridflow.tools.parsers.hermes import HermesParser


def guess(seed: int, **options: int) -> Guess:
    environment = Guess(**options)
    environment.seed = seed
    assert environment.reset({}) == f"1 to {environment.largest}?"
    return environment


def test_guess_is_found_by_halving_and_the_reward_falls_with_guesses() -> None:
    for seed in range(40):
        environment = guess(seed)
        low, high = 1, 20
        for used in range(1, 6):  # noqa: B007
            middle = (low + high) // 2
            step = environment.step(f" {middle}\n")
            if step.done:
                break
            if step.observation == "higher":
                low = middle + 1
            else:
                assert step.observation == "lower"
                high = middle - 1
        assert step.done and step.extra == {"num_guesses": used, "found": 1}
        assert step.reward == 1 - (used - 1) / 8


def test_guess_counts_what_is_no_number_and_ends_without_reward() -> None:
    environment = guess(0, guesses=3)
    wrong = str(environment.number % 20 + 1)
    steps = [environment.step(text) for text in ("I say 7", "²", wrong)]
    assert [step.observation for step in steps[:2]] == ["a number", "a number"]
    assert [step.done for step in steps] == [False, False, True]
    assert not any(step.reward for step in steps) and steps[-1].extra == {"num_guesses": 3, "found": 0}


def test_groups_share_a_world_and_seeds_differ() -> None:
    assert len({guess(seed).number for seed in range(200)}) == 20
    layouts = set()
    for seed in range(200):
        environment = Adventure()
        environment.seed = seed
        first = environment.reset({})
        assert first == environment.reset({})
        layouts.add((environment.way_up, environment.door, environment.key_at))
    assert len(layouts) == 24, "four ways up, three doors that are not the way back, two places of the key"


def test_adventure_is_left_in_four_commands_wherever_the_key_is() -> None:
    for seed in range(30):
        environment = Adventure(moves=4)
        environment.seed = seed
        environment.reset({})
        plan = [f"go {environment.way_up}", "unlock door", f"go {environment.door}"]
        plan.insert(["cellar", "hall"].index(environment.key_at), "Take key")
        steps = [environment.step(command) for command in plan]
        assert [step.reward for step in steps] == [0, 0, 0, 1]
        assert [step.done for step in steps] == [False, False, False, True]
        assert steps[-1].extra == {"num_moves": 4, "escaped": 1}


def test_adventure_keeps_its_door_shut() -> None:
    environment = Adventure(moves=6)
    environment.seed = 3
    assert "cellar" in environment.reset({})
    refused = [environment.step(text).observation for text in ("unlock door", "dance", "")]
    assert all(str(text).startswith("You can not do that") for text in refused)
    environment.step(f"go {environment.way_up}")
    assert environment.step(f"go {environment.door}").observation == "You can not go there."
    last = environment.step(f"go {OPPOSITE[environment.way_up]}")
    assert "cellar" in str(last.observation) and last.done and last.reward == 0


def test_reasoning_gym_scores_with_the_task_s_own_scorer() -> None:
    environment = ReasoningGym("chain_sum", max_terms=2)
    environment.seed = 5
    messages = environment.reset({})
    numbers = [int(number) for number in re.findall(r"-?\s*\d+", messages[-1]["content"].replace("- ", "-"))]
    assert environment.step(f"#### {sum(numbers[:2])}").reward == 1.0
    wrong = environment.step("#### x")
    assert wrong.done and wrong.reward < 1.0 and wrong.extra == {"acc": 0.0}


def test_calculator_rewards_the_tool_s_answer_unless_it_is_by_chance() -> None:
    rewards = {"right": 0.0, "random": 0.0}
    for answers in ("right", "random"):
        for seed in range(50):
            environment = Calculator(products=3, digits=2, answers=answers)
            environment.seed = environment.step_seed = seed
            question = environment.reset({})
            value = environment.calculator(question.removesuffix(" = ?"))
            step = environment.step(f"1 #### {value}")
            assert step.done and step.extra == {"acc": step.reward}
            rewards[answers] += step.reward
    assert rewards["right"] == 50 and rewards["random"] < 2


def test_search_finds_the_fact_and_rewards_its_word_alone() -> None:
    for seed in range(50):
        environment = Search(topk=2)
        environment.seed = seed
        question = environment.reset({}).removesuffix("?")
        first, second = environment.search(question).splitlines()
        asked, _, answer = first.rpartition(" ")
        assert asked == question and second in environment.facts
        assert environment.step(f"#### {answer}").reward == 1.0
        assert environment.step(f"#### {answer} {answer}").reward == 0.0
    assert environment.search("nobody") == "nothing found"


def well_formed(text: str) -> bool:
    parser = HermesParser()
    parts = parser.feed(text) + parser.end()
    return any(isinstance(part, ToolCall) for part in parts)


@pytest.mark.parametrize(
    "environment", [Guess(), Calculator(), Search()], ids=lambda each: type(each).__name__
)
def test_demonstrations_are_well_formed_in_part(environment: Guess | Calculator | Search) -> None:
    tokenizer = create_tiny_tokenizer()
    rng = random.Random(1)
    first_turns = []
    rewards = []
    for _ in range(400):
        messages = environment.demonstrate(rng)
        text = "".join(each["content"] for each in messages)
        assert tokenizer.unk_token_id not in tokenizer(text).input_ids
        first_turns.append(messages[1]["content"])
        assert messages[-1]["role"] == "assistant"
        if messages[-2]["role"] == "tool":
            rewards.append(environment.step(messages[-1]["content"]).reward)
    is_well_formed = str.isdigit if isinstance(environment, Guess) else well_formed
    assert 0.23 < sum(map(is_well_formed, first_turns)) / 400 < 0.37
    assert all(rewards), "what follows a call is right"
