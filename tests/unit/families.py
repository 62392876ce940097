"""Models' folders as each family has them: tokenizer, chat template, ends. Made here, no download.

The vocabularies are bytes or letters; control tokens, their roles, what is put in front of a text,
`generation_config.json` and the markers of the chat templates are those of the published models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Qwen3-Instruct-2507's has no default system message.
CHATML_BARE = CHATML.partition("{% endif %}")[2]
#: Trims, and has a system header with dates of its own.
LLAMA_3 = (
    "{{ bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{{ 'Cutting Knowledge Date: December 2023\n\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}{{ '<|eot_id|>' }}"
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ (m.content | trim) + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
#: Refuses a system message, as v0.3's first template does.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
#: Puts it into the user's turn, as the later one does.
MISTRAL_WITH_SYSTEM = (
    "{% set said = '' %}{% if messages[0].role == 'system' %}"
    "{% set said = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + said + m.content + '[/INST]' }}"
    "{% endfor %}"
)
#: Leaves a system message out, without a word.
MISTRAL_SILENT = (
    "{{ bos_token }}{% for m in messages if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}{% endfor %}"
)


def byte_level(special: tuple[str, ...], plain: tuple[str, ...] = ()) -> Tokenizer:
    """Qwen's and Llama 3's kind: BPE over bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    core.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])
    return core


def sentence_piece(*, old: bool) -> Tokenizer:
    """Mistral's kind: letters, bytes for the rest, and a space in front of a text.

    Args:
        old: the space is put there by a normalizer, behind every control token again.
    """
    letters = [chr(i) for i in range(33, 127)] + ["▁"]
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    entries = [*control, *(f"<0x{i:02X}>" for i in range(256)), *letters]
    vocabulary = {entry: i for i, entry in enumerate(dict.fromkeys(entries))}
    core = Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if old:
        core.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    return core


def begins_with(core: Tokenizer, bos: str) -> Tokenizer:
    """The tokenizer with a BOS in front of every text."""
    core.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
    )
    return core


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        core: makes its tokenizer.
        template: chat template.
        eos: the tokenizer's.
        pad: the tokenizer's; None: it has none, and OpenRLHF takes the eos.
        ends: eos of ``generation_config.json``.
        turn_end: what ends a turn of its chat form.
        model_type: of ``config.json``.
        tokenizer_class: of ``tokenizer_config.json``.
        bos: what a text begins with, if anything.
    """

    core: Callable[[], Tokenizer]
    template: str
    eos: str
    pad: str | None
    ends: tuple[str, ...]
    turn_end: str
    model_type: str
    tokenizer_class: str
    bos: str | None = None

    def write(self, folder: Path) -> Path:
        """The folder as on the hub, without weights."""
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=self.core(), eos_token=self.eos, pad_token=self.pad,
            bos_token=self.bos, chat_template=self.template, clean_up_tokenization_spaces=False,
        )  # fmt: skip
        tokenizer.save_pretrained(folder)
        ends = [tokenizer.convert_tokens_to_ids(end) for end in self.ends]
        generation = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
        (folder / "generation_config.json").write_text(json.dumps(generation))
        (folder / "config.json").write_text(json.dumps({"model_type": self.model_type}))
        # Transformers builds the tokenizer by its class, not as the file has it.
        file = folder / "tokenizer_config.json"
        published = {"tokenizer_class": self.tokenizer_class}
        if self.tokenizer_class == "LlamaTokenizer":
            published |= {"add_bos_token": True, "add_eos_token": False, "legacy": False}
        file.write_text(json.dumps(json.loads(file.read_text()) | published))
        return folder


FAMILIES = {
    "qwen2.5-instruct": Family(
        lambda: byte_level(QWEN), CHATML, "<|im_end|>", "<|endoftext|>",
        ("<|im_end|>", "<|endoftext|>"), "<|im_end|>", "qwen2", "Qwen2Tokenizer",
    ),
    "qwen2.5-base": Family(
        lambda: byte_level(QWEN), CHATML, "<|endoftext|>", "<|endoftext|>", ("<|endoftext|>",),
        "<|im_end|>", "qwen2", "Qwen2Tokenizer",
    ),
    "qwen3-instruct-2507": Family(
        lambda: byte_level(QWEN, ("<think>", "</think>")), CHATML_BARE, "<|im_end|>",
        "<|endoftext|>", ("<|im_end|>", "<|endoftext|>"), "<|im_end|>", "qwen3", "Qwen2Tokenizer",
    ),
    "llama-3.1-instruct": Family(
        lambda: begins_with(byte_level(LLAMA), "<|begin_of_text|>"), LLAMA_3, "<|eot_id|>", None,
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "<|eot_id|>", "llama",
        "PreTrainedTokenizerFast", "<|begin_of_text|>",
    ),
    "mistral-v0.3": Family(
        lambda: begins_with(sentence_piece(old=False), "<s>"), MISTRAL, "</s>", None, ("</s>",),
        "</s>", "mistral", "LlamaTokenizer", "<s>",
    ),
    "mistral-old-tokenizer": Family(
        lambda: begins_with(sentence_piece(old=True), "<s>"), MISTRAL_WITH_SYSTEM, "</s>", None,
        ("</s>",), "</s>", "mistral", "LlamaTokenizer", "<s>",
    ),
    "mistral-silent": Family(
        lambda: begins_with(sentence_piece(old=True), "<s>"), MISTRAL_SILENT, "</s>", None,
        ("</s>",), "</s>", "mistral", "LlamaTokenizer", "<s>",
    ),
}  # fmt: skip
