"""Log-probs and entropy from hidden states, block by block, without materialised logits."""
