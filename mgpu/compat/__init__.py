"""Names, files and trainings of Gluon, and names of PyTorch."""
