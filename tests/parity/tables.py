"""Networks that add tables of their own to the input, in Gluon and in
torch."""
import mgpu
from nets import torch_block


def in_gluon(tables, kind="constant", use="broadcast_add", freeze=False):
    """Adds tables to the input. "null": parameters without a gradient."""
    def make():
        with mgpu.using_backend("mxnet"):
            import mxnet as mx
            from mxnet.gluon import nn

        class Net(nn.HybridBlock):
            def __init__(self):
                super().__init__()
                for name, value in tables.items():
                    value = mx.nd.array(value, dtype="float64")
                    with self.name_scope():
                        setattr(self, name, self.params.get_constant(
                            name, value) if kind == "constant" else
                            self.params.get(
                                name, shape=value.shape, grad_req="null",
                                init=mx.init.Constant(value)))
                self.hidden = nn.Dense(6, in_units=6, flatten=False)
                self.out = nn.Dense(3, in_units=6)

            def hybrid_forward(self, F, x, **given):
                for name in tables:
                    x = F.tanh(getattr(F, use)(x, F.reshape(
                        given[name], (1, -1, 6))))
                return self.out(F.mean(self.hidden(x), axis=1))
        net = Net()
        if freeze:
            net.hidden.collect_params().setattr("grad_req", "null")
        return net
    return make


def in_torch(tables, kind="buffer", use="add", freeze=False):
    def forward(net, x):
        import torch
        for name in tables:
            x = torch.tanh(getattr(torch, use)(x, getattr(net, name)))
        return net.out(net.hidden(x).mean(1))

    def make():
        import torch
        net = torch_block(lambda nn: {
            **{name: nn.Parameter(torch.tensor(value), requires_grad=False)
               for name, value in tables.items() if kind == "frozen"},
            "hidden": nn.Linear(6, 6), "out": nn.Linear(6, 3)}, forward)()
        if kind != "frozen":
            for name, value in tables.items():
                net.register_buffer(name, torch.tensor(value),
                                    persistent=kind == "buffer")
        if freeze:
            net.hidden.requires_grad_(False)
        return net
    return make
