"""Names that users of Gluon and PyTorch know, with mgpu's meaning."""
