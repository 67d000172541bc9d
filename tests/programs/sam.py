"""SAM: the gradient at the weights of the worst loss nearby."""
import torch
from torch import nn
from torch.nn import functional as F

results = []
net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
for size in (8, 7, 3, 8):
    x, y = torch.randn(size, 6), torch.randint(3, (size,))
    loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
    loss.backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        moves = [p.grad * 0.05 / norm for p in net.parameters()]
        for p, move in zip(net.parameters(), moves):
            p.add_(move)
    optimizer.zero_grad()
    F.cross_entropy(net(x), y, label_smoothing=0.1).backward()
    with torch.no_grad():
        for p, move in zip(net.parameters(), moves):
            p.sub_(move)
    optimizer.step()
    optimizer.zero_grad()
    results.append(loss)
