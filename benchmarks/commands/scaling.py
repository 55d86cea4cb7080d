"""``scaling``: the bytes that every rank stores and sends, and modeled step times, for up to thousands of ranks.

Bytes are those of ``optimizer.plan()``, which computes them from shapes. The tests check that they are equal to the
counters of runs with 2, 3 and 4 processes. Seconds are a model, not a measurement. For the busiest rank, it adds

===============  =======================================================================================
training         FLOPs of the forward and backward pass, which torch counts on shapes, over the rate
gradients        ``2 (W − 1) / W`` times their bytes over the bandwidth
statistics       FLOPs of the products that compute the factors over the rate, amortized
refresh          FLOPs of factorizations over a separate rate, which is far below that of products
preconditioning  FLOPs over the rate
messages         bytes that a rank sends over the bandwidth, which is that inside a node if all ranks of a
                 message are in one, and the latency times ``log2`` of the ranks for each message
===============  =======================================================================================

without any overlap.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import report
from benchmarks.commands.options import Output, check_ranges
from benchmarks.counting import counted_flops, factor_flops
from benchmarks.plot import OPTIMIZERS, Panel, Row, plot_rows
from benchmarks.report import Table, value
from benchmarks.workloads.resnets import cifar_resnet, imagenet_resnet
from secondorder import EKFAC, KFAC, MFAC, BatchOptions, CommOpt, HybridOpt, HyLo, InverseOptions, LocalFactors, MemOpt
from secondorder.comm import CommStrategy, RankGrid
from secondorder.plan.plan import Plan, RankPlan

ModelName = Literal["resnet20", "resnet32", "resnet50", "bert-base", "bert-large", "decoder-7b"]


@dataclass(frozen=True)
class Architecture:
    """A model on the meta device, and its inputs."""

    model: nn.Module
    inputs: Callable[[int], Tensor]  # returns a batch with a given number of examples
    batch_size: int  # usual number of examples per rank


def architecture(name: ModelName) -> Architecture:
    with torch.device("meta"):
        return _MODELS[name]()


def _images(side: int) -> Callable[[int], Tensor]:
    return lambda n: torch.empty(n, 3, side, side, device="meta")


def _words(positions: int) -> Callable[[int], Tensor]:
    return lambda n: torch.empty(n, positions, dtype=torch.int64, device="meta")


class _Bert(nn.Module):
    """An encoder with word, position and segment embeddings, and a masked-word head.

    The last layer of the head is tied to the word embedding, whose weight it uses directly.
    """

    def __init__(self, width: int, depth: int, words: int = 30522, positions: int = 512) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.transform, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)
        found = self.norm(self.words(x) + self.positions(places) + self.segments(torch.zeros_like(x)))
        found = self.head_norm(F.gelu(self.transform(self.encoder(found))))
        logits: Tensor = found @ self.words.weight.mT
        return logits


class DecoderLayer(nn.Module):
    """A decoder layer with attention and a gated feed-forward network, without biases."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        maps = (self.query, self.key, self.value)
        query, key, value = (m(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in maps)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(-2))
        normed = self.norm2(x)
        added: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + added


def _decoder() -> Architecture:
    width, words = 4096, 32000
    layers = [DecoderLayer(width, 32, 11008) for _ in range(32)]
    head = [nn.RMSNorm(width), nn.Linear(width, words, bias=False)]
    return Architecture(nn.Sequential(nn.Embedding(words, width), *layers, *head), _words(2048), 2)


_MODELS: dict[ModelName, Callable[[], Architecture]] = {
    "resnet20": lambda: Architecture(cifar_resnet(3), _images(32), 128),
    "resnet32": lambda: Architecture(cifar_resnet(5), _images(32), 128),
    "resnet50": lambda: Architecture(imagenet_resnet("bottleneck", (3, 4, 6, 3)), _images(224), 32),
    "bert-base": lambda: Architecture(_Bert(768, 12), _words(512), 8),
    "bert-large": lambda: Architecture(_Bert(1024, 24), _words(512), 8),
    "decoder-7b": _decoder,
}


MethodName = Literal["kfac", "kfac-cholesky", "ekfac", "ekfac-running", "hylo", "mfac"]

NODE = 8  # number of ranks in a node, and in a row of the grid of `HybridOpt`

_BUILD: dict[MethodName, Callable[..., Any]] = {
    "kfac": lambda model, n: KFAC(model),
    "kfac-cholesky": lambda model, n: KFAC(model, inverse_method=InverseOptions("cholesky", damping_split="pi")),
    "ekfac": lambda model, n: EKFAC(model),
    "ekfac-running": lambda model, n: EKFAC(model, estimator="running"),
    "hylo": lambda model, n: HyLo(model, batch=BatchOptions(size=n)),
    "mfac": lambda model, n: MFAC(model, window_size=64),
}
"""Optimizers with their defaults, except for the window size."""

STRATEGIES: dict[str, Callable[[int], CommStrategy]] = {
    "CommOpt": lambda world: CommOpt(),
    f"HybridOpt, rows of {NODE}": lambda world: HybridOpt(1 / min(world, NODE)),
    "MemOpt": lambda world: MemOpt(),
    "MemOpt, all factors": lambda world: MemOpt(replicate_factors=True),
}
"""Strategies by name. The last one stores all factors on every rank, as other implementations do."""

FIRST_ORDER = ("momentum", "fallback", "buffers")  # kinds of state that first-order methods also have


@dataclass
class Scaling(Output):
    """Plan memory, bytes and step time for many numbers of ranks, from the shapes of a model alone."""

    model: ModelName = "resnet50"
    """Model whose shapes are used."""
    method: MethodName = "kfac"
    """Optimizer, with its default options."""
    worlds: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    """Numbers of ranks."""
    batch_size: int | None = None
    """Examples per rank. Default: a usual number for the model."""
    link_gbps: float = 100.0
    """Rate of the network in gigabits per second and rank."""
    node_gbps: float = 2400.0
    """Rate inside a node of 8 ranks, in gigabits per second."""
    latency_us: float = 10.0
    """Latency of one message between two ranks, in microseconds."""
    gpu_tflops: float = 60.0
    """Rate of matrix products of a rank, in TFLOP/s."""
    refresh_tflops: float = 1.0
    """Rate of factorizations of a rank, in TFLOP/s."""
    dp_kfac: bool = False
    """Also show DP-KFAC, with factors of a layer from the examples of its owner."""

    def run(self) -> int:
        self._check()
        found = architecture(self.model)
        examples = self.batch_size or found.batch_size
        base = _base(found, examples)
        optimizer = _BUILD[self.method](found.model, examples)
        rows = []
        cases = [
            (name, strategy(world), world) for name, strategy in self._strategies().items() for world in self.worlds
        ]
        for name, comm, world in report.tracked("plans", cases):
            rows.append(self._row(name, comm, optimizer.plan(world, comm, batch_size=examples), base, optimizer))
        settings = {name: value for name, value in asdict(self).items() if not isinstance(value, Path)}
        title = f"{type(optimizer).__name__} on {self.model}, {examples} examples per rank"
        path = self.out_dir / f"scaling-{self.model}-{self.method}.svg"
        report.save(self.out_dir, path.stem, [_table(title, rows)], {"settings": settings, "results": rows})
        for note in dict.fromkeys(note for row in rows if row["world"] == max(self.worlds) for note in row["notes"]):
            print(f"note: {note}")
        plot_scaling(rows, title, self._assumptions(), path)
        report.print_path("picture", path)
        return 0

    def _check(self) -> None:
        check_ranges(self, ("worlds", "batch_size", "link_gbps", "node_gbps", "gpu_tflops", "refresh_tflops"))
        if self.dp_kfac and self.method not in {"kfac", "kfac-cholesky"}:
            raise ValueError(
                f"dp_kfac is a way to take the factors of kfac and kfac-cholesky, got method {self.method!r}"
            )

    def _strategies(self) -> dict[str, Callable[[int], CommStrategy]]:
        has_factors = self.method != "mfac" and self.method != "hylo"
        found = {name: made for name, made in STRATEGIES.items() if has_factors or "all factors" not in name}
        return found | ({"DP-KFAC": lambda world: LocalFactors()} if self.dp_kfac else {})

    def _assumptions(self) -> str:
        return (
            f"model, not measured: {self.gpu_tflops:g} TFLOP/s ({self.refresh_tflops:g} in factorizations), "
            f"{self.link_gbps:g} Gbit/s between nodes and {self.node_gbps:g} inside, {self.latency_us:g} µs, no overlap"
        )

    def _row(self, name: str, comm: CommStrategy, plan: Plan, base: "Base", optimizer: Any) -> dict[str, Any]:
        curvature = [sum(n for kind, n in rank.stored.items() if kind not in FIRST_ORDER) for rank in plan.ranks]
        sent = [sum(rank.sent.values()) for rank in plan.ranks]
        seconds = self._seconds(comm, plan, base, optimizer)
        return {
            "strategy": name, "world": plan.world_size, "curvature_mean": sum(curvature) / len(curvature),
            "curvature_most": max(curvature), "state_most": max(sum(rank.stored.values()) for rank in plan.ranks),
            "sent": max(sent), "worst_sent": max(sum(rank.worst_sent.values()) for rank in plan.ranks),
            "seconds": seconds, "sgd_seconds": seconds["training"] + seconds["gradients"],
            "step_seconds": sum(seconds.values()), "padding": plan.padding, "notes": plan.notes,
        }  # fmt: skip

    def _seconds(self, comm: CommStrategy, plan: Plan, base: "Base", optimizer: Any) -> dict[str, float]:
        world, rate = plan.world_size, 1e12 * self.gpu_tflops
        interval = optimizer.param_groups[0].get("factor_update_steps")
        share = self._share(comm, plan, optimizer, base.examples)
        different = {tuple(rank.wire.items()): rank for rank in plan.ranks}.values()  # only a few of thousands
        return {
            "training": base.training / rate,
            "gradients": 2 * (world - 1) / world * base.gradient_bytes / self._rate(world <= NODE),
            "statistics": share * base.statistics / interval / rate if interval else 0.0,
            "refresh": max(rank.flops.get("refresh", 0.0) for rank in plan.ranks) / (1e12 * self.refresh_tflops),
            "precondition": max(rank.flops.get("precondition", 0.0) for rank in plan.ranks) / rate,
            "messages": max(self.messages(comm, rank, world) for rank in different),
        }

    def _share(self, comm: CommStrategy, plan: Plan, optimizer: Any, examples: int) -> float:
        """Return the busiest rank's share of all statistics, which is below 1 only if each owner computes its own.

        Without a step, the plan assumes that every layer has one row per example.
        """
        if not isinstance(comm, LocalFactors):
            return 1.0
        whole = float(optimizer.plan(1, batch_size=examples).ranks[0].flops["statistics"])
        return max(rank.flops["statistics"] for rank in plan.ranks) / whole

    def messages(self, comm: CommStrategy, rank: RankPlan, world: int) -> float:
        """Return the average seconds per step that the messages of one rank take."""
        assert isinstance(comm, RankGrid)
        width = world // comm.workers(world)
        sizes = {"directions": width, "dots": width, "curvature": comm.workers(world)}
        latency = 1e-6 * self.latency_us
        total = 0.0
        for stage, wire in rank.wire.items():
            size = sizes.get(stage, world)
            # Rows are consecutive ranks. Other groups are inside a node only if all ranks are.
            inside = size <= NODE if stage in {"directions", "dots"} else world <= NODE
            total += wire / self._rate(inside) + rank.messages[stage] * latency * max(1, (size - 1).bit_length())
        return total

    def _rate(self, inside: bool) -> float:
        return 1e9 / 8 * (self.node_gbps if inside else self.link_gbps)


@dataclass(frozen=True)
class Base:
    """The cost of a step that does not depend on the strategy."""

    training: int  # FLOPs of the forward and backward pass
    gradient_bytes: int  # bytes of all gradients
    statistics: int  # FLOPs of the products that compute the factors of one batch
    examples: int = 1  # number of examples in that batch


def _base(found: Architecture, examples: int) -> Base:
    one = found.inputs(1)
    statistics = factor_flops(found.model, lambda: found.model(one))
    training = counted_flops(lambda: found.model(one).sum().backward())
    nbytes = sum(p.numel() * p.element_size() for p in found.model.parameters())
    for p in found.model.parameters():
        p.grad = None
    return Base(examples * training, nbytes, examples * statistics, examples)


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    def size(key: str) -> report.Column:
        def shown(row: Mapping[str, Any]) -> str:
            whole, unit = _unit(row[key])
            return f"{row[key] / whole:.3g} {unit}"

        return shown

    columns: Mapping[str, report.Column] = {
        "strategy": value("strategy"),
        "ranks": value("world", ","),
        "curvature, mean": size("curvature_mean"),
        "curvature, fullest": size("curvature_most"),
        "sent / step": size("sent"),
        "largest step": size("worst_sent"),
        "step time (modeled)": lambda row: f"{1e3 * row['step_seconds']:,.1f} ms",
        "share of SGD": lambda row: f"{row['sgd_seconds'] / row['step_seconds']:.0%}",
    }
    caption = (
        "Bytes are exact; the tests compare them with the counters of runs of 2 to 4 processes. Times are modeled, not "
        "measured, and the model assumes that nothing overlaps."
    )
    return report.table_of(title, rows, columns, caption)


def _unit(largest: float) -> tuple[float, str]:
    return (2**30, "GiB") if largest >= 2**29 else (2**20, "MiB")


def plot_scaling(rows: Sequence[dict[str, Any]], title: str, assumptions: str, path: Path) -> None:
    (in_memory, memory_unit), (on_wire, wire_unit) = (
        _unit(max(row[key] for row in rows)) for key in ("curvature_most", "sent")
    )
    first = [row for row in rows if row["strategy"] == rows[0]["strategy"]]

    def more(panels: Sequence[Axes]) -> None:
        sgd = [1e3 * row["sgd_seconds"] for row in first]
        panels[2].plot([row["world"] for row in first], sgd, color=OPTIMIZERS["SGD"], linestyle="--", linewidth=1.2)
        panels[0].plot([], [], color=OPTIMIZERS["SGD"], linestyle="--", linewidth=1.2, label="SGD")
        panels[2].set_title(assumptions, fontsize=7, wrap=True)

    memory: dict[str, Callable[[Row], float | None]] = {
        "": lambda row: row["curvature_most"] / in_memory,
        ":": lambda row: row["curvature_mean"] / in_memory,
    }
    panels = [
        Panel(f"curvature of the fullest rank, {memory_unit} (dotted: mean)", memory),
        Panel(f"sent per rank and step, {wire_unit}", {"": lambda row: row["sent"] / on_wire}, log=False),
        Panel("modeled step of the busiest rank, ms", {"": lambda row: 1e3 * row["step_seconds"]}, False, modeled=True),
    ]
    words = title, "ranks"
    plot_rows(rows, panels, lambda row: row["world"], lambda row: row["strategy"], words, path, more)
