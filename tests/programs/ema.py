"""An average of the weights predicts; gradients are accumulated over two
batches."""
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

results = []
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.NAdam(net.parameters(), 0.01)
for number, size in enumerate((8, 7, 3, 8, 1, 6)):
    x, y = torch.randn(size, 6), torch.randint(3, (size,))
    loss = F.multi_margin_loss(net(x), y) / 2
    loss.backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
    results.append(loss)
results.append(average(torch.randn(5, 6)).sum())
