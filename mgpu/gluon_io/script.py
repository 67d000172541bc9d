"""What the lines of a Gluon script become: one table, which `mgpu lint`
looks up and the guide shows.

Gluon's cell of a row is a pattern. A name in it that is not MXNet's stands for
any expression, which then stands in the other cells too; all else must be as
in the cell. A line of another case is shown with a reference to its row.

A script is read by its syntax tree. Nothing is imported or executed, so
neither MXNet nor what else the script needs must be there.
"""
import ast
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from mgpu.utils.files import FilePath, path_of


class Line(NamedTuple):
    """A row of the table.

    Attributes
    ----------
    topic : str
        What it is about, unique.
    gluon, mgpu, torch : str
        The line in Gluon, in mgpu on either backend, in plain PyTorch, in
        Markdown. The first code of `gluon` is the pattern.
    names : tuple of str
        What a script calls it: full names (``mxnet.gluon.Trainer``; one that
        ends in a dot stands for all that begin so), methods (``.asnumpy``),
        keyword arguments or attributes (``grad_req=``), a method with a
        keyword (``mxnet.autograd.record(train_mode=)``), ``[net(X)]``.
    """

    topic: str
    gluon: str
    mgpu: str
    torch: str
    names: tuple[str, ...]


_PACKAGE = "mxnet."

#: what scripts use most
LINES = (
    Line("devices", "`[mx.gpu(0), mx.gpu(1)]`", "`mgpu.list_devices(2)`",
         '`["cuda:0", "cuda:1"]`',
         ("mxnet.gpu", "mxnet.cpu", "mxnet.context.", "mxnet.Context",
          "mxnet.cpu_pinned", "mxnet.npx.gpu", "mxnet.npx.cpu")),
    Line("a device", "`mx.gpu(i)`", "`mgpu.gpu(i)`",
         '`torch.device("cuda", i)`', ("mxnet.gpu", "mxnet.npx.gpu")),
    Line("number of GPUs", "`mx.context.num_gpus()`", "`mgpu.num_gpus()`",
         "`torch.cuda.device_count()`",
         ("mxnet.context.num_gpus", "mxnet.num_gpus", "mxnet.npx.num_gpus")),
    Line("an array", "`mx.nd.array(x, ctx=ctx)`, of NumPy or numbers",
         '`mgpu.put(x, device, dtype="float32")`',
         "`torch.tensor(x, dtype=torch.float32, device=device)`",
         ("mxnet.nd.array", "mxnet.np.array", "mxnet.ndarray.array")),
    Line("to a device", "`x.as_in_context(ctx)`", "`mgpu.put(mgpu.to_numpy(x),"
         " device)`; a batch: `mgpu.split_batch(X, y, devices)`",
         "`x.to(device)`",
         (".as_in_context", ".as_in_ctx", ".copyto")),
    Line("to NumPy", "`x.asnumpy()`", "`mgpu.to_numpy(x)`",
         "`x.detach().cpu().numpy()`", (".asnumpy",)),
    Line("to a number", "`x.asscalar()`", "`mgpu.to_numpy(x).item()`",
         "`x.item()`", (".asscalar",)),
    Line("initial weights", "`net.initialize(init.Normal(0.01), ctx=devices)`",
         "`replicas = mgpu.initialize(net, devices, "
         "mgpu.initializers.Normal(0.01))`",
         "`nn.init.normal_` for each weight, then a copy per device",
         (".initialize", "mxnet.init.", "mxnet.initializer.")),
    Line("on other devices", "`net.collect_params().reset_ctx(devices)`",
         '`replicas = mgpu.initialize(net, devices, "keep", '
         'force_reinit=True)`', "`net.to(device)`", (".reset_ctx",)),
    Line("parameters", "`net.collect_params()`", "`replicas.params()`; "
         "`replicas` itself for the trainer", "`net.parameters()`",
         (".collect_params",)),
    Line("weights from a file", "`net.load_parameters(file, ctx=devices)`",
         "load them into `net`, then `replicas = mgpu.initialize(net, "
         "devices)`: existing values are kept",
         "`net.load_state_dict(torch.load(file))`",
         (".load_parameters", ".load_params")),
    Line("a network from files", "`SymbolBlock.imports(symbol, [\"data\"], "
         "params)`", "`mgpu.from_gluon(symbol, params)`",
         "`torch.export.load(file).module()`, to predict",
         ("mxnet.gluon.SymbolBlock.imports", "mxnet.gluon.SymbolBlock",
          "mxnet.model.load_checkpoint")),
    Line("a network of symbols", "`mx.mod.Module(symbol)`",
         "`mgpu.from_gluon(symbol, params)`, or `mgpu.resume_from_gluon` with "
         "its states", "written by `mgpu convert`",
         ("mxnet.mod.", "mxnet.module.", ".fit")),
    Line("a network of the zoo", "`model_zoo.vision.resnet18_v1()`",
         "stays on MXNet; its export by `mgpu.from_gluon(symbol, params)`",
         "written by `mgpu convert`", ("mxnet.gluon.model_zoo.",)),
    Line("not trained", '`p.grad_req = "null"`', 'on MXNet the same, on torch '
         "`p.requires_grad_(False)`, before `mgpu.initialize`",
         "`p.requires_grad_(False)`", ("grad_req=",)),
    *(Line(f"multipliers of the {what}", f"`p.{key} = factor`",
           f"`mgpu.Trainer(..., {key}={{q.name: factor}})`, with `q` of "
           "`replicas.params()`", "groups of parameters", (f"{key}=",))
      for what, key in (("rate", "lr_mult"), ("decay", "wd_mult"))),
    Line("optimizer", '`gluon.Trainer(net.collect_params(), "sgd", '
         '{"learning_rate": rate})`',
         '`mgpu.Trainer(replicas, "sgd", {"learning_rate": rate})`',
         "`torch.optim.SGD(net.parameters(), lr=rate)`",
         ("mxnet.gluon.Trainer", "mxnet.gluon.trainer.Trainer",
          "mxnet.optimizer.")),
    Line("another optimizer",
         "`gluon.Trainer(net.collect_params(), name, options)`",
         "`mgpu.Trainer(replicas, name, options)`",
         "one of `torch.optim`, whose formula may be another",
         ("mxnet.gluon.Trainer", "mxnet.gluon.trainer.Trainer")),
    Line("key-value store", '`gluon.Trainer(..., kvstore="device")`',
         "`mgpu.Trainer(..., allreduce=\"auto\")`",
         "`DistributedDataParallel`",
         ("kvstore=", "update_on_kvstore=", "mxnet.kv.", "mxnet.kvstore.")),
    Line("loss", "`gluon.loss.SoftmaxCrossEntropyLoss()`",
         "`mgpu.losses.SoftmaxCrossEntropyLoss()`",
         '`nn.CrossEntropyLoss(reduction="none")`', ("mxnet.gluon.loss.",)),
    Line("data", "`gluon.data.DataLoader(dataset, rows)`", "on both, with "
         "NumPy arrays: `mgpu.datasets.BatchIterator(X, y, rows, "
         "shuffle=False)`", "`torch.utils.data.DataLoader(dataset, rows)`",
         ("mxnet.gluon.data.", "mxnet.io.")),
    Line("split a batch", "`gluon.utils.split_and_load(X, devices)`",
         "`mgpu.split_and_load(X, devices)`; uneven: `mgpu.split_batch(X, y, "
         "devices)`", "`X.chunk(len(devices))`, then `.to(device)`",
         ("mxnet.gluon.utils.split_and_load",
          "mxnet.gluon.utils.split_data")),
    Line("seed of dropout", "`mx.random.seed(number)`", "`mgpu.seed(number)`",
         "`torch.manual_seed(number)`", ("mxnet.random.seed",
                                    "mxnet.np.random.seed")),
    Line("record", "`with autograd.record():`", "`with mgpu.record():`",
         "recorded by default; `net.train()`", ("mxnet.autograd.record",)),
    Line("not recorded", "`with autograd.pause():`", "nothing is recorded "
         "outside `mgpu.record()`", "`with torch.no_grad():`",
         ("mxnet.autograd.pause",)),
    Line("gradients of predictions",
         "`with autograd.record(train_mode=False):`",
         "`with mgpu.record(train_mode=False):`", "`net.eval()`; a whole "
         "network in eval mode is not trained in `mgpu.record()`",
         ("mxnet.autograd.record(train_mode=)",
          "mxnet.autograd.predict_mode", "mxnet.autograd.train_mode")),
    Line("forward on all devices", "`[net(X) for X in X_shards]`",
         "`replicas(X_shards)`", "a process per device", ("[net(X)]",)),
    Line("backward", "`for l in ls: l.backward()`", "`mgpu.backward(ls)`",
         "`loss.mean().backward()`", (".backward",
                                      "mxnet.autograd.backward")),
    Line("step", "`trainer.step(batch_size)`", "`trainer.step(batch_size)`",
         "`optimizer.step(); optimizer.zero_grad()`", (".step",)),
    Line("the whole step", "", "`mgpu.train_batch(X, y, replicas, loss, "
         "trainer)`", "", ()),
    Line("wait", "`mx.nd.waitall()`", "`mgpu.synchronize(devices)`",
         "`torch.cuda.synchronize()` for each device",
         ("mxnet.nd.waitall", "mxnet.ndarray.waitall", "mxnet.npx.waitall",
          ".wait_to_read")),
    Line("rate", "`mx.lr_scheduler.FactorScheduler(step, factor)`",
         "`mgpu.lr_scheduler.FactorScheduler(step, factor)`",
         "`torch.optim.lr_scheduler.StepLR(optimizer, step, factor)`, stepped "
         "after each batch",
         ("mxnet.lr_scheduler.",)),
    Line("a new rate", "`trainer.set_learning_rate(rate)`",
         "`trainer.set_learning_rate(rate)`",
         '`optimizer.param_groups[0]["lr"] = rate`',
         (".set_learning_rate",)),
    Line("metric", "`mx.metric.Accuracy()`", "`mgpu.accuracy(y_hat, y) / "
         "len(y)`; a data set: `mgpu.evaluate_accuracy_gpus(replicas, data)`",
         "`(y_hat.argmax(1) == y).float().mean()`", ("mxnet.metric.",)),
    Line("save weights", "`net.save_parameters(file)`",
         "`replicas.save_parameters(file)`",
         "`torch.save(net.state_dict(), file)`",
         (".save_parameters", ".save_params", "mxnet.model.save_checkpoint")),
    Line("save the network", "`net.export(prefix)`", "stays on MXNet; on "
         "torch `mgpu.to_pt2(net, file, [X])`",
         "`torch.export.save(torch.export.export(net, (X,)), file)`",
         (".export",)),
    Line("save the optimizer", "`trainer.save_states(file)`",
         "`trainer.save_states(file)`, the same file for both backends",
         "`torch.save(optimizer.state_dict(), file)`", (".save_states",)),
    Line("the optimizer from a file", "`trainer.load_states(file)`",
         "`trainer.load_states(file)`, for files of mgpu",
         "`optimizer.load_state_dict(torch.load(file))`", (".load_states",)),
    Line("compile", "`net.hybridize()`",
         "`mgpu.initialize(..., hybridize=True)`", "`torch.compile(net)`",
         (".hybridize",)),
    Line("gradient norm", "`gluon.utils.clip_global_norm(arrays, most)`, of "
         "gradients summed over the batch",
         "`trainer.clip_global_norm(most)`, between "
         "`trainer.allreduce_grads()` and `trainer.update(batch_size)`",
         "`clip_grad_norm_(parameters, most / batch_size)`, of their means",
         ("mxnet.gluon.utils.clip_global_norm",)))


class ScriptLine(NamedTuple):
    """A line of a script that has a row in the table.

    Attributes
    ----------
    number : int
        From 1.
    source : str
    line : Line
        With the script's own expressions in its cells, or a reference to the
        row where the line is of another case.
    """

    number: int
    source: str
    line: Line


def table() -> str:
    """`LINES` in Markdown."""
    rows = ["| | Gluon | mgpu, either backend | plain PyTorch |",
            "|---|---|---|---|"]
    rows += [f"| {' | '.join(line[:4])} |".replace("|  |", "| |")
             for line in LINES]
    return "\n".join(rows) + "\n"


def lint_script(path: FilePath) -> list[ScriptLine]:
    """The lines of a Python script that are Gluon's, and what they become.

    Names count that lead to MXNet by an import of the script. Methods, whose
    objects no syntax tree knows, count in a script that imports MXNet.

    Raises
    ------
    ValueError
        If it is no Python.
    OSError
        If it cannot be opened.
    """
    path = path_of(path)
    with open(path, "rb") as file:
        data = file.read()
    try:
        tree = ast.parse(data, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"expected a Python script; {path!r} is not one "
                         f"({error}).") from error
    source = data.decode("utf-8", "replace").splitlines()
    aliases = dict(_imports(tree))
    if not any(map(_is_gluons, aliases.values())):
        return []
    rows: dict[str, list[Line]] = {}
    for line in LINES:
        for name in line.names:
            rows.setdefault(name, []).append(line)
    foreign = _foreign(tree, aliases)
    found: dict[tuple[int, str], Line] = {}
    done: set[ast.AST] = set()      # inside of what has been replaced
    for number, name, node, around in _names(tree, aliases, foreign):
        if node in done:
            continue
        for line in (candidates := _rows(name, rows)):
            whole = _fits(line, node, around, aliases)
            if whole is not None:
                found[number, line.topic] = _filled(line, whole, aliases)
                if "..." not in line.gluon:     # it has not looked there
                    done |= {*ast.walk(whole)} - {node}
                break
        else:
            for line in candidates[:1]:
                text = f'another case: see the row "{line.topic}" in the guide'
                found.setdefault((number, line.topic), line._replace(
                    mgpu=text, torch=text))
    return [ScriptLine(number, source[number - 1].strip(), line)
            for (number, _), line in sorted(
                found.items(), key=lambda item: item[0][0])]


def _rows(name: str, rows: dict[str, list[Line]]) -> list[Line]:
    """The rows of a name, or of what it begins with."""
    if name in rows or name[:1] in ".[" or name[-1:] == "=":
        return rows.get(name, [])
    parts = name.split(".")
    for end in range(len(parts) - 1, 1, -1):
        found = rows.get(".".join(parts[:end]) + ".")
        if found is not None:
            return found
    return []


# -- patterns -----------------------------------------------------------------

#: what Gluon's cells call the parts of MXNet
_CELL = {"mx": "mxnet", "nd": "mxnet.nd", "gluon": "mxnet.gluon",
         "autograd": "mxnet.autograd", "init": "mxnet.init",
         "SymbolBlock": "mxnet.gluon.SymbolBlock",
         "model_zoo": "mxnet.gluon.model_zoo"}
#: keyword arguments that a line may leave out: the device in use
_OPTIONAL = {"ctx"}


@functools.cache
def _pattern(line: Line) -> ast.AST | None:
    """The tree of Gluon's cell: the expression, or the assignment."""
    code = re.search("`(.+?)`", line.gluon)
    if code is None:
        return None
    body = code[1] + (" pass" if code[1].endswith(":") else "")
    node: ast.AST = ast.parse(body).body[0]
    if isinstance(node, ast.With):
        node = node.items[0].context_expr
    elif isinstance(node, ast.For):
        node, = node.body
    return node.value if isinstance(node, ast.Expr) else node


def _fits(line: Line, node: ast.AST, around: list[ast.AST],
          aliases: dict[str, str]) -> ast.AST | None:
    """The node, or what is right around it, that is as the pattern."""
    pattern = _pattern(line)
    for whole in [node, *around[::-1][:2]]:
        if pattern is not None and _matched(pattern, whole, aliases, {}):
            # A method of the result is none of what stands for it.
            after = around[around.index(whole) - 1:][:1] if whole in around \
                else around[-1:]
            if line.topic == "parameters" and after and isinstance(
                    after[0], (ast.Attribute, ast.Subscript)):
                return None
            return whole
    return None


def _matched(pattern: ast.AST, node: ast.AST, aliases: dict[str, str],
             names: dict[str, ast.AST]) -> bool:
    """Whether `node` is as `pattern`; `names` gets what its names stand
    for."""
    known = _full(pattern, _CELL)
    if known is not None:
        own = _full(node, aliases)
        return own is not None \
            and own.rpartition(".")[2] == known.rpartition(".")[2]
    if isinstance(pattern, ast.Name):
        if not isinstance(node, ast.expr) or isinstance(node, ast.Starred):
            return False
        before = names.setdefault(pattern.id, node)
        return ast.unparse(before) == ast.unparse(node)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Constant):
        assert isinstance(node, ast.Constant)
        return type(pattern.value) is type(node.value) \
            and pattern.value == node.value
    if isinstance(pattern, ast.Call):
        assert isinstance(node, ast.Call)
        given = {k.arg: k.value for k in node.keywords}
        wanted = {k.arg: k.value for k in pattern.keywords}
        some = pattern.args[:1]     # an ellipsis: all others
        rest = bool(some) and isinstance(some[0], ast.Constant) \
            and some[0].value is Ellipsis
        if not rest and (len(node.args) != len(pattern.args)
                         or given.keys() - wanted.keys()) \
                or wanted.keys() - given.keys() - _OPTIONAL:
            return False
        pairs = [(pattern.func, node.func)] + [
            (wanted[key], given[key]) for key in wanted if key in given]
        pairs += [] if rest else zip(pattern.args, node.args)
        return all(_matched(x, y, aliases, names) for x, y in pairs)
    for field, x in ast.iter_fields(pattern):
        y = getattr(node, field)
        if field in ("ctx", "type_comment"):
            continue
        xs, ys = (z if isinstance(z, list) else [z] for z in (x, y))
        if len(xs) != len(ys) or not all(
                _matched(x, y, aliases, names) if isinstance(x, ast.AST)
                else x == y for x, y in zip(xs, ys)):
            return False
    return True


def _filled(line: Line, node: ast.AST, aliases: dict[str, str]) -> Line:
    """The row with the script's expressions in the code of its cells."""
    names: dict[str, ast.AST] = {}
    pattern = _pattern(line)
    assert pattern is not None
    _matched(pattern, node, aliases, names)
    # mgpu takes a context for a device; torch does not
    own = {"device": names["ctx"], **names} if "ctx" in names else names

    def filled(cell: str, names: dict[str, ast.AST]) -> str:
        return re.sub("`.+?`", lambda code: re.sub(
            r"(?<![\w.\"'])[A-Za-z_]\w*(?!\w|=[^=])", lambda x: (
                ast.unparse(names[x[0]]) if x[0] in names else x[0]),
            code[0]), cell)
    return line._replace(mgpu=filled(line.mgpu, own),
                         torch=filled(line.torch, names))


# -- the names of a script ----------------------------------------------------

def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a script calls modules and their contents, and their full names;
    ``mx = mgpu.mxnet_compat()`` is an import too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield (name.asname, name.name) if name.asname else \
                    (name.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for name in node.names:
                yield (name.asname or name.name,
                       f"{node.module}.{name.name}")
        elif isinstance(node, ast.Assign) \
                and ast.unparse(node.value) == "mgpu.mxnet_compat()":
            for target in node.targets:
                yield ast.unparse(target), "mxnet"


#: whose objects have methods of the same names
_OTHERS = ("torch", "tensorflow", "jax")


def _foreign(tree: ast.AST, aliases: dict[str, str]) -> set[str]:
    """The names of a script that stand for another framework's objects: what
    is assigned to them is made with that, and nothing of it with MXNet."""
    others = {name for name, full in aliases.items()
              if full.split(".")[0] in _OTHERS}
    ours = {name for name, full in aliases.items() if _is_gluons(full)}
    made: list[tuple[set[str], set[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, (ast.For, ast.comprehension)):
            targets, value = [node.target], node.iter
        else:
            continue
        made.append(({x.id for t in targets for x in ast.walk(t)
                      if isinstance(x, ast.Name)},
                     {x.id for x in ast.walk(value)
                      if isinstance(x, ast.Name)}))
    nothing: set[str] = set()
    for known, against in ((ours, nothing), (others, ours)):
        size = -1
        while size != len(known):
            size = len(known)
            for names, used in made:
                if used & known and not used & against:
                    known |= names - against
    return others


def _names(tree: ast.AST, aliases: dict[str, str], foreign: set[str]
           ) -> Iterator[tuple[int, str, ast.AST, list[ast.AST]]]:
    """The names of a script, in the form of `Line.names`, with the numbers
    of their lines, their nodes and what these stand in, from the outermost.
    What stands around comes first."""
    networks = {ast.unparse(node.func.value) for node in ast.walk(tree)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("collect_params", "hybridize",
                                       "load_parameters", "initialize")}
    stack: list[tuple[ast.AST, list[ast.AST]]] = [(tree, [])]
    while stack:
        node, around = stack.pop()
        inside = [*around, node]
        stack += [(child, inside) for child in ast.iter_child_nodes(node)]
        for number, name in _names_of(node, aliases, foreign, networks):
            yield number, name, node, around


#: names with a keyword argument, which have a row of their own
_KEYED = {name for line in LINES for name in line.names if "(" in name}


def _names_of(node: ast.AST, aliases: dict[str, str], foreign: set[str],
              networks: set[str]) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Call):
        name = _full(node.func, aliases)
        keywords = [k.arg for k in node.keywords if k.arg]
        if name:
            found = [x for k in keywords if (x := f"{name}({k}=)") in _KEYED
                     ] or [name]
        elif isinstance(node.func, ast.Attribute) \
                and _root(node.func) not in foreign:
            method = f".{node.func.attr}"
            found = [method]
            if method == ".setattr" and node.args:
                found = [f"{x.value}=" for x in node.args[:1] if isinstance(
                    x, ast.Constant) and isinstance(x.value, str)]
        else:
            found = []
        yield from ((node.func.end_lineno or node.lineno, x)
                    for x in found)
        yield from ((k.value.lineno, f"{k.arg}=") for k in node.keywords
                    if k.arg)
    elif isinstance(node, ast.ListComp):
        call = node.elt
        if isinstance(call, ast.Call) and ast.unparse(call.func) in networks:
            yield node.lineno, "[net(X)]"
    elif isinstance(node, ast.Assign):
        yield from ((target.lineno, f"{target.attr}=")
                    for target in node.targets
                    if isinstance(target, ast.Attribute))
    elif isinstance(node, (ast.Attribute, ast.Name)) \
            and not isinstance(node.ctx, ast.Store):
        name = _full(node, aliases)
        if name:
            yield node.lineno, name


def _root(node: ast.AST) -> str | None:
    """The name that a chain of attributes, calls and items begins with."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _full(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """``mxnet.gluon.Trainer`` for ``gluon.Trainer``; None for what does not
    lead to MXNet."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return None
    name = ".".join([aliases[node.id], *reversed(names)])
    return name if _is_gluons(name) else None


def _is_gluons(name: str) -> bool:
    return f"{name}.".startswith(_PACKAGE)
