"""GAE at [256, 8192], γλ = 0.9: in blocks, against the loops over t that other systems have."""

import torch

from benchmarks.timing import Result, faster, interleaved
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


def verl(rewards, values, mask):
    """The same in verl, which carries value and advantage over masked tokens; not whitened."""
    next_values, last, reversed_advantages = 0.0, 0.0, []
    for t in reversed(range(WIDTH)):
        on = mask[:, t]
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        here = delta + GAMMA * LAM * last
        next_values = values[:, t] * on + (1 - on) * next_values
        last = here * on + (1 - on) * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def run():
    torch.manual_seed(0)
    rewards, values = torch.randn(2, ROWS, WIDTH)
    full = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    ragged = torch.arange(WIDTH)[None, :] < torch.randint(1, WIDTH + 1, (ROWS, 1))
    holes = torch.rand(ROWS, WIDTH) < 0.9
    floats = holes.float()

    def ours(mask):
        return lambda: gae(rewards, values, mask, gamma=GAMMA, lam=LAM)

    seconds = interleaved(
        {
            "loop (OpenRLHF, ROLL, trlx)": lambda: loop(rewards, values),
            "loop (verl)": lambda: verl(rewards, values, floats),
            # The next to ask for memory tidies up what the loops have freed: not in our time.
            "tidying up": lambda: torch.zeros(2, ROWS, WIDTH),
            "every token active": ours(full),
            "right padding": ours(ragged),
            "one token in ten masked": ours(holes),
        }
    )
    work = f"GAE [{ROWS}, {WIDTH}]"
    plain, carrying = "loop (OpenRLHF, ROLL, trlx)", "loop (verl)"
    lines = [
        *faster(work, seconds, "every token active", {plain: "≥ 35"}),
        *faster(work, seconds, "right padding", {plain: "", carrying: ""}),
        *faster(work, seconds, "one token in ten masked", {plain: "", carrying: "≥ 30"}),
    ]
    return Result(lines, differences(rewards, values, full, holes))


def differences(rewards, values, full, holes):
    """How far apart two ways are, and how far each is from the loop in float64."""

    def far(x, y, mask):
        return max(
            torch.where(mask, a - b, 0.0).abs().max().item() for a, b in zip(x, y, strict=True)
        )

    said = []
    for name, mask, way in (
        ("every token active", full, loop),
        ("one token in ten masked", holes, lambda r, v: verl(r, v, holes.to(r))),
    ):
        found, loops = gae(rewards, values, mask, gamma=GAMMA, lam=LAM), way(rewards, values)
        exact = way(rewards.double(), values.double())
        said.append(
            f"{name}, largest difference to the loop {far(found, loops, mask):.1e}, to the loop in "
            f"float64 {far(found, exact, mask):.1e} (the loop's own: {far(loops, exact, mask):.1e})"
        )
    return "; ".join(said) + "."


if __name__ == "__main__":
    print(run())
