"""How noisy one batch's KL is under each estimator: python -m experiments.noise RUN [RUN …]"""

import statistics
import sys

import torch

from klamp.objective.objective import Objective
from klamp.train import loading, models, rollout
from klamp.train.sampler import Decoding
from klamp.train.settings import ModelSettings
from klamp.train.tasks.digits import DigitTask

BATCHES, PROMPTS, SAMPLES = 30, 32, 8


def of_batches(path: str) -> dict[str, list[float]]:
    """The KL to the built-in reference, nats per response, of each of 30 batches."""
    policy = loading.load(ModelSettings(path=path, device="cpu"), Objective())
    reference = loading.load(ModelSettings(device="cpu"), Objective())
    generator = torch.Generator().manual_seed(0)
    found = {"k1": [], "k3": [], "exact": []}
    for start in range(0, BATCHES * PROMPTS, PROMPTS):
        examples = DigitTask().train(1_000, start, PROMPTS)
        made = rollout.sample(
            policy,
            examples,
            Decoding(max_new_tokens=10),
            samples_per_prompt=SAMPLES,
            generator=generator,
        )
        with torch.no_grad():
            own = models.forward(policy, policy.policy, made.tokens, 1.0)
            other = models.forward(reference, reference.policy, made.tokens, 1.0)
        d = own.logprobs - other.logprobs
        per_token = {
            "k1": d,
            "k3": torch.exp(-d) - 1 + d,
            "exact": models.exact_kl_of(own.reading, other.reading, 1.0),
        }
        for name, x in per_token.items():
            total = torch.where(made.tokens.mask, x, 0.0).sum(dim=1).mean()
            found[name].append(float(total))
    return found


def main() -> None:
    """Mean and standard deviation over batches, for each run's model."""
    for run in sys.argv[1:]:
        for name, kl in of_batches(f"{run}/model").items():
            mean, std = statistics.mean(kl), statistics.stdev(kl)
            print(f"{run} {name:<6} mean {mean:.2f} standard deviation {std:.2f}")


if __name__ == "__main__":
    main()
