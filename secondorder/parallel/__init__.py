"""What layers and windows exchange with other ranks.

The modules here turn blocks into messages: statistics that are summed, curvature that is shared, and parameters and
windows that are sharded. They ask a strategy of ``comm/`` who does what, and never call ``torch.distributed``
themselves.
"""
