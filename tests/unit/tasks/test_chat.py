"""What is said of prompts in another family's form."""

from types import SimpleNamespace

import pytest

from sg_rlhf.tasks import chat

#: Knows no control tokens.
TOKENIZER = SimpleNamespace(convert_tokens_to_ids=lambda token: None, unk_token_id=None)


@pytest.mark.parametrize("prompt", ["<|im_start|>user\nx", "<|start_header_id|>user"])
def test_the_remedy_is_one_for_every_domain(prompt):
    with pytest.raises(ValueError, match="has no token") as raised:
        chat.check_format(prompt, TOKENIZER)
    remedy, for_kk = str(raised.value).split("; for Knights & Knaves, ")
    assert remedy.endswith("rows of messages with data.apply_chat_template=true")
    assert for_kk == "`python -m sg_rlhf.data kk --chat-template MODEL`"


def test_plain_text_has_no_form():
    chat.check_format("What is 1 + 1?", TOKENIZER)
