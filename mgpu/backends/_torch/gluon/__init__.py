"""Networks that Gluon has exported, as torch modules."""
