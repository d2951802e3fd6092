"""The module and op databases of torch.testing, run through thunderpatch and compared with eager."""
