"""The text of the source."""
import functools
import importlib
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from mgpu.backends import gluon_layers
from mgpu.backends._torch.gluon.build import find, identifier
from mgpu.backends._torch.gluon.source import layout
from mgpu.backends._torch.gluon.source.classes import (Class, Instance,
                                                       classes_of, name,
                                                       normalize)
from mgpu.backends._torch.gluon.source.structure import (Arg, Block, Leaf,
                                                         Step,
                                                         arguments_of,
                                                         arrays_of,
                                                         defaults_of,
                                                         structure_of)
from mgpu.gluon_io.graph import Graph
from mgpu.gluon_io.parts import Call, MissingOperator, Shape, Slot

_INFIX = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**",
          "floordiv": "//", "mod": "%", "lt": "<", "le": "<=", "gt": ">",
          "ge": ">=", "eq": "==", "ne": "!=", "matmul": "@"}
_FUNCTIONS = {"torch.nn.ReLU": "torch.relu",
              "torch.nn.Sigmoid": "torch.sigmoid",
              "torch.nn.Tanh": "torch.tanh"}
_OURS = {"GluonBatchNorm":
         "Gluon's running variance is biased; PyTorch's is n / (n - 1) times "
         "as large.",
         "GluonMaxPool2d": "Gluon's windows may lie wholly in the padding; "
         "PyTorch leaves those out.",
         "GluonAvgPool2d": "Gluon's windows may lie wholly in the padding; "
         "PyTorch leaves those out."}
_WINDOWS = ("Gluon has one window more where the last one lies wholly in the "
            "padding; here the output is one smaller then.")
_FLOAT32 = ("Gluon rounds the negative part to float32, also in a float64 "
            "network; here it is not rounded (1e-7 of it).")
_TIES = ("Where several are equal the gradient is shared here; in Gluon {} "
         "gets all of it.")
#: in the place of mgpu's, and how far that is from Gluon
_PLAIN = {
    "GluonBatchNorm": ("nn.BatchNorm", "Gluon's running variance is that of "
                       "the batch; here it is n / (n - 1) times as large, n = "
                       "values of a channel (batch x height x width of "
                       "images). Predictions differ by that, after training. "
                       "With one value a channel Gluon trains, and this does "
                       "not."),
    "GluonMaxPool2d": ("nn.MaxPool2d", _WINDOWS),
    "GluonAvgPool2d": ("nn.AvgPool2d", _WINDOWS),
    "GluonLeakyReLU": ("nn.LeakyReLU", _FLOAT32),
    "GluonPReLU": ("nn.PReLU", _FLOAT32),
    "GluonSELU": ("nn.SELU", "Gluon's gradient below 0 is 1.05 * (1.67 + y); "
                  "here it is that of the function, 1.05 * 1.67 + y."),
    "maximum": ("torch.maximum", _TIES.format("the first")),
    "minimum": ("torch.minimum", _TIES.format("the first")),
    "amax": ("torch.amax", _TIES.format("each")),
    "amin": ("torch.amin", _TIES.format("each"))}


class Source(NamedTuple):
    """A file of source.

    Attributes
    ----------
    text : str
    names : dict of str to str
        The name in the ``.params`` file for each name in its `state_dict`.
    values : dict of str to float
        Names of `state_dict` that have this number, whatever the file has.
    counters : tuple of str
        Names of `state_dict` that Gluon has not: torch's counts of batches.
    shared : bool
        Whether layers share an array.
    classes : int
    arguments : int
        The most that a class has.
    """

    text: str
    names: dict[str, str]
    values: dict[str, float]
    counters: tuple[str, ...]
    shared: bool
    classes: int
    arguments: int


def source_of(graph: Graph, shapes: Mapping[str, Shape],
              title: str = "A network", plain: bool = False,
              safe: bool = False, whole: Collection[str] = ()) -> Source:
    """The source of a network, from its graph and the shapes of its arrays.
    `plain`: without mgpu's layers. `safe`: it reads weights in safetensors'
    form, where no layers share an array. `whole`: the names of the arrays of
    whole numbers. MissingOperator as in
    `from_gluon`."""
    top = structure_of(graph, shapes, whole)
    normalize(top)
    found = classes_of(top)
    name(found)
    names = _Names(set())
    inputs = [names.variable(identifier(graph.nodes[i].name))
              for i, _ in top.ins]
    # It may be a file's name, which must not end the docstring.
    title = re.sub(r"[^\w .,+-]", "_", title).strip() or "A network"
    return _Writer(top, found, inputs, title, plain,
                   safe).source()


class _Writer:
    def __init__(self, top: Block, found: list[Class], inputs: list[str],
                 title: str, plain: bool, safe: bool) -> None:
        self._top, self._found, self._inputs = top, found, inputs
        self._title, self._plain, self._safe = title, plain, safe
        self._imports: set[str] = set()
        self._helpers: set[str] = set()     # of mgpu, but for `_ours`
        self._ours: dict[str, None] = {}
        self._small: dict[str, list[str]] = {}      # classes around calls
        self._named: dict[str, str] = {}

    def source(self) -> Source:
        order: list[Class] = []
        for cls in _used(self._top):
            self._visit(cls, order)
        blocks = []
        for cls in order:
            if (lines := self._class(cls)):
                blocks.append(lines)
        net, places = self._net()
        shared = self._shared(places)
        if shared:
            at = next(i for i, line in enumerate(net)
                      if "def forward" in line)
            net[at - 1:at - 1] = shared
        names, values, counters = self._names(places)
        blocks = [*self._small.values(), *blocks, net, self._load(shared)]
        body = "\n\n\n".join("\n".join(lines) for lines in blocks)
        text = "\n".join([*self._head(body), "", "", body, ""])
        return Source(text, names, values, counters, bool(shared),
                      len(order), max(
            (len(c.parameters) for c in order), default=0))

    def _visit(self, cls: Class, order: list[Class]) -> None:
        if cls in order:
            return
        for other in _used(cls.body):
            self._visit(other, order)
        order.append(cls)

    # -- the file -------------------------------------------------------------

    def _head(self, body: str) -> list[str]:
        lines = [f'"""{self._title}, converted from Gluon."""', ""]
        if self._plain:
            for text in dict.fromkeys(_PLAIN[key][1] for key in self._ours):
                lines += _comment(text)
        plain = ["import torch"]
        for module in ("operator", "math"):
            if re.search(rf"(?<![`\w.]){module}\.", body):
                plain.insert(0, f"import {module}")
        if "Any" in re.findall(r"\bAny\b", body):
            lines += [*[x for x in plain if x != "import torch"],
                      "from typing import Any", ""]
            plain = ["import torch"]
        elif len(plain) > 1:
            lines += [*plain[:-1], ""]
            plain = plain[-1:]
        lines += plain
        ours = set() if self._plain else set(self._ours)
        if ours or self._helpers:       # comes first in the alphabet
            lines.append("")
            for text in dict.fromkeys(_OURS[k] for k in self._ours if ours):
                lines += _comment(text)
            for own in sorted(self._helpers):
                lines += _comment(f"{own}: {_about(own)}")
            lines += layout.fit("from mgpu.backends.gluon_layers import "
                                + ", ".join(sorted(ours | self._helpers)))
        found = {"from torch import nn", *self._imports}
        if "load_file(" in body:
            found.add("from safetensors.torch import load_file")
        if re.search(r"\bF\.", body):
            found.add("from torch.nn import functional as F")
        return [*lines, *sorted(found)]

    def _load(self, shared: list[str]) -> list[str]:
        read = "load_file(path)" if self._safe and not shared \
            else "torch.load(path, weights_only=True)"
        body = [f"    weights = {read}",
                "    net.to(next(iter(weights.values())).dtype)",
                "    net.load_state_dict(weights)"] if shared else \
            [f"    net.load_state_dict({read}, assign=True)"]
        return ["def load(path: str) -> Net:",
                '    """The network with the weights in a file."""',
                "    net = Net()", *body, "    return net"]

    # -- names of parameters --------------------------------------------------

    def _shared(self, places: list[tuple[str, Leaf]]) -> list[str]:
        """Statements that let layers share an array."""
        first: dict[str, str] = {}
        lines = []
        for path, leaf in places:
            for key, array in leaf.tensors.items():
                own = _dotted(path, key)
                if array in first and key in _buffers(leaf.kind):
                    raise MissingOperator(
                        f"source for a layer with running statistics that is "
                        f"called several times ({array!r})")
                if array in first:
                    lines += layout.fit(
                        f"self.{own} = self.{first[array]}", 8)
                first.setdefault(array, own)
        return lines

    def _names(self, places: list[tuple[str, Leaf]]
               ) -> tuple[dict[str, str], dict[str, float], tuple[str, ...]]:
        names, values, counters = {}, {}, []
        for path, leaf in places:
            buffers = _buffers(leaf.kind)
            for key, array in leaf.tensors.items():
                own = f"{path}.{key}" if key else path
                names[own] = f"{'aux' if key in buffers else 'arg'}:{array}"
                if key in leaf.values:
                    values[own] = leaf.values[key]
            if "num_batches_tracked" in buffers:
                counters.append(f"{path}.num_batches_tracked")
        return names, values, tuple(counters)

    # -- classes --------------------------------------------------------------

    def _class(self, cls: Class) -> list[str]:
        base = "nn.Module" if isinstance(cls.body, Block) else "nn.Sequential"
        if cls.joined:
            base = self._side_by_side(cls.joined[1])
            text, own = self._branches(cls.joined[0])
            _keep(cls, own)
            if not cls.parameters and (cls.places == 1 or len(text) < 100):
                cls.inline = f"{base}({text})"
                return []
        lines = [f"class {cls.name}({base}):", *_docstring(_meaning(cls)), ""]
        given = [f"{p.name}: {p.hint}" + (f" = {p.default}" if p.default
                                          else "") for p in cls.parameters]
        lines += layout.fit(f"def __init__({', '.join(['self', *given])}) "
                            "-> None:", 4)
        if cls.packed:
            lines += layout.fit(f"{', '.join(cls.packed)} = channels", 8)
        if cls.joined:
            lines += layout.fit(f"super().__init__({text})", 8)
        elif isinstance(cls.body, Block):
            made, forward, own = self._block(cls.body, ["x"], cls)
            if not made and not cls.parameters:
                lines.pop()             # nothing to make: no __init__
            else:
                lines += ["        super().__init__()", *made, ""]
            lines += self._forward(["x"], forward)
        else:
            text, own = self._sequence(cls.body)
            lines += layout.fit(f"super().__init__({text})", 8)
        _keep(cls, own)
        return lines

    def _side_by_side(self, axis: int) -> str:
        """The class of branches whose outputs become one."""
        own = "Concat" if axis == 1 else f"Concat{axis}".replace("-", "Last")
        if own not in self._small:
            what = "channels stand side by side" if axis == 1 \
                else f"outputs are joined along axis {axis}"
            self._small[own] = [
                f"class {own}(nn.Sequential):",
                f'    """Branches whose {what}."""', "",
                *self._forward(["x"], ["        return torch.cat([branch(x) "
                                       f"for branch in self], {axis})"])]
        return own

    def _branches(self, chains: list[list[Any]]
                  ) -> tuple[str, list[tuple[str, Leaf]]]:
        texts, places = [], []
        for i, chain in enumerate(chains):
            if len(chain) == 1:
                texts.append(self._make(chain[0]))
                places += [(f"{i}{rest}", leaf)
                           for rest, leaf in _places(chain[0])]
            else:
                text, own = self._sequence(chain)
                texts.append(f"nn.Sequential({text})")
                places += [(f"{i}.{path}", leaf) for path, leaf in own]
        return ", ".join(texts), places

    def _forward(self, inputs: list[str], body: list[str]) -> list[str]:
        given = ", ".join(f"{x}: torch.Tensor" for x in inputs)
        out = "torch.Tensor"
        if len(self._top.outs) > 1 and inputs is self._inputs:
            out = "tuple[torch.Tensor, ...]"
        first = ", ".join(["self", *([given] if given else [])])
        if len(first) + len(out) > layout.WIDTH - 24:
            return ["    def forward(", *(f"        {x}," for x in
                                          first.split(", ")),
                    f"    ) -> {out}:", *body]
        return [f"    def forward({first}) -> {out}:", *body]

    def _net(self) -> tuple[list[str], list[tuple[str, Leaf]]]:
        top = self._top
        lines = ["class Net(nn.Module):",
                 *_docstring(f"{self._title}."), "",
                 "    def __init__(self) -> None:",
                 "        super().__init__()"]
        inputs = self._inputs
        if len(inputs) == 1:
            inputs = self._inputs = ["x"]
        if len(top.steps) == 1 and top.steps[0].chain is not None:
            _features(top)
        made, forward, own = self._block(top, inputs, None)
        lines += [*made, "", *self._forward(inputs, forward)]
        return lines, own

    # -- a block --------------------------------------------------------------

    def _block(self, block: Block, inputs: list[str], cls: Class | None
               ) -> tuple[list[str], list[str], list[tuple[str, Leaf]]]:
        """Statements that make its layers, those of ``forward``, and where
        its leaves are."""
        made: list[str] = []
        body: list[str] = []
        places: list[tuple[str, Leaf]] = []
        names = _Names({"x", *inputs, *(p.name for p in cls.parameters)}
                       if cls else {"x", *inputs})
        used = Counter([v for s in block.steps for v in _uses(s)]
                       + list(block.outs))
        text: dict[Any, str] = dict(zip(block.ins, inputs))
        last = block.steps[-1] if block.steps else None
        for step in block.steps:
            if step.otherwise is not None and step.optional:
                used[step.otherwise] += 1
        for step in block.steps:
            expr, prefix, own = self._step(step, block, text, names, made,
                                           body, cls)
            places += own
            if cls and cls.flag and step.call is not None \
                    and step.call.function == "operator.add":
                main = next(text[v] for v, s in zip(step.ins, [
                    _maker(block, v) for v in step.ins])
                    if s is not None and not s.optional)
                made += [f"        self.residual = {cls.flag}"]
                expr = f"{expr} if self.residual else {main}"
            nested = step.layer.returns if step.layer is not None else ()
            if step is last and step.outs == block.outs and (
                    not nested or len(step.outs) == 1):
                body += _long_return(expr)
                continue
            if len(step.outs) > 1:
                for v in step.outs:
                    text[v] = names.variable("part") if used[v] else "_"
                outs = _unpacked(nested or tuple(range(len(step.outs))),
                                 [text[v] for v in step.outs])
                body += layout.fit(f"{outs} = {expr}", 8)
            elif (used[step.outs[0]] == 1 and len(expr) < 50
                  and not (cls and cls.flag) and " if " not in expr) \
                    or expr.isidentifier() or (
                        step.layer is not None and not step.ins):
                text[step.outs[0]] = expr
            else:
                own_name = names.variable(prefix)
                text[step.outs[0]] = own_name
                body += layout.fit(f"{own_name} = {expr}", 8)
        if last is None or last.outs != block.outs:
            body += _long_return(", ".join(text[v] for v in block.outs))
        return made, body, places

    def _step(self, step: Step, block: Block, text: Mapping[Any, str],
              names: "_Names", made: list[str], body: list[str],
              cls: Class | None
              ) -> tuple[str, str, list[tuple[str, Leaf]]]:
        """What gives its value, a word for that, and where its leaves are.
        Statements that make layers are added to `made`, those of ``forward``
        to `body`."""
        ins = [text[v] for v in step.ins]
        key = arrays_of(step)
        if step.layer is not None:
            leaf = step.layer
            again = key in names.modules
            attribute = names.modules[key] if again else names.attribute(
                _word(leaf) if leaf.kind != "parameter"
                else identifier(leaf.tensors[""]))
            names.modules[key] = attribute
            if leaf.kind == "parameter":
                size = leaf.arguments["size"]
                sizes = size.text if isinstance(size, Arg) \
                    else ", ".join(map(_value, size)) or "()"
                frozen = ", requires_grad=False" if leaf.frozen else ""
                made += layout.fit(f"self.{attribute} = nn.Parameter("
                                   f"torch.zeros({sizes}){frozen})", 8)
                return f"self.{attribute}", attribute, [(attribute, leaf)]
            if not again:
                made += layout.fit(f"self.{attribute} = {self._make(leaf)}",
                                   8)
            given = ", ".join(self._expr(x, ins) for x in
                              step.call.arguments) if step.call else ins[0]
            first = "[0]" if leaf.returns and len(step.outs) == 1 else ""
            return (f"self.{attribute}({given}){first}", attribute,
                    [] if again else [(attribute, leaf)])
        if step.call is not None:
            return self._expr(step.call, ins), "y", []
        chain = step.chain or []
        x = ins[0]
        if not chain:
            return x, "x", []
        if len(chain) == 1 and isinstance(chain[0], Leaf) \
                and not step.optional:
            only = chain[0]
            if only.call is not None:
                return self._expr(only.call, [x]), "y", []
            if only.kind in _FUNCTIONS:
                return f"{_FUNCTIONS[only.kind]}({x})", "y", []
        if not step.optional and any(map(_is_function, chain)):
            return self._mixed(step, block, x, names, made, body, cls)
        if key in names.modules:        # the network calls it again
            return f"self.{names.modules[key]}({x})", names.modules[key], []
        attribute = names.attribute(_attribute(step, block))
        if not step.optional:
            names.modules[key] = attribute
        if len(chain) == 1:
            made_text = self._make(chain[0])
            own = [(attribute + rest, leaf) for rest, leaf in
                   _places(chain[0])]
        else:
            inner, own = self._sequence(chain)
            made_text = f"nn.Sequential({inner})"
            own = [(f"{attribute}.{path}", leaf) for path, leaf in own]
        if step.optional and cls and cls.shortcut:
            condition = cls.shortcut
            other = text[step.otherwise]
            same = other == x
            lines = layout.fit(f"self.{attribute} = {made_text}", 12)
            empty = "nn.Identity()" if same else "None"
            hint = ": nn.Module" if same else ": nn.Module | None"
            made += [f"        self.{attribute}{hint} = {empty}",
                     f"        if {condition}:", *lines]
            if same:
                return f"self.{attribute}({x})", attribute, own
            return (f"{other} if self.{attribute} is None else "
                    f"self.{attribute}({x})"), attribute, own
        made += layout.fit(f"self.{attribute} = {made_text}", 8)
        return f"self.{attribute}({x})", attribute, own

    def _mixed(self, step: Step, block: Block, x: str, names: "_Names",
               made: list[str], body: list[str], cls: Class | None
               ) -> tuple[str, str, list[tuple[str, Leaf]]]:
        """A chain of layers and functions: `nn.Sequential` for the layers
        between two functions, which are written out."""
        places: list[tuple[str, Leaf]] = []
        title = _attribute(step, block)
        for functions, group in itertools.groupby(step.chain or [],
                                                  _is_function):
            if not functions:
                part = Step(step.outs, step.ins, [*group])
                part.title = title
                x, _, own = self._step(part, block, dict.fromkeys(
                    step.ins, x), names, made, body, cls)
                places += own
                continue
            for leaf in group:
                if not x.isidentifier() and len(_slots(leaf.call)) > 1:
                    own_name = names.variable("y")
                    body += layout.fit(f"{own_name} = {x}", 8)
                    x = own_name
                x = self._expr(leaf.call, [x])
        return x, "y", places

    def _sequence(self, chain: list[Any]
                  ) -> tuple[str, list[tuple[str, Leaf]]]:
        """The items of an `nn.Sequential`, and where the leaves are."""
        texts = [self._make(item) for item in chain]
        places = [(f"{i}{rest}", leaf) for i, item in enumerate(chain)
                  for rest, leaf in _places(item)]
        return ", ".join(text for text, _ in layout.loops(texts)), places

    # -- expressions ----------------------------------------------------------

    def _make(self, item: Any) -> str:
        """What makes a layer."""
        if isinstance(item, Instance):
            if item.cls.inline:
                return item.cls.inline
            given, keyed = [], False
            for p in item.cls.parameters:
                v = item.arguments[p.name]
                text = _value(v)
                if p.default is not None and text == p.default:
                    keyed = True
                    continue
                keyed = keyed or p.default is not None
                given.append(f"{p.name}={text}" if keyed else text)
            return f"{item.cls.name}({', '.join(given)})"
        if item.call is not None:
            return self._around(item.call)
        short = self._kind(item)
        usual, order = defaults_of(item.kind), arguments_of(item.kind)
        given = []
        keyed = False
        for key, v in item.arguments.items():
            text = _value(v)
            keyed = keyed or order[len(given):len(given) + 1] != [key]
            if not keyed and (key == text or "Pool" in short
                              and key in ("stride", "padding")) \
                    and not (key in usual and v == usual[key]):
                given.append(text)
                continue
            if key in usual and not isinstance(v, Arg) and v == usual[key] \
                    and key not in ("p",):
                keyed = True
                continue
            keyed = keyed or (key in usual and key != "p"
                              and key != "output_size")
            given.append(f"{key}={text}" if keyed else text)
        return f"{short}({', '.join(given)})"

    def _import(self, module: str, own: str) -> str:
        """What a class or function is called in the source."""
        if self._plain and own in _PLAIN:
            self._ours[own] = None
            return _PLAIN[own][0]
        if not module.startswith("mgpu."):
            self._imports.add(f"from {module} import {own}")
        elif self._plain:
            self._copy(module, own)
        else:
            self._helpers.add(own)
        return own

    def _copy(self, module: str, own: str) -> None:
        """Write a helper of mgpu's into the source, and what it uses."""
        if own not in self._small:
            known = vars(importlib.import_module(module))
            if any(base.__module__.startswith("mgpu.") for base in getattr(
                    known[own], "__bases__", ())):
                raise MissingOperator(f"source without mgpu for {own}: write "
                                      "it without plain")
            text = inspect.getsource(known[own])
            for other in dict.fromkeys(re.findall(r"\b_\w+(?=\()", text)):
                if other in known and other != own:
                    self._copy(module, other)
            self._small[own] = text.rstrip().splitlines()

    def _kind(self, leaf: Leaf) -> str:
        """The class of a layer as the source calls it."""
        module, _, own = leaf.kind.rpartition(".")
        if own in _OURS:
            if not self._plain:
                self._ours[own] = None
            else:
                own = self._import(module, own)
                if own == "nn.BatchNorm":
                    if leaf.rank is None:
                        raise MissingOperator(
                            "source with PyTorch's own batch norm, which "
                            "depends on the number of axes; this graph does "
                            "not tell it: write it without plain")
                    own += {2: "1d", 3: "1d", 4: "2d", 5: "3d"}[leaf.rank]
        elif module == "torch.nn":
            own = f"nn.{own}"
        else:
            own = self._import(module, own)
        return self._frozen(leaf, own) if leaf.frozen else own

    def _frozen(self, leaf: Leaf, own: str) -> str:
        """A class whose parameters are not trained."""
        last = own.rpartition(".")[2]
        norm = "BatchNorm" in last and leaf.frozen == ("weight",)
        short = ("FixedScale" if norm else "Frozen") + \
            last.removeprefix("Gluon")
        if short not in self._small:
            doc = "Batch norm whose scale stays 1." if norm else \
                f"{last} with parameters that are not trained."
            self._small[short] = [
                f"class {short}({own}):", f'    """{doc}"""', "",
                "    def __init__(self, *sizes: int, **options: float) -> "
                "None:",
                "        super().__init__(*sizes, **options)",
                *(f"        self.{key}.requires_grad_(False)"
                  for key in leaf.frozen)]
        return short

    def _around(self, call: Call) -> str:
        """A class for a function, where a chain needs a layer."""
        key = repr(call)
        if key not in self._named:
            module, _, word = call.function.rpartition(".")
            short = word if module.startswith("mgpu.") else call.function
            word = word.strip("_")
            base = "".join(x[:1].upper() + x[1:] for x in word.split("_"))
            own = base
            while own in self._small:
                own = f"{base}{len(self._small)}"
            why = "Bounds values; the gradient passes at the bounds too, " \
                "unlike nn.ReLU6's." if call.function == "torch.clamp" \
                else f"``{short}`` as a layer."
            self._named[key] = own
            self._small[own] = [
                f"class {own}(nn.Module):", *_docstring(why), "",
                *self._forward(["x"], _long_return(
                    self._expr(call, ["x"])))]
        return f"{self._named[key]}()"

    def _expr(self, x: Any, ins: list[str]) -> str:
        if isinstance(x, Slot):
            return ins[x.number]
        if not isinstance(x, Call):
            if type(x) in (tuple, list):
                inner = ", ".join(self._expr(y, ins) for y in x)
                if type(x) is list:
                    return f"[{inner}]"
                return f"({inner},)" if len(x) == 1 else f"({inner})"
            if isinstance(x, float) and x.is_integer() and abs(x) < 1e6:
                return repr(x)
            return _value(x)
        given = [self._expr(y, ins) for y in x.arguments]
        named = [f"{k}={self._expr(v, ins)}" for k, v in x.named.items()]
        module, _, own = x.function.rpartition(".")
        if module == "operator" and own in _INFIX and len(given) == 2:
            return f" {_INFIX[own]} ".join(map(_bracketed, given))
        if x.function == "operator.neg":
            return f"-{_bracketed(given[0])}"
        if x.function == "operator.getitem":
            index = x.arguments[1]
            parts = index if type(index) is tuple else (index,)
            return (f"{_bracketed(given[0])}["
                    + ", ".join(map(_indexed, parts)) + "]")
        inner = ", ".join([*given[1:], *named])
        if module == "torch.Tensor":
            return f"{_bracketed(given[0])}.{own}({inner})"
        inner = ", ".join([*given, *named])
        if module == "torch.nn.functional":
            return f"F.{own}({inner})"
        if module.split(".")[0] in ("torch", "math", "operator"):
            return f"{x.function}({inner})"
        return f"{self._import(module, own)}({inner})"


# -- small helpers ------------------------------------------------------------

class _Names:
    """Names of a module that differ, of attributes and of variables."""

    def __init__(self, taken: set[str]) -> None:
        self._attributes: set[str] = {"forward", *dir(torch.nn.Module)}
        #: what it calls several times, by `arrays_of`
        self.modules: dict[Any, str] = {}
        self._variables = {"self", "torch", "nn", "F", "math",
                           "operator"} | set(taken)

    def attribute(self, word: str) -> str:
        """One of the module."""
        return self._new(word, self._attributes)

    def variable(self, word: str) -> str:
        """One of ``forward``."""
        return self._new(word, self._variables)

    def _new(self, word: str, taken: set[str]) -> str:
        n, own = 1, word
        while own in taken:
            n += 1
            own = f"{word}_{n}" if word[-1].isdigit() else f"{word}{n}"
        taken.add(own)
        return own


def _about(own: str) -> str:
    """The first sentence that is said of a helper."""
    text = inspect.getdoc(getattr(gluon_layers, own)) or ""
    return " ".join(text.replace("`", "").split()).partition(". ")[0].rstrip(
        ".") + "."


def _is_function(item: Any) -> bool:
    """Whether a part of a chain is a call that is no activation."""
    return isinstance(item, Leaf) and item.call is not None \
        and not item.is_activation


def _slots(x: Any) -> list[int]:
    """The inputs that a call uses, each as often as it does."""
    if isinstance(x, Slot):
        return [x.number]
    if isinstance(x, Call):
        x = (*x.arguments, *x.named.values())
    return [n for y in x for n in _slots(y)] \
        if isinstance(x, (tuple, list)) else []


def _uses(step: Step) -> list[Any]:
    """The values that its text names, each as often as it does."""
    first = (step.chain or [None])[0]
    call = step.call or (first.call if isinstance(first, Leaf) else None)
    return [*step.ins] if call is None else [step.ins[n] for n in _slots(call)]


def _used(body: Any) -> Iterator[Class]:
    chains = [s.chain or [] for s in body.steps] if isinstance(body, Block) \
        else [body]
    for chain in chains:
        for item in chain:
            if isinstance(item, Instance):
                yield item.cls


def _places(item: Any) -> Iterator[tuple[str, Leaf]]:
    """Where the leaves behind an item are, each as ".path" from it."""
    if isinstance(item, Instance):
        for path, leaf in zip(item.cls.paths, item.leaves):
            if leaf is not None and path:
                yield f".{path}", leaf
    else:
        yield "", item


def _keep(cls: Class, own: list[tuple[str, Leaf]]) -> None:
    """Where the leaves of a class are in it."""
    at = {id(leaf): path for path, leaf in own}
    cls.paths = [at.get(id(leaf), "") for leaf in cls.leaves]


def _maker(block: Block, value: Any) -> Step | None:
    return next((s for s in block.steps if value in s.outs), None)


def _value(x: Any) -> str:
    if isinstance(x, Arg):
        return x.text
    if type(x) is tuple:
        inner = ", ".join(map(_value, x))
        return f"({inner},)" if len(x) == 1 else f"({inner})"
    if isinstance(x, (torch.dtype, torch.device)) or x is None or \
            isinstance(x, (int, float, str, bool)):
        if isinstance(x, float) and x in (float("inf"), -float("inf")):
            return f"{'-' if x < 0 else ''}math.inf"
        return repr(x).replace("'", '"') if isinstance(x, str) else repr(x)
    if isinstance(x, slice):
        return f"slice({x.start}, {x.stop}, {x.step})"
    if x is Ellipsis:
        return "..."
    raise MissingOperator(f"source for the argument {x!r}")


def _indexed(x: Any) -> str:
    """A part of what stands in the brackets of an index."""
    if not isinstance(x, slice):
        return _value(x)
    start, stop = ("" if y is None else _value(y) for y in (x.start, x.stop))
    return f"{start}:{stop}" + ("" if x.step in (None, 1)
                                else f":{_value(x.step)}")


def _unpacked(form: Any, names: list[str]) -> str:
    """What a call's result is unpacked to; nothing of it where no part
    behind the first is used."""
    def written(inner: Any) -> str:
        if not isinstance(inner, tuple):
            return names[inner]
        parts = [written(y) for y in inner]
        return "_" if set(parts) == {"_"} else f"({', '.join(parts)})"
    return ", ".join(map(written, form))


def _bracketed(text: str) -> str:
    depth = 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == " " and depth == 0:
            return f"({text})"
    return f"({text})" if text.startswith("-") else text


def _dotted(path: str, key: str) -> str:
    parts = [*path.split("."), *([key] if key else [])]
    return "".join(f"[{p}]" if p.isdigit() else f".{p}"
                   for p in parts).removeprefix(".")


@functools.cache
def _buffers(kind: str) -> frozenset[str]:
    """The names of the buffers of a layer."""
    if "BatchNorm" in kind:
        return frozenset(find(kind)(1)._buffers)
    return frozenset()


def _comment(text: str) -> list[str]:
    return _wrapped(text, "# ")


def _wrapped(text: str, start: str) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(start) + len(line) + 1 + len(word) > layout.WIDTH:
            lines.append(start + line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, start + line]


def _docstring(text: str) -> list[str]:
    if len(text) + 10 <= layout.WIDTH:
        return [f'    """{text}"""']
    lines = _wrapped('"""' + text, "    ")
    return [*lines[:-1], lines[-1], '    """']


def _long_return(expr: str) -> list[str]:
    lines = layout.fit(f"return {expr}", 8)
    if max(map(len, lines)) > layout.WIDTH:
        lines = layout.fit(f"return ({expr})", 8)
    return lines


_WORDS = {"Conv": "conv", "Norm": "norm", "Linear": "linear",
          "Pool": "pool", "Embedding": "embedding", "Dropout": "dropout"}


def _word(item: Any) -> str:
    if isinstance(item, Instance):
        own = re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", item.cls.base).lower()
        return {"conv_block": "conv", "squeeze_excitation": "attention"}.get(
            own, own)
    kind = item.kind.rpartition(".")[2]
    for key, word in _WORDS.items():
        if key in kind:
            return word
    return re.sub(r"\W", "", kind.lower()) or "layer"


def _size(chain: list[Any]) -> int:
    """The number of layers in a chain."""
    return sum(1 for item in chain for _ in _places(item))


def _attribute(step: Step, block: Block) -> str:
    """What to call a chain of a block."""
    calls = [s.call.function for s in block.steps if s.call is not None]
    chain = step.chain or []
    if step.title:
        return step.title
    join = calls[0] if len(calls) == 1 else ""
    taken = step.ins == block.ins
    if join == "operator.add":
        if step.optional or any(s is not step and s.chain and s.ins ==
                                step.ins and _size(s.chain) > _size(chain)
                                for s in block.steps):
            return "shortcut"
        if taken and any(x.is_norm or x.is_activation for x in chain) \
                and any(s.ins == step.outs for s in block.steps
                         if s.chain and s is not step) \
                and len([s for s in block.steps if s.chain]) > 2:
            return "preactivation"
        if any(s.call and step.outs[0] in s.ins for s in block.steps):
            return "body"
    if join == "operator.mul" and taken:
        return "gate"
    if join == "torch.cat" and taken:
        branches = [s for s in block.steps if s.chain]
        if len(branches) == 1:
            return "body"
        return _branch(chain)
    return _word(chain[0]) if len(chain) == 1 else "layers"


def _kernel(item: Any) -> tuple[int, ...] | None:
    """Of a convolution, or of what stands for one."""
    if isinstance(item, Instance):
        p = next((p for p in item.cls.parameters
                  if p.family == "kernel_size"), None)
        found = None if p is None else item.arguments[p.name]
        if p is None:
            inner = [_kernel(x) for x in item.cls.items
                     if isinstance(x, Leaf)]
            found = next((k for k in inner if k), None)
    else:
        found = item.arguments.get("kernel_size")
    if isinstance(found, Arg) or found is None:
        return None
    return (found, found) if isinstance(found, int) else found


def _branch(chain: list[Any]) -> str:
    """By its largest kernel, as in "branch3x3"."""
    if any(isinstance(x, Leaf) and "Pool" in x.kind for x in chain):
        return "branch_pool"
    sizes = [k for k in map(_kernel, chain) if k]
    if not sizes:
        return "branch"
    largest = max(sizes, key=lambda s: (sum(s), s))
    many = "_double" if sizes.count(largest) == 2 else ""
    return "branch" + "x".join(map(str, largest)) + many


def _features(top: Block) -> None:
    """A chain in two: what extracts features, and what classifies."""
    chain = top.steps[0].chain or []
    n = len(chain)
    while n and isinstance(chain[n - 1], (Leaf, Instance)) and (
            not chain[n - 1].is_weighted or _dense(chain[n - 1])):
        n -= 1
    dense = next((i for i in range(n, len(chain)) if _dense(chain[i])), None)
    step = top.steps[0]
    step.title = "layers"
    if dense is None and isinstance(chain[-1], Leaf) \
            and chain[-1].kind == "torch.nn.Flatten" and n \
            and isinstance(chain[n - 1], Leaf):
        dense = n = n - 1                       # a convolution classifies
    if dense is None or not 0 < n:
        return
    step.title = "features"
    start = dense
    if start and isinstance(chain[start - 1], Leaf) and \
            chain[start - 1].kind == "torch.nn.Flatten" \
            and len(chain) - start > 1:
        start -= 1
    value = ("features",)
    tail = Step(step.outs, (value,), chain[start:])
    tail.title = "output" if len(chain) - start == 1 else "classifier"
    step.outs, step.chain = (value,), chain[:start]
    top.steps.append(tail)


def _dense(item: Any) -> bool:
    if isinstance(item, Instance):
        return item.cls.base == "DenseBlock"
    return bool(item.kind.endswith("Linear"))


def _meaning(cls: Class) -> str:
    """A docstring by what is inside."""
    if cls.base == "ResidualBlock":
        longest = max((s.chain or [] for s in cls.body.steps), key=_size)
        n = sum(".Conv" in leaf.kind for item in longest
                for _, leaf in _places(item))
        what = {1: "A convolution", 2: "Two convolutions",
                3: "Three convolutions", 4: "Four convolutions"}.get(
                    n, "Layers")
        return f"{what}, and a shortcut around them."
    return {
        "Bottleneck": "Convolutions with fewer channels between, and a "
                      "shortcut around them.",
        "InvertedResidual": "Pointwise, depthwise and pointwise convolution, "
                            "and a shortcut around them.",
        "SqueezeExcitation": "Weighs channels by what their mean says.",
        "HardSwish": "The gradient passes at -3 and 3 too, unlike "
                     "nn.Hardswish's.",
        "Gate": "Weighs its input by what layers make of it.",
        "DenseLayer": "Layers whose output joins the channels of their "
                      "input.",
        "Branches": "Two branches or more, side by side.",
        "InceptionBlock": "Branches whose channels stand side by side.",
        "SplitBlock": "Layers for a part of the channels; the other part goes "
                      "past them.",
        "SqueezeExpand": "Fewer channels first, then branches side by side.",
        "SeparableConv": "A depthwise and a pointwise convolution.",
        "Transition": "Fewer channels and pixels, between dense blocks.",
    }.get(cls.base) or _listing(cls)


_SAID = {"Conv": "convolution", "BatchNorm": "batch norm", "Linear":
         "dense layer", "MaxPool": "max pooling", "AvgPool":
         "average pooling", "Dropout": "dropout", "clamp": "clamping"}


def _listing(cls: Class) -> str:
    if isinstance(cls.body, Block):
        return "Layers whose outputs meet; see ``forward``."
    words = []
    for item in cls.body:
        if isinstance(item, Instance):
            words.append(item.cls.name)
            continue
        kind = item.call.function.rpartition(".")[2] if item.call \
            else item.kind.rpartition(".")[2]
        words.append("depthwise " * item.is_depthwise + next(
            (v for k, v in _SAID.items() if k in kind), kind))
    text = words[0] if len(words) == 1 else \
        f"{', '.join(words[:-1])} and {words[-1]}"
    return f"{text[0].upper()}{text[1:]}."
