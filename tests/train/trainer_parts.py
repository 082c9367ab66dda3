"""Real parts at tiny size: the built-in model, random ones of other kinds, settings, sequences."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from klamp.objective.objective import Objective
from klamp.train import config as configs
from klamp.train import loading, rollout, trainer
from klamp.train.comm import OneProcess
from klamp.train.settings import ModelSettings
from klamp.train.tasks import alphabet
from klamp.train.tokens import Tokens

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = (
    "steps=2",
    "sampling.prompts=4",
    "sampling.samples_per_prompt=4",
    "evaluation.prompts=8",
    "threads=1",
)


def tiny_config(*overrides, file=None):
    """A config of this repository (None: the default) at a size that takes a moment."""
    return configs.load(file, [*TINY, *overrides])


def tiny_run(place, *overrides, file=None, comm=None):
    """A run that is set up in ``place`` and has made no step."""
    return trainer.set_up(tiny_config(*overrides, file=file), place, comm or OneProcess())


def trained(run, watch=lambda line, said: None):
    """The run, to its end."""
    return trainer.train(run, trainer.resume(run), watch, lambda: False)


def model_directory(place, kind, **changes):
    """An untrained model of another architecture, over the built-in alphabet, as a directory."""
    import transformers

    torch.manual_seed(0)
    tokenizer = alphabet.tokenizer()
    small = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "n_inner": 48},
        "qwen2": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "gemma": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "tie_word_embeddings": False,
        },
    }[kind]
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), **(small | ids | changes)
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.ndim > 1):
            matrix.normal_(std=0.15)  # far enough from nothing to tell tokens apart
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


def load(objective=None, **settings):
    """Networks from settings, with an objective that asks for nothing unless told."""
    return loading.load(ModelSettings(**settings), objective or Objective())


def precise(models):
    """The same networks in float64, so that one tolerance can tell rounding from a mistake."""
    for network in (models.policy, models.reference, models.value and models.value.trunk):
        if network is not None:
            network.double()
    return models


def sequences(prompts, responses, *, left=0, right=0, junk=0):
    """Lists of ids as Tokens, with so many columns of padding more than they need."""
    width = max(map(len, prompts)) + left
    length = max(map(len, responses)) + right
    filled = [[junk] * (width - len(p)) + list(p) for p in prompts]
    written = [list(r) + [junk] * (length - len(r)) for r in responses]
    return Tokens(
        prompts=torch.tensor(filled),
        prompt_mask=torch.arange(width) >= width - torch.tensor([[len(p)] for p in prompts]),
        responses=torch.tensor(written),
        mask=torch.arange(length) < torch.tensor([[len(r)] for r in responses]),
    )


PROMPTS = ([22, 5, 3, 9, 30], [22, 7, 30], [21, 12, 4, 6, 3, 11, 30])
RESPONSES = ([3, 5, 9, 1], [7, 7, 3, 4, 12, 6], [11])


@cache
def uneven():
    """Three sequences whose prompts and responses all differ in length."""
    return sequences(PROMPTS, RESPONSES)


@torch.no_grad()
def next_token(network, ids, temperature=1.0):
    """log π(· | ids) by a plain pass over one sequence without padding."""
    logits = network(input_ids=torch.tensor([ids])).logits[0, -1]
    return (logits.double() / temperature).log_softmax(-1)


def step_by_step(network, prompt, response, temperature=1.0):
    """log π(· | prompt, response so far) for each response token, [T, V]."""
    texts = [[*prompt, *response[:t]] for t in range(len(response))]
    return torch.stack([next_token(network, ids, temperature) for ids in texts])


def chosen(distributions, response):
    """The entries of what was chosen."""
    return distributions[torch.arange(len(response)), torch.tensor(response)]


def gradients(network):
    """A copy of every gradient, by name; None where there is none."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in network.named_parameters()}


def weights(network):
    """A copy of every weight, by name."""
    return {n: p.detach().clone() for n, p in network.named_parameters()}


def nudge(network, size=0.02):
    """Small changes to the weights that are trained, so that a policy is not its reference."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * size)


def one_batch(run, step=1, scores=None):
    """Samples of a run with what the objective makes of them: samples, batch, targets, state."""
    samples = trainer.sample(run, step)
    observed = trainer.observe(run, samples)
    scores = trainer.score(run, samples, step) if scores is None else scores
    batch = rollout.batch(samples, observed, scores)
    targets, state = run.objective.prepare(batch, run.objective.init(), run.comm)
    return samples, batch, targets, state


def with_objective(run, objective):
    """The same run, learning by another objective."""
    return replace(run, objective=objective, learner=replace(run.learner, objective=objective))
