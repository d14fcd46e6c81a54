"""From calls to rows: the extension property against a slow reference, and cases by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.protocol.prompt import Medium, Prompt
from hybridflow.protocol.trajectory import Lineage, Outcome, PolicyCall, Segment, rows_of


@dataclass(frozen=True)
class Output:
    token_ids: list[int]
    log_probs: list[float]
    policy_versions: list[int]


def call(prompt: list[int], sampled: list[int], number: int = 0, *, accepted: bool = True) -> PolicyCall:
    """A call whose log-probs and versions say which call and which place they are of."""
    places = range(len(sampled))
    output = Output(sampled, [-(number + place / 100) for place in places], [number] * len(sampled))
    return PolicyCall(Prompt(tuple(prompt)), output, accepted)


Token = tuple[int, float | None, int | None]
"""Id, log-prob and version of a token; None for a token that was given."""


def slow_rows(calls: list[PolicyCall]) -> list[tuple[int, list[Token]]]:
    """The definition, token by token: (tokens of the first prompt, all tokens of the row)."""
    rows: list[tuple[int, list[Token]]] = []
    last_used: list[int] = []
    for number, each in enumerate(calls):
        prompt = list(each.prompt.token_ids)
        if not each.accepted or not each.output.token_ids:
            continue
        best = -1
        for index, (_, tokens) in enumerate(rows):
            ids = [token for token, _, _ in tokens]
            if len(ids) > len(prompt) or any(a != b for a, b in zip(ids, prompt)):
                continue
            longer = best < 0 or len(ids) > len(rows[best][1])
            newer = best >= 0 and len(ids) == len(rows[best][1]) and last_used[index] > last_used[best]
            if longer or newer:
                best = index
        if best < 0:
            rows.append((len(prompt), []))
            last_used.append(number)
        tokens = rows[best][1]
        tokens += [(token, None, None) for token in prompt[len(tokens) :]]
        tokens += zip(each.output.token_ids, each.output.log_probs, each.output.policy_versions)
        last_used[best] = number
    return rows


def tokens_of(row: Lineage) -> tuple[int, list[Token]]:
    tokens: list[Token] = [(token, None, None) for token in row.prompt.token_ids]
    for segment in row.segments:
        if segment.sampled:
            tokens += zip(segment.token_ids, segment.log_probs, segment.versions)
        else:
            tokens += [(token, None, None) for token in segment.token_ids]
    return len(row.prompt.token_ids), tokens


SHORT = st.lists(st.integers(0, 1), max_size=3)


@st.composite
def histories(draw: st.DrawFn) -> list[PolicyCall]:
    """Calls whose prompts mostly begin with what an earlier call has read and written, whole or cut."""
    calls: list[PolicyCall] = []
    for number in range(draw(st.integers(1, 8))):
        earlier: list[int] = []
        if calls and draw(st.integers(0, 4)):
            one = draw(st.sampled_from(calls))
            earlier = [*one.prompt.token_ids, *one.output.token_ids]
            earlier = earlier[: len(earlier) - draw(st.sampled_from([0, 0, 0, 1, 2]))]
        prompt = earlier + draw(SHORT)
        calls.append(call(prompt, draw(SHORT), number, accepted=draw(st.integers(0, 5)) > 0))
    return calls


@settings(max_examples=100, deadline=None, derandomize=True)
@given(histories())
def test_rows_are_those_of_the_slow_reference(calls: list[PolicyCall]) -> None:
    rows = rows_of(calls)
    assert [tokens_of(row) for row in rows] == slow_rows(calls)
    sampled = [token for row in rows for token in tokens_of(row)[1] if token[1] is not None]
    wanted = [
        token
        for each in calls
        if each.accepted
        for token in zip(each.output.token_ids, each.output.log_probs, each.output.policy_versions)
    ]
    assert sorted(sampled) == sorted(wanted), "no sampled token is lost, doubled or given another log-prob"
    for row in rows:
        assert row.response_ids == [token for token, _, _ in tokens_of(row)[1]][len(row.prompt.token_ids) :]
        assert len(row.sampled_mask) == len(row.response_ids) and any(row.sampled_mask)
        assert all(segment.token_ids for segment in row.segments)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(histories(), st.data())
def test_calls_that_were_not_used_change_nothing(calls: list[PolicyCall], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(calls)))
    prompt = data.draw(SHORT)
    unused = data.draw(st.sampled_from([call(prompt, [], 99), call(prompt, [1], 99, accepted=False)]))
    assert rows_of([*calls[:place], unused, *calls[place:]]) == rows_of(calls)


def test_a_tool_answer_is_a_given_segment_of_the_same_row() -> None:
    rows = rows_of([call([1, 2], [3, 4], 0), call([1, 2, 3, 4, 8, 9], [5], 1)])
    assert len(rows) == 1 and rows[0].prompt == Prompt((1, 2))
    assert rows[0].segments == (
        Segment((3, 4), True, (0.0, -0.01), (0, 0)),
        Segment((8, 9)),
        Segment((5,), True, (-1.0,), (1,), call=1),
    )
    assert rows[0].sampled_mask == [True, True, False, False, True]


def test_a_prompt_that_lost_one_token_starts_a_row() -> None:
    rows = rows_of([call([1, 2], [3, 4], 0), call([1, 2, 3, 8], [5], 1)])
    assert [row.prompt.token_ids for row in rows] == [(1, 2), (1, 2, 3, 8)]
    assert [row.response_ids for row in rows] == [[3, 4], [5]]


def test_of_two_branches_the_second_is_a_row_of_its_own() -> None:
    rows = rows_of([call([1], [2], 0), call([1, 2, 7], [3], 1), call([1, 2, 8], [4], 2)])
    assert [row.response_ids for row in rows] == [[2, 7, 3], [4]]
    assert rows[1].prompt.token_ids == (1, 2, 8), "what another row has sampled is read here, not learned"


def test_the_longest_row_goes_on_and_of_equal_ones_the_newest() -> None:
    longest = rows_of([call([1], [2, 3], 0), call([1], [2], 1), call([1, 2, 3, 4], [5], 2)])
    assert [row.response_ids for row in longest] == [[2, 3, 4, 5], [2]]
    equal = rows_of([call([1], [2], 0), call([1], [2], 1), call([1, 2, 4], [5], 2)])
    assert [row.response_ids for row in equal] == [[2], [2, 4, 5]]


def test_other_media_under_equal_placeholders_never_share_a_row() -> None:
    cat, dog = Medium(1, 1, "cat"), Medium(1, 1, "dog")
    first = PolicyCall(Prompt((1, 2), (cat,)), Output([3], [-1.0], [0]))
    other = PolicyCall(Prompt((1, 2, 3, 4), (dog,)), Output([5], [-1.0], [0]))
    same = PolicyCall(Prompt((1, 2, 3, 4), (cat,)), Output([5], [-1.0], [0]))
    more = PolicyCall(Prompt((1, 2, 3, 2), (cat, Medium(3, 1, "dog"))), Output([5], [-1.0], [0]))
    assert len(rows_of([first, other])) == 2 and len(rows_of([first, same])) == 1
    (row,) = rows_of([first, more])
    assert row.media == more.prompt.media and row.given_media == more.prompt.media[1:]


def test_a_segment_and_an_outcome_refuse_what_does_not_fit() -> None:
    with pytest.raises(AssertionError, match="2 tokens, sampled=True, has 1 log-probs"):
        Segment((1, 2), True, (-0.5,), (0, 0))
    with pytest.raises(AssertionError, match="has 1 log-probs and 0 versions; wanted 0"):
        Segment((1,), False, (-0.5,))
    with pytest.raises(AssertionError, match="wrong cause"):
        Outcome("failed")
