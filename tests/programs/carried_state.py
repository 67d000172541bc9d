"""An LSTM whose state goes from one part of a long text to the next."""
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 5), nn.Linear(7, 9)
        self.cell = nn.LSTMCell(5, 7)

    def forward(self, tokens, state):
        scores = []
        for token in self.embedding(tokens).unbind(1):
            state = self.cell(token, state)
            scores.append(self.head(state[0]))
        return torch.stack(scores, 1), state


results = []
net = Model()
optimizer = torch.optim.SGD(net.parameters(), 0.5)
for size in (6, 5, 1):
    text = torch.randint(9, (size, 13))
    state = (torch.zeros(size, 7), torch.zeros(size, 7))
    for start in (0, 4, 8):
        scores, state = net(text[:, start:start + 4], state)
        loss = F.cross_entropy(scores.flatten(0, 1),
                               text[:, start + 1:start + 5].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = tuple(x.detach() for x in state)
        results.append(loss)
