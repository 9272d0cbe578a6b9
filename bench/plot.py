"""Curves from the JSON files of the GPU benchmarks.

    python bench/plot.py RESULT.json [RESULT.json ...] --out FOLDER

Draws what the files hold: share of the copy bandwidth by context (kernel.py), time over floor by
context (round.py), tokens a second by accept length (generate.py), both sides of compare_torch.py.
Needs matplotlib, which nothing else here does.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

Curves = dict[str, list[tuple[float, float]]]


def kernel_curves(result: dict) -> Curves:
    """Implementation and rows -> (context, share), at the smallest batch."""
    curves: Curves = defaultdict(list)
    batch = min(shape["batch"] for shape in result["shapes"])
    for shape in result["shapes"]:
        if shape["batch"] == batch:
            for name, share in shape["share"].items():
                curves[f"{name}, {shape['rows']} rows"].append((shape["context"], share))
    return curves


def round_curves(result: dict) -> Curves:
    """Part and tree -> (context, time over floor), at the smallest batch."""
    curves: Curves = defaultdict(list)
    batch = min(one["batch"] for one in result["rounds"])
    for one in result["rounds"]:
        if one["batch"] == batch:
            for part, values in one["parts"].items():
                curves[f"{part}, {one['tree']}"].append((one["context"], values["time / floor"]))
    return curves


def generate_curves(result: dict) -> Curves:
    """Tree, batch and context -> (accept length, tokens a second); plain decoding beside it."""
    curves: Curves = defaultdict(list)
    for run in result["runs"]:
        where = f"batch {run['batch']}, context {run['context']}"
        for accept, rate in run.get("tokens_per_s", {}).items():
            curves[f"{run['tree']}, {where}"].append((float(accept), rate))
            curves[f"no draft, {where}"].append((float(accept), run["without_a_draft"]))
    return {name: sorted(set(points)) for name, points in curves.items()}


def torch_curves(result: dict) -> Curves:
    """Side, rows and batch -> (context, microseconds)."""
    curves: Curves = defaultdict(list)
    for one in result["passes"]:
        for side, values in one["parts"].items():
            name = f"{side}, {one['rows']} rows, batch {one['batch']}"
            curves[name].append((one["context"], values["us"]))
    return curves


KINDS = {
    "shapes": (kernel_curves, "context", "share of the copy bandwidth"),
    "rounds": (round_curves, "context", "time over the byte floor"),
    "runs": (generate_curves, "tokens a round", "tokens/s"),
    "passes": (torch_curves, "context", "microseconds a pass"),
}


def curves_of(result: dict) -> tuple[Curves, str, str]:
    """The curves of a result and the names of the axes.

    Raises:
      ValueError: a result of none of these benchmarks.
    """
    for key, (read, x, y) in KINDS.items():
        if key in result:
            return read(result), x, y
    raise ValueError(f"none of {', '.join(KINDS)} in the file: not a result of a GPU benchmark")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(argv)
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("bench/plot.py needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    matplotlib.use("svg")
    from matplotlib import pyplot

    args.out.mkdir(parents=True, exist_ok=True)
    for path in args.results:
        result = json.loads(path.read_text())
        curves, x, y = curves_of(result)
        figure, axes = pyplot.subplots(figsize=(8, 5))
        for name, points in sorted(curves.items()):
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        if x == "context":
            axes.set_xscale("log", base=2)
        axes.set(xlabel=x, ylabel=y, ylim=(0, None), title=title(path, result))
        axes.legend(fontsize="x-small")
        figure.savefig(args.out / f"{path.stem}.svg", bbox_inches="tight")
        pyplot.close(figure)
        print(args.out / f"{path.stem}.svg")
    return 0


def title(path: Path, result: dict) -> str:
    """The file, the device and the jax that ran."""
    packages = result["provenance"]["packages"]
    return f"{path.stem}: {result['device']['kind']}, jax {packages['jax']}"


if __name__ == "__main__":
    sys.exit(main())
