"""The built-in model's tokenizer: one token per character, as a real Hugging Face tokenizer."""

import string
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
CHARACTERS = string.digits + string.ascii_lowercase + "=+-*/,.:;()?! \n"


def tokenizer() -> "PreTrainedTokenizerFast":
    """Characters ⇄ ids; padding and end of text are the first two."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, END, UNKNOWN, *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r".|\n"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, padding_side="left"
    )
