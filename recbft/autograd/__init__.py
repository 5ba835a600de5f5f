"""What PyTorch needs told: hand-written gradients under torch.func and torch.compile, full precision, complex pairs."""
