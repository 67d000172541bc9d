"""SimCLR: a contrastive loss over all pairs of a batch, two views."""
import torch
from torch import nn
from torch.nn import functional as F

results = []
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.01)
for size in (8, 7, 3, 8):
    x = torch.randn(size, 6)
    views = torch.cat([x + 0.1 * torch.randn_like(x) for _ in range(2)])
    z = F.normalize(net(views), dim=1)
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(2 * size).bool(),
                                         -torch.inf)
    loss = F.cross_entropy(scores, torch.arange(2 * size).roll(size))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    results.append(loss)
