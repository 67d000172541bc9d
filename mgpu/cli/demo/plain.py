"""A training in plain PyTorch: a small network, AdamW, a schedule."""
import torch
from torch import nn


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * 5 * 5, 10)).double()


net = network()
optimizer = torch.optim.AdamW(net.parameters(), 0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
X = torch.randn(256, 1, 12, 12, dtype=torch.float64)
y = torch.randint(10, (256,))
losses = []
for rows in torch.arange(256).split(13):        # the last batch is smaller
    loss = nn.functional.cross_entropy(net(X[rows]), y[rows],
                                       label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
