"""A GAN with a gradient penalty (WGAN-GP): two networks, two optimizers."""
import torch
from torch import nn

results = []
generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
net, critic = nn.ModuleList([generator, critic])
steps = [torch.optim.Adam(one.parameters(), 0.01, betas=(0.5, 0.9))
         for one in (net, critic)]
for size in (8, 7, 3, 8):
    real = torch.randn(size, 4)
    fake = net(torch.randn(size, 2))
    mixed = (real + torch.rand(size, 1) * (fake.detach() - real)
             ).requires_grad_()
    slope, = torch.autograd.grad(critic(mixed).sum(), mixed,
                                 create_graph=True)
    loss = critic(fake.detach()).mean() - critic(real).mean() \
        + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
    steps[1].zero_grad()
    loss.backward()
    steps[1].step()
    steps[0].zero_grad()
    wins = -critic(fake).mean()
    wins.backward()
    steps[0].step()
    results += [loss, wins]
