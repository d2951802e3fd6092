"""Run chosen submodules of a PyTorch model through thunderfx, in place, and put everything back."""
