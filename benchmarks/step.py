"""A whole GRPO step, from prompts to new weights, against TRL's GRPOTrainer.

The same random Llama, prompts of one length, no end-of-text token within the model's vocabulary, so
that every response of both has its full length; one update per batch, no KL unless a line says so.
TRL's trainer runs its own loop; after each of its steps one of ours is made.
"""

import copy
import os
import statistics
import sys
import tempfile
import time
from typing import NamedTuple

import torch

from benchmarks.timing import Line, Result
from klamp.objective.control import FixedKL
from klamp.objective.kl import KLTerm
from klamp.objective.losses import ClippedSurrogate
from klamp.objective.normalise import NormaliseScores
from klamp.objective.objective import Objective
from klamp.train import rollout
from klamp.train.comm import OneProcess
from klamp.train.models import Models
from klamp.train.sampler import Decoding
from klamp.train.settings import OptimizerSettings
from klamp.train.tasks.task import Example
from klamp.train.update import Learner, optimizer_of

VOCABULARY, GROUP, RATE, WARM_UP = 256, 8, 1e-5, 3


class Size(NamedTuple):
    """A model and a batch."""

    name: str
    goal: str
    rounds: int
    rows: int
    prompt: int
    response: int
    hidden: int
    inner: int
    layers: int
    beta: float = 0.0


SIZES = (
    Size("tiny", "≥ 2.5", 15, 8, 24, 32, hidden=48, inner=128, layers=4),
    Size("mid", "≥ 1.4", 9, 32, 24, 64, hidden=192, inner=512, layers=4),
    Size("long prompt", "≥ 3.2", 9, 32, 200, 32, hidden=128, inner=344, layers=4),
    Size("mid, KL to a reference", "", 7, 32, 24, 64, hidden=192, inner=512, layers=4, beta=0.04),
)


def model(size):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def tokenizer():
    """One word per id; padding and the end lie outside what the model can write."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCABULARY)} | {"<pad>": VOCABULARY, "<end>": VOCABULARY + 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


def prompts(size, count):
    ids = torch.randint(
        VOCABULARY, (count, size.prompt), generator=torch.Generator().manual_seed(1)
    )
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]


def reward(completions):
    """How many even words there are."""
    return [float(sum(w[-1] in "02468" for w in text.split())) for text in completions]


def ours(size):
    """Our step, to be called with the number of the step."""
    policy = model(size)
    objective = Objective(
        stages=(NormaliseScores(mean="group", std="group"),),
        kl=KLTerm(estimator="k3", where="loss", control=FixedKL(coef=size.beta))
        if size.beta
        else None,
        surrogate=ClippedSurrogate(low=0.2, high=0.2),
        reduction="token_mean",
    )
    models = Models(
        policy=policy,
        reference=copy.deepcopy(policy).requires_grad_(False) if size.beta else None,
        value=None,
        tokenizer=tokenizer(),
        device=torch.device("cpu"),
        autocast=None,
    )
    settings = OptimizerSettings(lr=RATE, betas=(0.9, 0.999))
    learner = Learner(
        models=models,
        objective=objective,
        optimizer=optimizer_of(models, settings),
        settings=settings,
        temperature=1.0,
        comm=OneProcess(),
    )
    groups = size.rows // GROUP
    texts = prompts(size, groups * (size.rounds + WARM_UP))
    generator = torch.Generator().manual_seed(2)
    decoding = Decoding(max_new_tokens=size.response)

    def step(number):
        examples = [Example(prompt=t) for t in texts[groups * number : groups * (number + 1)]]
        samples = rollout.sample(
            models, examples, decoding, samples_per_prompt=GROUP, generator=generator
        )
        observed = rollout.observe(
            models,
            objective,
            samples.tokens,
            temperature=1.0,
            micro_tokens=settings.micro_tokens,
            known=samples.sampler_logprobs if rollout.as_trained(models, decoding) else None,
        )
        batch = rollout.batch(samples, observed, reward(samples.texts))
        targets, _ = objective.prepare(batch, objective.init())
        learnt = learner.learn(samples.tokens, batch, targets, generator, 0)
        assert learnt.problem is None
        return int(samples.tokens.mask.sum())

    return step


def seconds(size):
    """Median CPU seconds of a step of TRL and of ours, and the response tokens of one step."""
    from datasets import Dataset
    from transformers import LlamaForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    step, theirs, mine, counted, written = ours(size), [], [], [], []

    def counting_reward(completions, completion_ids, **_):
        counted.append(sum(map(len, completion_ids)))
        return reward(completions)

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            theirs.append(time.process_time())

        def on_step_end(self, args, state, control, **_):
            theirs[-1] = time.process_time() - theirs[-1]
            start = time.process_time()
            written.append(step(len(mine)))
            mine.append(time.process_time() - start)

    steps = size.rounds + WARM_UP
    with tempfile.TemporaryDirectory() as place:
        config = GRPOConfig(
            output_dir=place,
            per_device_train_batch_size=size.rows,
            num_generations=GROUP,
            max_completion_length=size.response,
            max_steps=steps,
            learning_rate=RATE,
            beta=size.beta,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        model(size).save_pretrained(f"{place}/model")  # where TRL looks for its reference
        given = [{"prompt": text} for text in prompts(size, steps * size.rows // GROUP)]
        trainer = GRPOTrainer(
            model=LlamaForCausalLM.from_pretrained(f"{place}/model"),
            reward_funcs=counting_reward,
            args=config,
            train_dataset=Dataset.from_list(given),
            processing_class=tokenizer(),
            callbacks=[Clock()],
        )
        trainer.train()
    assert len(theirs) == steps == len(counted)
    assert set(counted) == set(written) == {size.rows * size.response}
    return statistics.median(theirs[WARM_UP:]), statistics.median(mine[WARM_UP:])


def run(sizes=SIZES) -> Result:
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    lines, taken = [], []
    for size in sizes:
        theirs, mine = seconds(size)
        count = sum(p.numel() for p in model(size).parameters()) / 1e6
        work = (
            f"GRPO step, {size.name}: {count:.2g} M parameters, "
            f"{size.rows} × ({size.prompt} + {size.response}) tokens, groups of {GROUP}"
        )
        lines.append(Line(work, "ours", "TRL", "times faster", theirs / mine, size.goal))
        taken.append(f"{size.name} {theirs:.3f} s and {mine:.3f} s")
    return Result(
        lines,
        "the installed TRL's own loop (no KL, gradient checkpointing off, float32), a step of "
        f"ours after each of its steps; TRL and ours: {'; '.join(taken)}.",
    )


if __name__ == "__main__":
    found = run([size for size in SIZES if size.name in sys.argv[1:]] or SIZES)
    for line in found.lines:
        print(f"{line.work}: {line.ratio:.2f} {line.goal} {line.met()}")
    print(found.notes)
