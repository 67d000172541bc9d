"""A student learns from a teacher in eval mode, with batch norm frozen."""
import copy

import torch
from torch import nn
from torch.nn import functional as F

results = []
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(),
                    nn.Linear(16, 3))
teacher = copy.deepcopy(net).eval().requires_grad_(False)
net.train()[1].eval()
optimizer = torch.optim.RMSprop([
    {"params": net[0].parameters(), "lr": 0.001},
    {"params": net[3].parameters(), "weight_decay": 0.1}], 0.01)
for size in (8, 7, 3, 8):
    x, y = torch.randn(size, 6), torch.randint(3, (size,))
    scores = net(x)
    loss = F.cross_entropy(scores, y) + F.kl_div(
        (scores / 2).log_softmax(1), (teacher(2 * x) / 2).log_softmax(1),
        reduction="batchmean", log_target=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    results.append(loss)
