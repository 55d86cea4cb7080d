"""The exchange of layers and windows with other ranks.

The modules turn blocks into messages: statistics that are summed, curvature that is shared, and parameters and windows
that are sharded. A strategy of ``comm/`` assigns the work, and only ``comm/`` calls ``torch.distributed``.
"""
