"""PyTorch source for a network that Gluon has exported."""
