"""The models that learn without a GPU: tokenizer, demonstrations, warm start, shipped folders."""
