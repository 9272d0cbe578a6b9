"""The inspection as one page of text."""

import json
from collections.abc import Mapping
from typing import Any

from eagle3_jax.inspection.serving import shown
from eagle3_jax.rope_config import stated_axes

STATUS = {0: "clean", 1: "warnings", 2: "unusable"}


def page(found: Mapping[str, Any]) -> str:
    """Plain text of what `inspect_draft` returns."""
    if not found["usable"]:
        error = found["error"]
        lines = [f"{found['path']}: unusable", f"  error [{error['code']}] {error['message']}"]
        return "\n".join([*lines, *_tensors(found)]) + "\n"
    lines = [
        f"{found['path']}: {found['kind']}, dialect {found['dialect']}: {STATUS[found['status']]}",
        "",
        *_sizes(found),
        "",
        *_switches(found),
        "",
        *_aux(found),
        "",
        *_vocabulary(found["vocabulary"]),
        "",
        *_rope(found["rope"]),
        *_tensors(found),
    ]
    if found["ignored"]:
        lines += ["", "tensors without a use"]
        lines += [f"  {name}: {reason}" for name, reason in found["ignored"].items()]
    lines += ["", "findings", *(_line(one) for one in found["findings"])]
    lines += [] if found["findings"] else ["  none"]
    lines += ["", *_engines(found["engines"])]
    if found["patch"]:
        lines += ["", *_patch(found["patch"])]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _line(one: Mapping[str, Any]) -> str:
    fix = f"; fix: {one['fix']}" if one["fix"] else ""
    return f"  {one['severity']} [{one['code']}] {one['message']}{fix}"


def _sizes(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{'sizes':<24}{'used':<10}{'config':<10}from"]
    for row in found["sizes"]:
        stated = "-" if row["config"] is None else row["config"]
        mark = "" if row["agrees"] else "  DISAGREES"
        name = f"{row['name']} {row['letter']}"
        lines.append(f"  {name:<22}{row['used']:<10}{stated!s:<10}{row['origin']}{mark}")
    return lines


def _switches(found: Mapping[str, Any]) -> list[str]:
    lines = ["switches"]
    for row in found["switches"]:
        value = row["value"]
        text = json.dumps(value) if isinstance(value, dict | list) else shown(value)
        lines.append(f"  {row['name']:<22}{text:<12} {row['origin']}")
    return lines


def _aux(found: Mapping[str, Any]) -> list[str]:
    rows = found["aux"]
    engines = list(rows[0]["engines"])
    head = "".join(f"{name:<15}" for name in engines)
    lines = ["target states", f"  slot  id    boundary    {'meaning':<22}{head}"]
    for row in rows:
        layer_id = "-" if row["id"] is None else row["id"]
        taken = "".join(f"{_taken(row['engines'][name]):<15}" for name in engines)
        place = f"{row['boundary']!s:<12}{row['meaning']:<22}"
        lines.append(f"  {row['slot']:<6}{layer_id!s:<6}{place}{taken}")
    if rows[0]["convention"]:
        kind = rows[0]["convention"]
        means = "the output of block id" if kind == "output" else "boundary id"
        lines.append(f"  ids read as {kind}: {means}")
    return lines


def _taken(value: Any) -> str:
    return "-" if value is None else str(value)


def _vocabulary(vocabulary: Mapping[str, Any]) -> list[str]:
    low, high = vocabulary["range"]
    order = "ascending" if vocabulary["sorted"] else "not ascending"
    sizes = ", ".join(f"{key} {value}" for key, value in vocabulary["sizes"].items())
    lines = [
        f"vocabulary: {vocabulary['meaning']} ({vocabulary['origin']})",
        f"  target ids {low}..{high}, {order}, {vocabulary['coverage']:.1%} of the target's",
        f"  target vocabulary: {sizes}",
        "  draft id, offset -> target id",
    ]
    for row in vocabulary["first"]:
        text = f"  {row['text']!r}" if "text" in row else ""
        lines.append(f"    {row['draft']:<6}{row['offset']:+d} -> {row['target']}{text}")
    return lines


def _rope(rope: Mapping[str, Any]) -> list[str]:
    stated = json.dumps(rope["configured"] or {})
    used = rope["effective"] or {}
    axes = stated_axes(used)
    lines = [
        f"rope: base {used.get('theta', 0):g}, {used.get('kind')}{', ' + axes if axes else ''} "
        f"({rope['origins']['theta']})",
        f"  as configured: {stated}",
    ]
    trained = rope["trained"]
    if trained is None:
        return [*lines, "  as trained: nothing known to differ"]
    surely = f"base {trained['theta']:g}, {trained['kind']}"
    return [*lines, f"  as trained: {surely if trained['sure'] else 'not known'}: {trained['why']}"]


def _tensors(found: Mapping[str, Any]) -> list[str]:
    if not found["tensors"]:
        return []
    width = max(len(row["name"]) for row in found["tensors"]) + 2
    lines = ["", f"{'tensors':<{width}}  {'dtype':<10}{'shape':<16}{'NaN':<6}{'Inf':<6}largest"]
    for row in found["tensors"]:
        values = f"{row['nan']:<6}{row['inf']:<6}{row['max_abs']:.4g}" if "nan" in row else ""
        lines.append(f"  {row['name']:<{width}}{row['dtype']:<10}{row['shape']!s:<16}{values}")
    return lines


def _engines(engines: Mapping[str, Any]) -> list[str]:
    lines = ["engines"]
    for name, found in engines.items():
        lines.append(f"  {name}: {'as trained' if not found else ''}".rstrip())
        lines += [f"  {_line(one)}" for one in found]
    return lines


def _patch(patch: Mapping[str, Any]) -> list[str]:
    lines = [f"config.json for {patch['engine']} (null removes a key)"]
    lines.append(f"  {json.dumps(patch['config'])}" if patch["config"] else "  nothing to change")
    lines += [f"  because: {note}" for note in patch["notes"]]
    lines += [f"  no key says: {problem}" for problem in patch["problems"]]
    lines += [f"  left: {_line(one).strip()}" for one in patch["left"]]
    return lines
