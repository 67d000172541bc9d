"""What every form of a report says about a result, as text and tables."""
import platform
from collections.abc import Mapping
from typing import Any

from mgpu.parity import forms
from mgpu.parity.measure import STAGES, Gap, layer_of
from mgpu.parity.result import BY_STAGE, Result
from mgpu.tools import doctor

#: titles of the columns, and rows
Table = tuple[list[str], list[list[str]]]
Rows = list[tuple[str, str]]

#: stage -> what it is called in a list, and in "they first differ in ..."
STAGE_WORDS = {
    "initial": ("initial values", "the initial value of"),
    "layer": ("output of a layer", "the output of layer"),
    "output": ("outputs", "the output"),
    "loss": ("loss of each example", "the loss of an example"),
    "gradient": ("gradients", "the gradient of"),
    "devices": ("copies on the devices", "what the devices hold of"),
    "clipping": ("gradients as the optimizer gets them",
                 "what the optimizer gets as the gradient of"),
    "rate": ("learning rates", "the learning rate of"),
    "weight": ("updated weights", "the updated weight"),
    "memory": ("the optimizer's memory", "the optimizer's memory"),
    "statistic": ("running statistics", "the running statistic"),
    "prediction": ("outputs in prediction mode",
                   "the output in prediction mode")}
NETWORK = "(the network)"       # instead of an empty path


def sentence(result: Result) -> str:
    """The verdict, in a sentence."""
    if result.verdict == "not compared":
        return str(result.reason)
    if result.reason is not None:
        return ("No number differs, but " if result.verdict == "different"
                else "Nothing differs, and nothing is proved: "
                ) + f"{result.reason}."
    steps = result.settings.get("steps")
    times = f"{steps} step{'s' * (steps != 1)}" if steps else "all steps"
    each = "the one step" if steps == 1 else f"each of {times}"
    if result.first is not None:
        gap = result.first
        what = f"{STAGE_WORDS[gap.stage][1]} {gap.name}".rstrip()
        return (f"Started alike before {each}, the sides first "
                f"differ in step {gap.step}, in {what}.")
    largest = result.largest()
    worst = 0.0 if largest is None else largest.relative
    larger = sum(g.status == "rounding" for g in result.gaps)
    return (f"Started alike before {each}, the sides computed the same, up "
            f"to a relative {worst:.1e} "
            f"({result.settings.get('tolerance'):g} is tolerated)" + (
                f" and {larger} larger difference{'s' * (larger != 1)} that "
                "rounding explains" if larger else "") + (
        ", with MXNet's float32 on both" if result.float32 else "") + (
        "; named formulas explain what is larger." if result.formulas
        else "."))


def first_rows(gap: Gap) -> Rows:
    """The first difference, as (name, value)."""
    rows = [("step", str(gap.step)), ("stage", STAGE_WORDS[gap.stage][0])]
    if gap.stage not in ("output", "loss", "prediction"):
        rows.append(("layer", layer_of_gap(gap) or NETWORK))
    if gap.name and gap.stage != "layer":
        rows.append(("tensor", gap.name))
    rows += [("index", str(list(gap.index)) if gap.index else "the value"),
             ("a", f"{gap.a:.17g}"), ("b", f"{gap.b:.17g}"),
             ("absolute difference", f"{gap.absolute:.3e}"),
             ("relative difference", f"{gap.relative:.3e} (of "
              f"{gap.scale:.3e}, the largest value)")]
    if gap.own is not None:
        rows.append(("rounding alone", f"{gap.own:.3e} (what a change of the "
                     "last bits does to a, relative)"))
    return rows


def short_rows(result: Result) -> Rows:
    """The first difference and its layer, as (name, value), without what
    `sentence` says."""
    gap, place = result.first, result.location
    rows: Rows = []
    if gap is not None:
        rows = [row for row in first_rows(gap) if row[0] in (
            "index", "a", "b", "relative difference", "rounding alone")]
    if place:
        more = location_rows(place)
        if more[0][1] == more[1][1]:
            more[:2] = [("layer", more[0][1])]
        if not place.get("inputs_agree"):   # its options explain nothing
            more = [row for row in more if not row[0].startswith("its ")
                    or row[0] == "its input"]
        rows += more
    return rows


def location_rows(location: Mapping[str, Any]) -> Rows:
    """The first layer whose output differs, as (name, value)."""
    layers: list[Any] = [location.get("a"), location.get("b")]
    rows = [(f"layer of {side}", "none" if layer is None else
             f"{layer['path'] or NETWORK}, {layer['kind']}")
            for side, layer in zip("ab", layers)]
    if None not in layers:
        one, two = (layer["options"] for layer in layers)
        rows += [(f"its {name}", f"{one.get(name)!r} in a, "
                  f"{two.get(name)!r} in b") for name in {**one, **two}
                 if one.get(name) != two.get(name)]
    if location.get("predicting"):
        rows.append(("mode", "prediction; in training mode it agrees"))
    return [*rows, (
        "its input", "agrees: the layer itself makes the difference"
        if location.get("inputs_agree") else "differs already: a function "
        "before the layer makes the difference")]


def stage_table(result: Result) -> Table:
    """The largest relative difference of each stage."""
    return list(BY_STAGE), result.by_stage()


def layer_table(result: Result) -> Table:
    """The largest relative difference of each layer and stage, over all
    steps, in the order of the layers."""
    order, worst, stages = by_layer(result)
    rows = [[str(i), name or NETWORK, *(
        f"{worst[name, stage]:.1e}" if (name, stage) in worst else "-"
        for stage in stages)] for i, name in enumerate(order, 1)]
    return ["number", "layer", *stages], rows


def plan_table(result: Result) -> Table:
    """How parameters were matched."""
    plan = result.plan
    rows = [[", ".join(p.a), ", ".join(p.b), forms.text(p.steps)]
            for p in plan.pairs]
    for side, names in plan.left.items():
        rows += [[*([name, "-"] if side == "a" else ["-", name]),
                  "left as it is"] for name in names]
    return ["a", "b", "layout"], rows


def side_table(result: Result) -> Table:
    """The settings of both sides."""
    a, b = result.sides.get("a", {}), result.sides.get("b", {})
    return ["setting", "a", "b"], [
        [name.replace("_", " "), text(a.get(name)), text(b.get(name))]
        for name in {**a, **b}]


def setting_rows(result: Result) -> Rows:
    """The settings of the comparison, as (name, value)."""
    return [(name.replace("_", " "), text(value))
            for name, value in result.settings.items()]


def versions(result: Result) -> Rows:
    """The software that made the result, as far as it is running now."""
    engines = dict.fromkeys(side["engine"] for side in result.sides.values()
                            if "engine" in side)
    return [*doctor.versions().items(),
            *((name, version) for engine in engines
              for name, _, version in [engine.partition(" ")]),
            ("platform", platform.platform())]


def layer_of_gap(gap: Gap) -> str:
    """The path of the layer that a gap belongs to."""
    if gap.stage == "layer":
        return gap.name
    name = layer_of(gap.name)
    return layer_of(name) if gap.stage == "memory" else name


def text(value: Any) -> str:
    """A value for a table: floats with six digits, lists without
    brackets."""
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def by_layer(result: Result
             ) -> tuple[list[str], dict[tuple[str, str], float], list[str]]:
    """The layers in their order; the largest relative difference by layer
    and stage, over all steps; the stages."""
    worst: dict[tuple[str, str], float] = {}
    for gap in result.gaps:
        if gap.name and gap.stage not in ("output", "layer", "prediction"):
            key = layer_of_gap(gap), gap.stage
            worst[key] = max(worst.get(key, 0.0), gap.relative)
    named = {name for name, _ in worst}
    order = [name for name in dict.fromkeys(
        map(layer_of, result.plan.names())) if name in named]
    order += sorted(named - set(order))
    return order, worst, [s for s in STAGES if any(
        stage == s for _, stage in worst)]
