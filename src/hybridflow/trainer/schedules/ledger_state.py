"""The transitions of groups and the state they add up to: the fold of a ledger, without its file.

    Transition ──LedgerState.apply──► version, active and ready groups, batches, counts

    Admitted ──► Finished ──► Scored ──► Taken ──► Published (the groups of the step are trained)
        │            │           │└────► Filtered
        └────────────┴───────────┴─────► Failed

Every admitted index has exactly one `GroupPhase`, so trained, active, failed and filtered groups are disjoint
and cover 0..admitted - 1; and a group that is in a batch is never taken again, so each is trained once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice


def ranges(indices: Iterable[int]) -> Iterator[range]:
    """Cut ascending indices into runs without a gap: 3, 4, 5, 9 are 3..5 and 9."""
    run: range | None = None
    for index in indices:
        if run is not None and index == run.stop:
            run = range(run.start, index + 1)
            continue
        if run is not None:
            yield run
        run = range(index, index + 1)
    if run is not None:
        yield run


def ranges_text(indices: Iterable[int], most: int) -> str:
    """Return ascending indices for a message, such as `3-5, 9`, with at most `most` ranges."""
    runs = list(ranges(indices))
    texts = [str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in islice(runs, most)]
    if len(runs) > most:
        texts.append(f"and {sum(map(len, runs[most:]))} more")
    return ", ".join(texts)


@dataclass(frozen=True)
class Transition:
    """One line of a ledger: something that has happened, or is allowed to happen once the line is written."""


@dataclass(frozen=True)
class Groups(Transition):
    """Something that happened to the groups `first` .. `first + count - 1` at once."""

    first: int
    count: int = 1

    @property
    def indices(self) -> range:
        """The indices of the groups."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class Admitted(Groups):
    """Groups start to be generated under a published `version`, in the exact schedules perhaps an older one;
    their indices are the next ones.
    """

    version: int = field(kw_only=True)
    prompts: tuple[int, ...] = ()
    """Rows of the data that a sampler which learns chose for the groups, one each; empty: the loader's order
    says which."""


@dataclass(frozen=True)
class Restarted(Groups):
    """Active groups restart under a published `version`, because a resume does not have their rows."""

    version: int = field(kw_only=True)


@dataclass(frozen=True)
class Finished(Groups):
    """Groups whose responses are whole."""

    tokens: int = 0
    """Tokens that were sampled for the groups, all together; so too below."""


@dataclass(frozen=True)
class Scored(Groups):
    """Finished groups that have their rewards: they are ready for training."""


@dataclass(frozen=True)
class Taken(Groups):
    """Ready groups that are in the batch of training step `step`, from 0."""

    step: int = field(kw_only=True)
    tokens: int = 0


@dataclass(frozen=True)
class Published(Transition):
    """All engines have the weights of step `version - 1`, whose groups are now trained."""

    version: int


@dataclass(frozen=True)
class Failed(Groups):
    """Groups that were given up, with the tokens that they had by then."""

    cause: str = field(kw_only=True)
    tokens: int = 0


@dataclass(frozen=True)
class Filtered(Groups):
    """Scored groups that are not trained, because nothing can be learned from them."""


@dataclass(frozen=True)
class Replaced(Groups):
    """Failed or filtered groups, in whose place the active groups from index `by` on were admitted."""

    by: int = field(kw_only=True)


@dataclass(frozen=True)
class Replayed(Groups):
    """Rows of groups of an earlier batch that step `step` trains again; exempt from "trained once"."""

    step: int = field(kw_only=True)
    draws: int = 1
    """Trajectories of each group, counted as often as they were drawn."""


class ImpossibleTransition(AssertionError):
    """A transition that cannot follow those before it, such as a group that is taken twice."""


class GroupPhase(IntEnum):
    """Where a group is; `wording` says it in a message."""

    GENERATING = 0
    FINISHED = 1
    SCORED = 2
    TAKEN = 3
    TRAINED = 4
    FAILED = 5
    FILTERED = 6

    @property
    def wording(self) -> str:
        """The phase in words that follow "it is"."""
        return ("being generated", "finished", "scored", "in a batch", "trained", "failed", "filtered")[self]


ACTIVE = (GroupPhase.GENERATING, GroupPhase.FINISHED, GroupPhase.SCORED)
LISTED = 20
"""Ranges of groups that a message lists for each phase."""


class LedgerState:
    """The state after all transitions so far; `apply` updates it at a cost that depends on one line only."""

    def __init__(self) -> None:
        self.version = 0
        """Training steps whose weights are published."""
        self.active: dict[int, int] = {}
        """Version of each group that was admitted and has not been taken, failed or filtered, by index."""
        self.ready: dict[int, None] = {}
        """Indices of the scored groups among them, in the order in which they were scored."""
        self.prompts: dict[int, int] = {}
        """Row of the data of each active group, where a sampler has chosen it."""
        self.batches: dict[int, list[int]] = {}
        """Indices taken for each step that is not published yet."""
        self.trained_per_step: list[int] = []
        """Groups that each published step has trained."""
        self.groups: Counter[str] = Counter()
        """Groups by what happened to them: the transition's name in lower case, such as `failed`."""
        self.tokens: Counter[str] = Counter()
        """Sampled tokens of these groups; known for `finished`, `taken` and `failed`."""
        self.causes: Counter[str] = Counter()
        """Failed groups by cause."""
        self.staleness: Counter[int] = Counter()
        """Taken groups by the step that took them, less the version that they were admitted under."""
        self._phases = bytearray()

    @property
    def num_admitted(self) -> int:
        """Groups that were admitted: the next one has this index."""
        return len(self._phases)

    @property
    def num_taken(self) -> int:
        """Groups in all batches so far: `trained` of `Schedule.may_admit`."""
        return self.groups["taken"]

    def phase(self, index: int) -> GroupPhase:
        """Return where the admitted group `index` is."""
        return GroupPhase(self._phases[index])

    def apply(self, transition: Transition) -> None:
        """Apply one transition, or raise ImpossibleTransition and change nothing where it cannot follow."""
        match transition:
            case Admitted():
                self._admit(transition)
            case Restarted():
                self._restart(transition)
            case Finished():
                self._move(transition, (GroupPhase.GENERATING,), GroupPhase.FINISHED)
            case Scored():
                self._move(transition, (GroupPhase.FINISHED,), GroupPhase.SCORED)
                self.ready.update(dict.fromkeys(transition.indices))
            case Taken():
                self._take(transition)
            case Published():
                self._publish(transition)
            case Failed():
                self._move(transition, ACTIVE, GroupPhase.FAILED)
                self._leave(transition.indices)
                self.causes[transition.cause] += transition.count
            case Filtered():
                self._move(transition, (GroupPhase.SCORED,), GroupPhase.FILTERED)
                self._leave(transition.indices)
            case Replaced():
                self._check(transition, (GroupPhase.FAILED, GroupPhase.FILTERED))
                self._check(Groups(transition.by, transition.count), ACTIVE)
            case Replayed():
                self._check(transition, (GroupPhase.TAKEN, GroupPhase.TRAINED))
            case _:
                raise ImpossibleTransition(
                    f"{transition} belongs into the file of a ledger, not into its fold"
                )
        if isinstance(transition, Groups):
            name = type(transition).__name__.lower()
            self.groups[name] += transition.count
            self.tokens[name] += getattr(transition, "tokens", 0)

    def open_items(self) -> str:
        """Return the unfinished groups, as one line for the message of a deadline that has passed."""
        parts = [f"version {self.version}, {self.num_admitted} groups admitted"]
        for phase in ACTIVE:
            indices = sorted(index for index in self.active if self.phase(index) == phase)
            if indices:
                parts.append(f"{phase.wording}: {self._with_versions(indices)}")
        for step, indices in self.batches.items():
            parts.append(f"in the batch of step {step}: {ranges_text(sorted(indices), LISTED)}")
        if len(parts) == 1:
            parts.append("no group is open")
        return "; ".join(parts)

    def _with_versions(self, indices: list[int]) -> str:
        versions = sorted({self.active[index] for index in indices})
        texts = []
        for version in islice(versions, LISTED):
            of_version = [index for index in indices if self.active[index] == version]
            texts.append(f"{ranges_text(of_version, LISTED)} (version {version})")
        return ", ".join(texts)

    def _admit(self, admitted: Admitted) -> None:
        if admitted.first != self.num_admitted or admitted.count < 1:
            raise ImpossibleTransition(f"{admitted}: the next index is {self.num_admitted}")
        if admitted.prompts and len(admitted.prompts) != admitted.count:
            raise ImpossibleTransition(f"{admitted}: {admitted.count} groups need as many prompts")
        self._check_published(admitted, admitted.version)
        self._phases.extend([GroupPhase.GENERATING] * admitted.count)
        self.active.update(dict.fromkeys(admitted.indices, admitted.version))
        self.prompts.update(zip(admitted.indices, admitted.prompts))

    def _restart(self, restarted: Restarted) -> None:
        self._check_published(restarted, restarted.version)
        self._move(restarted, ACTIVE, GroupPhase.GENERATING)
        for index in restarted.indices:
            self.active[index] = restarted.version
            self.ready.pop(index, None)

    def _take(self, taken: Taken) -> None:
        if taken.step < self.version:
            raise ImpossibleTransition(f"{taken}: step {taken.step} has been published")
        self._move(taken, (GroupPhase.SCORED,), GroupPhase.TAKEN)
        self.batches.setdefault(taken.step, []).extend(taken.indices)
        self.staleness.update(taken.step - self.active[index] for index in taken.indices)
        self._leave(taken.indices)

    def _publish(self, published: Published) -> None:
        if published.version != self.version + 1:
            raise ImpossibleTransition(
                f"{published}: version {self.version} is published, so {self.version + 1} fits"
            )
        indices = self.batches.pop(self.version, [])
        for index in indices:
            self._phases[index] = GroupPhase.TRAINED
        self.trained_per_step.append(len(indices))
        self.version = published.version

    def _move(self, groups: Groups, allowed: tuple[GroupPhase, ...], to: GroupPhase) -> None:
        self._check(groups, allowed)
        for index in groups.indices:
            self._phases[index] = to

    def _leave(self, indices: Iterable[int]) -> None:
        for index in indices:
            del self.active[index]
            self.ready.pop(index, None)
            self.prompts.pop(index, None)

    def _check(self, groups: Groups, allowed: tuple[GroupPhase, ...]) -> None:
        if groups.first < 0 or groups.count < 1 or groups.first + groups.count > self.num_admitted:
            raise ImpossibleTransition(f"{groups}: the groups 0 to {self.num_admitted - 1} were admitted")
        for index in groups.indices:
            if self._phases[index] not in allowed:
                phase = self.phase(index).wording
                wanted = " or ".join(each.wording for each in allowed)
                raise ImpossibleTransition(f"{groups}: group {index} is {phase}, and not {wanted}")

    def _check_published(self, transition: Transition, version: int) -> None:
        if version > self.version:
            raise ImpossibleTransition(
                f"{transition}: version {self.version} is the newest that is published"
            )
