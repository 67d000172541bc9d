"""Detection with a list of boxes for each image, empty in some."""
import torch
from torch import nn
from torch.nn import functional as F

results = []
net = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(),
                    nn.Conv2d(4, 5, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.05)
for size in (6, 5, 2, 6):
    images = torch.randn(size, 1, 9, 9)
    targets = [{"boxes": torch.rand(n % 3, 4), "labels": torch.ones(n % 3)}
               for n in range(size)]
    cells = net(images).flatten(2).transpose(1, 2)
    loss = 0
    for cell, target in zip(cells, targets):
        boxes, scores = cell[:, :4].sigmoid(), cell[:, 4]
        nearest = torch.cdist(target["boxes"], boxes).argmin(1)
        loss = loss + F.l1_loss(boxes[nearest], target["boxes"],
                                reduction="sum") \
            + F.binary_cross_entropy_with_logits(
                scores, torch.zeros_like(scores).index_fill(0, nearest, 1))
    optimizer.zero_grad()
    (loss / size).backward()
    optimizer.step()
    results.append(loss)
