"""PPO: a policy and a value from one network, clipped ratios, several epochs
over one rollout."""
import torch
from torch import nn
from torch.nn import functional as F


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.policy, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x):
        h = self.body(x)
        return self.policy(h).log_softmax(1), self.value(h).squeeze(1)


results = []
net = Agent()
optimizer = torch.optim.Adam(net.parameters(), 0.01)
states, rewards = torch.randn(22, 4), torch.randn(22)
with torch.no_grad():
    before, values = net(states)
actions = before.exp().multinomial(1)
before, advantages = before.gather(1, actions), rewards - values
for _ in range(2):
    for part in torch.randperm(22).split(8):
        log, value = net(states[part])
        ratio = (log.gather(1, actions[part]) - before[part]).exp()[:, 0]
        gain = torch.minimum(ratio * advantages[part], ratio.clamp(
            0.8, 1.2) * advantages[part]).mean()
        loss = F.mse_loss(value, rewards[part]) - gain \
            + 0.01 * (log.exp() * log).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        results.append(loss)
