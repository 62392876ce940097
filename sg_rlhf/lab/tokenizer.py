"""A tokenizer of 520 entries: byte-level BPE plus the stock phrases of Knights & Knaves.

A model of under a million parameters cannot afford a general vocabulary, and short prompts are
what makes a rollout cheap on two CPU cores. So every phrase that the puzzle templates repeat is
one entry, each name has exactly one entry (spaces and punctuation belong to the phrases around
it, so a name is never learnt twice), and all other text falls back to BPE over bytes: any string
survives encoding and decoding.
"""

from __future__ import annotations

import re

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sg_rlhf.tasks.kk.prompt import SYSTEM, THINK
from sg_rlhf.tasks.kk.render import FRAMES, INTRO, NAMES, QUESTION

PAD = "<|endoftext|>"
TURN_START = "<|im_start|>"
EOS = "<|im_end|>"
CONTROL = (PAD, TURN_START, EOS)

# What phrases leave of it goes to BPE merges. A multiple of 8 suits matrix kernels.
VOCAB_SIZE = 520
# Most people in a puzzle whose answer lines are one entry each; longer answers are spelt out.
_ANSWER_LINES = 8

_PROMPT_PHRASES = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n",
    "<|im_start|>user\n",
    f"{INTRO}You meet ",
    " inhabitants: ",
    ", and ",
    ", ",
    QUESTION,
    "\n<|im_end|>\n<|im_start|>assistant\n",
)
_CLAIM_PHRASES = (
    " is a knight",
    " is a knave",
    " is not a knight",
    " is not a knave",
    "If ",
    " then ",
    " and ",
    " or ",
    " if and only if ",
)
# " no\nTry " is one decision (this assignment fails, on to the next), hence one entry.
_TRACE_PHRASES = (
    "Try ", "=knight ", "=knave ", ": ", " T", " F", " ok ", " ok",
    " no\nTry ", " no\nGuess", " no", "Guess",
)  # fmt: skip

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# What BPE sees of ordinary language: enough for digits, spaces and short words of other prompts
# not to cost one token per letter. Written for this purpose; nothing is learnt from it but
# merges.
_MERGE_TEXT = (
    "Let's think step by step and output the final answer within \\boxed{}. Find the value"
    " of the number x such that the sum of the terms is equal to the product. How many of"
    " the integers from 1 to 100 are there? Answer the given question. You must think "
    "about what you know, then search for the information that you need, and give the "
    "answer when you have it. Who was the first person that wrote the book? Where is the "
    "river in the country? There are 12 apples and 24 pears; the other one has more. In "
    "the end the total is 36. Suppose that the function is continuous on the interval and"
    " that for every point there is another point. The reasoning must be right, the "
    "result must be stated clearly, and the question must be answered in full."
)


def phrases() -> list[str]:
    """Every entry that is neither a byte, a merge nor a control token, in the order of its id."""
    tags = [THINK, "</think>", "<answer>", "</answer>", "<answer>(1) "]
    lines = [f"\n({i}) " for i in range(2, _ANSWER_LINES + 1)]
    # The fixed pieces of "{name} said, \"{claim}.\" ": a frame is followed by a space, always.
    frames = [piece for frame in FRAMES for piece in re.split(r"{name}|{claim}", f"{frame} ")]
    pieces = [*tags, *lines, *_PROMPT_PHRASES, *frames, *_CLAIM_PHRASES, *_TRACE_PHRASES, *NAMES]
    return [text for text in dict.fromkeys(pieces) if len(text) > 1]


def build_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """The tiny model's tokenizer; the same code always gives the same ids.

    Phrases are matched before BPE runs, the longest at each position first, so the whole system
    turn is one token though it contains `<|im_start|>`. Decoding joins the pieces with nothing
    between them.

    Raises:
        ValueError: `vocab_size` does not hold all bytes and phrases.
    """
    extra = phrases()
    room = vocab_size - len(CONTROL) - len(extra)
    if room < 256:
        raise ValueError(f"vocab_size must be at least {vocab_size + 256 - room}, got {vocab_size}")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=room, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([_MERGE_TEXT], trainer)
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
