"""The causes that `mgpu.parity.diagnosis` knows, a module for each subject."""
