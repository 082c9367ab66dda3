"""What the policy answered before training, and what it answers after."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from klamp.inspect.markup import Html, joined, tag
from klamp.inspect.runlog import Completion, Evaluation
from klamp.inspect.wording import count, number

MARKS = {True: ("✓", "right"), False: ("✗", "wrong")}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same prompt, answered twice."""

    before: Completion | None
    after: Completion | None

    @property
    def either(self) -> Completion:
        """For the prompt and the answer, which both have."""
        found = self.after or self.before
        assert found is not None, "a pair has at least one completion"
        return found


def pairs(first: Evaluation, last: Evaluation) -> list[Pair]:
    """The completions of two evaluations, put together by prompt, in the order of the last."""
    waiting: defaultdict[tuple[str, str | None], deque[Completion]] = defaultdict(deque)
    for sample in first.samples:
        waiting[sample.prompt, sample.answer].append(sample)
    found = [
        Pair(before=queue.popleft() if queue else None, after=sample)
        for sample in last.samples
        for queue in [waiting[sample.prompt, sample.answer]]
    ]
    return found + [
        Pair(before=sample, after=None) for queue in waiting.values() for sample in queue
    ]


def table(evaluations: Sequence[Evaluation]) -> Html:
    """The completions of the first evaluation beside those of the last."""
    if not evaluations:
        return tag("p", "This run has no evaluations.", class_="none")
    first, last = evaluations[0], evaluations[-1]
    if first.step == last.step:
        found = [Pair(before=None, after=sample) for sample in last.samples]
        heads, sides = [when(last.step)], ["after"]
    else:
        found = pairs(first, last)
        heads, sides = [when(first.step), when(last.step)], ["before", "after"]
    if not found:
        return tag("p", "The evaluations kept no completions.", class_="none")
    head = tag("tr", *(tag("th", h, scope="col") for h in ["Prompt", "Answer", *heads]))
    rows = joined(row(pair, sides) for pair in found)
    body = tag("table", tag("thead", head), tag("tbody", rows), class_="completions")
    scroll = tag(
        "div", body, class_="scroll tall", tabindex="0", role="region", aria_label="Completions"
    )
    return joined([tag("p", summary(found), class_="how"), scroll])


def when(step: int) -> str:
    """The heading of an evaluation's column."""
    return "Before training" if step == 0 else f"After {count(step, 'update')}"


def summary(found: list[Pair]) -> str:
    """How many were right, and how many changed."""
    both = [(p.before.correct, p.after.correct) for p in found if p.before and p.after]
    known = [(was, now) for was, now in both if was is not None and now is not None]
    total = count(len(found), "prompt")
    if not known:
        return f"{total}."
    return (
        f"{total}: {sum(was for was, _ in known)} right before, {sum(now for _, now in known)} "
        f"after; {known.count((False, True))} turned right, {known.count((True, False))} turned "
        f"wrong."
    )


def row(pair: Pair, sides: list[str]) -> Html:
    """One prompt with its completions."""
    shown = {"before": pair.before, "after": pair.after}
    return tag(
        "tr",
        tag("th", written(pair.either.prompt), scope="row"),
        tag("td", written(pair.either.answer) if pair.either.answer is not None else "–"),
        *(cell(shown[side]) for side in sides),
    )


def cell(sample: Completion | None) -> Html:
    """A completion under its mark and score."""
    if sample is None:
        return tag("td", "–")
    mark = Html("")
    if sample.correct is not None:
        sign, word = MARKS[sample.correct]
        mark = tag("span", tag("b", sign, aria_hidden="true"), f" {word}", class_=f"mark {word}")
    score = "" if sample.score is None else tag("span", f"score {number(sample.score)}")
    return tag(
        "td",
        tag("div", mark, score, class_="verdict") if mark or score else "",
        written(sample.completion),
    )


def written(words: str) -> Html:
    """Text as it came out of the model, its spaces and lines kept."""
    if not words.strip():
        return tag("span", "(empty)" if not words else "(blank)", class_="none")
    return tag("bdi", words, class_="said")
