"""Training steps as users of Gluon and PyTorch write them, without mgpu."""

def gluon_step(optimizer="sgd", clip=None, schedule=None, of=None,
               clipped=None, **options):
    """With a `gluon.Trainer`; `schedule` makes an ``lr_scheduler``; `of` and
    `clipped`: parts of the network that are trained, and clipped."""
    def make(net):
        from mxnet import autograd, gluon
        own = {"lr_scheduler": schedule()} if schedule else {}
        trainer = gluon.Trainer((of or net).collect_params(), optimizer,
                                {**options, **own})
        loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

        def step(x, y):
            with autograd.record():
                loss = loss_of(net(x), y)
            loss.backward()
            if clip:
                gluon.utils.clip_global_norm(
                    [p.grad() for p in (clipped or net).collect_params(
                        ).values() if p.grad_req != "null"], clip * len(x))
            trainer.step(len(x))
            return loss.mean()
        return step, [trainer]
    return make


def torch_step(optimizer="SGD", clip=None, schedule=None, before=False,
               scaler=None, parts=1, call=lambda net, x: net(x), **options):
    """A plain loop of PyTorch.

    `schedule` makes a scheduler, which moves ``before`` the optimiser or
    after it; `scaler`: the loss scale of a `GradScaler`; `parts`: how many
    backward passes a step has; `call`: of the network.
    """
    def make(net):
        import torch
        from torch.nn import functional
        moves = getattr(torch.optim, optimizer)(net.parameters(), **options)
        rates = schedule(moves) if schedule else None
        scales = torch.amp.GradScaler("cpu", init_scale=scaler or 1.0,
                                      enabled=bool(scaler))
        net.train()

        def step(x, y):
            moves.zero_grad()
            if rates and before:
                rates.step()
            losses = []
            for i in range(parts):
                loss = functional.cross_entropy(call(net, x[i::parts]),
                                                y[i::parts].long())
                scales.scale(loss / parts).backward()
                losses.append(loss.detach())
            if clip:
                scales.unscale_(moves)
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            scales.step(moves)
            scales.update()
            if rates and not before:
                rates.step()
            return sum(losses) / parts
        return step, [moves, *[rates] * bool(rates),
                      *[scales] * bool(scaler)]
    return make


def halving(optimizer):
    import torch
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def gluons_halving():
    import mxnet as mx
    return mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.125)
