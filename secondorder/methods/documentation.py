"""Descriptions of the arguments that several methods share.

``options.complete_docstring`` inserts them into the docstrings of the classes, in the order of the signature. A class
describes only the arguments that other methods do not have, or that have a different meaning there.
"""

#: Arguments of every method.
OPTIMIZER = """
    lr: Learning rate η, a number or a tensor with one element. If None, it is 1e-3, the default of AdamW, when
        ``graft`` or ``inner`` names Adam's rule (3e-4 with ``compression=TopK(...)``). It is 1.0 with
        ``AdaptationOptions(quadratic_model=True)``, and otherwise 0.1 for layer methods and 1e-3 for window methods.
    momentum: Coefficient of the heavy-ball momentum on the preconditioned gradient.
    nesterov: Whether to use Nesterov momentum.
    maximize: Whether to maximize the objective instead of minimizing it.
    foreach: Whether to update the parameters of one device and dtype in one call, as in ``torch.optim``. If None, all
        devices do so; a CPU updates what fits into its cache, and uses torch's fused kernel for steps of the graft.
    fallback: Rule for parameters that are not preconditioned: ``"sgd"``, ``"adam"``, ``"adamw"`` or
        :class:`FallbackOptions`, which also sets its learning rate, as in ``FallbackOptions("adamw", lr=1e-3)``. If
        None, it is the rule of ``graft`` if that is set, and SGD otherwise.
    clip: Upper bound on the norm of the direction over all blocks or windows, or :class:`ClipOptions`, which can also
        bound each entry, as in ``ClipOptions(norm=1.0, value=0.1)``. If None, nothing is clipped.
    betas: β₁ and β₂ of Adam's rule, wherever ``graft``, ``inner`` or ``fallback`` names it. Schedulers that cycle the
        momentum cycle this β₁ if ``graft`` or ``inner`` names Adam's rule.
    eps: ε of Adam's rule.
    inner: Rule that receives the preconditioned gradient as its gradient: ``"sgd"``, ``"adam"`` or ``"adamw"``.
    graft: Rule that determines the size of the step of each block or window: ``"sgd"``, ``"adam"`` or ``"adamw"``. You
        can then keep the learning rate schedule of that rule. With ``"adam"``, ``decoupled_weight_decay`` selects the
        kind of weight decay; with ``"adamw"``, the decay is always decoupled. If None, the step keeps its own size, as
        in the publications. ``"auto"`` is ``"adamw"`` if no learning rate is set, so an optimizer without arguments
        takes steps of AdamW's size at AdamW's default rate, but without weight decay; otherwise it is None.
"""

#: Arguments of the methods that precondition layer by layer: KFAC, EKFAC and HyLo.
LAYERS = """
    params: A module, a list of modules that are the parts of one model, or, together with ``module``, anything that
        ``torch.optim`` accepts.
    module: The module, or list of modules, whose layers are observed. It is necessary if ``params`` is not a module.
    comm: Communication strategy. If None, it is ``CommOpt()`` in a process group with more than one rank.
    loss_reduction: How the loss combines the examples of a batch: ``"mean"`` or ``"sum"``.
    batch: How the examples of a batch are counted, see :class:`BatchOptions`: use ``BatchOptions(dim=1)`` for inputs
        ``[T, N, ...]``, ``input="tokens"`` for the argument of ``forward`` that contains the examples, and
        ``loss_terms`` for a loss that is a mean over the tokens or the outputs of an example.
    skip_layers: Names, patterns, types or modules of the layers to leave to the fallback, with all their submodules.
    weight_decay: Coefficient of weight decay.
    decoupled_weight_decay: Whether to apply weight decay to the parameter instead of adding it to the direction.
    deterministic_seed: Seed of all random choices.
"""

#: Arguments of the methods with Kronecker factors: KFAC and EKFAC.
FACTORS = """
    damping: Damping λ in units of the Fisher of the per-example loss, or a multiple according to ``damping_mode``. If
        None, it is 10 times the mean eigenvalue of each block, which is safe for every scale of the loss, or 1e-3 with
        ``damping_mode="absolute"``. The damping is a key of the parameter groups, so you can schedule it with
        ``secondorder.ParamScheduler(optimizer, damping=...)``.
    damping_mode: ``"absolute"``, or ``"relative"`` to the mean eigenvalue of each block (for a normalization layer, of
        its steepest unit). If None, it is ``"absolute"`` if ``damping`` is set and ``"relative"`` otherwise.
    factor_decay: β, the weight of the old factors in the running mean.
    factor_update_steps: F, the number of steps between updates of the factors. If None, it is 10.
    inv_update_steps: K, the number of steps between refreshes; 0 turns preconditioning off. If None, it is 100.
    storage: How factors and inverses are stored, see :class:`StorageOptions`: their data types and the largest matrix.
        ``StorageOptions(factor_dtype=torch.bfloat16, packed=True)`` stores the factors as triangles of bfloat16 and
        takes a quarter of the memory for them; ``inv_dtype=torch.bfloat16`` halves the memory of the inverses.
    statistics: Which examples and positions contribute to the factors, see :class:`StatisticsOptions`: random samples
        of them (``batch_size``, ``positions``), their weights, and the blocks of normalization layers and tied weights.
    adaptation: Options that adapt the step to the loss, see :class:`AdaptationOptions`. They can adapt the damping
        (``AdaptationOptions(adaptive_damping=True)``), choose the length of a step with a quadratic model, and undo bad
        steps. They need ``step(closure)``, with a closure that calls ``zero_grad()`` and ``backward()`` and returns the
        loss; only a quadratic model without a likelihood does not. To schedule an adapted damping, pass
        :class:`ParamScheduler` a dict from steps to values; the adaptation starts again from each value. Functions of
        the step are rejected.
    overlap: Whether to refresh the inverses in a separate thread (on a GPU, in a separate stream) while training
        continues. The results are adopted ``max(1, inv_update_steps // 10)`` steps after the work began. The first
        refresh and those of a warm-up are not deferred. The copies of A and G need as much memory as A and G.
    approx: ``"expand"`` treats the positions that share a weight as independent; ``"reduce"`` averages their inputs and
        sums their gradients.
    fisher: ``"empirical"`` uses the gradients of the loss. ``"mc"`` (Monte Carlo) uses targets drawn from the model,
        ``"curvature_prop"`` uses random signs, and ``"exact"`` uses every column of the curvature of the loss. These
        three need a call such as ``optimizer.observe(outputs, "categorical")`` between the forward pass and
        ``backward()``. ``"forward_only"`` sets G = I. :class:`FisherOptions` also sets the number of draws per example,
        as in ``FisherOptions("mc", samples=4)``.
    power: Exponent p of ``(F + λ)^(-p)``: 1 is the natural gradient, and 1/2 whitens the gradient. KFAC needs
        ``inverse_method="eigen"`` for values below 1.
    orthogonalize: Whether to give the steps of linear and convolution layers a uniform spectrum, as Muon does. Only the
        polar factor of the preconditioned matrix is used. It is scaled to the usual size of Adam's steps, or to the
        size that ``graft`` sets, so a suitable ``lr`` is several times that of AdamW. This works best with momentum
        before the preconditioner: ``momentum_mode="pre"`` of EKFAC, or ``graft="adam"``.
    kl_clip: κ, the bound on the step in the Fisher metric. If None, steps are not bounded. Steps that are grafted or
        orthogonalized are not affected, since their size is already determined.
    checkpoint_curvature: How much of the curvature ``state_dict`` contains: ``"all"``, ``"factors"`` (inverses are
        recomputed on loading) or ``"none"`` (the curvature is estimated again).
"""

#: Arguments of the methods with a window of past gradients: MFAC, SparseMFAC and GGT.
WINDOW = """
    params: Anything that ``torch.optim`` accepts, a module, or a list of modules that are the parts of one model.
    module: The module, if ``params`` is not a module. It is optional and provides names, the layers for
        ``partition="layer"`` and the types of layers for ``skip_norm_layers``.
    comm: Communication strategy. If None, every rank stores the complete window. ``MemOpt()`` and ``HybridOpt(f)``
        divide it among the ranks of a row; with ``partition="layer"``, they assign each window to some of the ranks.
    partition: ``"global"`` uses one window for all parameters, ``"group"`` uses one window per parameter group, and
        ``"layer"`` uses one window per module (one per parameter if names are unknown).
    compression: Compression of the rows: ``TopK(...)`` or ``LowRank(...)``. If None, rows are dense.
    weight_decay: Coefficient of weight decay. Coupled decay is part of the gradient and enters the window.
    decoupled_weight_decay: Whether to apply weight decay to the parameter: p ← (1 − lr·wd)p.
    weight_decay_mode: ``"standard"``, or, to reproduce published runs, ``"legacy"`` (p ← (1 − wd)p, without lr),
        ``"reg"`` (g + wd·p is preconditioned, and g enters the window) or ``"both"`` of these.
    deterministic_seed: Seed of the random bases from which low-rank rows start.
    checkpoint_curvature: How much of the curvature ``state_dict`` contains: ``"all"``, or ``"none"`` (the window starts
        empty after loading).
"""

#: Arguments that most scripts set.
USUAL = (
    "params", "lr", "momentum", "module", "comm", "damping", "damping_mode", "kl_clip", "factor_update_steps",
    "inv_update_steps", "budget", "update_steps", "rank_fraction", "window_size", "skip_layers", "graft",
    "weight_decay", "decoupled_weight_decay",
)  # fmt: skip
#: Arguments for experts.
EXPERT = ("refresh", "statistics", "rows", "window", "inner", "deterministic_seed")
