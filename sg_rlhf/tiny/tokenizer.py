"""A tokenizer of 520 entries: byte-level BPE plus the stock phrases of a domain.

A model of under a million parameters cannot afford a general vocabulary, and short prompts are
what makes a rollout cheap on two CPU cores. So every phrase that the problem templates repeat is
one entry, and all other text falls back to BPE over bytes: any string survives encoding and
decoding.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sg_rlhf.tasks.tiny import EOS, TinyModel

PAD = "<|endoftext|>"
TURN_START = "<|im_start|>"
CONTROL = (PAD, TURN_START, EOS)

# What phrases leave of it goes to BPE merges. A multiple of 8 suits matrix kernels.
VOCAB_SIZE = 520

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(
    domain: TinyModel[Any], vocab_size: int = VOCAB_SIZE
) -> PreTrainedTokenizerFast:
    """The tiny model's tokenizer for one domain; the same code always gives the same ids.

    Phrases are matched before BPE runs, the longest at each position first, so the whole system
    turn of Knights & Knaves is one token though it contains `<|im_start|>`. Decoding joins the
    pieces with nothing between them.

    Raises:
        ValueError: `vocab_size` does not hold all bytes and phrases.
    """
    extra = domain.phrases()
    room = vocab_size - len(CONTROL) - len(extra)
    if room < 256:
        raise ValueError(f"vocab_size must be at least {vocab_size + 256 - room}, got {vocab_size}")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=room, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([domain.merge_text], trainer)
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in CONTROL])
    core.add_tokens([AddedToken(text, normalized=False) for text in extra])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        chat_template=CHATML,
    )
