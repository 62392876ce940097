"""Publishing a trained model: its model card, and the upload to the Hugging Face hub.

`model_card` is called by :mod:`sg_rlhf.train` when a run ends, `push` by ``sg-rlhf push``.
"""
