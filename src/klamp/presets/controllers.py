"""Upstream's KL controllers, which remember in place what ours return."""

from typing import SupportsFloat

from klamp.objective.control import controller


class AdaptiveKLController:
    """Ziegler et al.'s controller as OpenRLHF, ROLL and trlx write it; β never turns negative."""

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        self.control = controller(init_kl_coef, target, horizon)
        self.state = self.control.init()

    @property
    def value(self) -> float:
        """β."""
        return self.state.coef

    def update(self, current: SupportsFloat, n_steps: int) -> None:
        """Move β by the KL that n_steps sequences showed."""
        self.state = self.control.update(self.state, float(current), n_steps)


class FixedKLController:
    """A coefficient that stays."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: SupportsFloat, n_steps: int) -> None:
        """Nothing moves."""
