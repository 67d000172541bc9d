"""What the lines of a Gluon script become: one table, which `mgpu lint`
looks up and the guide shows.

A script is read by its syntax tree. Nothing is imported or executed, so
neither MXNet nor what else the script needs must be there.
"""
import ast
from collections.abc import Iterator
from typing import NamedTuple

from mgpu.files import FilePath, path_of


class Line(NamedTuple):
    """A row of the table.

    Attributes
    ----------
    topic : str
        What it is about, unique.
    gluon, mgpu, torch : str
        The line in Gluon, in mgpu on either engine, in plain PyTorch, in
        Markdown.
    names : tuple of str
        What a script calls it: full names (``mxnet.gluon.Trainer``; one that
        ends in a dot stands for all that begin so), methods (``.asnumpy``),
        keyword arguments or attributes (``grad_req=``), a method with a
        keyword (``.initialize(ctx=)``).
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
          "mxnet.cpu_pinned")),
    Line("number of GPUs", "`mx.context.num_gpus()`", "`mgpu.num_gpus()`",
         "`torch.cuda.device_count()`",
         ("mxnet.context.num_gpus", "mxnet.num_gpus")),
    Line("an array", "`mx.nd.array(x, ctx=ctx)`", "`mgpu.put(x, device)`",
         "`torch.tensor(x, device=device)`",
         ("mxnet.nd.array", "mxnet.np.array", "mxnet.ndarray.array")),
    Line("to a device", "`x.as_in_context(ctx)`", "`mgpu.put(mgpu.to_numpy(x),"
         " device)`; a batch: `mgpu.split_batch(X, y, devices)`",
         "`x.to(device)`",
         (".as_in_context", ".as_in_ctx", ".copyto")),
    Line("to NumPy", "`x.asnumpy()`", "`mgpu.to_numpy(x)`",
         "`x.detach().cpu().numpy()`", (".asnumpy",)),
    Line("to a number", "`x.asscalar()`", "`mgpu.to_numpy(x).item()`",
         "`x.item()`", (".asscalar",)),
    Line("first weights", "`net.initialize(init.Normal(0.01), ctx=devices)`",
         "`replicas = mgpu.initialize(net, devices, "
         "mgpu.initializers.Normal(0.01))`",
         "`nn.init.normal_` for each weight, then a copy per device",
         (".initialize(ctx=)", "mxnet.init.", "mxnet.initializer.")),
    Line("parameters", "`net.collect_params()`", "`replicas.params()`; "
         "`replicas` itself for the trainer", "`net.parameters()`",
         (".collect_params",)),
    Line("weights from a file", "`net.load_parameters(file, ctx=devices)`",
         "load them into `net`, then `replicas = mgpu.initialize(net, "
         "devices)`: values that are there stay",
         "`net.load_state_dict(torch.load(file))`",
         (".load_parameters", ".load_params")),
    Line("a network from files", "`SymbolBlock.imports(symbol, [\"data\"], "
         "params)`", "`mgpu.from_gluon(symbol, params)`",
         "`torch.export.load(file).module()`, to predict",
         ("mxnet.gluon.SymbolBlock.imports", "mxnet.gluon.SymbolBlock",
          "mxnet.model.load_checkpoint", "mxnet.mod.Module.load")),
    Line("a network of symbols", "`mx.mod.Module(symbol)`",
         "`mgpu.from_gluon(symbol, params)`, or `mgpu.resume_from_gluon` with "
         "its states", "written by `mgpu convert`",
         ("mxnet.mod.", "mxnet.module.")),
    Line("a network of the zoo", "`model_zoo.vision.resnet18_v1()`",
         "stays on MXNet; its export by `mgpu.from_gluon(symbol, params)`",
         "written by `mgpu convert`", ("mxnet.gluon.model_zoo.",)),
    Line("not trained", '`p.grad_req = "null"`', 'on MXNet the same, on torch '
         "`p.requires_grad_(False)`, before `mgpu.initialize`",
         "`p.requires_grad_(False)`", ("grad_req=",)),
    Line("multipliers", "`p.wd_mult = 0`", "`mgpu.Trainer(..., "
         "wd_mult={p.name: 0.0})`", "groups of parameters",
         ("wd_mult=", "lr_mult=")),
    Line("optimiser", '`gluon.Trainer(net.collect_params(), "sgd", '
         '{"learning_rate": 0.1})`',
         '`mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})`',
         "`torch.optim.SGD(net.parameters(), lr=0.1)`",
         ("mxnet.gluon.Trainer", "mxnet.gluon.trainer.Trainer",
          "mxnet.optimizer.")),
    Line("key-value store", '`gluon.Trainer(..., kvstore="device")`',
         "`mgpu.Trainer(..., allreduce=\"auto\")`",
         "`DistributedDataParallel`",
         ("kvstore=", "update_on_kvstore=", "mxnet.kv.", "mxnet.kvstore.")),
    Line("loss", "`gluon.loss.SoftmaxCrossEntropyLoss()`",
         "`mgpu.losses.SoftmaxCrossEntropyLoss()`",
         '`nn.CrossEntropyLoss(reduction="none")`', ("mxnet.gluon.loss.",)),
    Line("data", "`gluon.data.DataLoader(dataset, 64)`", "stays on MXNet; "
         "`mgpu.datasets.BatchIterator(X, y, 64)`, with NumPy arrays, on both",
         "`torch.utils.data.DataLoader(dataset, 64)`",
         ("mxnet.gluon.data.", "mxnet.io.")),
    Line("split a batch", "`gluon.utils.split_and_load(X, devices)`",
         "`mgpu.split_and_load(X, devices)`; uneven: `mgpu.split_batch(X, y, "
         "devices)`", "`X.chunk(2)`, then `.to(device)`",
         ("mxnet.gluon.utils.split_and_load",
          "mxnet.gluon.utils.split_data")),
    Line("seed of dropout", "`mx.random.seed(1)`", "`mgpu.seed(1)`",
         "`torch.manual_seed(1)`", ("mxnet.random.seed",
                                    "mxnet.np.random.seed")),
    Line("record", "`with autograd.record():`", "`with mgpu.record():`",
         "recorded by default; `net.train()`", ("mxnet.autograd.record",)),
    Line("not recorded", "`with autograd.pause():`", "nothing is recorded "
         "outside `mgpu.record()`", "`with torch.no_grad():`",
         ("mxnet.autograd.pause", "mxnet.autograd.predict_mode")),
    Line("gradients of predictions",
         "`with autograd.record(train_mode=False):`",
         "`with mgpu.record(train_mode=False):`", "`net.eval()`; a whole "
         "network in eval mode is not trained in `mgpu.record()`",
         ("mxnet.autograd.record(train_mode=)",)),
    Line("forward on all devices", "`[net(X) for X in X_shards]`",
         "`replicas(X_shards)`", "a process per device", ()),
    Line("backward", "`for l in ls: l.backward()`", "`mgpu.backward(ls)`",
         "`loss.mean().backward()`", (".backward",
                                      "mxnet.autograd.backward")),
    Line("step", "`trainer.step(batch_size)`", "`trainer.step(batch_size)`",
         "`optimizer.step(); optimizer.zero_grad()`", ()),
    Line("the whole step", "", "`mgpu.train_batch(X, y, replicas, loss, "
         "trainer)`", "", ()),
    Line("wait", "`mx.nd.waitall()`", "`mgpu.synchronize(devices)`",
         "`torch.cuda.synchronize()` for each device",
         ("mxnet.nd.waitall", "mxnet.ndarray.waitall", "mxnet.npx.waitall",
          ".wait_to_read")),
    Line("rate", "`lr_scheduler.FactorScheduler(...)`",
         "`mgpu.lr_scheduler.FactorScheduler(...)`",
         "`torch.optim.lr_scheduler.StepLR(...)`",
         ("mxnet.lr_scheduler.",)),
    Line("a rate of one's own", "`trainer.set_learning_rate(0.01)`",
         "`trainer.set_learning_rate(0.01)`",
         '`optimizer.param_groups[0]["lr"] = 0.01`', ()),
    Line("metric", "`mx.metric.Accuracy()`", "`mgpu.accuracy(y_hat, y)`; a "
         "data set: `mgpu.evaluate_accuracy_gpus(replicas, data)`",
         "`(y_hat.argmax(1) == y).float().mean()`", ("mxnet.metric.",)),
    Line("save weights", "`net.save_parameters(file)`",
         "`np.savez(file, **replicas.export_numpy())`",
         "`torch.save(net.state_dict(), file)`",
         (".save_parameters", ".save_params", "mxnet.model.save_checkpoint")),
    Line("save the network", "`net.export(prefix)`", "stays on MXNet; on "
         "torch `mgpu.to_pt2(net, file, [X])`",
         "`torch.export.save(torch.export.export(net, (X,)), file)`",
         (".export",)),
    Line("save the optimiser", "`trainer.save_states(file)`",
         "`trainer.save_states(file)`, the same file for both engines",
         "`torch.save(optimizer.state_dict(), file)`", (".save_states",)),
    Line("the optimiser from a file", "`trainer.load_states(file)`",
         "`trainer.load_states(file)`, for files of mgpu",
         "`optimizer.load_state_dict(torch.load(file))`", (".load_states",)),
    Line("compile", "`net.hybridize()`",
         "`mgpu.initialize(..., hybridize=True)`", "`torch.compile(net)`",
         (".hybridize",)),
    Line("gradient norm", "`gluon.utils.clip_global_norm(arrays, 1.0)`",
         "between `trainer.allreduce_grads()` and "
         "`trainer.update(batch_size)`: `trainer.clip_global_norm(1.0, "
         "batch_size)`", "`clip_grad_norm_(parameters, 1.0)`",
         ("mxnet.gluon.utils.clip_global_norm",)))


class ScriptLine(NamedTuple):
    """A line of a script that has a row in the table.

    Attributes
    ----------
    number : int
        From 1.
    source : str
    line : Line
    """

    number: int
    source: str
    line: Line


def table() -> str:
    """`LINES` in Markdown."""
    rows = ["| | Gluon | mgpu, either engine | plain PyTorch |",
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
    rows = {name: line for line in LINES for name in line.names}
    found = {(number, line.topic): line
             for number, name in _names(tree, aliases)
             for line in [_row(name, rows)] if line is not None}
    return [ScriptLine(number, source[number - 1].strip(), line)
            for (number, _), line in sorted(
                found.items(), key=lambda item: item[0][0])]


def _row(name: str, rows: dict[str, Line]) -> Line | None:
    """The row of a name, or of what it begins with."""
    if name in rows or name[:1] == "." or name[-1:] == "=":
        return rows.get(name)
    parts = name.split(".")
    for end in range(len(parts) - 1, 1, -1):
        row = rows.get(".".join(parts[:end]) + ".")
        if row is not None:
            return row
    return None


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


def _names(tree: ast.AST, aliases: dict[str, str]
           ) -> Iterator[tuple[int, str]]:
    """The names of a script, in the form of `Line.names`, with the numbers
    of their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _full(node.func, aliases)
            keywords = [k.arg for k in node.keywords if k.arg]
            if name:
                found = [name, *(f"{name}({k}=)" for k in keywords)]
            elif isinstance(node.func, ast.Attribute):
                method = f".{node.func.attr}"
                found = [method, *(f"{method}({k}=)" for k in keywords)]
                if method == ".setattr" and node.args:
                    found = [f"{ast.literal_eval(node.args[0])}="] \
                        if isinstance(node.args[0], ast.Constant) else []
            else:
                found = []
            yield from ((node.func.end_lineno or node.lineno, x)
                        for x in found)
            yield from ((k.value.lineno, f"{k.arg}=") for k in node.keywords
                        if k.arg)
        elif isinstance(node, (ast.Attribute, ast.Name)):
            if isinstance(node.ctx, ast.Store):
                if isinstance(node, ast.Attribute):
                    yield node.lineno, f"{node.attr}="
            else:
                name = _full(node, aliases)
                if name:
                    yield node.lineno, name


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
