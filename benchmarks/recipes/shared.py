"""Keywords that several recipes share."""

from benchmarks.recipes.building import settings_of
from benchmarks.recipes.types import Settings

# Absolute damping would have to adapt to the gradients, which shrink by orders of magnitude during a run.
DAMPED: Settings = {"damping": 1.0, "damping_mode": "relative"}

DECAYED: Settings = {"weight_decay": 1e-2, "decoupled_weight_decay": True}

# Runs of a few hundred steps need recent factors. For a convolution, a part of the batch is sufficient.
OFTEN: Settings = {"factor_update_steps": 5, "inv_update_steps": 10, "refresh_warmup": False, "factor_batch_size": 32}

# Adam in the eigenbasis of the Fisher, which is refreshed often because a stale basis mixes directions.
WHITENING: Settings = settings_of(
    "estimator=running power=0.5 momentum_mode=pre momentum=0.9 scale_decay=0.95 kl_clip=none "
    "factor_update_steps=2 inv_update_steps=10 fallback=adamw"
)
# Whitened steps with a uniform spectrum. The running means are short because the runs are short.
SPECTRAL: Settings = {
    **WHITENING,
    **settings_of("nesterov=true momentum=0.8 plain_momentum=0.9 refresh_warmup=true fallback_beta2=0.95"),
}
# The quadratic model of the loss determines rate and momentum, and the error of its predictions the damping.
WATCHFUL: Settings = settings_of(
    "lr=1.0 quadratic_model=true adaptive_damping=true damping_interval=5 kl_clip=none factor_update_steps=1 "
    "inv_update_steps=5"
)

# The default of a tenth is few rows for a batch of 128 on one rank. With many ranks, the rows of all of them count.
HALF: Settings = {"rank_fraction": 0.5, "damping": 1e-3}
