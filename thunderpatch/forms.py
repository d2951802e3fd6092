"""How the command line names a target and an input; without torch, so that `--help` need not wait for it."""

BUILT_IN = ("gpt", "vit", "resnet", "mlp-mixer")  # the keys of `demo.MODELS`
INPUT_FORM = "[NAME=]SHAPE[:DTYPE[:LOW..HIGH]], such as 2x3x32x32 or ids=2x16:int64:0..128"
TARGET_FORM = f"package.module:factory, file.py:factory or {' | '.join(BUILT_IN)}"
