"""Training steps as users of Gluon and PyTorch write them, without mgpu."""

#: the rate of a step that names no other: float32 holds it
RATE = 0.125


def gluon_step(optimizer="sgd", clip=None, schedule=None, clipped=None,
               trainers=None, parts=1, **options):
    """With `gluon.Trainer`.

    `schedule` makes an ``lr_scheduler``; ``clipped(net)``: the part whose
    gradients are clipped; ``trainers(net)``: in the place of one for all
    weights; `parts`: gradients add up over so many passes.
    """
    def make(net):
        from mxnet import autograd, gluon
        own = {"lr_scheduler": schedule()} if schedule else {}
        moves = trainers(net) if trainers else [gluon.Trainer(
            net.collect_params(), optimizer,
            {"learning_rate": RATE, **options, **own})]
        loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
        if parts > 1:
            net.collect_params().setattr("grad_req", "add")

        def step(x, y):
            if parts > 1:
                net.collect_params().zero_grad()
            size, total = len(x) // parts, 0.0
            for i in range(0, len(x), size):
                with autograd.record():
                    loss = loss_of(net(x[i:i + size]), y[i:i + size])
                loss.backward()
                total = total + loss.mean() / parts
            if clip:
                part = clipped(net) if clipped else net
                gluon.utils.clip_global_norm(
                    [p.grad() for p in part.collect_params().values()
                     if p.grad_req != "null"], clip * len(x))
            for trainer in moves:
                trainer.step(len(x))
            return total
        return step, moves
    return make


def torch_step(optimizer="SGD", clip=None, schedule=None, before=False,
               scaler=None, parts=1, call=lambda net, x: net(x),
               clipped=None, optimizers=None, updates=True, after=None,
               **options):
    """A plain loop of PyTorch.

    `schedule` makes a scheduler, which moves ``before`` the optimizer or
    after it; `scaler`: the loss scale of a `GradScaler`; `parts`: how many
    backward passes a step has; `call`: of the network; ``clipped(net)``: the
    part whose gradients are clipped; ``optimizers(net)``: in the place of one
    for all weights; `updates`: whether they step; ``after(optimizer, count)``
    follows update number `count`.
    """
    def make(net):
        import torch
        from torch.nn import functional
        moves = optimizers(net) if optimizers else [
            getattr(torch.optim, optimizer)(net.parameters(), **{
                "lr": RATE, **options})]
        rates = schedule(moves[0]) if schedule else None
        scales = torch.amp.GradScaler("cpu", init_scale=scaler or 1.0,
                                      enabled=bool(scaler))
        net.train()
        count = 0

        def step(x, y):
            nonlocal count
            count += 1
            net.zero_grad()
            if rates and before:
                rates.step()
            losses = []
            for i in range(parts):
                loss = functional.cross_entropy(call(net, x[i::parts]),
                                                y[i::parts].long())
                scales.scale(loss / parts).backward()
                losses.append(loss.detach())
            if clip:
                scales.unscale_(moves[0])
                torch.nn.utils.clip_grad_norm_((
                    clipped(net) if clipped else net).parameters(), clip)
            for one in moves if updates else ():
                scales.step(one)
            scales.update()
            if after:
                after(moves[0], count)
            if rates and not before:
                rates.step()
            return sum(losses) / parts
        return step, [*moves, *[rates] * bool(rates),
                      *[scales] * bool(scaler)]
    return make


def halving(optimizer, every=2):
    import torch
    return torch.optim.lr_scheduler.StepLR(optimizer, every, 0.5)


def gluons_halving():
    import mxnet as mx
    return mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=RATE)


def trained_batch_norm(x):
    """Gluon's batch norm after a training pass of `x`, in float64."""
    from mxnet import autograd, gluon, nd
    layer = gluon.nn.BatchNorm(in_channels=x.shape[1])
    layer.cast("float64")
    layer.initialize()
    with autograd.record():
        y = layer(nd.array(x, dtype="float64"))
    y.backward()
    return layer
