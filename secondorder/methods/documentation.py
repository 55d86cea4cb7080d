"""Descriptions of the arguments that several methods share, each written once.

``options.complete_docstring`` puts them into the docstrings of the classes, in the order of the signature. A class
describes only the arguments that other methods do not have, or that mean something else there.
"""

#: Every method.
OPTIMIZER = """
    lr: Learning rate η, a number or a tensor with one element. If None, it is 1e-3, the default of AdamW, where
        ``graft`` or ``inner`` names Adam's rule; 1.0 with ``quadratic_model``; and otherwise 0.1 for layer methods and
        1e-3 for window methods.
    momentum: Coefficient of the heavy-ball momentum on the preconditioned gradient.
    nesterov: Whether to use Nesterov momentum.
    maximize: Whether to maximize the objective instead of minimizing it.
    foreach: Whether to update the parameters of one device and dtype in one call, as in ``torch.optim``. If None, this
        is done on every device except the CPU.
    fallback: Rule for parameters that are not preconditioned: ``"sgd"``, ``"adam"`` or ``"adamw"``. If None, it is the
        rule of ``graft`` if that is given, and SGD otherwise.
    fallback_lr: Learning rate of the fallback if its rule is Adam's. It follows the schedule of ``lr`` in proportion.
        If None, it is ``lr`` when grafting and 1e-3 otherwise.
    betas: β₁ and β₂ of Adam's rule, wherever ``graft``, ``inner`` or ``fallback`` names it. Schedulers that cycle the
        momentum cycle this β₁ if ``graft`` or ``inner`` names Adam's rule.
    eps: ε of Adam's rule.
    fallback_betas: An alias of ``betas``.
    fallback_eps: An alias of ``eps``.
    inner: Rule that takes the preconditioned gradient as its gradient: ``"sgd"``, ``"adam"`` or ``"adamw"``.
    graft: Rule from which each block or window takes the size of its step, so that the learning rate schedule of that
        rule carries over: ``"sgd"``, ``"adam"`` or ``"adamw"``. With ``"adam"``, ``decoupled_weight_decay`` decides how
        weights decay; with ``"adamw"``, the decay is always decoupled. If None, the step keeps its own size, as in the
        publications. ``"auto"`` is ``"adamw"`` if no learning rate is given, so that an optimizer without arguments
        trains like AdamW without arguments, and None otherwise.
    clip_value: Upper bound on the absolute value of each entry of the direction. If None, entries are not clipped.
"""

#: The methods that precondition layer by layer: KFAC, EKFAC and HyLo.
LAYERS = """
    params: A module, a list of modules that are the parts of one model, or, together with ``module``, anything that
        ``torch.optim`` accepts.
    module: The module, or list of modules, whose layers are observed if ``params`` is not a module itself.
    comm: Communication strategy. If None, it is ``CommOpt()`` in a process group of more than one rank.
    loss_reduction: How the loss combines the examples of a batch: ``"mean"`` or ``"sum"``.
    batch_dim: Dimension of the model's input that indexes the examples.
    batch_input: Name of the argument of the model's ``forward`` whose dimension ``batch_dim`` indexes the examples, or
        a function that takes the arguments of ``forward`` and returns the number of examples. If None, the first tensor
        is used, unless the outputs and the layers of the model agree on another number.
    skip_layers: Names, patterns, types or modules of the layers to leave to the fallback, with everything below them.
    tied: Which use of a weight that serves both as an embedding and as an output head provides the statistics of its
        block: ``"head"`` or ``"embedding"``. If None, the weight is left to the fallback.
    weight_decay: Coefficient of weight decay.
    decoupled_weight_decay: Whether to apply weight decay to the parameter instead of adding it to the direction.
    clip_norm: Upper bound on the norm of the direction over all blocks. If None, the norm is not clipped.
    grad_scaler: The ``torch.amp.GradScaler`` of float16 training.
    max_failures: Number of consecutive failed refreshes of a layer after which an error is raised.
    deterministic_seed: Seed of every random choice.
"""

#: The methods with Kronecker factors: KFAC and EKFAC.
FACTORS = """
    damping: Damping λ, in units of the Fisher of the per-example loss, or a multiple as ``damping_mode`` says. If None,
        it is 10 times the mean eigenvalue of each block, which is safe whatever the scale of the loss.
    damping_mode: ``"absolute"``, or ``"relative"`` to the mean eigenvalue of each block (for a normalization layer, to
        that of its steepest unit). If None, it is ``"absolute"`` if ``damping`` is given and ``"relative"`` otherwise.
    factor_decay: β, the weight of the old factors in the running mean.
    factor_update_steps: F, the number of steps between updates of the factors. If None, it is 10.
    inv_update_steps: K, the number of steps between refreshes; 0 turns preconditioning off. If None, it is 100.
    factor_dtype: Precision in which the factors A and G are stored. ``torch.float32`` stores the factors of float64
        parameters in float64. ``torch.bfloat16`` takes half the memory, but eigenvalues below 1/256 of the largest one
        are lost to rounding.
    inv_dtype: Precision in which bases and inverses are stored, with the choices of ``factor_dtype``. Products with
        bfloat16 bases or inverses are still computed in float32.
    factor_storage: ``"dense"``, or ``"packed"`` to store A and G as triangles. This takes half the memory; the full
        matrices exist only while a refresh needs them.
    stagger: Whether to spread the refreshes of the blocks over the interval.
    overlap: Whether to factorize in a separate thread (on a GPU, in a separate stream) while training continues. The
        results are adopted ``max(1, inv_update_steps // 10)`` steps after the work began. The first refresh and those
        of a warmup are not deferred. The copies of A and G need as much memory as A and G themselves.
    refresh_warmup: Whether to update the factors at every step of the first interval, and to refresh at its steps 0, 1,
        2, 4, 8, …, because the curvature of a new network changes a thousandfold in its first hundred steps. If None,
        it is on unless an interval is given, which is then kept exactly.
    approx: ``"expand"`` treats the positions that share a weight as independent; ``"reduce"`` averages their inputs and
        sums their gradients. The scale of EKFAC is exact for both.
    fisher: ``"empirical"`` uses the gradients of the loss. With :meth:`observe`, ``"mc"`` uses targets drawn from the
        model, ``"curvature_prop"`` random signs, and ``"exact"`` every column of the curvature of the loss.
        ``"forward_only"`` sets G = I. EKFAC, whose scale needs gradients, does not accept the last one, and uses the
        others for its bases and its scale alike.
    fisher_samples: Number of draws per example for ``fisher="mc"`` and ``fisher="curvature_prop"``.
    norm_curvature: Blocks of normalization layers: ``"unit"`` takes the scale and the shift of a unit together,
        ``"diagonal"`` takes each entry separately.
    max_factor_dim: Largest number of rows of a factor that is stored as a matrix; of larger factors only the diagonal
        is stored. None sets no bound. ``"auto"`` is 8192, except on a CPU, where it is 4096 with
        ``inverse_method="cholesky"`` of KFAC and 2048 otherwise.
    weighting: Weight of a batch in the running means: ``"samples"`` weights it by its number of examples, ``"update"``
        gives every batch the weight 1.
    burnin_steps: Number of first updates of the running means that all have the same weight (β = 1).
    decay_per_step: Whether to raise β to the power of the interval, so that it is the decay per step.
    factor_batch_size: Number of examples of each micro-batch, drawn at random, that contribute to the factors. If None,
        all of them do. It cannot be combined with :meth:`mask`.
    factor_positions: Number of positions of each example (pixels or tokens), drawn at random, that contribute to the
        factors. If None, all of them do.
    weight_decay_in_curvature: Whether to count ``weight_decay`` as curvature, which adds it to λ.
    power: p of ``(F + λ)^(-p)``: 1 is the natural gradient, 1/2 whitens. KFAC needs ``inverse_method="eigen"`` for
        values below 1.
    orthogonalize: Whether to give the steps of linear and convolution layers a uniform spectrum, as Muon does. Only the
        polar factor of the preconditioned matrix is used, scaled to the usual size of Adam's steps or to that of
        ``graft``, so that a suitable ``lr`` is several times that of AdamW. This works best with momentum before the
        preconditioner: ``momentum_mode="pre"`` of EKFAC, or ``graft="adam"``.
    orthogonal_dtype: Precision of the matrix products that compute the polar factor. ``torch.bfloat16``, the precision
        that Muon uses, applies to matrices with at least 128 rows and columns. It is faster on hardware that supports
        it, and adds noise in directions in which the gradient is close to zero.
    kl_clip: κ, the bound on the step in the Fisher metric. If None, steps are not bounded. Steps that are grafted or
        orthogonalized have a size of their own.
    adaptive_damping: Whether to adjust λ every ``damping_interval`` steps by how well the quadratic model predicted the
        change of the loss. This needs ``step(closure)``, and evaluates the closure once more at those steps.
    damping_interval: T, the number of steps between two adjustments of λ.
    min_damping: Lower bound of an adapted λ.
    max_damping: Upper bound of an adapted λ.
    include_damping_in_model: Whether the quadratic model that judges λ includes the term ``½ λ ‖δ‖²``.
    reject_steps: Whether to undo a step that increased the loss or made it non-finite, and to increase λ. This
        evaluates the closure once more at every step.
    quadratic_model: Whether to take the learning rate and the momentum of each step from the quadratic model. Its step
        is multiplied by ``lr``, so that 1.0 leaves it unchanged; ``momentum=0`` ignores the previous step.
    likelihood: Relation of the loss to the outputs: ``"categorical"``, ``"bernoulli"``, ``"gaussian"`` or an object.
        With a closure that returns ``(loss, outputs)``, the quadratic model is then exact.
    calibrate_damping: Whether to try values from a thousandth to a thousand times ``damping`` at the first refresh, and
        to keep the best one.
    checkpoint_curvature: How much of the curvature ``state_dict`` contains: ``"all"``, ``"factors"`` (inverses are
        recomputed on loading) or ``"none"`` (the curvature is estimated anew).
"""

#: The methods with a window of past gradients: MFAC, SparseMFAC and GGT.
WINDOW = """
    params: Anything that ``torch.optim`` accepts, a module, or a list of modules that are the parts of one model.
    module: The module, if ``params`` is not a module itself. It is optional, and provides names, the layers for
        ``partition="layer"`` and the types of layers for ``skip_norm_layers``.
    comm: Communication strategy. If None, every rank stores the whole window. ``MemOpt()`` and ``HybridOpt(f)`` divide
        it among the ranks of a row; with ``partition="layer"`` they assign each window to some of the ranks.
    partition: ``"global"`` uses one window for all parameters, ``"group"`` one per parameter group, and ``"layer"`` one
        per module (one per parameter where names are unknown).
    compression: Compression of the rows: ``TopK(...)`` or ``LowRank(...)``. If None, rows are dense.
    window_dtype: Precision of dense rows and of low-rank factors. If None, it is float32, and float64 for float64
        parameters.
    weight_decay: Coefficient of weight decay. If it is coupled, it is part of the gradient and enters the window.
    decoupled_weight_decay: Whether to apply weight decay to the parameter: p ← (1 − lr·wd)p.
    weight_decay_mode: ``"standard"``, or, to reproduce published runs, ``"legacy"`` (p ← (1 − wd)p, without lr),
        ``"reg"`` (g + wd·p is preconditioned, and g enters the window) or ``"both"`` of these.
    skip_norm_layers: Whether to leave the parameters of normalization layers (without a module, all vectors) to the
        fallback.
    skip_biases: Whether to leave biases (without names, all vectors) to the fallback.
    clip_norm: Upper bound on the norm of the direction over all parameters. If None, the norm is not clipped.
    grad_scaler: Loss scaler of float16 training. It is not needed, since gradients are unscaled before a step.
    deterministic_seed: Seed of the random bases from which low-rank rows start.
    checkpoint_curvature: How much of the curvature ``state_dict`` contains: ``"all"``, or ``"none"`` (the window fills
        anew).
"""
