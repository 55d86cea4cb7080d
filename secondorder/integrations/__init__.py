"""Callbacks for trainers and loggers, in one module each. Importing this package imports none of them.

* ``secondorder.integrations.transformers``: Hugging Face ``Trainer``
* ``secondorder.integrations.accelerate``: Accelerate
* ``secondorder.integrations.lightning``: Lightning
* ``secondorder.integrations.tensorboard``: TensorBoard
* ``secondorder.integrations.wandb``: Weights & Biases

The optimizers train without them. The callbacks complete checkpoints of several ranks and log measurements.
"""
