"""Which metric is drawn in which chart, and how the reader should take it."""

from dataclasses import dataclass
from typing import Literal

Style = Literal["line", "dashed", "marks", "hollow marks"]
Unit = Literal["number", "percent", "seconds"]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of a chart."""

    metric: str
    label: str
    style: Style = "line"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A chart that is drawn if its metrics were logged.

    What is 0 throughout is named below it and not drawn: 0.0 is what the log says of what is off.
    """

    title: str
    how: str
    curves: tuple[Curve, ...] = ()
    family: str | None = None
    """A regular expression of further metrics, each under its own name."""
    prefix: str = ""
    """The part of those names that the title says already."""
    unit: Unit = "number"
    zero: bool = False
    """The scale starts at 0."""
    apart: Literal["never", "overlaid", "always"] = "never"
    """When each metric gets a panel of its own; colours are for runs, or for one run's metrics."""


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """Charts that are read together."""

    title: str
    plans: tuple[Plan, ...]
    folded: bool = False


ACCURACY = Plan(
    title="Accuracy",
    how="How often the answer is right. The line is each step's own samples, the marks are the "
    "evaluation prompts; this, not the score, is what the run is for.",
    curves=(
        Curve(metric="task/accuracy", label="training samples"),
        Curve(metric="eval/accuracy", label="evaluation", style="marks"),
        Curve(metric="eval/accuracy_greedy", label="greedy evaluation", style="hollow marks"),
    ),
    unit="percent",
    zero=True,
)
SCORE = Plan(
    title="Score",
    how="The reward before any shaping. Where it rises while accuracy does not, the policy is "
    "learning the reward's leaks.",
    curves=(
        Curve(metric="critic/score/mean", label="training samples"),
        Curve(metric="eval/score", label="evaluation", style="marks"),
    ),
)
KL = Plan(
    title="KL and its target",
    how="How far the policy is from the reference, in nats as the controller watches it; it "
    "should settle at the dashed line.",
    curves=(
        Curve(metric="critic/kl", label="KL"),
        Curve(metric="critic/kl_target", label="target", style="dashed"),
    ),
    zero=True,
)
BETA = Plan(
    title="β, the KL coefficient",
    how="The price of KL. It rises while the KL is above its target and falls while it is below.",
    curves=(Curve(metric="critic/kl_coef", label="β"),),
    zero=True,
)
FRACTIONS = Plan(
    title="What was clipped, clamped or cut",
    how="The share of entries that each limit changed. A few per cent is a guard at work; a large "
    "or growing share means the limit shapes what is learned.",
    family=r"(?!signal/).*_frac(_low|_high)?",
    unit="percent",
    zero=True,
    apart="overlaid",
)
RATIO = Plan(
    title="Probability ratio",
    how="π / π_old over the tokens of a step. The mean stays near 1; extremes far outside the "
    "clip range mean stale samples or too large a step.",
    curves=(
        Curve(metric="actor/ratio_mean", label="mean"),
        Curve(metric="actor/ratio_max", label="max"),
        Curve(metric="actor/ratio_min", label="min"),
    ),
    apart="overlaid",
)
ADVANTAGES = Plan(
    title="Advantages",
    how="What pushes tokens up or down. The mean stays near 0; a size that dies away means there "
    "is nothing left to learn from.",
    family=r"critic/advantages/.*",
    prefix="critic/advantages/",
    apart="overlaid",
)
ENTROPY = Plan(
    title="Entropy",
    how="How undecided the policy is per token, in nats. A slow fall is learning; a collapse "
    "towards 0 ends exploration.",
    curves=(Curve(metric="actor/entropy", label="entropy"),),
    zero=True,
)
LENGTH = Plan(
    title="Response length",
    how="Tokens per response. Growth without better accuracy is a reward that likes length.",
    curves=(
        Curve(metric="response/length_mean", label="training samples"),
        Curve(metric="response/length_max", label="longest"),
        Curve(metric="eval/length", label="evaluation", style="marks"),
    ),
    zero=True,
)
LOSS = Plan(
    title="Loss",
    how="The terms of the loss. In policy gradients its size says little; look for jumps.",
    curves=(
        Curve(metric="actor/pg_loss", label="policy"),
        Curve(metric="actor/kl_loss", label="KL"),
        Curve(metric="critic/value_loss", label="value"),
    ),
    apart="overlaid",
)
GRADIENT = Plan(
    title="Gradient norm",
    how="Before clipping. A spike is one bad batch, a steady climb is trouble ahead.",
    curves=(
        Curve(metric="actor/grad_norm", label="policy"),
        Curve(metric="critic/grad_norm", label="value"),
    ),
    zero=True,
    apart="overlaid",
)
RATE = Plan(
    title="Learning rate",
    how="As the optimiser used it.",
    curves=(Curve(metric="actor/lr", label="rate"),),
    zero=True,
)
THROUGHPUT = Plan(
    title="Throughput",
    how="Generated tokens per second of a whole step. It falls as responses grow uneven.",
    curves=(Curve(metric="time/tokens_per_second", label="tokens per second"),),
    zero=True,
)
SECONDS = Plan(
    title="Seconds per step",
    how="Where the time of a step goes; evaluation and saving are left out.",
    curves=(Curve(metric="seconds", label="step"),),
    family=r"time/(?!.*per_second).*",
    prefix="time/",
    unit="seconds",
    zero=True,
    apart="overlaid",
)
SIGNAL = Plan(
    title="What a batch teaches",
    how="A group without spread and a sample that was removed give no gradient; the fewer "
    "effective groups, the noisier each step.",
    family=r"signal/.*",
    zero=True,
    apart="always",
)
REST = Plan(
    title="All other metrics in the log",
    how="Under the names that they have there.",
    family=r"(?s).*",
    apart="always",
)

BOOK = (
    Chapter(title="Learning", plans=(ACCURACY, SCORE)),
    Chapter(title="KL", plans=(KL, BETA)),
    Chapter(title="Clips and clamps", plans=(FRACTIONS,)),
    Chapter(title="Policy", plans=(RATIO, ADVANTAGES, ENTROPY, LENGTH)),
    Chapter(title="Optimiser", plans=(LOSS, GRADIENT, RATE)),
    Chapter(title="Speed", plans=(THROUGHPUT, SECONDS)),
    Chapter(title="Signal", plans=(SIGNAL,)),
    Chapter(title="Everything else", plans=(REST,), folded=True),
)
