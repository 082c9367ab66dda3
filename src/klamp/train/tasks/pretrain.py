"""Make the built-in reference policy: a small model that imitates a mediocre demonstrator.

    python -m klamp.train.tasks.pretrain            # writes the checkpoint that ships with klamp
    python -m klamp.train.tasks.pretrain --task recite --start builtin --lr 1e-3 --rows 32 --out DIR

The demonstrator is right 38 % of the time and otherwise makes one of a few systematic mistakes, so
what the model samples at temperature 1 is right about as often as not quite: there is something to
learn by reinforcement, and a reference worth staying near.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from klamp.train.tasks.alphabet import tokenizer
from klamp.train.tasks.digits import DigitTask
from klamp.train.tasks.task import Example

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

BUILTIN = Path(__file__).parent / "builtin"
SKILL = 0.38
SHIPPED = {"sort": 0.4, "reverse": 0.2, "add": 0.4}
IGNORED = -100


def demonstration(rng: Random, example: Example, skill: float = SKILL) -> str:
    """What the demonstrator writes: the answer, or with 1 − skill a systematic mistake."""
    assert example.answer is not None
    if rng.random() < skill:
        return example.answer
    blocks = example.answer.split(",")
    wrong = mistaken(rng, blocks[0])
    return ",".join([wrong] * len(blocks))


def mistaken(rng: Random, answer: str) -> str:
    """The usual mistake: the first digit comes last. Else one is doubled, left out or off by 1.

    The usual one is more frequent than the right answer, so greedy decoding makes it too.
    """
    at = rng.randrange(len(answer) - 1) if len(answer) > 1 else 0
    kind = rng.choices(["first last", "twice", "omit", "off"], weights=[7, 1, 1, 1])[0]
    if kind == "first last" and len(set(answer)) > 1:
        return answer[1:] + answer[0]
    if kind == "omit" and len(answer) > 1:
        return answer[:at] + answer[at + 1 :]
    if kind == "twice":
        return answer[: at + 1] + answer[at] + answer[at + 2 :]
    return answer[:at] + str((int(answer[at]) + 1) % 10) + answer[at + 1 :]


def blank_model(vocabulary: int, seed: int) -> "LlamaForCausalLM":
    """An untrained Llama of two layers and width 128, about 0.4 M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def labelled(tok: Any, rng: Random, examples: Sequence[Example], skill: float) -> Any:
    """Ids of prompt + demonstration + end, and labels that ignore prompt and padding."""
    prompts = [tok(e.prompt)["input_ids"] for e in examples]
    answers = [
        [*tok(demonstration(rng, e, skill))["input_ids"], tok.eos_token_id] for e in examples
    ]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(examples), width), tok.pad_token_id)
    labels = torch.full_like(ids, IGNORED)
    for row, (p, a) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : len(p) + len(a)] = torch.tensor(p + a)
        labels[row, len(p) : len(p) + len(a)] = torch.tensor(a)
    return ids, labels


def pretrain(
    model: "LlamaForCausalLM",
    tok: Any,
    mixture: dict[str, float],
    *,
    steps: int,
    rows: int,
    lr: float,
    skill: float,
    seed: int,
) -> None:
    """The model imitates the demonstrator."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / warm, 1.0 - 0.9 * n / steps)
    )
    tasks = {name: DigitTask(name=name) for name in mixture}
    rng = Random(f"demonstrator {seed}")
    for step in range(steps):
        names = rng.choices(list(mixture), weights=list(mixture.values()), k=rows)
        examples = [tasks[name].train(seed, step * rows + i, 1)[0] for i, name in enumerate(names)]
        ids, labels = labelled(tok, rng, examples, skill)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)


def main() -> None:
    """The command line of this module."""
    parse = argparse.ArgumentParser(description="Make a mediocre reference policy by imitation.")
    parse.add_argument("--task", choices=["shipped", "sort", "reverse", "add", "recite"])
    parse.add_argument("--steps", type=int, default=1000)
    parse.add_argument("--rows", type=int, default=128)
    parse.add_argument("--lr", type=float, default=3e-3)
    parse.add_argument("--skill", type=float, default=SKILL)
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--start", choices=["blank", "builtin"], default="blank")
    parse.add_argument("--out", type=Path, default=BUILTIN)
    given = parse.parse_args()
    if given.task not in (None, "shipped") and given.out == BUILTIN:
        parse.error(f"--task {given.task} needs --out DIR: the shipped model knows three tasks")
    began = time.process_time()
    mixture = SHIPPED if given.task in (None, "shipped") else {given.task: 1.0}
    tok = tokenizer()
    model = blank_model(len(tok), given.seed)
    if given.start == "builtin":
        model = type(model).from_pretrained(BUILTIN)
    pretrain(
        model,
        tok,
        mixture,
        steps=given.steps,
        rows=given.rows,
        lr=given.lr,
        skill=given.skill,
        seed=given.seed,
    )
    model.save_pretrained(given.out)
    tok.save_pretrained(given.out)
    print(f"wrote {given.out} after {time.process_time() - began:.0f} CPU-seconds")


if __name__ == "__main__":
    main()
