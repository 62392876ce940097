"""How a model computes log-probs and is optimized; some of it is installed by ``patches.table``.

``log_prob_head`` has the model class, which computes log-probs without logits;
``packed_attention`` attends within packed rows; ``prefix_sharing`` computes a group's prompt once;
``leaf_layers`` saves most of ZeRO-3's hooks; ``rotary`` keeps rotary frequencies in float32;
``adam`` selects torch's fused Adam.
"""
