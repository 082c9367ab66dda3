"""Upstream's running moments, which remember in place what ours return."""

from torch import Tensor

from klamp.objective.moments import Moments, moments, plain


class RunningMoments:
    """Mean and std of everything seen so far, as ROLL and trlx keep them; always finite."""

    def __init__(self) -> None:
        self.moments = Moments()

    @property
    def mean(self) -> float:
        """The mean so far; 0 before the first value."""
        return self.moments.mean

    @property
    def std(self) -> float:
        """The standard deviation so far (ddof 1); 1 before there are two values."""
        return self.moments.std(ddof=1) if self.moments.count > 1 else 1.0

    @property
    def count(self) -> float:
        """How many values were seen."""
        return self.moments.count

    def update(self, xs: Tensor) -> tuple[float, float]:
        """Take in a batch; its own mean and std (ddof 1)."""
        batch = plain(moments(xs, ~xs.isnan()))
        self.moments = self.moments.merged(batch)
        return batch.mean, batch.std(ddof=1)
