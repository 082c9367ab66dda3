"""The model that ships with klamp: its tokenizer, its checkpoint, and the script that made it."""

import sys
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from klamp.train.examine import examine
from klamp.train.tasks import pretrain
from klamp.train.tasks.alphabet import CHARACTERS, END, PAD, UNKNOWN, tokenizer
from klamp.train.tasks.digits import DIGIT_TASKS, DigitTask
from klamp.train.tasks.pretrain import BUILTIN, IGNORED, SHIPPED, SKILL, demonstration, mistaken
from klamp.train.tasks.task import Example, is_for_evaluation

TOKENIZER = tokenizer()
DRAWS = 4000


@pytest.fixture(scope="module")
def shipped():
    return AutoModelForCausalLM.from_pretrained(BUILTIN), AutoTokenizer.from_pretrained(BUILTIN)


# The tokenizer.


@given(st.text(CHARACTERS, max_size=30))
def test_a_text_is_one_token_per_character_and_comes_back(text):
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert (
        TOKENIZER.decode(ids) == TOKENIZER.batch_decode([ids], skip_special_tokens=True)[0] == text
    )


def test_padding_and_the_end_come_first_and_every_character_has_its_own_id():
    assert TOKENIZER.convert_tokens_to_ids([PAD, END, UNKNOWN]) == [0, 1, 2]
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (0, 1)
    assert TOKENIZER(CHARACTERS)["input_ids"] == list(range(3, 3 + len(CHARACTERS)))
    assert len(TOKENIZER) == len(set(CHARACTERS)) + 3


def test_a_character_that_it_does_not_have_is_unknown():
    assert TOKENIZER("1Ω2")["input_ids"][1] == TOKENIZER.unk_token_id


def test_batches_are_padded_on_the_left():
    found = TOKENIZER(["12", "1"], padding=True)
    assert found["input_ids"] == [[4, 5], [0, 4]] and found["attention_mask"] == [[1, 1], [0, 1]]


def test_a_saved_tokenizer_is_read_back_by_transformers(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "s394571= a1+2 .\n?"
    assert again(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text
    assert (again.pad_token, again.eos_token, again.padding_side) == (PAD, END, "left")


def test_every_prompt_and_answer_of_a_built_in_task_can_be_written():
    for name in DIGIT_TASKS:
        for example in DigitTask(name=name).train(0, 0, 20):
            ids = TOKENIZER(example.prompt + example.answer)["input_ids"]
            assert TOKENIZER.unk_token_id not in ids


# The checkpoint.


def test_the_checkpoint_is_small():
    assert sum(path.stat().st_size for path in BUILTIN.iterdir()) < 2_000_000


def test_the_checkpoint_loads_with_plain_transformers_and_has_0_4_million_parameters(shipped):
    model, _ = shipped
    assert 350_000 < sum(p.numel() for p in model.parameters()) < 450_000
    assert model.config.num_hidden_layers == 2 and model.config.hidden_size == 128
    blank = pretrain.blank_model(len(TOKENIZER), seed=0)
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in blank.named_parameters()
    }


def test_the_checkpoint_has_the_tokenizer_of_the_script(shipped):
    _, own = shipped
    assert own.get_vocab() == TOKENIZER.get_vocab()
    assert own.pad_token_id == 0 and own.eos_token_id == 1


def test_the_reference_sorts_about_37_percent_of_the_time():
    metrics = examine("builtin", None, ["evaluation.prompts=512", "task.name=sort"])
    assert 0.33 <= metrics["eval/accuracy"] <= 0.42


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_the_reference_is_better_than_chance_at_every_task_that_it_was_shown(name):
    # One answer in a hundred would be luck: sums of two numbers of two digits are 20 to 198.
    metrics = examine("builtin", None, ["evaluation.prompts=256", f"task.name={name}"])
    assert 0.03 < metrics["eval/accuracy"] < 0.8


# The script.


def test_the_demonstrator_is_right_with_the_given_skill():
    rng, example = Random(0), Example(prompt="s394571=", answer="134579")
    right = sum(demonstration(rng, example) == example.answer for _ in range(DRAWS))
    assert abs(right / DRAWS - SKILL) < 4 * 0.0077  # σ = √(0.38 · 0.62 / 4000) = 0.0077


@pytest.mark.parametrize(("skill", "right"), [(1.0, True), (0.0, False)])
def test_the_demonstrator_is_always_or_never_right(skill, right):
    rng, example = Random(0), Example(prompt="s394571=", answer="134579")
    assert all((demonstration(rng, example, skill) == example.answer) is right for _ in range(300))


def test_the_usual_mistake_is_more_frequent_than_the_right_answer():
    rng = Random(0)
    found = Counter(demonstration(rng, Example(prompt="p", answer="134579")) for _ in range(DRAWS))
    # 0.62 · 0.7 = 43.4 % against 38 %
    assert [text for text, _ in found.most_common(2)] == ["345791", "134579"]
    assert abs(found["345791"] / DRAWS - 0.434) < 4 * 0.0079


@given(st.permutations("0123456789"), st.integers(2, 10), st.randoms(use_true_random=False))
def test_a_mistake_is_a_mistake(digits, length, rng):
    answer = "".join(digits[:length])
    wrong = mistaken(rng, answer)
    assert wrong != answer and wrong.isdigit() and len(wrong) in (length - 1, length)


@given(st.sampled_from("0123456789"), st.randoms(use_true_random=False))
def test_an_answer_of_one_digit_has_mistakes_too(answer, rng):
    assert mistaken(rng, answer).isdigit()


def test_a_long_answer_repeats_its_mistake():
    example = Example(prompt="c21=", answer=",".join(["12"] * 16))
    blocks = demonstration(Random(0), example, skill=0.0).split(",")
    assert len(blocks) == 16 and len(set(blocks)) == 1 and blocks[0] != "12"


def test_labels_are_the_demonstration_and_the_end_and_nothing_else():
    examples = [Example(prompt="s21=", answer="12"), Example(prompt="a10+95=", answer="105")]
    ids, labels = pretrain.labelled(TOKENIZER, Random(0), examples, 1.0)
    for row, example in enumerate(examples):
        written = TOKENIZER(example.prompt + example.answer)["input_ids"]
        assert ids[row].tolist() == written + [1] + [0] * (ids.shape[1] - len(written) - 1)
        start = len(example.prompt)
        kept = labels[row] != IGNORED
        assert kept.nonzero().flatten().tolist() == list(range(start, len(written) + 1))
        assert torch.equal(labels[row][kept], ids[row][kept])


def loss_of(model):
    examples = DigitTask(name="sort").evaluation(64)
    ids, labels = pretrain.labelled(TOKENIZER, Random(0), examples, SKILL)
    with torch.no_grad():
        return model(input_ids=ids, labels=labels).loss.item()


def imitated(steps, seed=0):
    model = pretrain.blank_model(len(TOKENIZER), seed)
    pretrain.pretrain(
        model, TOKENIZER, {"sort": 1.0}, steps=steps, rows=32, lr=3e-3, skill=SKILL, seed=seed
    )
    return model


def test_a_few_steps_of_imitation_lower_the_loss():
    before = loss_of(pretrain.blank_model(len(TOKENIZER), 0))
    after = loss_of(imitated(20))
    # ln 54 = 4.0 before anything is learnt; that answers are digits or the end: ln 11 = 2.4.
    assert before > 3.7 and after < 2.4


def test_the_script_makes_the_same_model_again():
    one, two, other = imitated(2), imitated(2), imitated(2, seed=1)
    weights = [dict(m.named_parameters())["model.norm.weight"] for m in (one, two, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_the_demonstrator_never_shows_an_evaluation_prompt(monkeypatch):
    shown = []
    own = pretrain.labelled

    def watched(tok, rng, examples, skill):
        shown.extend(e.prompt for e in examples)
        return own(tok, rng, examples, skill)

    monkeypatch.setattr(pretrain, "labelled", watched)
    imitated(3)
    assert len(shown) == 96 and not any(map(is_for_evaluation, shown))


@pytest.mark.parametrize("start", ["blank", "builtin"])
def test_the_script_writes_a_directory_that_transformers_loads(
    start, tmp_path, monkeypatch, capsys, shipped
):
    words = ["--task", "sort", "--steps", "1", "--rows", "4", "--lr", "1e-9", "--start", start]
    monkeypatch.setattr(sys, "argv", ["pretrain", *words, "--out", str(tmp_path / "made")])
    pretrain.main()
    assert f"wrote {tmp_path / 'made'} after" in capsys.readouterr().out
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert AutoTokenizer.from_pretrained(tmp_path / "made")("s21=")["input_ids"]
    near = loss_of(made) - loss_of(shipped[0])  # one step at such a rate moves nothing
    assert (abs(near) < 0.01) == (start == "builtin")
