"""GAE at [256, 8192]: the block form against the loop over t that the seed systems have."""

import torch

from benchmarks.timing import interleaved, table
from klamp.objective.advantages import gae

ROWS, WIDTH, GAMMA, LAM = 256, 8192, 1.0, 0.9


def loop(rewards, values):
    """The recursion as OpenRLHF, ROLL and trlx write it: one step of the loop per column."""
    last, reversed_advantages = 0.0, []
    for t in reversed(range(WIDTH)):
        next_values = values[:, t + 1] if t < WIDTH - 1 else 0.0
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        last = delta + GAMMA * LAM * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def run():
    torch.manual_seed(0)
    rewards, values = torch.randn(2, ROWS, WIDTH)
    full = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    ragged = torch.arange(WIDTH)[None, :] < torch.randint(1, WIDTH + 1, (ROWS, 1))
    holes = torch.rand(ROWS, WIDTH) < 0.9

    def ours(mask):
        return lambda: gae(rewards, values, mask, gamma=GAMMA, lam=LAM)

    difference = (ours(full)()[0] - loop(rewards, values)[0]).abs().max().item()
    medians = interleaved(
        {
            "the loop": lambda: loop(rewards, values),
            "every token active": ours(full),
            "ragged responses": ours(ragged),
            "one token in ten masked": ours(holes),
        }
    )
    title = f"GAE, [{ROWS}, {WIDTH}], γλ = {GAMMA * LAM}"
    return (
        f"{table(title, 'the loop', medians)}\n\nLargest difference to the loop: {difference:.1e}"
    )


if __name__ == "__main__":
    print(run())
