"""The token-level objective: clipped surrogate, k3 in the loss, metrics; forward and backward.

The peers are our re-statements of the arithmetic that each system does at this place.
"""

import torch

import klamp
from benchmarks.memory import peak
from benchmarks.timing import Line, Result, faster, interleaved
from klamp.objective import fused
from klamp.objective.metrics import reduced

LOW, HIGH, BETA = 0.2, 0.2, 0.05


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def trl(logp, old, ref, advantages, mask):
    """GRPOTrainer's loss of type dapo, with what it logs: KL, entropy and five clip ratios."""
    log_ratio = logp - old
    rho = torch.exp(log_ratio)
    kl = torch.exp(ref - logp) - (ref - logp) - 1
    clipped = torch.clamp(rho, 1 - LOW, 1 + HIGH)
    loss = -torch.min(rho * advantages, clipped * advantages) + BETA * kl
    loss = (loss * mask).sum() / mask.sum().clamp(min=1.0)
    low = (rho < 1 - LOW) & (advantages < 0)
    high = (rho > 1 + HIGH) & (advantages > 0)
    logged = []
    for x in (kl, old, low.float(), high.float(), (low | high).float()):  # old: for entropies
        totals = torch.stack([(x * mask).sum(), mask.sum().float()])
        logged.append(totals[0] / totals[1].clamp(min=1.0))
    rows = [(x.float() * mask).sum(-1) / mask.sum(-1) for x in (low, high)]
    logged += [rows[0].nan_to_num(torch.inf).min(), rows[1].nan_to_num(-torch.inf).max()]
    return loss, logged


def openrlhf(logp, old, ref, advantages, mask):
    """PolicyLoss and compute_approx_kl (k3 in float32, ±10), both averaged over tokens."""
    log_ratio = (logp - old).clamp(-20.0, 20.0)
    rho = log_ratio.exp()
    s1, s2 = rho * advantages, rho.clamp(1 - LOW, 1 + HIGH) * advantages
    policy = masked_mean(-torch.min(s1, s2), mask)
    d = (logp.float() - ref.float()) * mask
    k3 = ((-d).exp() - 1 + d).clamp(-10, 10)
    loss = policy + BETA * masked_mean(k3, mask)
    with torch.no_grad():
        clip_ratio = masked_mean(torch.lt(s2, s1).float(), mask)
        ppo_kl = masked_mean(-log_ratio.detach(), mask)
        logprobs_diff = masked_mean(d, mask)
    return loss, [clip_ratio, ppo_kl, logprobs_diff, policy.detach()]


def trlx(logp, old, ref, advantages, mask, values):
    """PPOConfig.loss, which has a policy and a value part, and the k3 that is watched."""
    v, old_v, returns = values
    n = mask.sum()
    clipped_v = torch.clamp(v, old_v - 0.2, old_v + 0.2)
    error1, error2 = (v - returns) ** 2, (clipped_v - returns) ** 2
    value = 0.5 * torch.sum(torch.max(error1, error2) * mask) / n
    value_clips = torch.sum((error2 > error1).float() * mask) / n
    log_ratio = (logp - old) * mask
    rho = torch.exp(log_ratio)
    with torch.no_grad():
        approx_kl = torch.mean((rho - 1) - log_ratio)
        d = (logp - ref) * mask
        kl = ((torch.exp(d) - 1) - d).sum(1).mean()
    loss1 = -advantages * rho
    loss2 = -advantages * torch.clamp(rho, 1 - LOW, 1 + HIGH)
    policy = torch.sum(torch.max(loss1, loss2) * mask) / n
    with torch.no_grad():
        logged = [approx_kl, kl, value_clips, torch.sum((loss2 > loss1).float() * mask) / n]
        logged += [(rho * mask).sum() / n, 1 - n / mask.numel(), policy, value]
        logged += [torch.sum(((v - returns) * mask) ** 2) / n]
        logged += [torch.sum((abs(v - returns) * mask) / abs(returns * mask + 1e-2)) / n]
        for x in (v, old_v, returns):
            mean = (x * mask).sum() / n
            logged += [mean, torch.where(mask.bool(), x, torch.inf).min()]
            logged += [torch.where(mask.bool(), x, -torch.inf).max()]
            logged += [torch.sqrt((((x - mean) * mask) ** 2).sum() / n)]
    return policy + value, logged


def verl(logp, old, ref, advantages, mask):
    """compute_policy_loss (dual clip always on, c = 3), kl_penalty low_var_kl, agg_loss."""
    log_ratio = torch.clamp(logp - old, min=-20.0, max=20.0)
    rho = torch.exp(log_ratio)
    ppo_kl = masked_mean(-log_ratio, mask)
    losses1 = -advantages * rho
    losses2 = -advantages * torch.clamp(rho, 1 - LOW, 1 + HIGH)
    clip1 = torch.maximum(losses1, losses2)
    clipfrac = masked_mean(torch.gt(losses2, losses1).float(), mask)
    losses3 = -advantages * 3.0
    clip2 = torch.min(losses3, clip1)
    lower = masked_mean(torch.gt(clip1, losses3) * (advantages < 0).float(), mask)
    policy = masked_mean(torch.where(advantages < 0, clip2, clip1), mask)
    kl = torch.clamp(ref - logp, min=-20, max=20)
    kld = torch.clamp((torch.exp(kl) - kl - 1).contiguous(), min=-10, max=10)
    kl_loss = masked_mean(kld, mask)
    return policy + BETA * kl_loss, [ppo_kl, clipfrac, lower, kl_loss.detach(), policy.detach()]


def open_instruct(logp, old, ref, advantages, mask):
    """The dapo loss with ±40 on the log-ratio to the reference, and all four KLs logged."""
    rho = torch.exp(logp - old)
    losses1 = -advantages * rho
    losses2 = -advantages * torch.clamp(rho, 1.0 - LOW, 1.0 + HIGH)
    policy = torch.max(losses1, losses2)
    d = (logp - ref).clamp(-40.0, 40.0)
    kls = torch.stack([d, d**2 / 2, torch.expm1(-d) + d, rho * d])
    loss = masked_mean(policy + BETA * kls[2], mask)
    with torch.no_grad():
        logged = [masked_mean(k, mask) for k in kls]
        logged += [masked_mean((losses2 > losses1).float(), mask), masked_mean(rho, mask)]
        logged += [masked_mean(policy, mask), masked_mean(BETA * kls[2], mask)]
    return loss, logged


def roll(logp, old, ref, advantages, mask):
    """The rlvr actor's loss with dual clip, k3 of ±10, and the ratios that it logs."""
    rho = (logp - old).exp()
    s1, s2 = rho * advantages, rho.clamp(1 - LOW, 1 + HIGH) * advantages
    policy = -torch.min(s1, s2)
    dual = -torch.max(-policy, (1 + LOW * 2) * advantages)
    policy = torch.where(advantages < 0, dual, policy)
    pg_loss = ((policy * mask).sum(-1) / (mask.sum(-1) + 1e-8)).mean()
    log_ratio = ref - logp
    kld = torch.clamp((log_ratio.exp() - log_ratio) - 1, min=-10, max=10) * mask
    kl_loss = ((kld * mask).sum(-1) / (mask.sum(-1) + 1e-8)).mean()
    with torch.no_grad():
        rows = lambda x: ((x * mask).sum(-1) / (mask.sum(-1) + 1e-8)).mean()  # noqa: E731
        logged = [rows((logp - old) ** 2 / 2), rows(logp - old), rows(rho)]
        logged += [rows((rho > 1 + HIGH).float()), rows((rho < 1 - LOW).float())]
        logged += [rows(((rho > 1 + HIGH) | (rho < 1 - LOW)).float())]
        logged += [(rho * mask).max(), torch.where(mask > 0, rho, 1e9).min()]
    return pg_loss + BETA * kl_loss, logged


PEERS = {
    "TRL": (trl, int),
    "OpenRLHF": (openrlhf, bool),
    "trlx": (trlx, int),
    "verl": (verl, int),
    "open-instruct": (open_instruct, bool),
    "ROLL": (roll, int),
}
"""Each with the kind of mask that it holds."""


class Work:
    """One batch for everybody: 80 % of the tokens are active, 1 in 8 ratios leaves the range."""

    def __init__(self, rows, width):
        torch.manual_seed(0)
        self.logp = (-torch.rand(rows, width) * 3).requires_grad_()
        noise = torch.randn(2, rows, width) * 0.15
        self.old, self.ref = self.logp.detach() + noise
        self.values = torch.randn(rows, width, requires_grad=True)
        self.advantages = torch.randn(rows, 1).expand(rows, width).contiguous()
        lengths = torch.randint(int(0.6 * width), width + 1, (rows, 1))
        self.mask = torch.arange(width) < lengths
        self.masks = {bool: self.mask, int: self.mask.long()}
        kl = klamp.KLTerm(estimator="k3", control=klamp.FixedKL(coef=BETA))
        self.objective = klamp.Objective(
            kl=kl, surrogate=klamp.ClippedSurrogate(low=LOW, high=HIGH)
        )
        self.batch = klamp.Batch(
            mask=self.mask,
            scores=torch.zeros(rows),
            groups=torch.arange(rows),
            old_logprobs=self.old,
            ref_logprobs=self.ref,
        )
        self.targets = klamp.Targets(
            mask=self.mask,
            weights=torch.ones(rows),
            advantages=self.advantages,
            corrections=torch.ones(rows, width),
            kl_coef=BETA,
        )
        self.shares = self.objective.shares(self.mask)

    def peer(self, function, kind):
        """A peer's loss, backward and numbers."""
        mask = self.masks[kind]

        more = [(self.values, self.old, self.ref)] if function is trlx else []

        def run():
            loss, logged = function(self.logp, self.old, self.ref, self.advantages, mask, *more)
            loss.backward()
            numbers = [x.item() for x in logged]
            del loss, logged
            self.logp.grad = self.values.grad = None  # each frees what is its own
            return numbers

        return run

    def ours(self, compiled=False, readable=False):
        """Our loss, backward and numbers."""
        loss = self.objective.plain_loss if readable else self.objective.loss
        loss = self.objective.compiled_loss if compiled else loss

        def run():
            out = loss(self.logp, self.batch, self.targets, self.shares)
            out.loss.backward()
            numbers = reduced(out.metrics)
            del out
            self.logp.grad = None
            return numbers

        return run


def measured(rows, width, repeats, goals):
    """Seconds and peak memory of everybody, as lines."""
    work, size = Work(rows, width), f"objective [{rows}, {width}]"
    variants = {name: work.peer(*how) for name, how in PEERS.items()}
    variants |= {"klamp": work.ours(), "klamp compiled": work.ours(compiled=True)}
    variants["klamp readable"] = work.ours(readable=True)
    seconds = interleaved(variants, rounds=15, repeats=repeats)
    fastest = min(PEERS, key=seconds.__getitem__)
    lines: list[Line] = []
    for ours, goal in goals.items():
        wanted = {name: (goal if name == fastest else "") for name in PEERS}
        lines += faster(size, seconds, ours, wanted)
    lines += faster(size, seconds, "klamp readable", {fastest: ""})
    variants["klamp"] = afresh(variants["klamp"])
    memory = {name: peak(run) / work.old.nbytes for name, run in variants.items()}
    return lines, memory


def afresh(run):
    """With the scratch that is kept between calls made anew, so that it is counted."""

    def call():
        fused._KEPT.__dict__.clear()
        run()

    return call


def run() -> Result:
    large, memory = measured(64, 4096, 5, {"klamp": "≥ 4", "klamp compiled": "≥ 8"})
    small, _ = measured(8, 512, 100, {"klamp": "≥ 2", "klamp compiled": ""})
    limits = {"klamp": "≤ 3.5", "klamp compiled": "≤ 2.5"}
    held = [
        Line(
            "objective [64, 4096]",
            name,
            "one [B, T] tensor",
            "peak memory",
            m,
            limits.get(name, ""),
        )
        for name, m in memory.items()
    ]
    return Result(large + small + held, NOTES)


NOTES = (
    "loss, backward and the logged numbers on the host; each variant in turn makes 5 calls, 100 at "
    "[8, 512], so that it is not the caches that another one left which are measured (the first of "
    "these 100 takes any variant, ours too, 0.5 to 0.7 ms). Peers are "
    "re-statements: of TRL 1.16's loss from the installed package, of the others from what they "
    "are known to do, each with the kind of mask that it holds; trlx's loss cannot be had without "
    "its value part. `klamp compiled` is `objective.compiled_loss`, `klamp readable` is "
    "`objective.plain_loss`. The scratch that `objective.loss` keeps between calls is counted in "
    "its memory."
)
