"""Draws the pictures of ``docs/strategies.md`` and ``docs/nodes.md`` from the grid that the strategies use.

``python docs/draw_grids.py`` writes them into ``docs/images``. Their colours can be read on a light and a dark page.
"""

from __future__ import annotations

from pathlib import Path

from secondorder.comm.placement import Grid

FOLDER = Path(__file__).parent / "images"
WORLD, OWNER = 8, 5
CELL_W, CELL_H, GAP = 54, 34, 16
LEFT, TOP = 80, 70
STYLE = """
  text { font: 15px sans-serif; fill: #1c2128; text-anchor: middle; dominant-baseline: central }
  .label { fill: #7d8590; font-size: 14px } .start { text-anchor: start }
  .idle { fill: #d3dbe4 } .worker { fill: #9cc3f0 } .owner { fill: #f2b56b }
  .node { fill: none; stroke: #7d8590; stroke-dasharray: 5 4 }
  .curvature, .direction, .word { fill: none; stroke-width: 1.8 }
  .curvature { stroke: #3b82d0 } .direction { stroke: #d9622b } .word { stroke: #7d8590 }
"""
HEADS = {"curvature": "#3b82d0", "direction": "#d9622b", "word": "#7d8590"}


def svg(width: float, height: float, title: str, parts: list[str]) -> str:
    """A whole picture."""
    markers = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        for name, colour in HEADS.items()
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    return "\n".join(
        [head, f"<title>{title}</title>", f"<style>{STYLE}</style>", f"<defs>{markers}</defs>", *parts, "</svg>", ""]
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words at a place."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def box(x: float, y: float, w: float, h: float, kind: str, words: str = "") -> str:
    """A box with words in its middle."""
    drawn = f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5" class="{kind}"/>'
    return drawn + (text(x + w / 2, y + h / 2, words) if words else "")


def arrow(kind: str, path: str) -> str:
    """An arrow along a path."""
    return f'<path d="{path}" class="{kind}" marker-end="url(#{kind})"/>'


def centre(grid: Grid, rank: int, row_gap: int) -> tuple[float, float]:
    """Where the cell of a rank has its middle."""
    row, column = divmod(rank, grid.width)
    return LEFT + column * (CELL_W + GAP) + CELL_W / 2, TOP + row * (CELL_H + row_gap) + CELL_H / 2


def down_the_column(grid: Grid, row_gap: int) -> list[str]:
    """Arrows of curvature, from the owner to the other ranks of its column."""
    x, y = centre(grid, OWNER, row_gap)
    others = [rank for rank in grid.column_of(OWNER) if rank != OWNER]
    ends = [(rank, centre(grid, rank, row_gap)[1]) for rank in others]
    side = x + CELL_W / 2
    drawn = []
    for rank, end in ends:
        bend = side + 12 + 14 * abs(rank - OWNER) / grid.width
        drawn.append(arrow("curvature", f"M{side:g} {y:g}Q{bend:g} {(y + end) / 2:g} {side + 2:g} {end:g}"))
    return drawn


def along_the_rows(grid: Grid, row_gap: int) -> list[str]:
    """Arrows of directions, from each rank of the owner's column to the others of its row."""
    drawn = []
    for worker in grid.column_of(OWNER):
        x, y = centre(grid, worker, row_gap)
        top = y - CELL_H / 2
        for rank in (other for other in grid.row_of(worker) if other != worker):
            end = centre(grid, rank, row_gap)[0]
            peak = top - 8 - 9 * abs(rank - worker)
            drawn.append(arrow("direction", f"M{x:g} {top:g}Q{(x + end) / 2:g} {peak:g} {end:g} {top - 1:g}"))
    return drawn


def grid_picture(name: str, workers: int, nodes: bool = False) -> str:
    """The grid of a strategy, and what travels for a layer of rank 5."""
    grid = Grid(WORLD, workers)
    row_gap = 58 if 1 < workers < WORLD else 8
    column = grid.column_of(OWNER)
    parts = [text(LEFT, 18, f"{name}: a layer owned by rank {OWNER}", "label start")]
    right, bottom = centre(grid, WORLD - 1, row_gap)
    for rank in range(WORLD):
        x, y = centre(grid, rank, row_gap)
        kind = "owner" if rank == OWNER else "worker" if rank in column else "idle"
        parts.append(box(x - CELL_W / 2, y - CELL_H / 2, CELL_W, CELL_H, kind, str(rank)))
    for i, row in enumerate(grid.rows):
        x, y = centre(grid, row[0], row_gap)
        parts.append(text(x - CELL_W / 2 - 40, y, f"node {i}" if nodes else f"row {i}", "label"))
        if nodes:
            parts.append(box(x - CELL_W / 2 - 8, y - CELL_H / 2 - 36, right - x + CELL_W + 16, CELL_H + 44, "node"))
    parts += down_the_column(grid, row_gap) + along_the_rows(grid, row_gap)
    height = bottom + CELL_H / 2
    for kind, words in (("curvature", "curvature, at a refresh"), ("direction", "direction, every step")):
        if (kind == "curvature" and workers > 1) or (kind == "direction" and workers < WORLD):
            height += 26
            parts += [arrow(kind, f"M{LEFT:g} {height:g}h34"), text(LEFT + 44, height, words, "label start")]
    return svg(max(right + CELL_W / 2 + 60, 480), height + 18, f"Rank grid of {name}", parts)


def lockstep_picture() -> str:
    """Dedicated workers: what each role does in each epoch, and what it hands on."""
    left, width, lane = 110, 150, 74
    parts = [text(left, 18, "DedicatedWorkers, lockstep: epochs of T gradient steps", "label start")]
    tasks = {"gradient": "uses version {}", "factor": "factors at θ{}", "inverse": "inverts {}"}
    for row, (role, words) in enumerate(tasks.items()):
        y = 60 + row * lane
        parts.append(text(left - 56, y + CELL_H / 2, role, "label"))
        for epoch in range(4):
            version = epoch - (2, 0, 1)[row]
            said = words.format(version) if version >= 0 else ("warm-up" if role == "gradient" else "")
            kind = ("worker", "idle", "owner")[row]
            if said:
                parts.append(box(left + epoch * width, y, width - 8, CELL_H, kind, said))
    parts.extend(text(left + epoch * width + (width - 8) / 2, 44, f"epoch {epoch}", "label") for epoch in range(4))
    bottom = 60 + CELL_H  # of the first lane
    for epoch in range(2):
        x = left + epoch * width
        done = x + 2 * width - 12
        parts += [
            arrow("word", f"M{x + 10:g} {bottom:g}V{60 + lane - 1:g}"),
            arrow("curvature", f"M{x + width - 14:g} {bottom + lane:g}L{x + width + 8:g} {60 + 2 * lane - 1:g}"),
            arrow("direction", f"M{done:g} {60 + 2 * lane:g}L{done + 22:g} {bottom + 1:g}"),
        ]
    y = 60 + 3 * lane
    for kind, words in (("word", "parameters θ"), ("curvature", "factors"), ("direction", "inverses")):
        parts += [arrow(kind, f"M{left:g} {y:g}h34"), text(left + 44, y, words, "label start")]
        left += 190
    return svg(740, y + 18, "Epochs of dedicated workers", parts)


def pictures() -> dict[str, str]:
    """All pictures by file name."""
    return {
        "grid-comm-opt.svg": grid_picture("CommOpt()", WORLD),
        "grid-hybrid-opt.svg": grid_picture("HybridOpt(0.25)", 2),
        "grid-mem-opt.svg": grid_picture("MemOpt()", 1),
        "grid-nodes.svg": grid_picture("HybridOpt(1/4), nodes of four ranks", 2, nodes=True),
        "dedicated-lockstep.svg": lockstep_picture(),
    }


if __name__ == "__main__":
    for file, drawn in pictures().items():
        (FOLDER / file).write_text(drawn, encoding="utf-8")
