"""The rules of sequences in plain Python, as the model for a state machine of the core.

Its input are the messages that clients send and receive, and the requests that workers start, finish and are sent. It
decides which requests must be accepted, and asserts what workers may see. It does not depend on slots, batches or
queues.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Asked = tuple[int, int]
"""Client and its number of the request."""


@dataclass(eq=False)
class Story:
    """A sequence, from its START until no state of it is left. Another START before its END belongs to it."""

    name: int | str
    user: str
    generation: int
    active: int
    asked: list[Asked] = field(default_factory=list)
    starts: set[Asked] = field(default_factory=set)
    waits_for_answer: set[Asked] = field(default_factory=set)
    over: bool = False
    broken: bool = False
    begun: int = 0
    """Number of requests in `asked` that a worker has begun."""
    told: int | str | None = None
    """The id under which workers know the sequence: a different one if a sequence of another user has the same id."""
    at: tuple[int, int] | None = None
    """Worker and slot."""


@dataclass
class Kept:
    """The state of one worker process for an id."""

    story: Story
    ended: bool = False
    """The worker was notified of the end: by a request with END that has run, or by the broker."""


class Rules:
    def __init__(self, idle_ns: int, slots: int, direct: bool) -> None:
        self.idle_ns, self.slots, self.direct = idle_ns, slots, direct
        self.generation = 0
        self.live: dict[tuple[str, int | str], Story] = {}
        """Live sequences, by user and id."""
        self.of: dict[Asked, Story] = {}
        self.ends: set[Asked] = set()
        self.kept: dict[int, dict[int | str, Kept]] = {}
        self.running: dict[Asked, int] = {}
        self.again: set[Asked] = set()

    # ------------------------------------------------------------------------------------ what clients do

    def must_take(self, asked: Asked, user: str, name: int | str, start: bool, end: bool, now: int) -> bool:
        """Whether this request must be accepted. If so, it is part of a sequence from now on."""
        story = self.live.get((user, name))
        if story is not None and not story.waits_for_answer and now >= story.active + self.idle_ns:
            del self.live[user, name]
            story = None
        if not start and (story is None or story.over):
            return False
        if story is None or story.over or (start and story.generation != self.generation):
            if story is not None:
                story.over = True
            story = self.live[user, name] = Story(name, user, self.generation, now)
        story.asked.append(asked)
        story.waits_for_answer.add(asked)
        story.active = now
        story.over = end
        self.of[asked] = story
        if start:
            story.starts.add(asked)
        if end:
            self.ends.add(asked)
        return True

    def answered(self, asked: Asked, given_up: bool, now: int) -> None:
        story = self.of.get(asked)
        if story is None:
            return
        story.waits_for_answer.discard(asked)
        story.active = now
        if given_up:
            self.broken(story)
        elif story.over and not story.waits_for_answer and self.live.get((story.user, story.name)) is story:
            del self.live[story.user, story.name]

    def broken(self, story: Story) -> None:
        story.broken = True
        if self.live.get((story.user, story.name)) is story:
            del self.live[story.user, story.name]

    # ------------------------------------------------------------------------------------ what workers see

    def begins(self, worker: int, slot: int, asked: Asked, name: int | str, start: bool, end: bool) -> None:
        story = self.of[asked]
        kept = self.kept.setdefault(worker, {})
        story.told = name if story.told is None else story.told
        assert name == story.told, "a worker knows a sequence by two ids"
        assert asked not in self.running, "a request runs twice at a time"
        if asked in self.again:
            self.again.remove(asked)
            assert story.asked[story.begun - 1] == asked
            assert not start, "START was said twice"
        else:
            assert story.asked[story.begun] == asked, f"{asked} of {story} is not its next one"
            assert start == (asked in story.starts)
            story.begun += 1
        assert end == (asked in self.ends)
        for other in story.asked:
            assert other not in self.running, "two requests of a sequence run at a time"
        if story.begun == 1 and story.at is None:
            story.at = (worker, slot)
            before = kept.get(name)
            assert before is None or before.ended, f"{name} begins at a worker that keeps an older one"
            kept[name] = Kept(story)
        assert story.at == (worker, slot), "a sequence has moved"
        assert kept[name].story is story
        assert not kept[name].ended, f"{name} goes on where it is over"
        assert self._living(worker) <= self.slots
        assert (0 <= slot < self.slots) if self.direct else slot == -1
        self.running[asked] = worker

    def finishes(self, worker: int, asked: Asked, again: bool) -> None:
        assert self.running.pop(asked) == worker
        story = self.of[asked]
        if again:
            self.again.add(asked)
        elif asked in self.ends:
            assert story.told is not None
            self.kept[worker][story.told].ended = True

    def told(self, worker: int, name: int | str) -> None:
        """Handles EndSequences. A sequence that the worker has never begun is ignored."""
        kept = self.kept.get(worker, {}).get(name)
        if kept is not None:
            story = kept.story
            assert not any(asked in self.running for asked in story.asked), "told that it is over while it runs"
            assert story.broken or story.over or not story.waits_for_answer, f"{name} goes on: {story}"
            kept.ended = True
            if not story.broken and self.live.get((story.user, story.name)) is story:
                del self.live[story.user, story.name]  # it was idle

    def dies(self, worker: int, bound: list[Story]) -> None:
        """`bound`: the sequences with a slot at this worker."""
        self.kept.pop(worker, None)
        for asked in [asked for asked, at in self.running.items() if at == worker]:
            del self.running[asked]
            self.broken(self.of[asked])
        for story in bound:
            self.broken(story)

    def _living(self, worker: int) -> int:
        return sum(not kept.ended for kept in self.kept[worker].values())

    def left_at_workers(self) -> list[int | str]:
        """Ids for which some worker keeps state."""
        return [name for kept in self.kept.values() for name, one in kept.items() if not one.ended]
