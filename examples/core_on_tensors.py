"""The core alone, on tensors of your own loop: one batch, two epochs of micro-batches."""

import torch

import klamp

torch.manual_seed(0)
rows, width = 8, 12  # two prompts, four samples each, up to twelve tokens
mask = torch.arange(width) < torch.randint(4, width + 1, (rows, 1))
old_logprobs = -torch.rand(rows, width)

batch = klamp.Batch(
    mask=mask,  # True = generated token that counts; response positions only
    scores=torch.rand(rows),  # one raw score per sequence, NaN where missing
    groups=torch.arange(rows) // 4,  # samples of one prompt share an id
    old_logprobs=old_logprobs,
    ref_logprobs=old_logprobs + 0.1 * torch.randn(rows, width),
)

objective = klamp.presets.load("klamp", kl_target=2.0)
state = objective.init()
targets, state = objective.prepare(batch, state)  # once per batch

logprobs = old_logprobs.clone().requires_grad_()  # stands for the policy's output
optimizer = torch.optim.SGD([logprobs], lr=0.5)
for epoch in range(2):
    shares = objective.shares(targets.mask, targets.weights)  # once per optimizer step
    for part in torch.arange(rows).split(3):  # any cut gives the same gradient
        out = objective.loss(logprobs[part], batch.select(part), targets.select(part), shares[part])
        out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    moved = (logprobs - old_logprobs).abs().max().item()
    print(f"epoch {epoch}: largest move of a log-prob {moved:.4f}")

print("β for the next batch:", round(state.kl_coef, 6))
for name in ("critic/kl", "critic/kl_target", "critic/score/mean", "critic/reward_clip_frac"):
    print(f"{name}: {targets.metrics[name]:.4f}")
