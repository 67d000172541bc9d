"""A U-Net that takes a dict and returns a dict, with two losses."""
import torch
from torch import nn
from torch.nn import functional as F


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, batch):
        skip = self.down(batch["image"]).relu()
        small = self.middle(F.max_pool2d(skip, 2)).relu()
        scores = self.out(torch.cat([skip, self.up(small)], 1))
        return {"scores": scores, "sizes": (
            scores.softmax(1).sum((2, 3)), small)}


results = []
net = UNet()
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
for size in (6, 5, 2, 6):
    batch = {"image": torch.randn(size, 1, 8, 8),
             "names": tuple("strings")}
    labels = torch.randint(3, (size, 8, 8))
    out = net(batch)
    loss = F.cross_entropy(out["scores"], labels) \
        + out["sizes"][0].var() / 1000 + out["sizes"][1].abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    results.append(loss)
