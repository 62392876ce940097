"""Assignment of samples to ranks and micro-batches by length, so that ranks wait little.

Pure functions on lists of lengths. Used by the learner and by ``plan``, which predicts the waiting.
"""
