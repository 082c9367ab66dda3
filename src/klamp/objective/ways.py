"""The ways to the policy and KL terms: by the formulae, in one pass, or in one compiled loop.

All give the same numbers. The last two are for objectives in which a token's terms depend on that
token alone; every other goes by the formulae.
"""

import torch

from klamp.objective.fused import fits, fused_term
from klamp.objective.kl import KLTerm
from klamp.objective.losses import Surrogate
from klamp.objective.terms import Term, kl_term, policy_term, token_wise, written_down
from klamp.objective.written import written_term
from klamp.types import Batch, PerToken, Targets

PLAIN, FUSED, COMPILED = "plain", "fused", "compiled"


def token_terms(
    way: str,
    surrogate: Surrogate,
    kl: KLTerm | None,
    logprobs: PerToken,
    batch: Batch,
    targets: Targets,
    shares: PerToken,
    exact_kl: PerToken | None,
) -> list[Term]:
    """The policy term and, where the KL is a loss, its term; one by one or as one."""
    kl = kl if kl is not None and kl.where == "loss" else None
    given = (logprobs, batch, targets)
    written = written_down(surrogate, kl, batch) and token_wise(surrogate, kl, targets)
    if way != PLAIN and written and logprobs.numel():
        if torch.compiler.is_compiling():
            return [written_term(surrogate, kl, *given, shares)]
        if way == COMPILED:
            return [written_term(surrogate, kl, *given, shares, compiled=True)]
        if fits(*given):
            return [fused_term(surrogate, kl, *given, shares)]
    active = targets.mask & (shares > 0)
    terms = [policy_term(surrogate, *given, active, shares)]
    if kl is not None:
        terms.append(kl_term(kl, *given, active, shares, exact_kl))
    return terms
