"""Published recipes for the size ``paper``: the settings that authors used, as keywords of this package.

Each comes from the paper or the code that its ``source`` names, and none was run here. If that has no rule for other
batch sizes, the rates of SGD and of its replacements are proportional to the batch size (Goyal et al. 2017,
arXiv:1706.02677), and those of other optimizers to its square root. Three things differ for all recipes: the warm-up
starts at 0, while KAISA, DP-KFAC and HyLo start at one rank's share of the rate; a λ that decreases during a run keeps
its first value; and a cosine ends at 0. Settings that depend on a scale of the curvature that no keyword here restores
are omitted, and ``note`` contains them. Runs are omitted if this is their only setting (DP-KFAC on sequences), if the
momentum is applied elsewhere (the convolutional network of tensorflow/kfac), or if their settings were not published
(EK-FAC). The scales of the implementations are in ``docs/migrating``.
"""

from collections.abc import Mapping
from functools import partial

from benchmarks.recipes.building import settings_of
from benchmarks.recipes.types import MethodName, Recipe, Rule, Schedule, Settings


def falling(epochs: float, *at: float, warmup: float = 0.0, gamma: float = 0.1) -> Schedule:
    return Schedule("steps", warmup / epochs, tuple(epoch / epochs for epoch in at), gamma)


LINEAR = Schedule("linear")
_RESNETS = (1, 128, 64_000 * 128 / 50_000)
"""Ranks, batch size and epochs of He et al. on CIFAR-10: 64,000 steps."""


def _recipe(
    settings: Settings,
    source: str,
    schedule: Schedule,
    length: tuple[int, int | None, float | None],
    note: str = "",
    workload: Settings | None = None,
    rule: Rule = "linear",
) -> Recipe:
    """Return a recipe. ``length`` contains the number of ranks, the batch size per rank and the number of epochs."""
    world, batch_size, epochs = length
    return Recipe(settings, source, schedule, batch_size, world, epochs, rule, workload=workload or {}, note=note)


_rooted = partial(_recipe, rule="sqrt")
"""Returns a recipe whose rates are proportional to the square root of the batch size."""

# ---------------------------------------------------------------------- SGD
_HE = "He et al. 2015, arXiv:1512.03385, section 4.2"
_TORCHVISION = "pytorch/vision, references/classification/train.py: its defaults, 8 ranks"
_SGD: Settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
_HE_SHAPE = Schedule("steps", 0.0, (0.5, 0.75))
SGD: dict[str, Recipe] = {
    "resnet20": _recipe(_SGD, _HE, _HE_SHAPE, _RESNETS),
    "resnet32": _recipe(_SGD, _HE, _HE_SHAPE, _RESNETS),
    "resnet110": _recipe(_SGD, _HE, _HE_SHAPE, _RESNETS, note="its first 400 steps or so have a tenth of the rate"),
    "vgg16": _recipe(
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4},
        "weiaicunzai/pytorch-cifar100, train.py and conf/global_settings.py",
        falling(200, 60, 120, 160, warmup=1, gamma=0.2),
        (1, 128, 200),
        workload={"dataset": "cifar100"},
    ),
    "resnet18": _recipe(_SGD, _TORCHVISION, falling(90, 30, 60), (8, 32, 90)),
    "resnet50": _recipe(_SGD, _TORCHVISION, falling(90, 30, 60), (8, 32, 90)),
}

# ---------------------------------------------------------------------- AdamW
ADAMW: dict[str, Recipe] = {
    "chargpt": _rooted(
        {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
        "karpathy/nanoGPT, config/train_shakespeare_char.py and train.py",
        Schedule("cosine", 100 / 5000),
        (1, 64, None),
        "5,000 steps; it ends at a rate of 1e-4, clips gradients to a norm of 1, and does not decay vectors",
    ),
    "gpt2_small": _rooted(
        {"lr": 6e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1},
        "karpathy/nanoGPT, config/train_gpt2.py and train.py",
        Schedule("cosine", 2000 / 600_000),
        (8, 60, None),
        "600,000 steps of 480 × 1,024 tokens, 12 sequences at a time; it ends at a rate of 6e-5, clips gradients "
        "to a norm of 1, and does not decay vectors",
    ),
    "bert_qa": _rooted(
        {"lr": 3e-5, "weight_decay": 0.0},
        "huggingface/transformers, examples/pytorch/question-answering/README.md, BERT-base on SQuAD 1.0",
        LINEAR,
        (1, 12, 2),
        "length 384, stride 128; its trainer clips gradients to a norm of 1",
    ),
    "glue": _rooted(
        {"lr": 2e-5, "weight_decay": 0.0},
        "huggingface/transformers, examples/pytorch/text-classification/README.md, BERT-base",
        LINEAR,
        (1, 32, 3),
        "length 128; 5 epochs on MRPC and WNLI; its trainer clips gradients to a norm of 1",
    ),
}

# ---------------------------------------------------------------------- K-FAC
_KAISA_NOTE = "it uses λ = {} in a unit that depends on the layer; here, λ is the default, relative to each layer"
_KAISA_KEYWORDS: Settings = {"factor_decay": 0.95, "kl_clip": 1e-3, "momentum": 0.9, "skip_layers": "BatchNorm2d"}
# DP-KFAC gives the new batch a weight of 0.95. It computes the factors of each layer from its owner's examples.
_DP: Settings = settings_of(
    "momentum=0.9 damping=0.03 damping_mode=absolute factor_decay=0.05 factor_update_steps=1 inv_update_steps=1 "
    "kl_clip=1e-3 comm=local_factors skip_layers=BatchNorm2d"
)
_DP_CIFAR = "lzhangbv/kfac_pytorch, train_{}.sh and examples/pytorch_cifar10_resnet.py: 0.1 times 4 ranks"
_AUTOENCODER = _recipe(
    settings_of(
        "lr=1.0 quadratic_model=true adaptive_damping=true damping=150.0 damping_interval=5 min_damping=1e-6 "
        "factor_decay=0.95 factor_update_steps=1 inv_update_steps=5 kl_clip=none weight_decay=1e-5 "
        "weight_decay_in_curvature=true fisher=mc likelihood=bernoulli"
    ),
    "tensorflow/kfac, kfac/examples/autoencoder_mnist.py, of the authors of arXiv:1503.05671",
    Schedule(),
    (1, 1000, None),
    "batches grow from 1,000 to all images, and the quadratic model determines rate and momentum; the original run has "
    "10,000 steps, the first 5 of which only gather statistics",
    rule="constant",
)
KFAC: dict[str, Recipe] = {
    "autoencoder": _AUTOENCODER,
    "resnet32": _recipe(
        {"lr": 0.1, "weight_decay": 5e-4, "factor_update_steps": 1, "inv_update_steps": 10, **_KAISA_KEYWORDS},
        "gpauloski/kfac-pytorch (KAISA), examples/torch_cifar10_resnet.py: its defaults, rate times ranks",
        falling(100, 35, 75, 90, warmup=5),
        (1, 128, 100),
        note=_KAISA_NOTE.format("0.003"),
    ),
    "resnet50": _recipe(
        {"lr": 0.0125, "weight_decay": 5e-5, "factor_update_steps": 10, "inv_update_steps": 100, **_KAISA_KEYWORDS},
        "gpauloski/kfac-pytorch (KAISA), examples/torch_imagenet_resnet.py: its defaults, rate times ranks",
        falling(55, 25, 35, 40, 45, 50, warmup=5),
        (1, 32, 55),
        note=_KAISA_NOTE.format("0.001"),
        workload={"label_smoothing": 0.1},
    ),
    "resnet110": _recipe(
        {"lr": 0.4, "weight_decay": 5e-4, **_DP},
        _DP_CIFAR.format("cifar10"),
        falling(100, 35, 75, 90, warmup=1),
        (4, 128, 100),
    ),
    "vgg16": _recipe(
        {"lr": 0.4, "weight_decay": 5e-4, **_DP},
        _DP_CIFAR.format("cifar100"),
        falling(100, 35, 65, 80, 90, warmup=1),
        (4, 128, 100),
        workload={"dataset": "cifar100"},
    ),
}

# ---------------------------------------------------------------------- HyLo
_HYLO: Settings = settings_of("momentum=0.9 rank_fraction=0.1 approx=reduce conv_scale=hylo skip_layers=BatchNorm2d")
_HYLO_NOTE = (
    "λ falls to {} there; KID for {} epochs and for those from {} to {}, else KIS, is "
    "switch=secondorder.switching.EpochList([(0, {}), ({}, {})], …): here the policy decides"
)
_HYLO_EPOCHS = (10, 35, 40, 10, 36, 41)
_HYLO_RANKS = "the script does not specify the number of ranks"
HYLO: dict[str, Recipe] = {
    "resnet32": _recipe(
        {"lr": 1.8, "damping": 1.5, "weight_decay": 4.5e-4, "update_steps": 13, **_HYLO},
        "hylo-dso/hylo, scripts/train-resnet32-cifar10-end-to-end.sh (SC 2022)",
        falling(100, 35, 75, 90, warmup=5, gamma=0.3),
        (32, 128, 100),
        note=f"{_HYLO_RANKS}: 13 steps between refreshes are an epoch on 32; " + _HYLO_NOTE.format(0.1, *_HYLO_EPOCHS),
    ),
    "resnet50": _recipe(
        {"lr": 4.0, "damping": 4.0, "weight_decay": 2.5e-5, "update_steps": 200, **_HYLO},
        "hylo-dso/hylo, scripts/train-resnet50-imagenet-end-to-end.sh (SC 2022)",
        falling(55, 25, 35, 40, 45, 50, warmup=5),
        (64, 80, 55),
        note=f"{_HYLO_RANKS}: the abstract says up to 64; " + _HYLO_NOTE.format(0.04, *_HYLO_EPOCHS),
        workload={"label_smoothing": 0.1},
    ),
}

# ---------------------------------------------------------------------- methods with a window
_WINDOW: Settings = {"window_size": 1024, "scale": "window", "momentum": 0.0}
_EFCP = "IST-DASLab/EFCP, README.md (arXiv:2306.06098)"
_SPARSE: Settings = {**_WINDOW, "density": 0.01}
_LEGACY: Settings = {"weight_decay_mode": "legacy"}
MFAC: dict[str, Recipe] = {
    "resnet20": _rooted(
        {"lr": 1e-3, "damping": 1e-5, "weight_decay": 3e-3, **_WINDOW, "window_size": 512},
        "IST-DASLab/M-FAC, README.md and main_optim.py (arXiv:2107.03356)",
        falling(164, 82, 123),
        (1, 128, 164),
    ),
    "bert_qa": _rooted(
        {"lr": 1e-4, "damping": 1e-6, **_WINDOW},
        "model card of M-FAC/bert-tiny-finetuned-squadv2, the same for bert-mini",
        LINEAR,
        (1, 12, 2),
        "SQuAD 2, length 384, stride 128",
    ),
    "glue": _rooted(
        {"lr": 1e-4, "damping": 1e-6, **_WINDOW},
        "model cards of M-FAC/bert-tiny-finetuned-qqp and bert-mini-finetuned-qnli",
        LINEAR,
        (1, 32, 5),
        "length 128; window_size=512 on MRPC",
    ),
}
SPARSE_MFAC: dict[str, Recipe] = {
    "resnet20": _rooted(
        {"lr": 1e-3, "damping": 1e-4, "weight_decay": 1e-4, **_SPARSE, **_LEGACY},
        f"{_EFCP}, CIFAR-10 / ResNet-20; main.py",
        falling(164, 82, 123),
        (1, 128, 164),
    ),
    "resnet18": _rooted(
        {"lr": 1e-3, "damping": 1e-7, "weight_decay": 1e-5, **_SPARSE, **_LEGACY},
        f"{_EFCP}, ImageNet; ffcv-imagenet/rn18_configs/rn18_88_epochs.yaml",
        LINEAR,
        (1, 1024, 88),
        "it does not decay norm layers, and the image size grows from 160 to 192",
        {"label_smoothing": 0.1},
    ),
    "bert_qa": _rooted(
        {"lr": 3e-5, "damping": 5e-5, **_SPARSE},
        f"{_EFCP}, QA/SquadV2, BERT-base",
        LINEAR,
        (1, None, 2),
        "SQuAD 2; the batch size is not stated",
    ),
    "glue": _rooted(
        {"lr": 2e-5, "damping": 5e-5, **_SPARSE}, f"{_EFCP}, GLUE/MNLI, BERT-base", LINEAR, (1, 32, 3), "length 128"
    ),
}
GGT: dict[str, Recipe] = {
    "logistic": _rooted(
        {"lr": 1.0, "window_size": 100, "density": 0.01, "beta1": 0.0, "beta2": 1.0, "eps": 1e-5, "weight_decay": 0.0},
        f"{_EFCP}, Logistic Regression (sparse GGT), on features of ImageNet",
        Schedule("cosine"),
        (1, 128, 10),
    )
}

PUBLISHED: Mapping[MethodName, Mapping[str, Recipe]] = {
    "sgd": SGD, "adamw": ADAMW, "kfac": KFAC, "kfac_adaptive": {"autoencoder": _AUTOENCODER}, "hylo": HYLO,
    "mfac": MFAC, "sparse_mfac": SPARSE_MFAC, "ggt": GGT,
}  # fmt: skip
"""Recipes by method and workload, for the size ``paper``."""
