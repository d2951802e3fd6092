"""What the command line takes: verbs, targets, selectors and options. Made without torch, so that `--help` is quick."""

from __future__ import annotations

import argparse
import ast
from typing import Any, TypeAlias

from .forms import BUILT_IN, INPUT_FORM

Parser: TypeAlias = argparse.ArgumentParser

# What each verb is for, and an example that shows something.
VERBS = {
    "demo": ("train a small GPT as it is and patched, side by side", "demo --steps 50"),
    "list": ("show which modules the selectors choose", "list resnet --types ReLU,BatchNorm2d"),
    "report": ("run the patched model and show what ran where", "report gpt --repeated --backward"),
    "verify": ("compare each module with its original", "verify vit --repeated --dtype bfloat16"),
    "culprits": (
        "find the modules that break the model",
        "culprits my.py:make --types Linear --check my.py:loss_is_fine",
    ),
    "bench": ("time each module and the model both ways", "bench gpt --repeated --plot bench.png"),
    "tune": (
        "find what pays to patch, and with which options",
        "tune my.py:make --names '*.mlp' --input ids=2x16:int64:0..128",
    ),
}
NOTES = f"""\
TARGET is package.module:factory, file.py:factory, or a small built-in model:
{", ".join(BUILT_IN)}.
The factory takes no arguments and returns a model, or a model and its inputs:
a tuple, a dict or one tensor. Without selectors the whole model is one region.

Exit status: 0 all is well, 1 a finding, 2 the command could not do its work,
130 interrupted.
"""


def build_parser() -> Parser:
    """Build the parser of all verbs; each sets `run`, the name of the function of `verbs` that does its work."""
    parser = argparse.ArgumentParser(
        prog="thunderpatch",
        description="Run chosen submodules of a PyTorch model through thunderfx, in place.",
        epilog=_examples(*VERBS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "tcsh"),
        action=_PrintCompletion,
        help="print what your shell needs to complete this command",
    )
    added = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, run: str, *parents: argparse.ArgumentParser) -> Parser:
        purpose, _ = VERBS[name]
        made: argparse.ArgumentParser = added.add_parser(
            name,
            parents=[*parents, common],
            help=purpose,
            description=purpose[0].upper() + purpose[1:] + ".",
            epilog=_examples(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run)
        return made

    common, target, calls, scripts = _common(), _target(), _calls(), _scripts()
    demo = verb("demo", "demo")
    demo.add_argument("--steps", type=_steps, default=20, help="training steps (default: 20)")
    verb("list", "list_modules", target)
    report = verb("report", "report", target, calls, scripts)
    report.add_argument("--calls", type=_positive, default=2, help="how often to run the model (default: 2)")
    verb("verify", "verify", target, calls, scripts)
    culprits = verb("culprits", "culprits", target, calls)
    culprits.add_argument(
        "--check",
        metavar="TARGET",
        help="a function that takes the model and returns whether it is good; by default what the model "
        "computes is compared with what it computes unpatched",
    )
    bench = verb("bench", "bench", target, calls)
    bench.add_argument("--plot", metavar="FILE", help="also draw the result")
    verb("tune", "tune", target, calls)
    return parser


def _examples(*names: str) -> str:
    lines = [f"  thunderpatch {VERBS[name][1]}" for name in names]
    return "\n".join(["examples:" if len(lines) > 1 else "example:", *lines, "", NOTES])


def _common() -> Parser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print the result as JSON")
    common.add_argument("--traceback", action="store_true", help="show where an error comes from")
    common.add_argument("--seed", type=int, default=0, help="of weights and inputs (default: 0)")
    common.add_argument("--device", help="where to run, such as cuda (default: where the factory puts it)")
    return common


def _target() -> Parser:
    target = argparse.ArgumentParser(add_help=False)
    target.add_argument("target", metavar="TARGET", help="what to work on, see below")
    choose = target.add_argument_group("which modules (what is given must all hold)")
    choose.add_argument("--types", type=_names, action="extend", metavar="CLASS,...", help="of these classes")
    choose.add_argument("--names", type=_names, action="extend", metavar="GLOB,...", help="with these FQNs")
    choose.add_argument("--exclude", type=_names, action="extend", metavar="GLOB,...", help="but not these")
    choose.add_argument("--repeated", action="store_true", help="the equal blocks of lists of modules")
    choose.add_argument(
        "--nested",
        choices=("outermost", "innermost", "all"),
        default="outermost",
        help="which of matches inside one another (default: outermost)",
    )
    mode = target.add_mutually_exclusive_group()
    mode.add_argument("--train", action="store_const", const=True, dest="training", help="in train mode")
    mode.add_argument("--eval", action="store_const", const=False, dest="training", help="in eval mode")
    target.add_argument("--dtype", help="cast the model and its floating-point inputs, such as bfloat16")
    target.add_argument(
        "--input", action="append", default=[], metavar="SPEC", help=f"an input of the model: {INPUT_FORM}"
    )
    return target


def _calls() -> Parser:
    calls = argparse.ArgumentParser(add_help=False)
    calls.add_argument(
        "--backward", action=argparse.BooleanOptionalAction, help="run backward too (verify: by default)"
    )
    calls.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of thunderpatch.apply, such as dynamic=True or 'executors=[\"torch_compile\"]'",
    )
    return calls


def _scripts() -> Parser:
    scripts = argparse.ArgumentParser(add_help=False)
    scripts.add_argument(
        "--reproducers",
        metavar="FOLDER",
        help="also write each graph as a script of its own (verify: those of the modules that differ)",
    )
    scripts.add_argument("--data", action="store_true", help="with the inputs that the graphs had, beside the scripts")
    return scripts


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (equals and key.isidentifier()):
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, not {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value  # a bare word, as in mode=max-autotune


def _positive(text: str) -> int:
    return _at_least(1, text)


def _steps(text: str) -> int:
    return _at_least(2, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, not {text!r}")
    return int(text)


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: Parser, namespace: Any, values: Any, option: str | None = None) -> None:
        try:
            import shtab
        except ImportError:
            parser.error("shell completion needs shtab: pip install 'thunderpatch[completion]'")
        print(shtab.complete(parser, shell=values))
        parser.exit()
