"""An E5-shaped encoder with random weights: everything runs with it, nothing is learnt in it.

For tests and benchmarks on machines without a hub. Its vectors still tell texts with different
words apart, since the mean over random token vectors does.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch

from sg_rlhf.retrieval.encoder import PROMPTS


def save_random_encoder(
    folder: Path,
    texts: Iterable[str],
    *,
    width: int = 32,
    layers: int = 2,
    heads: int = 2,
    vocabulary: int = 2000,
    positions: int = 512,
    seed: int = 0,
) -> None:
    """Write a BERT of the given shape and a WordPiece tokenizer learnt from `texts`.

    The same arguments give the same files.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import WordPieceTrainer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = WordPieceTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    # The prefixes become words of the vocabulary: unknown ones would all be the same.
    prefixes = [text for text in PROMPTS["e5"].values() for _ in range(1000)]
    tokenizer.train_from_iterator(chain(texts, prefixes), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=positions).save_pretrained(
        folder
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertModel(
            BertConfig(
                vocab_size=tokenizer.get_vocab_size(),
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=4 * width,
                max_position_embeddings=positions,
                # BERT's 0.02 is made for training: at it all vectors point almost the same way.
                initializer_range=0.2,
            )
        )
    model.save_pretrained(folder)
