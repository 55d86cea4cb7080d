"""Callbacks for trainers and loggers, one module each; importing this package imports none of them.

* ``secondorder.integrations.transformers``: Hugging Face ``Trainer``
* ``secondorder.integrations.accelerate``: Accelerate
* ``secondorder.integrations.lightning``: Lightning
* ``secondorder.integrations.tensorboard``: TensorBoard
* ``secondorder.integrations.wandb``: Weights & Biases

The optimizers train without any of them. The callbacks complete checkpoints of several ranks, and log.
"""
