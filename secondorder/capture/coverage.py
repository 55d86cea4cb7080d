"""Messages about layers that have a gradient but no captured statistics."""

from __future__ import annotations

import re
from collections.abc import Mapping

from secondorder.capture.loss_scale import UNKNOWN
from secondorder.runtime import some_of

#: The reason if nothing else is known.
NO_HOOKS = "its hooks did not run"
#: The message if the gradients are those of the step before, instead of a list of layers.
REPEATED = (
    "step() was called again without a backward pass in between, so it used the same gradients again and had no new "
    "statistics. Call backward() before every step()"
)


def kind_of(text: str) -> str:
    """Return a reason, or the name of a layer, without its numbers, which experts of a mixture have in common."""
    return re.sub(r"\d+", "#", text)


def grouped(reasons: Mapping[str, str]) -> str:
    """Return layers and why nothing was captured for them, grouping reasons that differ only in numbers."""
    alike: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        alike.setdefault(kind_of(reason), []).append(name)
    return "; ".join(
        f"{some_of(names)}: {'for example, ' if len({reasons[n] for n in names}) > 1 else ''}{reasons[names[0]]}"
        for names in alike.values()
    )


def verdict(reasons: Mapping[str, str], total: int) -> str:
    """Describe in two sentences the layers without statistics, among ``total`` layers with a gradient."""
    missed = len(reasons)
    count = "the only layer that has" if total == 1 else f"{missed} of the {total} layers that have"
    they = "It keeps its" if missed == 1 else "They keep their"
    follow = "follows" if missed == 1 else "follow"
    return (
        f"nothing was captured for {count} a gradient ({grouped(reasons)}). {they} last estimate, or {follow} the "
        "fallback rule until there is one."
    )


def advice(reasons: Mapping[str, str], others_were_captured: bool, batch_dim: int) -> str:
    """Return advice for the user, beginning with a space, or an empty string if the reasons contain it."""
    found = set(reasons.values())
    if found == {UNKNOWN}:
        return ""
    lines = []
    if batch_dim == 0 and any("sequences of" in reason or "second dimension" in reason for reason in found):
        lines.append(" If the model takes sequences as [T, N, ...], make the optimizer with batch=BatchOptions(dim=1).")
    if any(NO_HOOKS in reason for reason in found):
        if others_were_captured:
            causes = "they were not called since the last step, are in eval mode, or had their weights used by F.linear"
        else:
            causes = (
                "the model was in eval mode, torch.func or vmap called it, torch.compile runs code from before the "
                "optimizer was made, or for another model of the same class (then call torch.compiler.reset(), or set "
                "torch._dynamo.config.skip_nnmodule_hook_guards = False before anything is compiled)"
            )
        lines.append(f" Usual causes: {causes}.")
    return "".join([*lines, " If layers are meant to have no curvature, name them in skip_layers."])
